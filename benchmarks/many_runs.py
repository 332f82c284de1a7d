"""Cost of many runs: a real apiserver, KubeRay and the operator's process; the rest is simulated.

    python benchmarks/many_runs.py [--runs N] [--quick] [--json FILE]

Each run has a head, a trainer, an inference and an env pod, which KWOK starts, and makes a step a
minute. All heads are in the process of the benchmark (tests/support/kwok_fleet.py). Programs of
Kubernetes share the machine with the operator: on a small one they are slow before it is.

- `create_ratio_to_rayjob`: time from the first creation of some runs until all have a RayCluster,
  over the same for RayJobs of KubeRay with RayClusters of the same spec; the median of rounds that
  take turns.
- `all_train_s`: time from the first creation of all runs until the status of each shows a step.
- `operator_mb_<N>`, `operator_cores_<N>`: resident memory after two minutes in which N runs train,
  and CPU seconds per second.
- `status_lag_p99_s`, `status_lag_median_s`: from a step to its status in a watch, of the steps of
  these two minutes.
- `requests_per_minute_<method>`, `head_requests_per_minute`, `writes_per_run_minute`: to the
  apiserver without watches, to heads, and of the status of a run.
- `restart_to_steady_s`: from SIGKILL of the operator, whose container starts again, until each
  status shows a step that was made while it was down.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from record import write_record

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
sys.path.append(str(Path(__file__).parents[1] / "tools"))
from kwok_fleet import KwokFleet, kwok_fleet
from operator_process import OperatorProcess

SHOWN_SECONDS = 15.0
"""Time in which the last steps of the two minutes may still be shown."""


@dataclass(frozen=True)
class Size:
    """The number of runs, and the times of a measurement."""

    runs: int
    rounds: int
    created: int
    """Runs and jobs of a round."""
    step_seconds: float
    window_seconds: float


async def measure(size: Size, folder: Path) -> dict[str, float]:
    """Return the figures of a fleet."""
    figures: dict[str, float] = {}
    async with kwok_fleet(folder, size.step_seconds) as fleet:
        operator = fleet.start_operator()
        try:
            await measure_creation(fleet, size, figures)
            names = [f"run-{number}" for number in range(size.runs)]
            began = time.monotonic()
            await fleet.create_runs(names)
            await fleet.until(lambda: fleet.shows(dict.fromkeys(names, 1)), "all runs train")
            figures["all_train_s"] = time.monotonic() - began
            await measure_steady(fleet, operator, size, figures)
            began = time.monotonic()
            await asyncio.to_thread(operator.crash)
            steps = fleet.make_steps()
            operator = fleet.start_operator()
            await fleet.until(lambda: fleet.shows(steps), "the steps that it missed are shown")
            figures["restart_to_steady_s"] = time.monotonic() - began
        finally:
            await asyncio.to_thread(operator.stop)
    return figures


async def measure_creation(fleet: KwokFleet, size: Size, figures: dict[str, float]) -> None:
    """Measure the time until runs, and KubeRay's jobs, have RayClusters; some at a time."""

    async def seconds(creation: Awaitable[None]) -> float:
        began = time.monotonic()
        await creation
        await fleet.until(lambda: len(fleet.clusters) == size.created, "all have RayClusters")
        return time.monotonic() - began

    ratios = []
    for number in range(size.rounds):
        names = [f"round-{number}-{run}" for run in range(size.created)]
        ours = await seconds(fleet.create_runs(names))
        spec = fleet.clusters[names[0]]["spec"]
        await fleet.delete_all()
        theirs = await seconds(fleet.create_ray_jobs(names, spec))
        await fleet.delete_all()
        ratios.append(ours / theirs)
    figures["create_ratio_to_rayjob"] = statistics.median(ratios)


async def measure_steady(
    fleet: KwokFleet, operator: OperatorProcess, size: Size, figures: dict[str, float]
) -> None:
    """Measure what the operator does and costs while all runs train."""
    process = psutil.Process(operator.process.pid)
    before, used = operator.metrics(), sum(process.cpu_times()[:2])
    began = time.monotonic()
    await asyncio.sleep(size.window_seconds)
    seconds = time.monotonic() - began
    figures[f"operator_mb_{size.runs}"] = process.memory_info().rss / 1e6
    figures[f"operator_cores_{size.runs}"] = (sum(process.cpu_times()[:2]) - used) / seconds
    after = operator.metrics()
    counted = {name: (after[name] - before[name]) * 60 / seconds for name in after}
    for name, number in counted.items():
        kind, _, method = name.partition(" ")
        if kind == "api_requests_total":
            figures[f"requests_per_minute_{method.lower()}"] = number
    figures["head_requests_per_minute"] = counted["head_requests_total"]
    figures["writes_per_run_minute"] = counted["status_writes_total"] / size.runs
    await asyncio.sleep(SHOWN_SECONDS)
    lags = fleet.lags_between(began, began + seconds)
    figures["status_lag_p99_s"] = float(np.percentile(lags, 99))
    figures["status_lag_median_s"] = float(np.median(lags))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=0, help="default: 1000; with --quick 20")
    parser.add_argument("--quick", action="store_true", help="few runs, short steps, one round")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.quick:
        size = Size(options.runs or 20, 1, 10, step_seconds=5.0, window_seconds=10.0)
    else:
        size = Size(options.runs or 1000, 3, 50, step_seconds=60.0, window_seconds=120.0)
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(size, Path(folder)))
    figures = {name: round(value, 3) for name, value in figures.items()}
    for name, value in figures.items():
        print(f"{name:45} {value:10.3f}")
    if options.json:
        write_record(options.json, figures)


if __name__ == "__main__":
    main()
