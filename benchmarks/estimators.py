"""Train the demo's task with each of examples/algorithms within one budget, and compare them.

Each runs as a sequential loop in one process.

    python benchmarks/estimators.py [--quick] [--json FILE] [--plot FILE] [--only NAME ...]
        [--seed N] [--jobs N]

Every algorithm has the same 300 steps of 128 trajectories, the same levels and the same warm-up
(a step-wise agent's has no observations to foresee). Success is greedy, on 200 levels that training
never sees. `--quick` trains one for 4 steps: a smoke test.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from learning import Learner, Outcome
from record import write_record

from agenticrun_api.overrides import load_run_with

EXAMPLES = Path(__file__).parent.parent / "examples" / "algorithms"
GOAL = 0.45
"""Success that each must reach."""


def learn(name: str, seed: int, changes: list[str]) -> Outcome:
    """One algorithm's run, on one torch thread."""
    torch.set_num_threads(1)
    run = load_run_with(EXAMPLES / f"{name}.yaml", changes)

    async def whole(folder: Path) -> Outcome:
        return await Learner(run, seed, folder).learn()

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(whole(Path(folder)))


def table(outcomes: dict[str, Outcome]) -> str:
    lines = [
        "algorithm            random  warm-up  step 50  step 100  step 200  final  passed  CPU s"
    ]
    for name, o in outcomes.items():
        shown = "  ".join(f"{o.curve.get(step, float('nan')):7.3f}" for step in (50, 100, 200))
        passed = "yes" if o.final >= GOAL else "no"
        spent = o.cpu_warmup + o.cpu_rollout + o.cpu_training
        lines.append(
            f"{name:19}  {o.random:6.3f}  {o.warmup:7.3f}  {shown}  {o.final:5.3f}  {passed:6}"
            f"  {spent:5.0f}"
        )
    return "\n".join(lines)


def plot(outcomes: dict[str, Outcome], file: Path) -> None:
    """The curves side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    for name, outcome in outcomes.items():
        curve = {0: outcome.warmup, **outcome.curve}
        axes.plot(
            list(curve), list(curve.values()), marker="o", markersize=3, linewidth=1.5, label=name
        )
    axes.axhline(GOAL, color="grey", linestyle=":", linewidth=1, label=f"goal {GOAL}")
    axes.set(
        xlabel="training step",
        ylabel="success on unseen maps (greedy)",
        ylim=(0, 1),
        xlim=(0, None),
    )
    axes.set_title("FrozenLake 4x4, tiny Llama, one seed each")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)


def main() -> None:
    names = sorted(file.stem for file in EXAMPLES.glob("*.yaml"))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="4 steps of the first: a smoke test")
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--jobs", type=int, default=2, help="algorithms at a time")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="draw the curves here")
    arguments = parser.parse_args()
    changes = (
        ["pipeline.maxSteps=4", "pipeline.evalSteps=2", "pipeline.warmup.steps=4"]
        if arguments.quick
        else []
    )
    if arguments.quick:
        del arguments.only[1:]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        runs = {name: pool.submit(learn, name, arguments.seed, changes) for name in arguments.only}
        outcomes = {name: run.result() for name, run in runs.items()}
    print(table(outcomes))
    if arguments.plot:
        plot(outcomes, arguments.plot)
    if arguments.json:
        figures = {
            f"{name}_step{step}": value
            for name, o in outcomes.items()
            for step, value in o.curve.items()
        }
        figures |= {f"{name}_final": o.final for name, o in outcomes.items()}
        passed = {"algorithms_passed": sum(o.final >= GOAL for o in outcomes.values())}
        write_record(
            arguments.json, {**figures, **passed}, f"{arguments.jobs} at a time on one thread each"
        )


if __name__ == "__main__":
    main()
