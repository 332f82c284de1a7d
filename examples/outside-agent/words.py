"""Words: one is shown, and the right answer is its opposite."""

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


class Words:
    """The right answer earns 1.

    There are only six words, so validation asks for the same ones as training.
    """

    blocking = False  # steps take microseconds, so they need no thread
    instruction = "Say the opposite."

    def reset(self, seed: int, split: str) -> str:
        self.shown = random.Random(seed).choice(list(OPPOSITE))
        return self.shown

    def step(self, action: str) -> StepResult:
        right = action == OPPOSITE[self.shown]
        metrics = {"success": float(right), "action_is_valid": float(action in OPPOSITE)}
        return StepResult("over", reward=float(right), terminated=True, metrics=metrics)

    def valid_actions(self) -> list[str]:
        return list(OPPOSITE)

    def vocabulary(self) -> list[str]:
        """Return all pieces of text, for the word-level tokenizer of a model made from scratch."""
        return [*OPPOSITE, "over"]
