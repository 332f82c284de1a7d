"""The command: `python -m agenticrun_workers.gpu_check`, `make gpu-check`.

Exit codes: 0 all stages passed (in a dry run: none failed), 1 a stage failed, 3 there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agenticrun_workers.gpu_check.stages import Outcome, Stage, Verdict, run_stage
from agenticrun_workers.models.devices import driver_gpus

NO_GPU = 3
FORK = multiprocessing.get_context("fork")
"""Children share the parent's imports. So the parent itself must never touch CUDA."""


@dataclass(frozen=True)
class Entry:
    """The place of a stage in the code, and its time limit on a GPU."""

    name: str
    module: str
    minutes: float

    def load(self) -> Stage:
        module = importlib.import_module(f"agenticrun_workers.gpu_check.{self.module}")
        stage: Stage = getattr(module, self.name)
        return stage


ENTRIES = (
    Entry("probe", "machine", 1),
    Entry("kernels", "training", 4),
    Entry("ranks", "training", 8),
    Entry("train", "training", 5),
    Entry("weights", "serving", 4),
    Entry("checkpoint", "training", 3),
    Entry("samplers", "machine", 2),
    Entry("engine", "serving", 4),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run stages, write their results and print the table. Returns the exit code."""
    options = _parse(arguments)
    entries = [entry for entry in ENTRIES if entry.name in options.stages]
    if not options.dry_run:
        count, reason = driver_gpus()
        if not count:
            cause = reason or "NVIDIA's driver shows none"
            print(f"no GPU: {cause}. --dry-run runs every stage at tiny size on the CPU")
            return NO_GPU
    options.out.mkdir(parents=True, exist_ok=True)
    _replace_numba()
    stages = {entry: entry.load() for entry in entries}
    for number, (entry, stage) in enumerate(stages.items(), 1):
        print(f"[{number}/{len(stages)}] {entry.name}", flush=True)
        outcome = _run(entry, stage, options.out, gpu=not options.dry_run)
        print(_line(outcome), flush=True)
    outcomes = [
        Outcome.read(file)
        for entry in ENTRIES
        if (file := options.out / f"{entry.name}.json").exists()
    ]
    print(f"\n{table(outcomes)}")
    report = options.out / "report.json"
    report.write_text(
        json.dumps(
            {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "stages": [asdict(outcome) for outcome in outcomes],
            },
            indent=1,
        )
    )
    print(f"\nall figures: {report}")
    if options.dry_run:
        print("This was a dry run: it proves nothing about a GPU.")
    ran = [outcome for outcome in outcomes if outcome.stage in options.stages]
    return int(any(outcome.verdict is Verdict.FAILED for outcome in ran))


def _parse(arguments: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(
        prog="python -m agenticrun_workers.gpu_check",
        description="Check on one GPU what no test on a CPU can show. Half an hour on 80 GB.",
    )
    names = [entry.name for entry in ENTRIES]

    def stages(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in names]:
            raise argparse.ArgumentTypeError(f"no stage {unknown[0]}; stages: {', '.join(names)}")
        return chosen

    parser.add_argument(
        "--stages",
        type=stages,
        default=names,
        metavar="A,B",
        help=f"only these, of {', '.join(names)}; results of others in the folder stay",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/gpu-check"),
        help="folder of the results (default: %(default)s)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="the same code at tiny size, on the CPU"
    )
    return parser.parse_args(arguments)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return one line for each stage, then each missed bound and each error."""
    rows = [("stage", "result", "seconds", "device")]
    rows += [
        (outcome.stage, str(outcome.verdict), f"{outcome.seconds:.1f}", outcome.device)
        for outcome in outcomes
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    for outcome in outcomes:
        lines += [f"{outcome.stage}: {figure}" for figure in outcome.outside]
        if outcome.error:
            lines.append(f"{outcome.stage}: {outcome.error.strip().splitlines()[-1]}")
    return "\n".join(lines)


def _line(outcome: Outcome) -> str:
    lines = [f"  {name}: {text}" for name, text in outcome.notes.items()]
    lines += [f"  {figure}{'' if figure.within else '  <- FAILED'}" for figure in outcome.figures]
    if outcome.error:
        lines += [f"  {line}" for line in outcome.error.strip().splitlines()]
    return "\n".join([*lines, f"  {outcome.verdict}, {outcome.seconds:.1f} s"])


def _run(entry: Entry, stage: Stage, out: Path, *, gpu: bool) -> Outcome:
    """Run a stage in a process of its own; what it does to CUDA or memory ends with it."""
    file = out / f"{entry.name}.json"
    file.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        arguments = (entry.name, stage, Path(folder), file, gpu)
        process = FORK.Process(target=_work, args=arguments)
        begun = time.monotonic()
        process.start()
        process.join(60 * entry.minutes)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
    if not file.exists():
        reason = (
            f"it took more than {entry.minutes:g} minutes"
            if late
            else f"its process ended with exit code {process.exitcode}"
        )
        seconds = round(time.monotonic() - begun, 1)
        Outcome(entry.name, Verdict.FAILED, seconds, "GPU" if gpu else "CPU", error=reason).write(
            file
        )
    return Outcome.read(file)


def _work(name: str, stage: Stage, folder: Path, file: Path, gpu: bool) -> None:
    run_stage(name, stage, folder, gpu=gpu).write(file)


def _replace_numba() -> None:
    """Do without numba where it is not installed; it is larger than everything else together.

    It compiles maths of NumPy arrays that no stage computes.
    """
    if find_spec("numba") is None:

        def njit(**_: Any) -> Callable[[Any], Any]:
            return lambda function: function

        sys.modules["numba"] = SimpleNamespace(njit=njit)  # type: ignore[assignment]


if __name__ == "__main__":
    sys.exit(main())
