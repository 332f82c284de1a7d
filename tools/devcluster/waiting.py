"""Waiting for the cluster: say every 20 s what for, and stop early when it can no longer happen.

A wait reads what the objects report: events, states of containers, the condition of the node, the
log of a process. It prints the last report, and ends with a report that does not go away alone
(CANNOT_PASS).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from devcluster.console import say
from devcluster.shell import DevclusterError

TELL_SECONDS = 20.0
_LOOK_SECONDS = 3.0
_POLL_SECONDS = 0.2
_MESSAGE_CHARACTERS = 400


class CannotPass(DevclusterError):
    """A wait that cannot end well; the message carries the report that says so."""


@dataclass(frozen=True)
class Report:
    """One thing that an object reports.

    Attributes:
        source: the object, such as "pod kuberay-operator-7f".
        reason: the name that Kubernetes gives it, such as "ErrImagePull".
        message: the text beside the reason.
        count: how often it happened; for a container, how often the kubelet restarted it.
    """

    source: str
    reason: str
    message: str
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        message = " ".join(self.message.split())
        if len(message) > _MESSAGE_CHARACTERS:
            message = (
                f"{message[: _MESSAGE_CHARACTERS // 2]} ... {message[-_MESSAGE_CHARACTERS // 2 :]}"
            )
        return f"{self.source}: {self.reason}{times}{f': {message}' if message else ''}"


@dataclass(frozen=True)
class Rule:
    """Reports that end a wait. Time and count let pass what is normal while a cluster starts.

    Attributes:
        reasons: any of these; a report that alternates between them counts as one.
        seconds: how long an object must have reported it without a break.
        count: how often it must have happened.
        words: what the message must contain.
        ended_by: reasons of later events of the same object which show that the trouble is over.
    """

    reasons: tuple[str, ...]
    seconds: float = 0
    count: int = 1
    words: str = ""
    ended_by: tuple[str, ...] = ()

    def matches(self, report: Report) -> bool:
        """Return True for a report that this rule is about."""
        return report.reason in self.reasons and self.words in report.message


CANNOT_PASS: tuple[Rule, ...] = (
    # The kubelet tries again every 10 to 15 s. A missing CNI plugin does not appear.
    Rule(
        ("FailedCreatePodSandBox",),
        seconds=30,
        count=3,
        ended_by=("Pulling", "Pulled", "Created", "Started"),
    ),
    # The kubelet tries again after 10 and 20 s: three refusals.
    Rule(("ErrImagePull", "ImagePullBackOff"), seconds=40),
    Rule(("InvalidImageName", "ErrImageNeverPull")),
    Rule(("CreateContainerConfigError", "CreateContainerError", "RunContainerError"), seconds=40),
    # Quota, admission webhooks and pod security refuse pods here. So does a service account that is
    # still being made, but not for long: controllers try again at once, then less and less often.
    Rule(
        ("FailedCreate", "FailedToCreateHeadPod", "FailedToCreateWorkerPod"),
        seconds=30,
        count=3,
        ended_by=("SuccessfulCreate", "CreatedHeadPod", "CreatedWorkerPod"),
    ),
    # The third crash, some 30 s after the first.
    Rule(("CrashLoopBackOff",), count=2),
    # Normal for the seconds before containerd has read its network configuration.
    Rule(("KubeletNotReady",), seconds=45, words="cni plugin not initialized"),
)

_NEVER = "9999"
"""Later than every time of an event."""

Observe = Callable[[], Sequence[Report]]


def nothing() -> Sequence[Report]:
    """Report nothing: for waits without an object to ask."""
    return ()


class Wait:
    """One wait. Its owner polls a condition and calls `look` in between."""

    def __init__(
        self,
        what: str,
        observe: Observe = nothing,
        *,
        rules: Sequence[Rule] = CANNOT_PASS,
        tell: Callable[[str], None] = say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to wait now.

        Args:
            what: completes the sentence "waiting for ...".
            observe: returns what the objects report now, the newest report last.
            rules: reports that end the wait.
            tell: prints a line.
        """
        self._what, self._observe, self._rules, self._tell, self._clock = (
            what,
            observe,
            rules,
            tell,
            clock,
        )
        self._begun = self._looked = self._told = clock()
        self._since: dict[tuple[str, Rule], float] = {}
        self._last: Report | None = None

    @property
    def seconds(self) -> float:
        """Time since the wait began."""
        return self._clock() - self._begun

    @property
    def last(self) -> str:
        """The report that matters most: one that a rule is about, else the newest."""
        return str(self._last) if self._last else "no event yet"

    def look(self) -> None:
        """Read the reports and print the last, each in its own interval.

        Raises:
            CannotPass: a report has been there long and often enough to end the wait.
        """
        now = self._clock()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._judge(self._observe(), now)
        if now - self._told >= TELL_SECONDS:
            self._told = now
            self._tell(f"waiting for {self._what}: {self.seconds:.0f} s; {self.last}")

    def _judge(self, reports: Sequence[Report], now: float) -> None:
        about = {
            (report.source, rule): report
            for rule in self._rules
            for report in reports
            if rule.matches(report)
        }
        self._since = {key: self._since.get(key, now) for key in about}
        self._last = next(iter(about.values()), reports[-1] if reports else None)
        for (source, rule), report in about.items():
            if report.count >= rule.count and now - self._since[source, rule] >= rule.seconds:
                raise CannotPass(
                    f"gave up waiting for {self._what} after {self.seconds:.0f} s: {report}"
                )


def wait_for(
    what: str,
    condition: Callable[[], bool],
    observe: Observe = nothing,
    *,
    seconds: float = 600,
    tell: Callable[[str], None] = say,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Poll `condition` until it holds.

    Args:
        what: completes the sentence "waiting for ...".
        observe: returns what the objects report now, the newest report last.

    Raises:
        CannotPass: an object reports something that does not go away on its own.
        DevclusterError: the condition did not hold within `seconds`.
    """
    wait = Wait(what, observe, tell=tell, clock=clock)
    while not condition():
        wait.look()
        if wait.seconds >= seconds:
            raise DevclusterError(
                f"timed out after {seconds:.0f} s waiting for {what}; {wait.last}"
            )
        sleep(_POLL_SECONDS)


def reports_of(items: Sequence[Mapping[str, Any]]) -> list[Report]:
    """Return what objects report, the newest last: events, then containers that cannot run.

    Args:
        items: objects and events as `kubectl get` prints them. Only events of these objects count,
            none of an object that is gone or scaled to nothing, or from before it became ready.
    """
    objects = [item for item in items if item["kind"] != "Event"]
    since = {item["metadata"]["uid"]: _ready_since(item) for item in objects if _wanted(item)}
    events = [
        item
        for item in items
        if item["kind"] == "Event"
        and _when(item)[0] >= since.get(item["involvedObject"].get("uid"), _NEVER)
    ]
    return [
        *_events(events),
        *(report for item in objects if item["kind"] == "Pod" for report in _containers(item)),
    ]


def last_line(text: str) -> str:
    """Return the last line of a log that is not blank."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _ready_since(item: Mapping[str, Any]) -> str:
    """Return when the object became ready; the empty string, which is before all, if it is not."""
    return next(
        (
            str(condition.get("lastTransitionTime", ""))
            for condition in item.get("status", {}).get("conditions", ())
            if (condition["type"], condition["status"]) == ("Ready", "True")
        ),
        "",
    )


def _wanted(item: Mapping[str, Any]) -> bool:
    return "deletionTimestamp" not in item["metadata"] and item.get("spec", {}).get("replicas") != 0


def _events(events: Sequence[Mapping[str, Any]]) -> list[Report]:
    """Add up the events of each object and reason: each failed sandbox has one of its own."""
    newest: dict[tuple[str, str], Mapping[str, Any]] = {}
    counts: dict[tuple[str, str], int] = {}
    for event in sorted(events, key=_when):
        key = (_name(event["involvedObject"]), event["reason"])
        newest.pop(key, None)  # to the end
        newest[key] = event
        counts[key] = counts.get(key, 0) + ((event.get("series") or event).get("count") or 1)
    return [
        Report(source, reason, event.get("message", ""), counts[source, reason])
        for (source, reason), event in newest.items()
        if not any(
            _when(newest[source, end]) >= _when(event)
            for end in _ends(reason)
            if (source, end) in newest
        )
    ]


def _ends(reason: str) -> tuple[str, ...]:
    return next((rule.ended_by for rule in CANNOT_PASS if reason in rule.reasons), ())


def _when(event: Mapping[str, Any]) -> tuple[str, int]:
    series = event.get("series") or {}
    stamp = (
        series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or ""
    )
    return str(stamp)[: len("2000-01-01T00:00:00")], int(
        event["metadata"].get("resourceVersion", 0)
    )


def _name(reference: Mapping[str, Any]) -> str:
    return f"{reference['kind'].lower()} {reference['name']}"


def _containers(pod: Mapping[str, Any]) -> list[Report]:
    """Return a report for each container that waits with a message, or with its last end."""
    status = pod.get("status", {})
    found = []
    for container in [
        *status.get("initContainerStatuses", ()),
        *status.get("containerStatuses", ()),
    ]:
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("message"):
            ended = container.get("lastState", {}).get("terminated", {})
            message = ended.get("message") or waiting["message"]
            source = f"pod {pod['metadata']['name']}, container {container['name']}"
            found.append(
                Report(source, waiting["reason"], message, container.get("restartCount", 0))
            )
    return found
