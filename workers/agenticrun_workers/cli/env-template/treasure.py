"""Treasure: find the number in a range, which each answer narrows.

A game to begin with: write your own `reset` and `step`, then change the tests to match.
"""

import random
from itertools import combinations

from agenticrun_workers.envs import StepResult


class Treasure:
    """The environment. An instance runs many episodes, one after another.

    Arguments are the keys of `envs[].config`: `highest: 8` in YAML. Raise a ValueError that names
    the key of a bad value.
    """

    # reset and step take microseconds, so they need no thread. Leave this out if yours wait for
    # anything (files, network, a game).
    blocking = False

    def __init__(self, highest: int = 8) -> None:
        if highest < 4:  # validation would have no range, see reset
            raise ValueError(f"highest must be at least 4, not {highest}")
        self.highest = highest
        self._numbers = [str(n) for n in range(1, highest + 1)]
        # The task and the format of an answer: the first message of an episode.
        self.instruction = "Find the number. Answer with a number."

    def reset(self, seed: int, split: str) -> str:
        """Start an episode and return its first observation.

        The same seed and split must give the same episode on any machine: use your own generator.
        """
        draw = random.Random(seed)
        # Training and validation must not share levels: every fifth range is for validation. And
        # validation must not need what training cannot teach: any number may be the treasure.
        ranges = [
            (low, high)
            for low, high in combinations(range(1, self.highest + 1), 2)
            if ((low + high) % 5 == 0) == (split == "validation")
        ]
        self.low, self.high = draw.choice(ranges)
        self.treasure = draw.randint(self.low, self.high)
        return f"from {self.low} to {self.high}"

    def step(self, action: str) -> StepResult:
        """Take the text of an answer and return the result.

        Any text can come: an invalid answer is a normal step with action_is_valid 0.
        """
        if action not in self._numbers:
            return StepResult(
                "invalid", reward=0.0, terminated=False, metrics={"action_is_valid": 0.0}
            )
        guess = int(action)
        found = guess == self.treasure
        if self.treasure > guess:
            self.low = max(self.low, guess + 1)
        elif self.treasure < guess:
            self.high = min(self.high, guess - 1)
        return StepResult(
            "found" if found else f"from {self.low} to {self.high}",
            reward=float(found),
            terminated=found,
            # env/<tag>/success in training, val/<tag>/success in validation
            metrics={"success": float(found), "action_is_valid": 1.0},
        )

    def valid_actions(self) -> list[str]:
        """Return answers that make sense now (optional).

        The warm-up teaches the format with them, and the random policy chooses from them.
        """
        return [str(n) for n in range(self.low, self.high + 1)]

    def vocabulary(self) -> list[str]:
        """Return all pieces of text (optional).

        For the word-level tokenizer of a model made from scratch (`model.initialize`).
        """
        return [*self._numbers, "from", "to", " ", "found", "invalid"]
