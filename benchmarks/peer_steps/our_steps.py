"""The same GRPO steps by `agenticrun run` with its defaults. See benchmarks/peers.py.

python our_steps.py MODEL PROMPTS
"""

from __future__ import annotations

import asyncio
import io
import sys
import tempfile
from pathlib import Path
from typing import Any

from peer_steps.task import (
    LEARNING_RATE,
    NEW_TOKENS,
    SAMPLES,
    WORDS,
    StepGate,
    random_prompt,
    score,
)
from rich.console import Console

from agenticrun_api import parse_run
from agenticrun_workers.driver import attempt
from agenticrun_workers.driver.local import run_locally
from agenticrun_workers.driver.loop import Loop
from agenticrun_workers.envs import StepResult


class Words:
    """The environment: one question, one answer."""

    instruction = "go"
    blocking = False

    def reset(self, seed: int, split: str) -> str:  # noqa: ARG002
        return random_prompt(seed)

    def step(self, action: str) -> StepResult:
        return StepResult("end", reward=score(action), terminated=True)

    def vocabulary(self) -> list[str]:
        return [*WORDS, "go", "end"]


def run_of(model: str, prompts: int) -> dict[str, Any]:
    """Return the run. It has no `roles`."""
    return {
        "apiVersion": "agenticrun.dev/v1alpha1",
        "kind": "AgenticRun",
        "metadata": {"name": "peers"},
        "spec": {
            "model": {"path": model},
            "checkpoint": {"none": True},
            "pipeline": {
                "seed": 1,
                "maxSteps": 1000,
                "evalSteps": 0,
                "saveSteps": 0,
                "rolloutBatchSize": prompts * SAMPLES,
                "sequenceLength": 384,
                "algorithm": {"name": "grpo"},
                "envs": [
                    {
                        "tag": "Words",
                        "type": "peer_steps.our_steps:Words",
                        "maxSteps": 1,
                        "maxTokensPerStep": NEW_TOKENS,
                        "agent": {"config": {"systemTemplate": ""}},
                    }
                ],
                "trainEnvs": {"groups": prompts, "groupSize": SAMPLES, "tags": ["Words"]},
                "actorTrain": {"training": {"learningRate": LEARNING_RATE}},
            },
        },
    }


class GatedLoop(Loop):
    """The product's loop, held between two steps."""

    gate = StepGate()

    async def _run_step(self) -> None:
        await asyncio.to_thread(self.gate.begin)
        await super()._run_step()
        self.gate.end()


def main() -> None:
    setattr(attempt, "Loop", GatedLoop)  # noqa: B010  (mypy: it is not for other modules)
    with tempfile.TemporaryDirectory() as output:
        run = parse_run(run_of(sys.argv[1], int(sys.argv[2])))
        run_locally(run, Path(output), Console(file=io.StringIO()))


if __name__ == "__main__":
    main()
