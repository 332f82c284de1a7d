"""The demo follows its run, says what keeps it, and gives up when that cannot pass."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from devcluster.kubectl import Kubectl
from devcluster.waiting import CannotPass, Report, Wait
from testcluster import ROOT

NO_IMAGE = Report("pod run-head", "ErrImagePull", "worker:dev-1: not found")


class Follower:
    """A demo with a fake cluster: each look at the run takes the next status, a second later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.syspath_prepend(ROOT / "tools")
        import demo

        self.demo, self.capsys, self.now = demo, capsys, 0.0
        self.statuses: Iterator[dict[str, Any]] = iter(())
        self.reported: list[Report] = []
        monkeypatch.setattr(demo, "find_run", lambda kubectl, name: {"status": next(self.statuses)})
        monkeypatch.setattr(
            demo, "Wait", lambda *words, **more: Wait(*words, **more, clock=lambda: self.now)
        )
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def reports(self, *words: str, **more: str) -> list[Report]:
        return self.reported

    def watch(self, *statuses: dict[str, Any]) -> str:
        self.statuses = iter(statuses)
        return str(self.demo.watch(cast(Kubectl, self), "run", self.demo.Steps()))

    @property
    def lines(self) -> list[str]:
        return [
            line.partition(" s  ")[2].strip() for line in self.capsys.readouterr().out.splitlines()
        ]


@pytest.fixture
def follower(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Follower:
    return Follower(monkeypatch, capsys)


def test_each_change_of_the_run_is_a_line(follower: Follower) -> None:
    statuses = [{"phase": "Pending"}, {"phase": "Running", "activity": "loading"}]
    assert follower.watch(*statuses, *statuses[1:], {"phase": "Succeeded"}) == "Succeeded"
    assert follower.lines == ["Pending", "Running  loading", "Succeeded"]


def test_a_run_that_does_not_start_says_what_its_pods_report(follower: Follower) -> None:
    follower.reported = [Report("pod run-head", "Pulling", "image x")]
    follower.watch(*[{"phase": "Pending"}] * 50, {"phase": "Succeeded"})
    assert [line.partition(": ")[2] for line in follower.lines if "waiting" in line] == [
        "20 s; pod run-head: Pulling: image x",
        "40 s; pod run-head: Pulling: image x",
    ]


def test_a_run_with_pods_that_cannot_start_ends_the_demo_within_a_minute(
    follower: Follower,
) -> None:
    follower.reported = [NO_IMAGE]
    changing = [[{"status": "False", "message": f"{number} of 3 pods"}] for number in range(100)]
    with pytest.raises(CannotPass, match="not found"):
        follower.watch(*({"phase": "Pending", "conditions": some} for some in changing))
    assert follower.now <= 60


def test_a_run_that_has_trained_is_left_to_its_operator(follower: Follower) -> None:
    follower.reported = [NO_IMAGE]
    statuses = [{"phase": "Running", "step": 1}, *[{"phase": "Restarting", "step": 1}] * 100]
    assert follower.watch(*statuses, {"phase": "Succeeded"}) == "Succeeded"
