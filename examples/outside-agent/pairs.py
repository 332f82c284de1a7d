"""Pairs: two words, and the right answer is their opposites."""

import hashlib
import random

from agenticrun_workers.envs import StepResult

OPPOSITE = {"hot": "cold", "cold": "hot", "day": "night", "night": "day", "up": "down", "down": "up"}


class Pairs:
    """Each right word of the answer earns a half."""

    blocking = False  # steps take microseconds, so they need no thread
    instruction = "Say the opposites."

    def reset(self, seed, split):
        draw = random.Random(seed)
        while True:  # a hash decides which pairs are for validation: training never sees those
            self.pair = [draw.choice(list(OPPOSITE)), draw.choice(list(OPPOSITE))]
            if _is_holdout(self.pair) == (split == "validation"):
                return " ".join(self.pair)

    def step(self, action):
        said = action.split(" ")
        right = [word == OPPOSITE[shown] for word, shown in zip(said, self.pair, strict=False)]
        valid = len(said) == 2 and all(word in OPPOSITE for word in said)
        metrics = {"success": float(valid and all(right)), "action_is_valid": float(valid)}
        return StepResult("over", reward=valid * sum(right) / 2, terminated=True, metrics=metrics)

    def valid_actions(self):
        return [f"{first} {second}" for first in OPPOSITE for second in OPPOSITE]

    def vocabulary(self):
        """All pieces of text, for the word-level tokenizer of a model made from scratch."""
        return [*OPPOSITE, " ", "over"]


def _is_holdout(words):
    return hashlib.sha256(" ".join(words).encode()).digest()[0] < 64
