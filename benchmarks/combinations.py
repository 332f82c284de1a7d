"""Train one run with each combination of three engines and three trainers, and compare them.

The figures are reward, log-prob gap, tokens per second and seconds of weight sync.

    python benchmarks/combinations.py [--engines NAME ...] [--trainers NAME ...] [--quick]
        [--json FILE]

Each of them is `agenticrun run -f examples/engines-and-trainers.yaml` in local mode, with two
trainer ranks. Only the names of the strategies change: the seed is the same, so the levels and the
first weights are too. Rewards differ, because engines draw their own samples. The log-prob gap is
mean |trainer's - engine's log-prob| over the tokens that were sampled with the weights that are
trained. `--quick` trains for one step, with the first engine and trainer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from record import write_record

ENGINES = ("transformers", "sglang", "vllm")
TRAINERS = ("fsdp2", "megatron", "deepspeed")
EXAMPLE = Path(__file__).parent.parent / "examples" / "engines-and-trainers.yaml"
LARGEST_GAP = 1e-3


@dataclass(frozen=True)
class Result:
    """The result of one combination, over all steps."""

    steps: int
    reward: float
    gap: float
    tokens_per_second: float
    """Prompt and response tokens over the whole step."""
    sync_seconds: float
    """Seconds of one weight sync, on average."""
    wall_seconds: float
    """Seconds of the whole command, start and end included."""


def run(engine: str, trainer: str, steps: int) -> Result:
    """Train with one combination.

    Raises:
        CalledProcessError: The run failed; its output has been shown.
    """
    with tempfile.TemporaryDirectory(prefix="combination-") as folder:
        settings = {
            "spec.pipeline.actorInfer.strategy.name": engine,
            "spec.pipeline.actorTrain.strategy.name": trainer,
            "spec.pipeline.maxSteps": str(steps),
        }
        overrides = [
            word for path, value in settings.items() for word in ("--set", f"{path}={value}")
        ]
        command = [
            sys.executable,
            "-m",
            "agenticrun_workers.cli",
            "run",
            "-f",
            str(EXAMPLE),
            "-o",
            folder,
            *overrides,
        ]
        began = time.monotonic()
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            print(done.stdout)
        done.check_returncode()
        lines = [
            json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()
        ]
        rows = [line for line in lines if "critic/score/mean" in line]
        return Result(
            steps=len(rows),
            reward=fmean(row["critic/score/mean"] for row in rows),
            gap=fmean(row["engine/logprob_gap"] for row in rows),
            tokens_per_second=fmean(row["system/tps"] for row in rows),
            sync_seconds=fmean(
                row["weight_sync/seconds"] for row in rows if row["weight_sync/seconds"]
            ),
            wall_seconds=time.monotonic() - began,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=ENGINES)
    parser.add_argument("--trainers", nargs="*", choices=TRAINERS, default=TRAINERS)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one step of the first engine and trainer: a smoke test",
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    if arguments.quick:
        arguments.engines, arguments.trainers = arguments.engines[:1], arguments.trainers[:1]
    print(
        f"{'engine':14}{'trainer':12}{'reward':>8}{'gap':>11}{'tok/s':>8}{'sync s':>8}{'wall s':>8}"
    )
    for engine in arguments.engines:
        for trainer in arguments.trainers:
            found = run(engine, trainer, 1 if arguments.quick else 4)
            print(
                f"{engine:14}{trainer:12}{found.reward:8.3f}{found.gap:11.2e}"
                f"{found.tokens_per_second:8.0f}{found.sync_seconds:8.3f}"
                f"{found.wall_seconds:8.0f}"
                f"{'' if found.gap < LARGEST_GAP else '  the gap is too large'}",
                flush=True,
            )
            figures |= {
                f"{engine}_{trainer}_{name}": round(value, 9) for name, value in vars(found).items()
            }
    if arguments.json:
        write_record(arguments.json, figures)


if __name__ == "__main__":
    main()
