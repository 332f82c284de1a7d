"""Waits report what they wait for, and end early on permanent errors.

The clock is the test's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from devcluster.kubectl import Kubectl, node_reports
from devcluster.shell import CommandFailed, DevclusterError
from devcluster.waiting import CANNOT_PASS, CannotPass, Report, last_line, reports_of, wait_for

_POD = "pod operator-7f"


@dataclass
class World:
    """A clock that only sleeping moves, the printed lines, and the times of objects' reports."""

    reports: Callable[[float], Sequence[Report]] = lambda now: ()
    ready_at: float = 1e9
    now: float = 0.0
    lines: list[str] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, seconds: float = 600) -> None:
        wait_for(
            "the operator to be available",
            lambda: self.now >= self.ready_at,
            lambda: self.reports(self.now),
            seconds=seconds,
            tell=self.lines.append,
            clock=lambda: self.now,
            sleep=self.sleep,
        )


def retried(reason: str, message: str, every: float) -> Callable[[float], Sequence[Report]]:
    """Report a failure that happens again and again."""
    return lambda now: [Report(_POD, reason, message, 1 + int(now / every))]


def test_what_holds_already_is_not_waited_for() -> None:
    world = World(ready_at=0)
    world.wait()
    assert (world.now, world.lines) == (0, [])


def test_every_20_seconds_a_line_says_what_for_since_when_and_the_last_event() -> None:
    world = World(lambda now: [Report(_POD, "Pulling", "image x")] if now > 30 else (), ready_at=50)
    world.wait()
    assert world.lines == [
        "waiting for the operator to be available: 20 s; no event yet",
        f"waiting for the operator to be available: 40 s; {_POD}: Pulling: image x",
    ]


def test_a_wait_that_times_out_says_what_for_and_the_last_event() -> None:
    world = World(lambda now: [Report(_POD, "FailedScheduling", "Insufficient cpu")])
    with pytest.raises(
        DevclusterError, match=r"after 100 s waiting for the operator.*Insufficient cpu"
    ):
        world.wait(seconds=100)


NO_PLUGIN = 'failed to find plugin "loopback" in path [/opt/cni/bin]'
FATAL: dict[str, Callable[[float], Sequence[Report]]] = {
    "no sandbox": retried("FailedCreatePodSandBox", NO_PLUGIN, every=12),
    "image cannot be pulled": lambda now: [
        Report(_POD, "ErrImagePull" if now % 20 < 10 else "ImagePullBackOff", "not found")
    ],
    "image name is no name": lambda now: [Report(_POD, "InvalidImageName", "couldn't parse")],
    "image may not be pulled": lambda now: [Report(_POD, "ErrImageNeverPull", "not present")],
    "configuration of the container": lambda now: [
        Report(_POD, "CreateContainerConfigError", 'secret "x" not found')
    ],
    "program of the container": lambda now: [Report(_POD, "RunContainerError", "no such file")],
    "quota": retried("FailedCreate", "forbidden: exceeded quota: pods", every=5),
    "KubeRay is refused a head": retried("FailedToCreateHeadPod", "denied the request", every=5),
    "KubeRay is refused a worker": retried("FailedToCreateWorkerPod", "forbidden", every=5),
    "crashes": lambda now: [Report(_POD, "CrashLoopBackOff", "KeyError", int(now / 15))],
    "no network": lambda now: [
        Report("node n", "KubeletNotReady", "Network plugin: cni plugin not initialized")
    ],
}


@pytest.mark.parametrize("reports", FATAL.values(), ids=FATAL.keys())
def test_what_cannot_pass_ends_the_wait_within_a_minute(
    reports: Callable[[float], Sequence[Report]],
) -> None:
    world = World(reports)
    with pytest.raises(CannotPass, match="gave up waiting for the operator to be available") as end:
        world.wait()
    assert world.now <= 60
    (last,) = reports(world.now)
    assert last.message in str(end.value), "with the message of the object"


def test_every_rule_is_tried_above() -> None:
    tried = {
        report.reason for reports in FATAL.values() for now in range(60) for report in reports(now)
    }
    assert [rule.reasons for rule in CANNOT_PASS if not tried & set(rule.reasons)] == []


PASSING = {
    "a sandbox that fails twice": lambda now: [
        Report(_POD, "FailedCreatePodSandBox", NO_PLUGIN, 1 + int(now > 20))
    ],
    "three sandboxes in a moment": lambda now: (
        [Report(_POD, "FailedCreatePodSandBox", NO_PLUGIN, 3)] if now < 20 else ()
    ),
    "a pull that succeeds the second time": lambda now: (
        [Report(_POD, "ErrImagePull", "timeout")] if now < 30 else ()
    ),
    "pulls that fail now and then": lambda now: (
        [Report(_POD, "ErrImagePull", "timeout")] if now % 40 < 30 else ()
    ),
    "a service account that comes late": lambda now: (
        [Report("replicaset r", "FailedCreate", "serviceaccount not found", 9)] if now < 20 else ()
    ),
    "one crash": lambda now: [Report(_POD, "CrashLoopBackOff", "connection refused", 1)],
    "a runtime that starts": lambda now: (
        [Report("node n", "KubeletNotReady", "cni plugin not initialized")] if now < 30 else ()
    ),
    "a node that is not ready otherwise": lambda now: [
        Report("node n", "KubeletNotReady", "CSINode is not yet initialized")
    ],
    "a pod without room": lambda now: [Report(_POD, "FailedScheduling", "Insufficient cpu", 50)],
}


@pytest.mark.parametrize("reports", PASSING.values(), ids=PASSING.keys())
def test_what_may_pass_does_not_end_the_wait(
    reports: Callable[[float], Sequence[Report]],
) -> None:
    world = World(reports, ready_at=300)
    world.wait()
    assert world.now == pytest.approx(300, abs=1)


def test_trouble_of_one_object_does_not_count_for_another() -> None:
    names = [f"pod p{number}" for number in range(10)]
    world = World(lambda now: [Report(names[int(now / 30)], "ErrImagePull", "x")], ready_at=290)
    world.wait()


def test_the_report_that_a_rule_is_about_is_shown_rather_than_a_newer_one() -> None:
    world = World(
        lambda now: [
            Report(_POD, "ErrImagePull", "not found"),
            Report("pod other", "Started", "Started container"),
        ],
        ready_at=25,
    )
    world.wait()
    assert world.lines[0].endswith(f"{_POD}: ErrImagePull: not found")


def test_a_long_message_keeps_its_beginning_and_its_end() -> None:
    shown = str(Report(_POD, "Failed", "begins\n" + "x" * 5000 + " ends"))
    assert len(shown) < 500
    assert "begins" in shown
    assert shown.endswith(" ends")


# --- reading objects ------------------------------------------------------------------------------


def thing(kind: str, name: str, **parts: Any) -> dict[str, Any]:
    return {"kind": kind, "metadata": {"name": name, "uid": f"uid-{name}"}, **parts}


def event(
    about: str, reason: str, message: str, at: int, count: int = 1, kind: str = "Pod"
) -> dict[str, Any]:
    return {
        "kind": "Event",
        "metadata": {"name": f"{about}.{at}", "resourceVersion": str(at)},
        "involvedObject": {"kind": kind, "name": about, "uid": f"uid-{about}"},
        "reason": reason,
        "message": message,
        "count": count,
        "lastTimestamp": f"2026-01-01T00:{at // 60:02}:{at % 60:02}Z",
    }


def test_events_of_one_reason_add_up_although_each_names_another_sandbox() -> None:
    failures = [
        event("p", "FailedCreatePodSandBox", f'sandbox "{at}": no loopback', at) for at in (9, 1, 5)
    ]
    restarts = [
        event("p", "SandboxChanged", "it will be killed and re-created", at) for at in (3, 11)
    ]
    reports = reports_of([thing("Pod", "p"), *failures, *restarts])
    assert [(report.reason, report.count) for report in reports] == [
        ("FailedCreatePodSandBox", 3),
        ("SandboxChanged", 2),
    ]
    assert reports[0].message == 'sandbox "9": no loopback'


@pytest.mark.parametrize(
    ("kind", "reason", "success"),
    [
        ("Pod", "FailedCreatePodSandBox", "Pulled"),
        ("ReplicaSet", "FailedCreate", "SuccessfulCreate"),
        ("RayCluster", "FailedToCreateHeadPod", "CreatedHeadPod"),
    ],
)
def test_a_later_success_ends_a_failure_and_an_earlier_one_does_not(
    kind: str, reason: str, success: str
) -> None:
    def reasons(failed_at: int, succeeded_at: int) -> list[str]:
        failed = event("o", reason, "no", failed_at, 9, kind)
        succeeded = event("o", success, "yes", succeeded_at, 1, kind)
        return [report.reason for report in reports_of([thing(kind, "o"), failed, succeeded])]

    assert reasons(1, 2) == [success]
    assert reasons(2, 1) == [success, reason]


def test_events_of_what_is_gone_or_going_or_not_wanted_do_not_count() -> None:
    going = thing("Pod", "going")
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    items = [going, thing("ReplicaSet", "old", spec={"replicas": 0})]
    events = [event(name, "FailedCreate", "quota", 1, 9) for name in ("gone", "going", "old")]
    assert reports_of([*items, *events]) == []


def test_events_from_before_an_object_became_ready_are_history() -> None:
    events = [event("p", "Unhealthy", "refused", 4, 25), event("p", "Evicted", "disk", 6)]

    def reasons(ready: str) -> list[str]:
        now = {"type": "Ready", "status": ready, "lastTransitionTime": "2026-01-01T00:00:05Z"}
        pod = thing("Pod", "p", status={"conditions": [now]})
        return [report.reason for report in reports_of([pod, *events])]

    assert reasons("False") == ["Unhealthy", "Evicted"]
    assert reasons("True") == ["Evicted"]


def test_containers_that_cannot_run_come_last_with_how_they_ended() -> None:
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off 10s"}
    status = {
        "containerStatuses": [
            {"name": "starts", "state": {"waiting": {"reason": "ContainerCreating"}}},
            {
                "name": "crashes",
                "state": {"waiting": waiting},
                "lastState": {"terminated": {"message": "KeyError"}},
                "restartCount": 4,
            },
        ]
    }
    reports = reports_of([thing("Pod", "p", status=status), event("p", "Pulled", "present", 1)])
    assert [str(report) for report in reports] == [
        "pod p: Pulled: present",
        "pod p, container crashes: CrashLoopBackOff (4 times): KeyError",
    ]


def test_a_node_says_why_it_is_not_ready() -> None:
    condition = {"type": "Ready", "status": "False", "reason": "KubeletNotReady", "message": "cni"}
    node = thing("Node", "n", status={"conditions": [condition]})
    assert node_reports(node) == [Report("node n", "KubeletNotReady", "cni")]
    assert node_reports(None)[0].reason == "NotRegistered"
    condition["status"] = "True"
    assert node_reports(node) == []


class FakeKubectl(Kubectl):
    """kubectl that finds these objects, and prints this log."""

    def __init__(self, items: list[dict[str, Any]], log: str | None) -> None:
        self.items, self.log = items, log

    def find(self, *arguments: str) -> dict[str, Any]:
        return {"items": self.items}

    def __call__(self, *arguments: Any, stdin: str | None = None) -> str:
        if self.log is None:
            raise CommandFailed("no log")
        assert arguments[:3] == ("logs", "run-head", "--container=ray")
        return self.log


@pytest.mark.parametrize(
    ("log", "message"), [("loading\nImportError: x\n\n", "ImportError: x"), (None, "back-off")]
)
def test_a_crash_is_reported_with_the_last_line_of_its_log(log: str | None, message: str) -> None:
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off"}
    containers = [{"name": "ray", "state": {"waiting": waiting}, "restartCount": 2}]
    pods = [
        thing("Pod", name, status={"containerStatuses": containers})
        for name in ("run-head", "other")
    ]
    reports = FakeKubectl(pods, log).reports("default", prefix="run-")
    assert [report.message for report in reports] == [message]


def test_the_last_line_of_a_log_is_not_blank() -> None:
    assert (last_line("a\nb\n\n"), last_line("")) == ("b", "")
