"""The lines that `agenticrun run` prints before a run and after it."""

from __future__ import annotations

import sys
from pathlib import Path

from agenticrun_api import AgenticRun, FinalReport, Outcome
from agenticrun_workers.reporting.display import duration, sparkline, time_shares
from agenticrun_workers.reporting.run_folder import TRACES, RunFolder


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
