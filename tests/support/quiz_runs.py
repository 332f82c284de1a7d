"""The quiz of examples/judged with the smallest model.

Items, a reward function, and runs that train in seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agenticrun_api import AgenticRun, parse_run
from tiny_runs import tiny_document

FOLDER = Path(__file__).parents[2] / "examples/judged"
WORDS = FOLDER / "words.jsonl"
MODULE = "examples.judged.judged"
"""As Ray's workers import it: they have the repository's root on their path."""


def quiz_document(**pipeline: Any) -> dict[str, Any]:
    """`pipeline` replaces fields of spec.pipeline."""
    return tiny_document(
        **{
            "envs": [
                {
                    "tag": "Quiz",
                    "type": f"{MODULE}:Quiz",
                    "maxSteps": 1,
                    "maxTokensPerStep": 2,
                    "dataset": {"path": str(WORDS), "valSplit": "train"},
                    "agent": {"config": {"systemTemplate": ""}},
                }
            ],
            "rewards": [{"name": "right", "type": f"{MODULE}:right", "config": {"partly": 0.25}}],
            "trainEnvs": {"groups": 4, "groupSize": 2, "tags": ["Quiz"]},
            "valEnvs": {"groups": 4, "tags": ["Quiz"]},
            "valBatchSize": 6,
            **pipeline,
        }
    )


def quiz_run(**pipeline: Any) -> AgenticRun:
    return parse_run(quiz_document(**pipeline))
