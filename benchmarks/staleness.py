"""Train the demo's task with rollouts of older policies, on real engines and a slow environment.

    python benchmarks/staleness.py [--quick] [--steps N] [--seed N] [--json FILE] [--plot FILE]

Each variant is `agenticrun run` of examples/frozen-lake.yaml as users start it: Ray, three
engines, one trainer rank, two env workers. A step of the environment takes 0.1 s on average
(log-normal), one in 100 takes 2 s. The engines have CPU priorities (nice) 0, 5 and 10, so where
they compete for the cores they run at different speeds.

- `sync`: `staleness.max: 0`. `eta1`, `eta4`: 1 and 4. Both correct with `oldLogProbs: Rollout`.
- `eta1_streamed`: the batch of `eta1` as four batches, each trained as soon as its groups have
  finished; weights go to the engines after every fourth. Four of its steps count as one here.

Per variant: `seconds_per_step` (median from a tenth of the run on), `engine_busy` (share of the
time with at least one request, mean over engines), `thrown_away` (share of all sampled tokens) and
`success_step<n>`, greedy on 200 maps that training never sees.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from agenticrun_workers.envs import FrozenLake
from agenticrun_workers.envs.env import StepResult

EXAMPLE = Path(__file__).parent.parent / "examples" / "frozen-lake.yaml"
MEAN_WAIT, SIGMA, STRAGGLERS, STRAGGLER_SECONDS = 0.1, 1.0, 0.01, 2.0
PARTS = 4
NICE = (0, 5, 10)
EPISODES = 128
CORRECTED = ("pipeline.oldLogProbs=Rollout", "pipeline.algorithm.pgVariant=ppo")
VARIANTS: dict[str, tuple[str, ...]] = {
    "sync": (),
    "eta1": ("pipeline.staleness.max=1", *CORRECTED),
    "eta4": ("pipeline.staleness.max=4", *CORRECTED),
    "eta1_streamed": (f"pipeline.staleness.max={2 * PARTS - 1}", *CORRECTED),
}


class SlowFrozenLake(FrozenLake):
    """FrozenLake of which each step takes as long as a call over a network."""

    @override
    async def step(self, action: str) -> StepResult:  # type: ignore[override]
        slow = random.random() < STRAGGLERS
        typical = MEAN_WAIT * random.lognormvariate(-SIGMA * SIGMA / 2, SIGMA)
        await asyncio.sleep(STRAGGLER_SECONDS if slow else typical)
        return super().step(action)


@dataclass(frozen=True)
class Outcome:
    """The figures of a variant, by step of `EPISODES` trajectories."""

    seconds_per_step: float
    engine_busy: float
    thrown_away: float
    success: dict[int, float]


def settings(name: str, steps: int, seed: int) -> list[str]:
    """Return the changes to the example."""
    parts = PARTS if name.endswith("_streamed") else 1
    batch = EPISODES // parts
    return [
        f"metadata.name=staleness-{name.replace('_', '-')}",
        f"pipeline.seed={seed}",
        f"pipeline.maxSteps={steps * parts}",
        f"pipeline.evalSteps={max(1, steps // 6) * parts}",
        "pipeline.saveSteps=0",
        f"pipeline.rolloutBatchSize={batch}",
        f"pipeline.modelUpdateFrequency={parts}",
        f"pipeline.actorTrain.training.miniBatchSize={min(32, batch)}",
        "pipeline.envs[0].type=staleness:SlowFrozenLake",
        "roles.inference.replicas=3",
        "roles.env.replicas=2",
        *VARIANTS[name],
    ]


def train(name: str, changes: Sequence[str]) -> Outcome:
    """Run a variant, with changes of the example, in a folder of its own."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shutil.copy(__file__, folder / "staleness.py")
        shutil.copy(EXAMPLE, folder / "run.yaml")
        options = [word for change in changes for word in ("--set", change)]
        command = [str(Path(sys.executable).parent / "agenticrun"), "run", *options]
        command += ["-f", str(folder / "run.yaml"), "-o", str(folder / "out")]
        with (folder / "log").open("w") as log:
            run = subprocess.Popen(command, stdout=log, stderr=log)
            while run.poll() is None:
                slow_down_engines()
                time.sleep(1)
        if run.returncode:
            sys.exit(f"{name} failed:\n{(folder / 'log').read_text()[-3000:]}")
        lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    return outcome(name, [json.loads(line) for line in lines])


def slow_down_engines() -> None:
    """Give the engines their priorities."""
    import psutil

    engines = [
        process
        for process in psutil.process_iter(["cmdline", "create_time"])
        if "EngineActor" in " ".join(process.info["cmdline"] or ())
    ]
    engines.sort(key=lambda process: process.info["create_time"])
    for process, nice in zip(engines, NICE, strict=False):
        os.setpriority(os.PRIO_PROCESS, process.pid, nice)


def outcome(name: str, lines: list[dict[str, Any]]) -> Outcome:
    """Sum up metrics.jsonl."""
    parts = PARTS if name.endswith("_streamed") else 1
    steps = [line for line in lines if "time/step" in line]
    settled = steps[len(steps) // 10 :]
    chunks = [settled[at : at + parts] for at in range(0, len(settled) - parts + 1, parts)]
    sampled = sum(line["tokens/response"] for line in steps)
    wasted = sum(
        line.get("rollout/stale_tokens", 0) + line.get("rollout/aborted_tokens", 0)
        for line in steps
    )
    return Outcome(
        statistics.median(sum(line["time/step"] for line in chunk) for chunk in chunks),
        statistics.mean(line["rollout/engine_busy"] for line in settled),
        wasted / (sampled + wasted),
        {
            line["step"] // parts: line["val/FrozenLake/success"]
            for line in lines
            if "val/FrozenLake/success" in line
        },
    )


def plot(outcomes: dict[str, Outcome], file: Path) -> None:
    """Draw success by step and by minute, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (by_step, by_minute) = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for name, each in outcomes.items():
        steps, success = list(each.success), list(each.success.values())
        minutes = [step * each.seconds_per_step / 60 for step in steps]
        by_step.plot(steps, success, marker="o", markersize=3, label=name)
        by_minute.plot(minutes, success, marker="o", markersize=3, label=name)
    by_step.set(
        xlabel=f"steps of {EPISODES} episodes", ylabel="success on unseen maps", ylim=(0, 1)
    )
    by_minute.set(xlabel="minutes of training")
    for axes in (by_step, by_minute):
        axes.grid(alpha=0.3)
    by_minute.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    """Train each variant, and print the figures."""
    from record import write_record  # imports torch, which no env worker has

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="2 steps of the first: a smoke test")
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, help="draw the curves to this file")
    arguments = parser.parse_args()
    outcomes: dict[str, Outcome] = {}
    figures: dict[str, float] = {}
    for name in arguments.only[:1] if arguments.quick else arguments.only:
        changes = settings(name, 2 if arguments.quick else arguments.steps, arguments.seed)
        if arguments.quick:
            changes += ["pipeline.evalSteps=0", "pipeline.warmup.steps=2"]
        found = outcomes[name] = train(name, changes)
        figures |= {
            f"seconds_per_step_{name}": found.seconds_per_step,
            f"engine_busy_{name}": found.engine_busy,
            f"thrown_away_{name}": found.thrown_away,
            **{f"success_{name}_step{step}": share for step, share in found.success.items()},
        }
        print(f"{name:14} {found}", flush=True)
    if arguments.plot:
        plot(outcomes, arguments.plot)
    if arguments.json:
        write_record(arguments.json, figures)


if __name__ == "__main__":
    main()
