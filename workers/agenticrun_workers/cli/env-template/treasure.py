"""Treasure: walk to a treasure. Each observation says where it is.

A game to begin with: write your own `reset` and `step`, then change the tests to match.
"""

import random
from itertools import product

from agenticrun_workers.envs import StepResult

MOVES = {"north": (0, 1), "east": (1, 0), "south": (0, -1), "west": (-1, 0)}


class Treasure:
    """The environment. An instance runs many episodes, one after another.

    Arguments are the keys of `envs[].config`: `size: 3` in YAML. Raise a ValueError that names
    the key of a bad value.
    """

    # reset and step take microseconds, so they need no thread. Leave this out if yours wait for
    # anything (files, network, a game).
    blocking = False

    # The task and the format of an answer: the first message of an episode.
    instruction = "Go to the treasure. Answer with north, east, south or west."

    def __init__(self, size: int = 3) -> None:
        if size < 2:  # validation would have no level, see reset
            raise ValueError(f"size must be at least 2, not {size}")
        self.size = size
        self.east = self.north = 0

    def reset(self, seed: int, split: str) -> str:
        """Start an episode and return its first observation.

        The same seed and split must give the same episode on any machine: use your own generator.
        """
        # Training and validation must not share levels: about every fifth place is for validation.
        # And validation must not need what training cannot teach: both need all four moves.
        levels = [
            (east, north)
            for east, north in product(range(-self.size, self.size + 1), repeat=2)
            if (east or north) and ((east + 2 * north) % 5 == 0) == (split == "validation")
        ]
        self.east, self.north = random.Random(seed).choice(levels)
        return self._observation()

    def step(self, action: str) -> StepResult:
        """Take the text of an answer and return the result.

        Any text can come: an invalid answer is a normal step with action_is_valid 0.
        """
        if action in MOVES:
            east, north = MOVES[action]
            # A fence: the treasure stays within `size` steps in each direction.
            self.east = max(-self.size, min(self.east - east, self.size))
            self.north = max(-self.size, min(self.north - north, self.size))
        found = self.east == self.north == 0
        return StepResult(
            self._observation(),
            reward=float(found),
            terminated=found,
            # env/<tag>/success in training, val/<tag>/success in validation
            metrics={"success": float(found), "action_is_valid": float(action in MOVES)},
        )

    def _observation(self) -> str:
        """Return where the treasure is: `2 north 1 east`."""
        ways = {"north": self.north, "east": self.east, "south": -self.north, "west": -self.east}
        return " ".join(f"{steps} {way}" for way, steps in ways.items() if steps > 0) or "found"

    def valid_actions(self) -> list[str]:
        """Return answers that make sense now (optional).

        The warm-up teaches the format with them, and the random policy chooses from them.
        """
        return list(MOVES)

    def vocabulary(self) -> list[str]:
        """Return all pieces of text (optional).

        For the word-level tokenizer of a model made from scratch (`model.initialize`).
        """
        return [*MOVES, *map(str, range(1, self.size + 1)), " ", "found"]
