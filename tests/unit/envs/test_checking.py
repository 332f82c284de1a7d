"""`check_env` finds each broken promise by name, and nothing in the environments we ship."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from agenticrun_workers.envs import StepResult
from agenticrun_workers.envs.checking import Report, Verdict, check_env, run_checks
from agenticrun_workers.envs.checking.checklist import CHECKS, FIRST
from agenticrun_workers.types import Stream

SEEDS = 4


class Count:
    """Says how far it is to a number: a good environment, which the others below spoil."""

    instruction = "Count down ."
    limit = 5

    def reset(self, seed: int, split: Stream) -> Any:
        self.left = random.Random(f"{split}{seed}").randint(1, 10_000) % 5000 + 5000 * (
            split == "validation"
        )
        self.turns = 0
        return str(self.left)

    def step(self, action: str) -> Any:
        self.turns += 1
        valid = action in ("1", "2")
        self.left -= int(action) if valid else 0
        return StepResult(
            str(self.left), 0.1, self.turns == self.limit, metrics={"action_is_valid": float(valid)}
        )

    def valid_actions(self) -> list[str]:
        return ["1", "2"]

    def vocabulary(self) -> list[str]:
        return list("-0123456789")


class Raises(Count):
    def step(self, action: str) -> Any:
        raise KeyError("no such cell")


class Prints(Count):
    """Prints what is not UTF-8, as a program in C does."""

    def step(self, action: str) -> Any:
        os.write(1, b"\xff")
        os.write(2, b"\xff")
        return super().step(action)


class Exits(Count):
    def step(self, action: str) -> Any:
        os._exit(3)


class Hangs(Count):
    def step(self, action: str) -> Any:
        time.sleep(1000)


class Unseeded(Count):
    levels = count(100)

    def reset(self, seed: int, split: Stream) -> Any:
        super().reset(seed, split)
        self.left = next(self.levels)
        return str(self.left)


class Hashes(Count):
    def reset(self, seed: int, split: Stream) -> Any:
        super().reset(seed, split)
        self.left = hash(f"level {seed}")
        return str(self.left)


class Remembers(Count):
    past = 0

    def reset(self, seed: int, split: Stream) -> Any:
        self.past += 1
        return super().reset(seed + self.past, split)


class Shares(Count):
    common = random.Random(0)

    def reset(self, seed: int, split: Stream) -> Any:
        Shares.common.seed(seed)
        return super().reset(seed, split)

    def step(self, action: str) -> Any:
        return super().step(action if Shares.common.random() < 0.5 else "0")


class SeedsTheProcess(Count):
    def reset(self, seed: int, split: Stream) -> Any:
        np.random.seed(seed)
        return super().reset(seed, split)


class OneLevel(Count):
    def reset(self, seed: int, split: Stream) -> Any:
        return super().reset(0, split)

    def valid_actions(self) -> list[str]:
        return ["1"]


class NoSplit(Count):
    def reset(self, seed: int) -> Any:  # type: ignore[override]
        return super().reset(seed, Stream.TRAIN)


class Overlaps(Count):
    limit = 1

    def reset(self, seed: int, split: Stream) -> Any:
        first = super().reset(seed, split)
        self.left %= 2 + 2 * (split == "train")
        return first and str(self.left)


class OwnScore(Count):
    def step(self, action: str) -> Any:
        result = super().step(action)
        return replace(result, metrics={**result.metrics, "score": 1.0})


class NeverInThreads(Count):
    blocking = False


class TrainOrElse(Count):
    """Takes everything that is not `train` for validation, as the protocol allows."""

    splits: ClassVar[set[str]] = set()

    def reset(self, seed: int, split: Stream) -> Any:
        self.splits.add(split)
        return super().reset(seed, Stream.TRAIN if split == "train" else Stream.VALIDATION)


class Picky(Count):
    def step(self, action: str) -> Any:
        return super().step(str(int(action)))


class NeverInvalid(Count):
    def step(self, action: str) -> Any:
        result = super().step(action)
        return result.observation, result.reward, result.terminated, False, {}


class Lists(Count):
    def valid_actions(self) -> list[str]:
        return ["1", "2", "3"]


class Stuck(Count):
    release: threading.Event

    def step(self, action: str) -> Any:
        if self.turns == self.limit:
            self.release.wait()
        return super().step(action)


class Speechless(Count):
    def vocabulary(self) -> list[str]:
        return list("012345678")


class Blurred(Count):
    def render(self) -> Any:
        return np.zeros((2, 2), np.uint8)


class Blocks(Count):
    blocking = False

    def step(self, action: str) -> Any:
        time.sleep(0.012)
        return super().step(action)


class Silent(Count):
    instruction = ""


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setitem(sys.modules, "test_checking", sys.modules[__name__])


@pytest.fixture(autouse=True)
def released(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread of a test outlives it."""
    release = threading.Event()
    monkeypatch.setattr(Stuck, "release", release, raising=False)
    yield
    release.set()


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the check in another process, whose start takes most of a test's time."""
    monkeypatch.setattr(run_checks, "FIRST", {"types": FIRST["types"]})


def check(cls: type, **options: Any) -> Report:
    return check_env(
        f"test_checking:{cls.__name__}",
        seeds=SEEDS,
        timeout=3.0 if cls in (Hangs, Stuck) else 30.0,
        **options,
    )


def test_a_good_environment_passes_all_checks() -> None:
    report = check(Count)
    report.assert_ok(warnings=False)
    assert list(report.findings) == [*FIRST, *CHECKS]
    assert list(report.of(Verdict.NOT_CHECKED)) == ["render"]


def test_an_environment_may_print_other_bytes_than_utf_8() -> None:
    check(Prints).assert_ok(warnings=False)


@pytest.mark.parametrize(
    ("cls", "name", "found"),
    [
        (Raises, "other process", "KeyError: 'no such cell' (test_checking.py:"),
        (Exits, "other process", "ends itself: exit code 3"),
        (Hangs, "other process", "step took more than 3.0 s"),
        (
            Unseeded,
            "same seed",
            "two new environments with the same seed differ in episode 0, turn 0",
        ),
        (Hashes, "other process", "another PYTHONHASHSEED, differ in episode 0"),
        (Remembers, "reuse", "one that has played others before differ in episode 1"),
        (Shares, "interleaved", "one beside others differ in episode"),
        (SeedsTheProcess, "global random", "changes the state of the process's numpy.random"),
        (Picky, "odd answers", "the answer '': ValueError"),
        (Lists, "valid actions", "'3' is listed by valid_actions, but step calls it invalid"),
        (Stuck, "after the end", "a step after the end: Stuck.step took more than 3.0 s"),
        (Speechless, "vocabulary", "vocabulary() does not cover '9"),
        (Blurred, "render", "render returned uint8 [2, 2]"),
    ],
)
def test_a_broken_promise_fails_its_check(
    cls: type, name: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name != "other process":
        monkeypatch.setattr(run_checks, "FIRST", {})  # a process takes half a second
        monkeypatch.setattr(run_checks, "CHECKS", {name: CHECKS[name]})
    report = check(cls)
    assert found in report.findings[name].found
    assert report.findings[name].verdict is Verdict.FAILED
    assert report.findings[name].advice
    with pytest.raises(AssertionError, match=name):
        report.assert_ok()


@pytest.mark.parametrize(
    ("cls", "name", "found"),
    [
        (OneLevel, "other seeds", "all 4 seeds give the same episode"),
        (NoSplit, "splits", "training and validation give the same episodes for the same seeds"),
        (Overlaps, "splits", "episodes of training are in validation too"),
        (NeverInvalid, "odd answers", "no odd answer has the metric action_is_valid: 0"),
        (Blocks, "speed", "steps per second, on the event loop"),
        (Silent, "types", "there is no instruction"),
    ],
)
@pytest.mark.usefixtures("one_process")
def test_what_is_not_as_good_as_it_could_be_is_a_warning(cls: type, name: str, found: str) -> None:
    report = check(cls)
    assert list(report.of(Verdict.WARNING)) == [name]
    assert found in report.findings[name].found
    report.assert_ok()
    with pytest.raises(AssertionError):
        report.assert_ok(warnings=False)


@pytest.mark.usefixtures("one_process")
def test_a_metric_with_a_name_of_ours_is_a_failure_that_says_so() -> None:
    failures = check(OwnScore).of(Verdict.FAILED)
    assert "the metric 'score' has a reserved name" in next(iter(failures.values())).found


@pytest.mark.usefixtures("one_process")
def test_threads_are_skipped_with_the_reason() -> None:
    found = check(NeverInThreads).findings["threads"]
    assert found.verdict is Verdict.NOT_CHECKED
    assert found.found == "not played in threads: blocking = False, so no thread ever calls it"


@pytest.mark.usefixtures("one_process")
def test_an_environment_gets_two_splits_and_the_warm_up_plays_training() -> None:
    check(TrainOrElse).assert_ok(warnings=False)
    assert TrainOrElse.splits == {"train", "validation"}


def test_after_a_crash_nothing_is_played_in_this_process() -> None:
    verdicts = [finding.verdict for finding in check(Exits).findings.values()]
    assert verdicts == [Verdict.FAILED, *[Verdict.NOT_CHECKED] * len(CHECKS), Verdict.NOT_CHECKED]


def test_a_class_can_be_given_and_one_of_a_function_too() -> None:
    class Local(Count): ...

    report = check_env(Local, seeds=2)
    report.assert_ok(warnings=False)
    assert "cannot be imported by another process" in report.findings["other process"].found


class Held(Count):
    """Holds something outside the process until it is closed."""

    reusable = False
    held: ClassVar[list[Held]] = []

    def reset(self, seed: int, split: Stream) -> Any:
        self.held.append(self)
        return super().reset(seed, split)

    async def close(self) -> None:
        if self in self.held:
            self.held.remove(self)


@pytest.mark.usefixtures("one_process")
def test_every_environment_is_closed() -> None:
    check(Held).assert_ok()
    assert Held.held == []


class Elsewhere(Unseeded):
    """An environment of others, for example on a server, that may ignore seeds."""

    may_ignore_seeds = True


def test_an_environment_of_others_that_ignores_seeds_is_a_warning() -> None:
    report = check(Elsewhere)
    assert report.of(Verdict.FAILED) == {}
    same = report.findings["same seed"]
    assert (same.verdict, "ignores seeds" in same.advice) == (Verdict.WARNING, True)


BUILT_IN: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
    ("frozen_lake", {}, []),
    ("frozen_lake", {"size": 6, "isSlippery": True, "words": "rows"}, []),
    ("sokoban", {}, []),
    ("webshop", {}, []),
    ("gymnasium", {"id": "Taxi-v4"}, []),
    (
        "math",
        {},
        [{"question": "2 + 3 = ?", "answer": "5"}, {"question": "6 * 7 = ?", "answer": "#### 42"}],
    ),
    ("python_tool", {"sandbox": "best-effort"}, [{"question": "2 + 3 = ?", "answer": "5"}]),
]


@pytest.mark.parametrize(
    ("name", "config", "items"),
    BUILT_IN,
    ids=[f"{name}{config or ''}" for name, config, _ in BUILT_IN],
)
def test_the_environments_that_we_ship_keep_their_promises(
    name: str, config: dict[str, Any], items: list[dict[str, Any]]
) -> None:
    check_env(
        name,
        config,
        items=items,
        seeds=2 if items else SEEDS,
        turns=2 if items else 8,
        timeout=120.0,
    ).assert_ok()
