"""`agenticrun run`: train on this machine. `agenticrun validate`: check a run file alone."""

from __future__ import annotations

import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from agenticrun_api import AgenticRun, FinalReport, Outcome
from agenticrun_workers.cli.common import (
    Changes,
    RunFile,
    check_writable,
    give_up,
    load,
    look_in,
    new_folder,
    refuse,
)
from agenticrun_workers.reporting.display import RunConsole, duration, sparkline, time_shares
from agenticrun_workers.reporting.run_folder import TRACES, FolderInUse, RunFolder


def run(
    file: RunFile,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder for metrics and checkpoints. Pass a stopped run's folder to resume it. "
            "Default: a new folder, runs/<name>/<time>.",
            file_okay=False,
        ),
    ] = None,
    in_process: Annotated[
        bool,
        typer.Option(
            "--in-process",
            help="Run trainer, engines and environments as threads of this process, without Ray: "
            "breakpoint() works in an environment, an estimator or a loss.",
        ),
    ] = False,
    trace_steps: Annotated[
        int,
        typer.Option(
            min=0,
            help="Record a Perfetto trace of the start and of so many steps, in the output "
            "folder. `agenticrun trace` records a run that trains.",
        ),
    ] = 0,
    changes: Changes = None,
) -> None:
    """Train on this machine, with the same YAML as on Kubernetes.

    Ctrl-C saves a checkpoint and ends the run. Exit codes: 0 succeeded, 1 failed and a retry may
    help, 64 the YAML can never work, 75 stopped.
    """
    loaded = load(file, changes)
    folder = (
        output or new_folder(Path("runs") / loaded.metadata.name, datetime.now(UTC))
    ).resolve()
    train(loaded, folder, file.parent, file, in_process=in_process, trace_steps=trace_steps)


def train(
    run: AgenticRun,
    folder: Path,
    code: Path,
    file: Path,
    *,
    in_process: bool = False,
    trace_steps: int = 0,
) -> NoReturn:
    """Train a run in an output folder, say where everything is, and end the command.

    Args:
        run: the run.
        folder: its output folder.
        code: the folder of its modules.
        file: its run file, which the last line names if the run failed.
        in_process: without Ray.
        trace_steps: number of steps to record from the beginning.
    """
    look_in(code)
    console = RunConsole()
    for line in code_notes(run, code):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    from agenticrun_workers.driver.attempt import exit_code
    from agenticrun_workers.driver.local import RayNotStarted, run_locally
    from agenticrun_workers.errors import InvalidConfig

    check_writable(folder)
    try:
        report = run_locally(
            run,
            folder,
            console,
            in_process=in_process,
            code=code.resolve(),
            trace_steps=trace_steps,
        )
    except (InvalidConfig, FolderInUse, RayNotStarted) as error:
        give_up(str(error))
    with suppress(OSError):  # The run is over; a closed stdout must not change its exit code.
        for line in closing_lines(run, RunFolder(folder), report, file):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(exit_code(report))


def code_notes(run: AgenticRun, folder: Path) -> list[str]:
    """Return what stands in for spec.code on this machine, where no pod fetches or installs it."""
    code = run.spec.code
    fetched = code and ((code.git and code.git.url) or (code.image and code.image.reference))
    notes = []
    if fetched:
        notes.append(f"spec.code: not {fetched}; modules are imported from {folder.resolve()}")
    if code and code.pip:
        notes.append(f"spec.code.pip: nothing is installed; packages are those of {sys.prefix}")
    return notes


def closing_lines(run: AgenticRun, folder: RunFolder, report: FinalReport, file: Path) -> list[str]:
    """Return the outcome of a run, how it went, where everything is, and what to do next."""
    lines = [f"{report.outcome}: {report.message}"]
    steps = [line for line in folder.metrics() if "time/step" in line]
    if steps:
        spent = sum(step["time/step"] for step in steps)
        shares = time_shares(steps).items()
        phases = ", ".join(f"{name} {share:.0%}" for name, (_, share) in shares if share >= 0.005)
        lines.append(f"steps        {len(steps)} in {duration(spent)}: {phases}")
        lines.append(f"reward       {sparkline([step['rollout/score/mean'] for step in steps])}")
    checkpoint = folder.checkpoint()
    places: list[tuple[str, Path | str | None]] = [
        ("metrics", folder.path / "metrics.jsonl"),
        ("samples", folder.path / "samples"),
        ("log", folder.path / "run.log"),
        ("traces", folder.path / TRACES),
        ("checkpoint", checkpoint or "none was saved"),
    ]
    if run.spec.tracking.render_dir:
        places.insert(2, ("pictures", folder.path / run.spec.tracking.render_dir))
    if run.spec.tracking.tensorboard:
        places.append(("curves", f"tensorboard --logdir {folder.path / 'tensorboard'}"))
    lines += [
        f"{name:<12} {place}"
        for name, place in places
        if not isinstance(place, Path) or place.exists()
    ]
    steps_next = [f"agenticrun report {folder.path} -o report.html"] if steps else []
    if report.outcome is Outcome.SUCCEEDED and checkpoint:
        config = folder.path / "run.yaml"
        steps_next.append(f"agenticrun eval -f {config} --checkpoint {checkpoint}")
        steps_next.append(f"agenticrun export -f {config} --checkpoint {checkpoint} -o policy")
    if report.outcome is not Outcome.SUCCEEDED:
        steps_next.append(_again(folder, report, file))
    return [
        *lines,
        *(f"{'next' if n == 0 else '':<12} {line}" for n, line in enumerate(steps_next)),
    ]


def _again(folder: RunFolder, report: FinalReport, file: Path) -> str:
    """Return how to train on after a run that failed or was stopped."""
    if report.outcome is Outcome.FAILED and not report.retryable:
        into = f" -o {folder.path}" if folder.checkpoint() else ""
        return f"correct the file and run again: agenticrun run -f {file}{into}"
    if folder.checkpoint() is None:
        return f"no checkpoint to resume from, run again: agenticrun run -f {file}"
    return f"agenticrun resume {folder.path}"


def validate(file: RunFile, changes: Changes = None) -> None:
    """Validate a file as the apiserver would, and import its environments as env workers do.

    Exit codes: 0 valid, 64 invalid.
    """
    loaded = load(file, changes, local=False)
    look_in(file.parent)
    from agenticrun_workers.errors import InvalidConfig
    from agenticrun_workers.rollout.env_worker import describe_envs

    try:
        describe_envs(loaded.spec.pipeline)
    except InvalidConfig as error:
        refuse(file, [str(error)])
    typer.echo(f"{file}: AgenticRun {loaded.metadata.name} is valid")
