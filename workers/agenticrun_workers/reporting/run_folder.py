"""The output folder of a run: what an attempt records in it, and how people's commands read it.

    run.yaml        the run as it was run; values of environment variables are hidden
    attempts.jsonl  one line per attempt: time, versions, machine
    metrics.jsonl   one line per step and per validation (trackers.py)
    samples/        episodes as text (driver/samples.py)
    checkpoints/    in local mode
    progress.json   in local mode: the newest progress snapshot
    process.json    in local mode: the process that trains; it takes signals
    traces/         traces that were recorded, and requests for more (driver/trace.py)
    run.log         in local mode; driver.log on a cluster
    actors/         in local mode with Ray: what the processes of actors print, a file for each

The folder may be that of a run which still trains, so a line may be half written.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from pydantic import ValidationError
from typing_extensions import override

from agenticrun_api import AgenticRun, Progress, Role
from agenticrun_api.base import clean_text
from agenticrun_api.version import __version__
from agenticrun_api.yaml_text import read_yaml, write_yaml
from agenticrun_workers.errors import CannotStart
from agenticrun_workers.reporting.client import ProgressSink, rfc3339

log = logging.getLogger(__name__)

HIDDEN = "(hidden)"
PACKAGES = (
    "torch", "ray", "transformers", "tokenizers", "safetensors", "peft", "numpy", "numba",
    "megatron-core", "deepspeed", "gymnasium",
)  # fmt: skip
"""Packages that decide what a run computes."""
GPU_SECONDS = 10.0


@dataclass(frozen=True)
class Episode:
    """A sample episode, as `SampleWriter` wrote it."""

    step: int
    validation: bool
    facts: Mapping[str, str]
    """tag, group, member, score, stop, turns, tokens; branch and error if there are any."""
    parts: tuple[tuple[str, str], ...]
    """Headline and text of each prompt, each answer, and the end."""
    picture: Path | None

    @property
    def text(self) -> str:
        """The episode as it is in the file, without its first line."""
        return "".join(f"--- {title} ---\n{text}\n" for title, text in self.parts)


class RunFolder:
    """An output folder. What is missing in it is empty or None."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def is_run(self) -> bool:
        """True if a run has written to the folder."""
        # Any of them: an attempt that fails early has written no metrics.
        names = ("metrics.jsonl", "attempts.jsonl", "progress.json")
        return any((self.path / name).is_file() for name in names)

    def config(self) -> dict[str, Any] | None:
        """Return the run as it was run; None if run.yaml is missing or not readable."""
        # A watcher reads while the run writes.
        with suppress(OSError, yaml.YAMLError):
            document = read_yaml((self.path / "run.yaml").read_text(encoding="utf-8"))
            return document if isinstance(document, dict) else None
        return None

    def attempts(self) -> list[dict[str, Any]]:
        """Return the record of each attempt, see `record_attempt`."""
        return _json_lines(self.path / "attempts.jsonl")

    def metrics(self) -> list[dict[str, Any]]:
        """Return all lines of metrics.jsonl; those of steps have `time/step`."""
        return _json_lines(self.path / "metrics.jsonl")

    def progress(self) -> Progress | None:
        """Return the newest progress snapshot."""
        with suppress(OSError, ValidationError):
            text = (self.path / "progress.json").read_bytes()
            return Progress.model_validate_json(text, extra="ignore")  # of a newer version
        return None

    def sample_files(self) -> list[Path]:
        """Return the files of sample episodes, the oldest step first."""
        named = ((SAMPLES.fullmatch(file.name), file) for file in self.path.glob("samples/*.txt"))
        found = [(int(name["step"]), bool(name["val"]), file) for name, file in named if name]
        return [file for _, _, file in sorted(found)]

    def episodes(self, file: Path) -> list[Episode]:
        """Return the episodes of one of the `sample_files`."""
        name = SAMPLES.fullmatch(file.name)
        assert name is not None
        tracking = ((self.config() or {}).get("spec") or {}).get("tracking") or {}
        folders = (str(tracking.get("renderDir") or ""), "pictures")  # a copy has the latter
        # A model may have written escape sequences or text that is not UTF-8.
        pieces = HEADER.split(clean_text(file.read_text(encoding="utf-8", errors="replace")))
        found = []
        for line, text in zip(pieces[1::2], pieces[2::2], strict=True):
            facts = _facts(line)
            gif = f"{file.stem}-{facts['tag']}-{facts.get('group')}-{facts.get('member')}.gif"
            pictures = (self.path / folder / gif for folder in folders)
            parts = PART.split(text)
            found.append(
                Episode(
                    step=int(name["step"]),
                    validation=bool(name["val"]),
                    facts=facts,
                    parts=tuple(
                        (title, body.strip("\n"))
                        for title, body in zip(parts[1::2], parts[2::2], strict=True)
                    ),
                    picture=next(filter(Path.is_file, pictures), None),
                )
            )
        return found

    def actor_logs(self, role: Role) -> list[tuple[str, Path]]:
        """Return what the actors of a role have printed on this machine: actor and file.

        run.log says which process an actor is, and Ray names the files by the process.
        """
        prefix = {Role.INFERENCE: "engine-", Role.ENV: "env-worker-"}.get(role, f"{role}-")
        started: list[tuple[str, str]] = []
        with suppress(OSError):
            started = STARTED.findall((self.path / "run.log").read_text(errors="replace"))
        return [
            (actor, file)
            for actor, pid in started
            if actor.startswith(prefix)
            for folder in (self.path / ACTORS, self.path / ACTORS / NOW)
            for file in sorted(folder.glob(f"worker-*-{pid}.*"))
            if _says_something(file)
        ]

    def checkpoint(self) -> Path | None:
        """Return the newest checkpoint of a run that was trained on this machine."""
        found = [
            (int(folder.name.removeprefix("step-")), folder)
            for folder in self.path.glob("checkpoints/step-*")
            # The manifest is written last: a folder without it is not a checkpoint.
            if folder.name.removeprefix("step-").isdigit() and (folder / "manifest.json").exists()
        ]
        return max(found)[1] if found else None

    def process(self) -> psutil.Process | None:
        """Return the process of this machine that trains in the folder."""
        try:
            kept = json.loads((self.path / "process.json").read_text())
            # The folder may be on a shared volume: a process id of another machine is another
            # process.
            if kept["host"] != socket.gethostname():
                return None
            process = psutil.Process(kept["pid"])
            # The number of a process is used again; its time of creation tells them apart.
            if abs(process.create_time() - kept["created"]) > 1:
                return None
            return None if process.status() == psutil.STATUS_ZOMBIE else process
        except (OSError, ValueError, KeyError, TypeError, psutil.NoSuchProcess):
            return None

    def record_attempt(self, run: AgenticRun, attempt: int, code: Path | None = None) -> None:
        """Write run.yaml, and add a line to attempts.jsonl.

        Args:
            run: the run.
            attempt: its number.
            code: the folder of modules beside the run file, in local mode.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            text = write_yaml(without_secrets(run.document()))
            (self.path / "run.yaml").write_text(text, encoding="utf-8")
            record = {
                "attempt": attempt,
                "time": rfc3339(time.time()),
                # Ray's start comes before the attempt; `watch` counts it as `run` does.
                "started": rfc3339(psutil.Process().create_time()),
                **({"code": str(code)} if code else {}),
                "versions": versions(),
                "machine": machine(),
            }
            with (self.path / "attempts.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:  # who saves a checkpoint there says what to do
            log.warning("the attempt is not recorded: %s", error)

    def link_actor_logs(self, written: Path) -> None:
        """Show the logs of actors where Ray writes them."""
        with suppress(OSError):
            (self.path / ACTORS).mkdir(parents=True, exist_ok=True)
            (self.path / ACTORS / NOW).unlink(missing_ok=True)  # of a killed process
            (self.path / ACTORS / NOW).symlink_to(written.absolute())

    def keep_actor_logs(self) -> None:
        """Copy the logs of actors that wrote anything: Ray's folder goes with the process."""
        with suppress(OSError):
            for file in (self.path / ACTORS / NOW).glob("worker-*-*-*.*"):
                # Most actors print nothing, and there may be hundreds.
                if _says_something(file):
                    shutil.copy(file, self.path / ACTORS)
            (self.path / ACTORS / NOW).unlink()

    def ask_for_trace(self, name: str, steps: int) -> TraceRequest:
        """Ask the run in the folder for a trace of its next steps."""
        file = self.path / TRACES / f"{name}.request"
        file.parent.mkdir(parents=True, exist_ok=True)
        # Renamed, so that the run never reads half a request.
        aside = file.with_suffix(".new")
        aside.write_text(str(steps))
        aside.replace(file)
        return TraceRequest(file, steps)

    def trace_requests(self) -> list[TraceRequest]:
        """Return the requests for traces, the oldest first."""
        found = []
        # By name, which begins with the time.
        for file in sorted((self.path / TRACES).glob("*.request"), key=lambda file: file.name):
            with suppress(OSError, ValueError):
                found.append(TraceRequest(file, int(file.read_text())))
        return found

    def refuse_if_in_use(self) -> None:
        """Raise `CannotStart` if another process trains in the folder."""
        other = self.process()
        if other is not None and other.pid != os.getpid():
            raise CannotStart(
                f"process {other.pid} trains in {self.path}: choose another folder with --output, "
                f"or end it first with `agenticrun stop {self.path}`"
            )

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Say in the folder that this process trains there and takes `STOP` and `CHECKPOINT`."""
        file = self.path / "process.json"
        process = psutil.Process()
        record = {
            "pid": process.pid,
            "created": process.create_time(),
            "host": socket.gethostname(),
            "command": Path(sys.argv[0]).name,
        }
        file.write_text(json.dumps(record))
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


STARTED = re.compile(r"driver\.actors: (\S+) runs on .*\bpid (\d+)\)$", re.MULTILINE)
ACTORS = "actors"
NOW = "now"
"""A link in `ACTORS` to the folder where Ray writes, while the run trains."""
SAMPLES = re.compile(r"step-(?P<step>\d+)(?P<val>-val)?\.txt")
HEADER = re.compile(r"^=== (tag .*) ===$\n?", re.MULTILINE)
PART = re.compile(r"^--- ((?:turn|answer|end|\d+ turns).*) ---$\n?", re.MULTILINE)
"""Headlines as `episode_text` and `transcript` write them."""


def _facts(line: str) -> dict[str, str]:
    """Parse `tag A, group 3, error KeyError: 'a, b'`."""
    # First, because the error may contain commas.
    line, _, error = line.partition(", error ")
    facts = dict(fact.split(" ", 1) for fact in line.split(", ") if " " in fact)
    return {**facts, "error": error} if error else facts


def _json_lines(path: Path) -> list[dict[str, Any]]:
    found = []
    with suppress(OSError):
        for line in path.read_text().splitlines():
            # The last line may be half written.
            with suppress(ValueError):
                found.append(json.loads(line))
    return found


RAY_MARKS = (":job_id:", ":actor_name:", ":task_name:")
"""Beginnings of lines in the logs of actors that Ray writes for itself."""


def _says_something(file: Path) -> bool:
    with suppress(OSError), file.open(encoding="utf-8", errors="replace") as lines:
        return any(not line.startswith(RAY_MARKS) for line in lines)
    return False


def without_secrets(document: Any) -> Any:
    """Return a copy of a run in which no environment variable has its value.

    Values may be keys. Their names stay, and so do references to Secrets, which hold no value.
    """
    if isinstance(document, list):
        return [without_secrets(item) for item in document]
    if not isinstance(document, dict):
        return document
    return {
        key: [{**item, "value": HIDDEN} if "value" in item else item for item in value]
        if key == "env" and isinstance(value, list) and all(isinstance(v, dict) for v in value)
        else without_secrets(value)
        for key, value in document.items()
    }


def versions() -> dict[str, str]:
    """Return the versions of AgenticRun, Python and the packages that are installed."""
    found = {"agenticrun": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def machine() -> dict[str, Any]:
    """Return the machine of this process: host, system, CPUs, memory, GPUs."""
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus(),
    }


def gpus() -> list[str]:
    """Return name, memory and driver of each NVIDIA GPU, without a CUDA context."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,driver_version",
        "--format=csv,noheader",
    ]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GPU_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


@dataclass(frozen=True)
class TraceRequest:
    """A file that asks a run for a trace of its next steps."""

    file: Path
    steps: int

    @property
    def answer(self) -> Path:
        """The trace."""
        return self.file.with_suffix(".json.gz")

    @property
    def failure(self) -> Path:
        """A text: why there is no trace."""
        return self.file.with_suffix(".failed")

    def withdraw(self) -> None:
        """Want no trace, or no more of it."""
        self.file.unlink(missing_ok=True)

    def fail(self, reason: str) -> None:
        """Answer that there is no trace."""
        with suppress(OSError):
            self.failure.write_text(reason, encoding="utf-8")
            self.withdraw()


TRACES = "traces"


class RecordedProgress(ProgressSink):
    """A `ProgressSink` that also keeps the newest snapshot in progress.json, for other processes.

    Args:
        sink: gets everything first.
        folder: the output folder.
    """

    def __init__(self, sink: ProgressSink, folder: Path) -> None:
        self._sink = sink
        self._file = folder / "progress.json"
        self._works = True

    @override
    def update(self, progress: Progress) -> None:
        self._sink.update(progress)
        self._write(progress)

    @override
    def sample(self, transcript: str) -> None:
        """Samples have files of their own."""
        self._sink.sample(transcript)

    @override
    async def finish(self, progress: Progress) -> None:
        # Before the sink, which may wait long for a reporter that is gone.
        self._write(progress)
        await self._sink.finish(progress)

    def _write(self, progress: Progress) -> None:
        aside = self._file.with_suffix(".tmp")
        try:
            text = progress.model_dump_json(by_alias=True, exclude_none=True)
            aside.write_text(text, encoding="utf-8")
            aside.replace(self._file)
            self._works = True
        except (OSError, ValueError) as error:  # a full disk does not stop training
            if self._works:
                log.warning("cannot write %s: %s", self._file, error)
            self._works = False


STOP = signal.SIGTERM
CHECKPOINT = signal.SIGUSR1
"""Signals to a process with a process.json. A second `STOP` changes nothing."""
