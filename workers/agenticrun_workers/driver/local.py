"""Local mode: the same attempt on this machine."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from agenticrun_api import AgenticRun, FinalReport
from agenticrun_workers.driver.attempt import AttemptRunner
from agenticrun_workers.driver.local_actors import (
    check_gpus,
    embedded_ray,
    gpus_here,
    in_one_process,
    threads_of_this_process,
)
from agenticrun_workers.driver.progress import AttemptId, Requests
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.launch import Launcher
from agenticrun_workers.reporting.client import ProgressSink
from agenticrun_workers.reporting.display import display_of
from agenticrun_workers.reporting.run_folder import CHECKPOINT, RecordedProgress, RunFolder

START_TRACE = "start"
"""Name of a trace from the beginning."""


def run_locally(
    run: AgenticRun,
    output: Path,
    console: Console,
    *,
    in_process: bool = False,
    code: Path | None = None,
    trace_steps: int = 0,
) -> FinalReport:
    """Train `run` on this machine.

    Ctrl-C saves and ends the run; a second one ends it at once.

    Args:
        output: folder of metrics and checkpoints. The run resumes from checkpoints in it as
            `checkpoint.resume` says.
        console: where the display is drawn.
        in_process: run all actors in this process, so that a debugger can stop in them.
        code: folder of the user's modules, which a later `agenticrun resume` needs, too.
        trace_steps: number of steps to record from the beginning.

    Raises:
        InvalidConfig: the run is suspended, asks for more GPUs than this machine has, or cannot be
            run in one process.
        CannotStart: another process trains in `output`, or this machine is too busy.
    """
    if run.spec.suspend:
        raise InvalidConfig(
            "spec.suspend",
            "a suspended run does not train: leave spec.suspend out, or add --set suspend=false",
        )
    pods = {*run.spec.roles.workers, run.spec.engine_role}
    if in_process:
        run = in_one_process(run, pods)
    # Before anything in the folder changes.
    folder = RunFolder(output)
    folder.refuse_if_in_use()
    output.mkdir(parents=True, exist_ok=True)
    if trace_steps:
        folder.ask_for_trace(START_TRACE, trace_steps)
    # A debugger needs the terminal for itself.
    display = display_of(run, console, live=console.is_terminal and not in_process)
    logs = output / "engines"
    actors = threads_of_this_process(logs) if in_process else embedded_ray(run, logs)
    with _log_file(output / "run.log"), actors as launcher:
        # Only a running Ray knows which GPUs it has found.
        if not in_process:
            check_gpus(run, pods, gpus_here())
        with display:
            return asyncio.run(_train(run, folder, display, launcher, code))


async def _train(
    run: AgenticRun, folder: RunFolder, sink: ProgressSink, launcher: Launcher, code: Path | None
) -> FinalReport:
    requests = Requests()
    training = asyncio.current_task()
    assert training is not None

    def interrupt() -> None:
        # The second one: the user does not want to wait for the checkpoint.
        if requests.stop.is_set():
            training.cancel()
        requests.stop.set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, interrupt)
    # Supervisors and `agenticrun stop` may send it more than once.
    loop.add_signal_handler(signal.SIGTERM, requests.stop.set)
    loop.add_signal_handler(CHECKPOINT, requests.ask_checkpoint)
    checkpoint = run.spec.storage
    runner = AttemptRunner(
        run=run,
        attempt=AttemptId(run.metadata.uid or "local", f"{run.metadata.name}-local", 1),
        output=folder.path,
        checkpoints=str(folder.path / "checkpoints"),
        # All runs with this output folder are one run.
        resume=checkpoint.resume
        if checkpoint and checkpoint.resume != "FromPreviousRun"
        else "Auto",
        sink=RecordedProgress(sink, folder.path),
        requests=requests,
        launcher=launcher,
        code=code,
    )
    with folder.announced():
        return await runner.execute()


@contextmanager
def _log_file(path: Path) -> Iterator[None]:
    """Log to a file, because the display owns the terminal."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
