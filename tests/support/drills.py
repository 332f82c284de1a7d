"""Fault drills: watch a run through a fault, and compare what its status said with the truth.

A `Recorder` takes a sample each second: the run's status, and what is so (does the driver live,
which pods are ready, which checkpoint is on disk). A `Report` is what the samples of one drill
show; it is pure.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol
from urllib.parse import quote

import psutil

from agenticrun_api import Role
from agenticrun_api.names import GROUP, LABEL_ROLE, LABEL_RUN, PLURAL, VERSION
from agenticrun_workers.driver.checkpoints import folder_of
from installation import SYSTEM
from testcluster import Cluster

TRUE_WITHIN_SECONDS = 10.0
"""The status may differ from the truth for so long."""
ENDED = ("Succeeded", "Failed")
_ANSWER_SECONDS = 5.0
_DRIVER = ["-m", "agenticrun_workers.driver"]


@dataclass(frozen=True)
class Sample:
    """The status of a run at one moment, and the truth."""

    at: float
    status: dict[str, Any] | None
    """None if the apiserver did not answer, or there is no run."""
    operator: bool
    """True if the operator's pod is ready, so that the status is written."""
    driver: str
    """running, stopped (by SIGSTOP) or gone."""
    ready: dict[str, int] = field(default_factory=dict)
    """Ready pods by role, as the apiserver shows them."""
    pods: frozenset[str] = frozenset()
    """Uid and restarts of each container of the run's pods."""
    saved: int | None = None
    """Step of the newest checkpoint on disk; None if the disk cannot be read from here."""

    @property
    def phase(self) -> str:
        status = self.status or {}
        phase = str(status.get("phase", ""))
        # Only the operator ends a run, and then the time is there.
        by_hand = phase in ENDED and not status.get("completionTime")
        return f"{phase} by hand" if by_hand else phase

    @property
    def step(self) -> int:
        return int((self.status or {}).get("step", 0))

    @property
    def attempt(self) -> int:
        return int((self.status or {}).get("job", {}).get("attempt", 0))

    @property
    def checkpoint(self) -> int:
        """Step of the newest checkpoint that the status names."""
        return int((self.status or {}).get("checkpoint", {}).get("step", 0))

    @property
    def message(self) -> str:
        return str((self.status or {}).get("message", ""))

    def conditions(self) -> dict[str, tuple[str, str, str]]:
        """Type -> status, reason and message."""
        found = (self.status or {}).get("conditions", ())
        return {
            item["type"]: (item["status"], item["reason"], item.get("message", ""))
            for item in found
        }

    @property
    def trains(self) -> bool:
        """The status says that the driver trains."""
        return self.conditions().get("Training", ("",))[0] == "True"

    @property
    def starts(self) -> bool:
        """The driver has not read its checkpoint yet, and the last attempt's numbers stay."""
        return (self.status or {}).get("activity") == "starting"

    def untruths(self) -> dict[str, str]:
        """Differences between status and truth, by subject; without the step."""
        if self.status is None or not self.operator:
            return {}
        found = {}
        if self.trains and self.driver != "running":
            found["driver"] = f"Training is True, but the driver is {self.driver}"
        if self.phase in ("Restarting", "Suspended", *ENDED) and self.driver == "running":
            found["phase"] = f"phase is {self.phase}, but the driver runs"
        for role in self.status.get("roles", ()) if self.phase not in ENDED else ():
            name, said, true = role["name"], role["ready"], self.ready.get(role["name"], 0)
            if said != true:
                found[f"{name} pods"] = f"{said} {name} pods are ready, but it is {true}"
        return found


@dataclass(frozen=True)
class Untruth:
    """A difference between status and truth, and how long it lasted."""

    seconds: float
    text: str


def untruths(samples: Sequence[Sample], within: float = TRUE_WITHIN_SECONDS) -> list[Untruth]:
    """The longest untruth about each subject, if it lasted longer than it may.

    The step in the status may be older than the newest on disk, but not for long.
    """
    began: dict[str, float] = {}
    worst: dict[str, Untruth] = {}
    saved: list[tuple[float, int]] = []
    """When each step was first seen on disk while the status claimed to be current."""
    attempt = 0
    for sample in samples:
        found = sample.untruths()
        current = sample.operator and sample.trains and not sample.starts
        if not current or sample.attempt != attempt:
            saved, attempt = [], sample.attempt
        elif sample.saved is not None:
            if not saved or sample.saved > saved[-1][1]:
                saved.append((sample.at, sample.saved))
            if sample.step < sample.saved:
                found["step"] = f"step is {sample.step}, but that of the disk is {sample.saved}"
                began["step"] = next(at for at, step in saved if step > sample.step)
        began = {subject: at for subject, at in began.items() if subject in found}
        for subject, text in found.items():
            seconds = sample.at - began.setdefault(subject, sample.at)
            if subject not in worst or seconds > worst[subject].seconds:
                worst[subject] = Untruth(seconds, text)
    return [item for item in worst.values() if item.seconds > within]


@dataclass(frozen=True)
class Report:
    """What the samples of one drill show.

    Args:
        samples: of the whole run, in order.
        injected: when the fault began.
    """

    samples: Sequence[Sample]
    injected: float

    @property
    def _after(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.at >= self.injected]

    @property
    def _before(self) -> Sample:
        return next(
            sample
            for sample in reversed(self.samples)
            if sample.at < self.injected and sample.status is not None
        )

    def said(self) -> list[tuple[float, str]]:
        """Each new phase and each new state of a condition that is not good, with seconds."""
        before, seen, found = self._before, set(), []
        usual = {(kind, *state[:2]) for kind, state in before.conditions().items()}
        for sample in self._after:
            if sample.status is None or sample.phase in ENDED:
                continue
            words = [
                f"{kind} {state[0]} {state[1]}"
                for kind, state in sorted(sample.conditions().items())
                if (kind, *state[:2]) not in usual and state[0] != _GOOD.get(kind, "False")
            ]
            words += [sample.phase] if sample.phase != before.phase else []
            new = [word for word in words if word not in seen]
            found += [(sample.at - self.injected, word) for word in new]
            seen.update(new)
        return found

    def showed(self, text: str) -> bool:
        """The status had this text: in its message, in that of a condition, or in the log's end."""
        return any(
            text in shown
            for sample in self.samples
            for shown in (
                sample.message,
                str((sample.status or {}).get("logTail", "")),
                *(said[2] for said in sample.conditions().values()),
            )
        )

    def trained_on(self) -> bool:
        """The driver ran all the time until the end."""
        return all(
            sample.driver == "running"
            for sample in self._after
            if sample.phase not in ENDED and sample.step < _last_step(sample)
        )

    def new_containers(self) -> int:
        """Number of the run's containers that started after the fault began."""
        after = [sample.pods for sample in self._after if sample.phase not in ENDED]
        return len(frozenset().union(*after) - self._before.pods)

    def recovered(self) -> float | None:
        """Seconds until a step was made and shown that was not there before the fault."""
        before = self._steps_at_the_fault()
        for sample in self._after:
            new = sample.trains and sample.driver == "running" and sample.step > before
            if new or sample.phase == "Succeeded":
                return sample.at - self.injected
        return None

    def _steps_at_the_fault(self) -> int:
        """Steps that were made before the driver noticed anything: injecting takes a moment."""
        stop = next((item.at for item in self._after if item.driver != "running"), self.injected)
        return max(max(item.step, item.saved or 0) for item in self.samples if item.at <= stop)

    def lost(self) -> int:
        """Steps that had to be made again, over all restarts."""
        return sum(max(0, before - first) for before, _, first in self._restarts())

    def lost_beyond_checkpoint(self) -> int:
        """Steps that had to be made again although a checkpoint of them was there."""
        return sum(max(0, saved - first) for _, saved, first in self._restarts())

    def _restarts(self) -> Iterator[tuple[int, int, int]]:
        """Step before, newest checkpoint before, and first step of each new attempt."""
        before: Sample | None = None
        for sample in self.samples:
            if sample.status is None:
                continue
            # The step of the last attempt stays in the status until the new one has read its own.
            if before and sample.attempt > before.attempt and sample.trains:
                yield before.step, before.checkpoint, sample.step
                before = sample
            elif before is None or sample.attempt == before.attempt:
                before = sample

    def end(self) -> Sample | None:
        """The first sample of the ended run."""
        return next((sample for sample in self.samples if sample.phase in ENDED), None)

    def result(self) -> str:
        """The end of the run, in its own words."""
        end = self.end()
        if end is None:
            return "did not end"
        reason = end.conditions()["Failed"][1]
        return end.phase if end.phase == "Succeeded" else f"Failed, {reason}: {end.message}"

    def timeline(self) -> str:
        """A line for each sample that differs from the one before."""
        lines, last = [], ""
        for sample in self.samples:
            conditions = " ".join(
                f"{kind}={state[0]}/{state[1]}"
                for kind, state in sorted(sample.conditions().items())
                if kind not in ("Complete", "Failed", "ClusterProvisioned") or state[0] == "Unknown"
            )
            line = (
                f"{sample.phase or '-'} step {sample.step} (disk {sample.saved}) attempt "
                f"{sample.attempt} driver {sample.driver} ready {sample.ready} "
                f"{'' if sample.operator else 'NO OPERATOR '}{conditions} | {sample.message}"
            )
            if line != last:
                lines.append(f"{sample.at - self.injected:7.1f} {line}")
            last = line
        return "\n".join(lines)


_GOOD = {
    "RolesReady": "True",
    "Training": "True",
    "ClusterProvisioned": "True",
    "Accepted": "True",
    "Complete": "True",
}


def _last_step(sample: Sample) -> int:
    return int((sample.status or {}).get("maxSteps", 0))


def broken_promises(
    report: Report, end: str = "Succeeded", within: float = TRUE_WITHIN_SECONDS
) -> Iterator[str]:
    """Yield what no fault may cause: another end than this, lost steps, an untrue status."""
    ended = report.end()
    if ended is None:
        last = report.samples[-1]
        yield f"neither recovered nor ended: {last.phase}, {last.message or 'without a message'}"
    elif ended.phase != end:
        yield f"{ended.phase} instead of {end}"
    if report.lost_beyond_checkpoint():
        yield f"{report.lost_beyond_checkpoint()} saved steps were lost"
    for item in untruths(report.samples, within):
        yield f"untrue for {item.seconds:.0f} s: {item.text}"


class Recorder:
    """Takes a sample of one run each second, in a thread. Use as a context manager."""

    def __init__(self, runs: Cluster, name: str) -> None:
        self._runs = runs
        self._name = name
        self._samples: list[Sample] = []
        self._done = threading.Event()
        self._folders: list[Path] = []

    def __enter__(self) -> Recorder:
        self._proxy = subprocess.Popen(
            ["kubectl", "proxy", "--port=0"],
            env=self._runs.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._proxy.stdout is not None
        line = self._proxy.stdout.readline()
        self._port = int(line.rpartition(":")[2])
        self._thread = threading.Thread(target=self._record, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()
        self._proxy.terminate()
        self._proxy.wait()
        assert self._proxy.stdout is not None
        self._proxy.stdout.close()

    @property
    def samples(self) -> list[Sample]:
        """All so far."""
        return list(self._samples)

    def wait(self, wanted: Callable[[Sample], bool], seconds: float) -> Sample | None:
        """Return the first sample from now on that is as wanted; None if none is."""
        end, seen = time.monotonic() + seconds, max(0, len(self._samples) - 1)
        while time.monotonic() < end:
            for sample in self._samples[seen:]:
                seen += 1
                if wanted(sample):
                    return sample
            time.sleep(0.2)
        return None

    def _record(self) -> None:
        while not self._done.is_set():
            began = time.monotonic()
            self._samples.append(self._sample())
            self._done.wait(max(0.0, 1.0 - (time.monotonic() - began)))

    def _sample(self) -> Sample:
        namespace = self._runs.namespace
        run = self._get(f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}/{self._name}")
        labelled = f"labelSelector={quote(f'{LABEL_RUN}={self._name}')}"
        pods = self._get(f"/api/v1/namespaces/{namespace}/pods?{labelled}")
        operators = self._get(f"/api/v1/namespaces/{SYSTEM}/pods")
        if run is not None and not self._folders:
            self._folders = _checkpoint_folders(self._get("/api/v1/persistentvolumes"), namespace)
        ready: dict[str, int] = {}
        for pod in pods["items"] if pods else ():
            role = pod["metadata"].get("labels", {}).get(LABEL_ROLE)
            if role in {item.value for item in Role} and counts_as_ready(pod):
                ready[role] = ready.get(role, 0) + 1
        answered = run is not None and pods is not None
        return Sample(
            at=time.time(),
            status=(run.get("status") or {}) if run is not None and answered else None,
            operator=bool(operators and any(map(is_ready, operators["items"]))),
            driver=_driver(),
            ready=ready,
            pods=frozenset(_containers(pods["items"] if pods else ())),
            saved=_newest_checkpoint(self._folders, run) if run else None,
        )

    def _get(self, path: str) -> dict[str, Any] | None:
        """Return the object that the apiserver answers within the limit; else None."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_ANSWER_SECONDS)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
            found: dict[str, Any] | None = json.loads(body) if answer.status == 200 else None
            return found
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            connection.close()


def counts_as_ready(pod: dict[str, Any]) -> bool:
    """The pod is ready, stays, and belongs to a RayCluster."""
    owners = pod["metadata"].get("ownerReferences", ())
    return is_ready(pod) and any(owner["kind"] == "RayCluster" for owner in owners)


def _containers(pods: Iterable[dict[str, Any]]) -> Iterator[str]:
    for pod in pods:
        owners = pod["metadata"].get("ownerReferences", ())
        if any(owner["kind"] == "RayCluster" for owner in owners):
            for item in pod.get("status", {}).get("containerStatuses", ()):
                yield f"{pod['metadata']['uid']}/{item['name']}/{item['restartCount']}"


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return "deletionTimestamp" not in pod["metadata"] and any(
        item["type"] == "Ready" and item["status"] == "True" for item in conditions
    )


def processes_in_pods(words: Sequence[str], pod_uid: str = "") -> list[psutil.Process]:
    """The processes of pods with these consecutive words in their command line.

    The node of the development cluster is this machine.
    """
    found = []
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
            places = range(len(line) - len(words) + 1)
            if not any(line[place : place + len(words)] == list(words) for place in places):
                continue
            cgroup = Path(f"/proc/{process.pid}/cgroup").read_text()
        except (psutil.Error, OSError):  # it has ended meanwhile
            continue
        if "kubepods" in cgroup and pod_uid in cgroup:
            found.append(process)
    return found


def _driver() -> str:
    """Is there a driver in a pod of this machine? One run at a time is drilled."""
    states = set()
    for process in processes_in_pods(_DRIVER):
        try:
            states.add(process.status())
        except psutil.Error:
            continue
    states -= {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    if not states:
        return "gone"
    return "stopped" if states == {psutil.STATUS_STOPPED} else "running"


def _checkpoint_folders(volumes: dict[str, Any] | None, namespace: str) -> list[Path]:
    """Folders on this machine of the volumes that runs of the namespace have claimed."""
    return [
        Path(item["spec"]["hostPath"]["path"])
        for item in (volumes or {"items": []})["items"]
        if item["spec"].get("claimRef", {}).get("namespace") == namespace
        and item["status"].get("phase") == "Bound"
        and "hostPath" in item["spec"]
    ]


def _newest_checkpoint(folders: Iterable[Path], run: dict[str, Any]) -> int | None:
    """Step of the run's newest checkpoint; None if no folder can be read from here."""
    own = folder_of("/", run["metadata"]["name"], run["metadata"]["uid"]).strip("/")
    readable = [folder for folder in folders if folder.is_dir()]
    steps = [
        int(manifest.parent.name.removeprefix("step-"))
        for folder in readable
        for manifest in folder.glob(f"{own}/step-*/manifest.json")
    ]
    return max(steps, default=0) if readable else None


@dataclass(frozen=True)
class Row:
    """One line of the table in benchmarks/results/drills.md."""

    drill: str
    date: str
    said: str
    recovered: str
    lost: str
    result: str

    @classmethod
    def of(cls, drill: str, report: Report, problems: Sequence[str]) -> Row:
        said = "; ".join(f"{word} ({seconds:.0f})" for seconds, word in report.said()[:4])
        recovered = report.recovered()
        again = "trained on" if report.trained_on() else "-"
        if again == "-" and recovered is not None:
            again = f"{recovered:.0f}"
        result = report.result()
        if problems:
            result = f"**{'; '.join(problems)}** ({result})"
        return cls(
            drill,
            datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
            said or "nothing",
            again,
            str(report.lost()),
            result,
        )

    def line(self) -> str:
        """As Markdown."""
        cells = (self.drill, self.date, self.said, self.recovered, self.lost, self.result)
        lines = (" ".join(cell.replace("|", " ").split()) for cell in cells)
        return f"| {' | '.join(lines)} |"


TABLE_HEAD = (
    "| drill | date (UTC) | what the status said (after seconds) | next step after seconds "
    "| steps lost | result |\n|---|---|---|---|---|---|\n"
)


class HasLine(Protocol):
    """A line of a table."""

    @property
    def drill(self) -> str: ...

    def line(self) -> str: ...


def with_row(text: str, row: HasLine, order: Sequence[str], table: str = TABLE_HEAD) -> str:
    """Return a page with this row in its table, instead of an older row of the same drill.

    Args:
        order: of the drills in the table.
        table: its head.
    """
    head, _, rest = text.partition(table)
    lines = rest.splitlines()
    count = next(
        (place for place, line in enumerate(lines) if not line.startswith("| ")), len(lines)
    )
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in lines[:count]}
    rows[row.drill] = row.line()
    ordered = [rows[name] for name in order if name in rows]
    return head + table + "\n".join([*ordered, *lines[count:]]) + "\n"
