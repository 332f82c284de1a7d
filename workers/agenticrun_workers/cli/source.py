"""Names the source of a run: its output folder on this machine, or its AgenticRun on a cluster.

Commands that show or steer a run take `RUN`, and work on both through `RunSource`. On a cluster,
kubectl is called: whatever the user's kubectl can reach and sign in to, these commands can.
The output folder is read in the head pod (`kubectl exec`). Once that is gone, object storage is
read from here, and a volume in a pod that mounts it until it is read (`reader_pod.py`).
"""

from __future__ import annotations

import atexit
import io
import json
import math
import re
import shutil
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

import psutil
import typer
from typing_extensions import override

from agenticrun_api import (
    AgenticRun,
    AgenticRunStatus,
    InvalidRun,
    Outcome,
    Phase,
    Role,
    parse_run,
)
from agenticrun_api.base import clean_text
from agenticrun_api.load import parse_served, read_run, repair_status
from agenticrun_api.names import (
    GROUP,
    LABEL_ROLE,
    LABEL_RUN,
    PLURAL,
    RAY_CONTAINER,
    REPORTER_CONTAINER,
    REPORTER_PORT,
    REPORTER_TOKEN_FILE,
    SINGULAR,
    TOKEN_HEADER,
)
from agenticrun_workers.cli.common import give_up
from agenticrun_workers.cli.kubectl import Kubectl, NoCluster, SourceError
from agenticrun_workers.cli.reader_pod import (
    READER_CONTAINER,
    MayNotCreatePods,
    Unreadable,
    commands_by_hand,
    output_volume,
    reader_pod,
    running_reader,
)
from agenticrun_workers.reporting.display import RunView, remaining_seconds
from agenticrun_workers.reporting.display import validation_result as result_of
from agenticrun_workers.reporting.run_folder import (
    CHECKPOINT,
    RAY_MARKS,
    SAMPLES,
    STOP,
    TRACES,
    RunFolder,
    TraceRequest,
    without_secrets,
)

RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Output folder of a run on this machine (the newest one below it), "
        "or name of an AgenticRun on the cluster.",
    ),
]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="Its namespace. Default: that of kubectl's context."),
]
Context = Annotated[
    str | None, typer.Option("--context", help="kubectl's context. Default: the current one.")
]

ALL = 10**9
"""Every step, or every sample."""


@contextmanager
def or_give_up() -> Iterator[None]:
    """End the command with exit code 64 if the body raises a `SourceError`, with its message."""
    try:
        yield
    except SourceError as error:
        give_up(str(error))


@dataclass(frozen=True)
class Reading:
    """State of a run, as it was read at one moment."""

    name: str
    place: str
    """Place of the run, to show to the user."""
    phase: str
    message: str
    step: int
    max_steps: int
    folder: RunFolder
    """Its output, or a copy; empty if it no longer exists."""
    config: Mapping[str, Any] | None
    """The run as it was run, without the values of environment variables."""
    finished: bool
    elapsed: float | None = None
    remaining: float | None = None
    newest: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the newest step, as far as they are known without the folder."""
    facts: Sequence[tuple[str, str]] = ()
    missing: Sequence[str] = ()
    """Parts that could not be read, and why."""

    def view(self) -> RunView:
        """Return what a terminal shows."""
        lines = self.folder.metrics()
        steps = [line for line in lines if "time/step" in line]
        validations = [line for line in lines if any(name.startswith("val/") for name in line)]
        newest = {**self.newest}
        for line in (*validations[-1:], *steps[-1:]):
            newest |= {name: value for name, value in line.items() if name not in ("step", "time")}
        results = (result_of(line) for line in validations)
        sample = ""
        if files := self.folder.sample_files():
            episodes = self.folder.episodes(files[-1])
            sample = episodes[0].text if episodes else ""
        return RunView(
            name=f"{self.name}  ({self.place})",
            phase=self.phase,
            message=self.message,
            step=self.step,
            max_steps=self.max_steps,
            metrics=newest,
            rewards=[line["rollout/score/mean"] for line in steps if "rollout/score/mean" in line],
            validations=[value for value in results if value is not None],
            elapsed=self.elapsed,
            remaining=self.remaining,
            facts=[*self.facts, *(("missing", text) for text in self.missing)],
            sample=sample,
        )


class RunSource(Protocol):
    """One run, wherever it is. Every method raises `SourceError`."""

    def read(self, *, steps: int = ALL, samples: int = ALL) -> Reading:
        """Read the run.

        Args:
            steps: the newest lines of metrics.
            samples: files of sample episodes, from the whole run and with the newest one.
        """
        ...

    def logs(self, role: str, *, lines: int, follow: bool) -> None:
        """Print the logs of a role, and new lines as they come if `follow`."""
        ...

    def stop(self) -> str:
        """Ask the run to save a checkpoint and end. Return what happens now."""
        ...

    def checkpoint(self) -> str:
        """Ask for a checkpoint after the current step. Return what happens now."""
        ...

    def resume(self) -> str:
        """Continue from the newest checkpoint. Return a message that says what happens now."""
        ...

    @property
    def trace_poll_seconds(self) -> float:
        """Time between two calls of `trace`."""
        ...

    def ask_for_trace(self, name: str, steps: int) -> None:
        """Ask for a trace of the next steps, as `driver/trace.py` expects it."""
        ...

    def end_trace(self, name: str) -> None:
        """Ask for what there is of a trace."""
        ...

    def trace(self, name: str) -> bytes | None:
        """Return the file of a trace that was asked for; None while there is none."""
        ...


def open_run(run: str, namespace: str | None, context: str | None) -> RunSource:
    """Return the source of a run; give up with a message if `run` can be neither."""
    path = Path(run)
    # Either option says that the run is on a cluster.
    if namespace is None and context is None and path.is_dir():
        # Times in names sort as text; the folder itself, if it is a run, is the last.
        found = sorted(
            (folder for folder in (path, *path.glob("*/")) if RunFolder(folder).is_run),
            key=lambda folder: (folder == path, folder.name),
        )
        if found:
            return FolderSource(RunFolder(found[-1].resolve()))
        if "/" in run or run in (".", ".."):
            give_up(f"{run} is not the output folder of a run: it has no metrics.jsonl")
    elif "/" in run:
        give_up(f"{run}: there is no such folder; `agenticrun run` writes to runs/<name>/<time>")
    return ClusterSource(Kubectl(namespace, context), run)


def _why_unread(file: Path) -> str:
    """Return why `RunFolder.config` is None."""
    if not file.is_file():
        return "the run was made by an older version"
    try:
        read_run(file)
    except (InvalidRun, OSError) as error:
        return str(error).removeprefix(f"{file}: ")
    return "it was written while it was read"


@dataclass(frozen=True)
class FolderSource(RunSource):
    """A run on this machine."""

    folder: RunFolder

    @override
    def read(self, *, steps: int = ALL, samples: int = ALL) -> Reading:
        """All of the folder is here."""
        del steps, samples
        folder, progress = self.folder, self.folder.progress()
        config, attempts = folder.config(), folder.attempts()
        alive = folder.process() is not None
        lines = [line for line in folder.metrics() if "time/step" in line]
        step = progress.step if progress else int(lines[-1]["step"]) if lines else 0
        spec = (config or {}).get("spec") or {}
        known = int((spec.get("pipeline") or {}).get("maxSteps") or step)
        final = progress.final if progress else None
        if alive:
            phase = progress.activity.value if progress else "Running"
            message = progress.message if progress else ""
        elif final:
            phase, message = final.outcome.value, final.message
        else:
            phase = "Ended"
            message = f"no process trains in {folder.path}: `agenticrun resume` continues it"
        began = None
        if attempts:  # those of older versions have no start of the process
            began = _seconds_of(attempts[-1].get("started") or attempts[-1]["time"])
        ended = _seconds_of(progress.time) if progress else None
        # A dead process may have left no end: its last report is the best that is known.
        until = time.time() if alive else ended
        checkpoint = folder.checkpoint()
        return Reading(
            name=((config or {}).get("metadata") or {}).get("name") or folder.path.name,
            place=_from_here(folder.path),
            phase=phase,
            message=message,
            step=step,
            max_steps=progress.max_steps if progress else known,
            folder=folder,
            config=config,
            finished=not alive,
            elapsed=until - began if until and began else None,
            remaining=remaining_seconds(progress) if progress and alive else None,
            newest=progress.metrics if progress else {},
            facts=[("checkpoint", _from_here(checkpoint) if checkpoint else "none yet")],
            missing=[] if config else ["run.yaml: " + _why_unread(folder.path / "run.yaml")],
        )

    @override
    def logs(self, role: str, *, lines: int, follow: bool) -> None:
        path = self.folder.path
        if role == REPORTER_CONTAINER:
            raise SourceError("on this machine there is no reporter")
        if role == Role.DRIVER:
            files = [(name, path / name) for name in ("run.log", *DRIVER_LOGS)]
        else:
            files = self.folder.actor_logs(Role(role))
        if role == Role.INFERENCE:
            servers = sorted(path.glob("engines/**/*.log"))
            files += [(str(file.relative_to(path / "engines")), file) for file in servers]
        files = [(name, file) for name, file in files if file.is_file()]
        if not files:
            raise SourceError(
                f"{path} has no log of the role {role}: it has printed nothing, or its actors are "
                "threads of the driver (--in-process), which logs for them"
            )
        # Of several files the newest lines, not the newest of each.
        if role == Role.DRIVER and not follow:  # one log in several files
            words = [str(lines), *(file.name for _, file in files)]
            _stream([(None, ["sh", "-c", LOG_END, "sh", str(path), *words])])
            return
        tail = ["tail", "-q", "-n", str(lines), *(["-F"] * follow)]
        _stream([(name if len(files) > 1 else None, [*tail, str(file)]) for name, file in files])

    @override
    def stop(self) -> str:
        self._signal(STOP)
        return (
            f"{self.folder.path}: the run saves a checkpoint and ends; "
            f"`agenticrun resume {self.folder.path}` continues it"
        )

    @override
    def checkpoint(self) -> str:
        self._signal(CHECKPOINT)
        return f"{self.folder.path}: the run saves a checkpoint after its current step"

    @override
    def resume(self) -> str:
        """Train in this process, which ends with the run."""
        from agenticrun_workers.cli.run import train

        path, attempts = self.folder.path, self.folder.attempts()
        file = path / "run.yaml"
        if not file.is_file():
            raise SourceError(
                f"{path} has no run.yaml: `agenticrun run -f FILE -o {path}` continues it"
            )
        progress = self.folder.progress()
        # A second run would end at once, with the same message.
        if progress and progress.final and progress.final.outcome is Outcome.SUCCEEDED:
            raise SourceError(
                f"{path}: {progress.final.message}. For more steps: "
                f"agenticrun run -f {file} -o {path} --set pipeline.maxSteps=..."
            )
        try:
            run = parse_run(read_run(file), local=True)
        except InvalidRun as error:
            raise SourceError(f"{file}: {str(error).removeprefix(f'{file}: ')}") from error
        # The run's modules may be elsewhere than its output.
        code = Path(attempts[-1].get("code", path)) if attempts else path
        train(run, path, code, file)

    trace_poll_seconds: ClassVar[float] = 0.3

    @override
    def ask_for_trace(self, name: str, steps: int) -> None:
        self._process()
        self.folder.ask_for_trace(name, steps)

    @override
    def end_trace(self, name: str) -> None:
        self._request(name).withdraw()

    @override
    def trace(self, name: str) -> bytes | None:
        request = self._request(name)
        alive = self.folder.process() is not None  # before the look: it writes, then it ends
        if request.answer.exists():
            return request.answer.read_bytes()
        if request.failure.exists():
            raise SourceError(f"{self.folder.path}: no trace: {request.failure.read_text()}")
        if not alive:
            request.withdraw()
            raise SourceError(f"{self.folder.path}: the run has ended without a trace: see run.log")
        return None

    def _request(self, name: str) -> TraceRequest:
        return TraceRequest(self.folder.path / TRACES / f"{name}.request", 0)

    def _process(self) -> psutil.Process:
        process = self.folder.process()
        if process is None:
            raise SourceError(
                f"no process of this machine trains in {self.folder.path}; "
                "one that has just started answers in some seconds"
            )
        return process

    def _signal(self, number: int) -> None:
        self._process().send_signal(number)


class ClusterSource(RunSource):
    """A run on a cluster."""

    def __init__(self, kubectl: Kubectl, name: str) -> None:
        self._kubectl = kubectl
        self._name = name
        self._copy: Path | None = None
        self._output: str | None = None
        self._volume_reads: dict[tuple[object, ...], tuple[str, float]] = {}
        """Reads of the volume, by what was read in which state: the error, or nothing, and when
        to try again.

        Nothing changes there while the run has no pods, and `watch` looks every two seconds.
        """

    @override
    def read(self, *, steps: int = ALL, samples: int = ALL) -> Reading:
        document = self._document()
        status = repair_status(document.get("status"))
        run, missing = None, []
        try:
            run = parse_served(document)
        except InvalidRun as error:
            missing.append(f"the output: this version cannot read the run: {error.errors[0]}")
        folder = self._folder()
        if run is not None:
            try:
                self._fetch(run, folder, steps, samples)
            except SourceError as error:
                missing.append(f"curves, samples and timings: {error}")
        started = status.start_time or document["metadata"]["creationTimestamp"]
        ended = _seconds_of(status.completion_time) if status.completion_time else time.time()
        message = status.message or ""
        metadata = document["metadata"]
        kept = {key: metadata[key] for key in ("name", "namespace", "uid") if key in metadata}
        head = {key: document[key] for key in ("apiVersion", "kind") if key in document}
        return Reading(
            name=self._name,
            place=f"AgenticRun in namespace {document['metadata']['namespace']}",
            phase=" ".join(filter(None, [status.phase.value, status.activity or ""])),
            message=message,
            step=status.step or 0,
            max_steps=status.max_steps or document["spec"]["pipeline"]["maxSteps"],
            folder=RunFolder(folder),
            config=RunFolder(folder).config()
            or without_secrets({**head, "metadata": kept, "spec": document["spec"]}),
            finished=status.phase.finished,
            elapsed=ended - _seconds_of(started),
            remaining=None
            if status.estimated_completion_time is None or status.phase.finished
            else max(0.0, _seconds_of(status.estimated_completion_time) - time.time()),
            newest={metric.name: float(metric.value) for metric in status.metrics},
            facts=_facts(status),
            missing=missing,
        )

    @override
    def logs(self, role: str, *, lines: int, follow: bool) -> None:
        document = self._document()
        status = repair_status(document.get("status"))
        if role == Role.DRIVER:
            head = self._head()
            if head is None:
                typer.echo(clean_text(self._log_of_an_ended_driver(document, lines)), nl=False)
                return
            if status.job is None:
                raise SourceError("the driver has not been submitted yet")
            file = f"job-driver-{status.job.submission_id}.log"
            self._follow([head], f"tail -q -n {lines} {{}} {RAY_LOGS}/{file}", follow)
            return
        if role == REPORTER_CONTAINER:
            more = ["-f"] if follow else []
            head = self._head()
            if head is None:
                raise SourceError("the head pod is gone, and the reporter's log with it")
            words = ("logs", head, "-c", REPORTER_CONTAINER, f"--tail={lines}", *more)
            _stream([(None, self._kubectl.command(*words))])
            return
        pods = self._pods(role)
        if not pods:
            raise SourceError(f"{self._name} has no running pod of the role {role}")
        names = ["worker-*.out", "worker-*.err"]
        if role == Role.INFERENCE:  # the logs of engines' servers
            names += ["sglang-*.log", "vllm-*.log"]
        files = f"$(ls {' '.join(f'{RAY_LOGS}/{name}' for name in names)} 2>/dev/null)"
        self._follow(pods, f"tail -q -n {lines} {{}} {files}", follow)

    @override
    def stop(self) -> str:
        """On a cluster, a run that is stopped is suspended."""
        self._suspend(True)
        return (
            f"{self._name}: the driver saves a checkpoint, then the pods go; "
            f"`agenticrun resume {self._name}` continues from it, "
            f"`kubectl delete {SINGULAR} {self._name}` removes the run"
        )

    @override
    def resume(self) -> str:
        self._suspend(False)
        return f"{self._name}: new pods come, and the run continues from its newest checkpoint"

    def _suspend(self, wanted: bool) -> None:
        phase = repair_status(self._document().get("status")).phase
        if phase.finished:
            raise SourceError(f"{self._name} has ended: its phase is {phase}")
        patch = json.dumps({"spec": {"suspend": wanted}})
        self._kubectl.run("patch", RESOURCE, self._name, "--type=merge", "-p", patch)

    @override
    def checkpoint(self) -> str:
        """The reporter hands requests to the driver."""
        document = self._document()
        head = self._head()
        if head is None:
            phase = repair_status(document.get("status")).phase
            raise SourceError(f"{self._name} is {phase}: only a run that trains saves a checkpoint")
        self._kubectl.run("exec", head, "-c", RAY_CONTAINER, "--", "python", "-c", ASK_CHECKPOINT)
        return f"{self._name}: the run saves a checkpoint after its current step"

    trace_poll_seconds: ClassVar[float] = 2.0

    @override
    def ask_for_trace(self, name: str, steps: int) -> None:
        script = 'mkdir -p "$(dirname "$1")" && echo "$2" > "$1.new" && mv "$1.new" "$1"'
        self._at_head(script, f"{self._trace_file(name)}.request", str(steps))

    @override
    def end_trace(self, name: str) -> None:
        self._at_head('rm -f "$1"', f"{self._trace_file(name)}.request")

    @override
    def trace(self, name: str) -> bytes | None:
        script = (
            'if [ -e "$1.json.gz" ]; then cat "$1.json.gz"; '
            'elif [ -e "$1.failed" ]; then echo "no trace: $(cat "$1.failed")" >&2; exit 3; fi'
        )
        return self._at_head(script, self._trace_file(name)) or None

    def _trace_file(self, name: str) -> str:
        if self._output is None:
            try:
                self._output = str(_folders(parse_served(self._document()))[0])
            except InvalidRun as error:
                raise SourceError(str(error)) from error
        return f"{self._output}/{TRACES}/{name}"

    def _at_head(self, script: str, *arguments: str) -> bytes:
        """Run a script in the head pod and return what it prints."""
        head = self._head()
        if head is None:
            phase = repair_status(self._document().get("status")).phase
            raise SourceError(f"{self._name} is {phase}: only a run that trains can be traced")
        return self._execute(head, RAY_CONTAINER, "sh", "-c", script, "sh", *arguments)

    def _document(self) -> dict[str, Any]:
        try:
            return self._kubectl.json(RESOURCE, self._name)
        except NoCluster:
            raise NoCluster(
                f"there is no folder {self._name} here, and kubectl knows no cluster: name the "
                f"output folder of a run, such as runs/{self._name}, or set KUBECONFIG"
            ) from None
        except SourceError as error:
            if "(NotFound)" in str(error) and f'"{self._name}" not found' in str(error):
                raise SourceError(
                    f"there is no AgenticRun {self._name} in this namespace, and no folder of "
                    "that name here: see `kubectl get agenticruns -A`, and use --namespace"
                ) from None
            if "doesn't have a resource type" in str(error):
                raise SourceError(
                    "the cluster does not know AgenticRuns: `agenticrun doctor` says what to do"
                ) from None
            raise

    def _head(self) -> str | None:
        pods = self._pods(Role.DRIVER)
        return pods[0] if pods else None

    def _pods(self, role: str) -> list[str]:
        selector = f"--selector={LABEL_RUN}={self._name},{LABEL_ROLE}={role}"
        return [
            pod["metadata"]["name"]
            for pod in self._kubectl.json("pods", selector)["items"]
            if pod["status"].get("phase") == "Running"
            and not pod["metadata"].get("deletionTimestamp")
        ]

    def _folder(self) -> Path:
        if self._copy is None:
            self._copy = Path(tempfile.mkdtemp(prefix="agenticrun-"))
            # Readings outlive the source.
            atexit.register(shutil.rmtree, self._copy, ignore_errors=True)
        return self._copy

    def _fetch(self, run: AgenticRun, folder: Path, steps: int, samples: int) -> None:
        """Copy what people look at from the output folder, wherever it is now."""
        output, base = _folders(run)
        pictures = run.spec.tracking.render_dir
        script = ("sh", "-c", PACK, "sh", str(output), str(steps), str(samples))
        pack = (*script, pictures or "pictures")
        if head := self._head():
            unpack(self._execute(head, RAY_CONTAINER, *pack), folder)
        elif "://" in base:
            download_output(base, folder, samples, pictures)
        else:
            job = run.status.job.submission_id if run.status.job else ""
            key = (run.status.phase, job, steps, samples)
            problem, again = self._volume_reads.get(key, ("", -math.inf))
            if time.monotonic() >= again:
                problem, again = "", math.inf
                try:
                    with self._reader(run, output) as pod:
                        unpack(self._execute(pod, READER_CONTAINER, *pack), folder)
                except SourceError as error:
                    final = isinstance(error, Unreadable)
                    problem = str(error)
                    again = math.inf if final else time.monotonic() + READ_AGAIN_SECONDS
                self._volume_reads[key] = problem, again
            if problem:
                raise SourceError(problem)

    def _log_of_an_ended_driver(self, document: Mapping[str, Any], lines: int) -> str:
        """Return the end of the driver's log: of driver.log, and of the full file before it."""
        try:
            run = parse_served(dict(document))
            output, base = _folders(run)
            if "://" in base:
                rows = stored_log(base).splitlines(keepends=True)
                return "".join(rows[max(0, len(rows) - lines) :])
            with self._reader(run, output) as pod:
                words = ("sh", "-c", LOG_END, "sh", str(output), str(lines), *DRIVER_LOGS)
                return self._execute(pod, READER_CONTAINER, *words).decode(errors="replace")
        except (InvalidRun, SourceError) as error:
            tail = repair_status(document.get("status")).log_tail
            end = f"\nIts end, as the status has it:\n{tail}" if tail else ""
            raise SourceError(f"driver.log: {error}{end}") from error

    def _execute(self, pod: str, container: str, *words: str) -> bytes:
        return self._kubectl.run("exec", pod, "-c", container, "--", *words, timeout=PACK_SECONDS)

    @contextmanager
    def _reader(self, run: AgenticRun, output: Path) -> Iterator[str]:
        """Yield the name of a pod that has the output folder; it lasts as long as the context."""
        phase = run.status.phase
        if not phase.finished and phase not in (Phase.SUSPENDED, Phase.QUEUED):
            # The run's own pods need the volume, perhaps on another node.
            raise SourceError(f"the run is {phase} and has no head pod: try again when it trains")
        volume = output_volume(run, output)
        if volume is None:
            none = run.spec.checkpoint is not None and run.spec.checkpoint.none
            reason = "it saves no checkpoints (checkpoint.none)" if none else f"{output} was theirs"
            raise Unreadable(f"the run's output was lost with its pods: {reason}")
        state = "has ended" if phase.finished else f"is {phase.lower()}"
        typer.echo(
            f"the run {state}: reading its output from {volume} with a pod, which takes seconds, "
            "or minutes if its node pulls the image",
            err=True,
        )
        pod = reader_pod(run, volume)
        try:
            with running_reader(self._kubectl, pod, volume) as name:
                yield name
        except MayNotCreatePods:
            typer.echo(
                f"You may not create pods here. A user who may can copy the output with:\n\n"
                f"{commands_by_hand(pod, output, self._kubectl.context)}\n\n"
                f"Then name the folder ./{self._name} instead of the run.",
                err=True,
            )
            raise Unreadable(
                f"only a pod can read {volume}, and you may not create pods in namespace "
                f"{run.metadata.namespace}"
            ) from None

    def _follow(self, pods: Sequence[str], script: str, follow: bool) -> None:
        text = script.format("-F" if follow else "")
        _stream(
            [
                (
                    pod if len(pods) > 1 else None,
                    self._kubectl.command("exec", pod, "-c", RAY_CONTAINER, "--", "sh", "-c", text),
                )
                for pod in pods
            ]
        )


RESOURCE = f"{PLURAL}.{GROUP}"
RAY_LOGS = "/tmp/ray/session_latest/logs"
PACK_SECONDS = 600.0
READ_AGAIN_SECONDS = 180.0
"""Time after which `watch` reads a volume again that could not be read."""
DRIVER_LOGS = ("driver.log.1", "driver.log")
"""Files of an output folder with the driver's log, the older one first."""

LOG_END = """
cd "$1" || exit
lines=$2 && shift 2
for file; do
    shift
    [ ! -r "$file" ] || set -- "$@" "$file"
done
[ $# -gt 0 ] || { echo "it is not in $PWD, or this user may not read it" >&2; exit 3; }
cat "$@" | tail -n "$lines"
"""
"""Writes the end of files that follow each other to standard output.

Arguments: the folder, the number of lines, and the names of the files.
"""

PACK = """
cd "$1" 2>/dev/null || { echo "there is no folder $1 yet" >&2; exit 3; }
copy=$(mktemp -d) && trap 'rm -rf "$copy"' EXIT
cp run.yaml attempts.jsonl "$copy" 2>/dev/null
tail -n "$2" metrics.jsonl > "$copy/metrics.jsonl" 2>/dev/null
mkdir "$copy/samples" "$copy/pictures"
files=$(ls -tr samples 2>/dev/null)
total=$(echo "$files" | wc -l)
number=0
for file in $files; do
    number=$((number + 1))
    [ $((number * $3 / total)) -gt $(((number - 1) * $3 / total)) ] || continue
    cp "samples/$file" "$copy/samples"
    cp "$4/${file%.txt}"-*.gif "$copy/pictures" 2>/dev/null
done
tar -C "$copy" -cz -f - .
"""
"""Writes the parts of an output folder that people look at to standard output.

Arguments: the folder, the number of lines of metrics and of files of samples, and the folder of
pictures.
"""

ASK_CHECKPOINT = f"""
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener
token = Path({REPORTER_TOKEN_FILE!r}).read_text().strip()
request = Request("http://127.0.0.1:{REPORTER_PORT}/checkpoint", method="POST",
                  headers={{{TOKEN_HEADER!r}: "Bearer " + token}})
build_opener(ProxyHandler({{}})).open(request, timeout=10)
"""


def _folders(run: AgenticRun) -> tuple[Path, str]:
    """Return what `cluster_folders` returns."""
    from agenticrun_workers.driver.checkpoints import cluster_folders
    from agenticrun_workers.errors import InvalidConfig

    try:
        return cluster_folders(run)
    except InvalidConfig as error:
        raise SourceError(str(error)) from error


def unpack(packed: bytes, folder: Path) -> None:
    """Write the files of a `PACK` to a folder."""
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")


def stored_log(base: str) -> str:
    """Return the driver's log from an output folder in object storage."""
    from agenticrun_workers.storage import Folder

    parts = []
    with _naming(base):
        storage = Folder(base)
        for name in DRIVER_LOGS:
            with suppress(FileNotFoundError):
                parts.append(storage.read(name))
    if not parts:
        raise SourceError(f"it is not in {base}")
    return b"".join(parts).decode(errors="replace")


@contextmanager
def _naming(base: str) -> Iterator[None]:
    """Turn what a storage raises into a `SourceError` with its name."""
    try:
        yield
    except Exception as error:  # drivers have exceptions of their own
        raise SourceError(
            f"no head pod runs, and {base} cannot be read from here: {error}"
        ) from error


def download_output(base: str, folder: Path, samples: int, pictures: str | None) -> None:
    """Copy the parts of an output folder that people look at from object storage."""
    from agenticrun_workers.storage import Folder

    with _naming(base):
        storage = Folder(base)
        names = list(storage.sizes())
        texts = [name for name in names if SAMPLES.fullmatch(name.removeprefix("samples/"))]
        texts.sort(key=lambda name: (int(re.findall(r"\d+", name)[0]), "-val" in name))
        taken = [
            name
            for number, name in enumerate(texts, start=1)
            if number * samples // len(texts) > (number - 1) * samples // len(texts)
        ]
        films = tuple(f"{pictures}/{Path(name).stem}-" for name in taken) if pictures else ()
        for name in names:
            if name in taken or name in RECORDS or name.startswith(films):
                target = folder / name
                if name.startswith(films):
                    target = folder / "pictures" / Path(name).name
                target.parent.mkdir(parents=True, exist_ok=True)
                storage.download(name, target)


RECORDS = ("run.yaml", "attempts.jsonl", "metrics.jsonl")


def _facts(status: AgenticRunStatus) -> list[tuple[str, str]]:
    pods = [
        f"{role.name} {role.ready}/{role.desired}{f' {role.message}' if role.message else ''}"
        for role in status.roles
    ]
    saved = status.checkpoint
    return [
        ("pods", ", ".join(pods) or "none"),
        ("restarts", str(status.restarts)),
        ("checkpoint", f"step {saved.step}, {saved.uri}" if saved else "none yet"),
    ]


def _from_here(path: Path) -> str:
    """Return a path as one would type it in the current folder."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _seconds_of(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


def _stream(commands: Sequence[tuple[str | None, list[str]]]) -> None:
    """Run commands side by side and print their lines, each behind a name if it has one."""
    processes = [
        (name, subprocess.Popen(words, stdout=subprocess.PIPE, text=True, errors="replace"))
        for name, words in commands
    ]

    def pass_on(name: str | None, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(RAY_MARKS):
                continue
            clean = clean_text(line)
            typer.echo(f"[{name}] {clean}" if name else clean, nl=False)

    threads = [threading.Thread(target=pass_on, args=pair, daemon=True) for pair in processes]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
        failed = [process.wait() for _, process in processes]
    except KeyboardInterrupt:
        return
    finally:
        for _, process in processes:
            process.terminate()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    if any(failed):
        raise typer.Exit(1)
