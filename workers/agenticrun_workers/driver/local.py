"""Local mode: an embedded Ray on this machine offers every role, and the same session trains as on a cluster."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import ray
from rich.console import Console

from agenticrun_api import AgenticRun, FinalReport, Role
from agenticrun_workers.driver.attempt import AttemptRunner
from agenticrun_workers.driver.progress import AttemptId, Requests
from agenticrun_workers.inference.actor import LOG_FOLDER
from agenticrun_workers.processes import children, end_families, families
from agenticrun_workers.reporting.client import ProgressSink
from agenticrun_workers.reporting.display import LiveDisplay, PlainDisplay

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 200 * 1024 * 1024
"""Enough for the weights of the small models that train on one machine; what does not fit spills to disk."""

PATIENCE_SECONDS = 15.0
"""How long Ray's leftover processes may take to end by themselves.

More than the supervisor of an engine's server needs to clean up.
"""

KILL_SECONDS = 10.0
"""How long killed processes may take to be gone: less than a hanging disk."""


def run_locally(run: AgenticRun, output: Path, console: Console) -> FinalReport:
    """Train `run` on this machine. Ctrl-C saves and ends; a second one ends at once.

    Args:
        output: where metrics and checkpoints go; checkpoints found there are gone on from, as `checkpoint.resume` says.
        console: where the display goes.
    """
    output.mkdir(parents=True, exist_ok=True)
    display: LiveDisplay | PlainDisplay = (
        LiveDisplay(console, run) if console.is_terminal else PlainDisplay(console)
    )
    with _log_file(output / "run.log"), embedded_ray(run, output / "engines"), display:
        return asyncio.run(_train(run, output, display))


async def _train(run: AgenticRun, output: Path, sink: ProgressSink) -> FinalReport:
    requests = Requests()
    training = asyncio.current_task()
    assert training is not None

    def interrupt() -> None:
        if requests.stop.is_set():
            training.cancel()
        requests.stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupt)
    checkpoint = run.spec.checkpoint
    session = AttemptRunner(
        run=run,
        attempt=AttemptId(run.metadata.uid or "local", f"{run.metadata.name}-local", 1),
        output=output,
        checkpoints=str(output / "checkpoints"),
        resume=checkpoint.resume if checkpoint else "Auto",
        sink=sink,
        requests=requests,
    )
    return await session.execute()


@contextmanager
def embedded_ray(run: AgenticRun, logs: Path | None = None) -> Iterator[None]:
    """A Ray of our own whose one node offers all roles. Its processes and those of environments end with it.

    Its files go with it, those of engines too unless they have a folder `logs`.
    """
    resources = {
        role.value: float(run.spec.actors(role))
        for role in {*run.spec.roles.workers, Role.INFERENCE}
    }
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    scratch = Path(
        tempfile.mkdtemp(prefix=f"arun-{os.getpid()}-", dir="/tmp")
    )  # paths of sockets must be short
    os.environ[LOG_FOLDER] = str((logs or scratch).absolute())
    others = children(os.getpid())
    ours: set[psutil.Process] = set()
    try:
        try:
            ray.init(
                address="local",
                num_cpus=1,
                resources=resources,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(scratch),
            )
        finally:
            ours = families(children(os.getpid()) - others)
        yield
    finally:
        ours = families(ours)  # before their parents end, and they are nobody's
        ray.shutdown()
        # Ray kills its daemon after a second. What that has not ended by then would live for a minute.
        if left := end_families(ours, PATIENCE_SECONDS, KILL_SECONDS):
            pids = sorted(process.pid for process in left)
            log.warning("processes of Ray that cannot be killed: %s", pids)
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _log_file(path: Path) -> Iterator[None]:
    """Log into a file: the terminal belongs to the display."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
