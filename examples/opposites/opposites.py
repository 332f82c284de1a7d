"""Opposites: each turn shows a word, and the right answer is its opposite."""

import hashlib
import random

from agenticrun_workers.envs import StepResult

OPPOSITE = {
    "hot": "cold",
    "cold": "hot",
    "day": "night",
    "night": "day",
    "up": "down",
    "down": "up",
}


class Opposites:
    """Each right answer earns an equal share of 1. The episode succeeds if all are right."""

    blocking = False  # steps take microseconds, so they need no thread
    instruction = "Say the opposite."

    def __init__(self, length: int = 4):
        self.length = length

    def reset(self, seed: int, split: str) -> str:
        draw = random.Random(seed)
        while True:  # a hash assigns sequences to validation: training never sees those
            self.left = [draw.choice(list(OPPOSITE)) for _ in range(self.length)]
            self.right = 0
            if _is_holdout(self.left) == (split == "validation"):
                return self.left[0]

    def step(self, action: str) -> StepResult:
        right = action == OPPOSITE[self.left.pop(0)]
        self.right += right
        return StepResult(
            self.left[0] if self.left else "over",
            reward=right / self.length,
            terminated=not self.left,
            metrics={
                "success": float(self.right == self.length),
                "action_is_valid": float(action in OPPOSITE),
            },
        )

    def valid_actions(self) -> list[str]:
        return list(OPPOSITE)

    def vocabulary(self) -> list[str]:
        """Return all pieces of text, for the word-level tokenizer of a model made from scratch."""
        return [*OPPOSITE, "over"]


def _is_holdout(words: list[str]) -> bool:
    return hashlib.sha256(" ".join(words).encode()).digest()[0] < 64
