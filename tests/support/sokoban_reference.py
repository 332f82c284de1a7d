"""gym-sokoban 0.0.6 behind ROLL's text interface, and measures of how hard a level is.

For tests and the benchmark.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import random
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
    warnings.simplefilter("ignore")  # it is old, and says so
    from gym_sokoban.envs import room_utils as gym_room_utils
    from gym_sokoban.envs.sokoban_env import SokobanEnv

room_utils: Any = gym_room_utils
"""gym-sokoban's own module that makes levels."""

SYMBOLS = "#_O√XPS"
"""By gym-sokoban's number of a cell; 6 is the player on a target."""

ACTIONS = {"up": 1, "down": 2, "left": 3, "right": 4}
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))


def walk_steps(rows: int, columns: int) -> int:
    """Of the random walk; what `SokobanEnv` asks for."""
    return int(1.7 * (rows + columns))


class ReferenceSokoban(SokobanEnv):  # type: ignore[misc]
    """The reference: text in, text out, as ROLL wraps it.

    Args:
        draws: whether a step draws the picture that `SokobanEnv.step` draws (ROLL throws it away).
    """

    def __init__(self, rows: int = 6, columns: int = 6, boxes: int = 1, draws: bool = True) -> None:
        super().__init__((rows, columns), max_steps=10**9, num_boxes=boxes, reset=False)
        self.draws = draws

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """A level from the global random numbers, seeded first. No picture."""
        random.seed(seed)
        np.random.seed(seed % 2**32)
        while True:
            try:
                self.room_fixed, self.room_state, _ = room_utils.generate_room(
                    self.dim_room, num_steps=self.num_gen_steps, num_boxes=self.num_boxes
                )
                break
            except (RuntimeError, RuntimeWarning):
                continue
        self.begin()
        return self.board(), {}

    def start_on(self, board: str) -> None:
        """Begin on a level of ours."""
        cells = np.array([[SYMBOLS.index(symbol) for symbol in row] for row in board.split("\n")])
        self.room_fixed = np.select([cells == 0, np.isin(cells, (2, 3, 6))], [0, 2], 1)
        self.room_state = np.select([cells == 3, cells == 4, cells == 6], [3, 4, 5], cells)
        self.begin()

    def begin(self) -> None:
        self.player_position = np.argwhere(self.room_state == 5)[0]
        self.num_env_steps = self.reward_last = self.boxes_on_target = 0

    def play(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """A step in gymnasium's shape."""
        number = ACTIONS.get(action.strip().lower(), 0)
        _, reward, done, info = self.step(number)
        solved = bool(self._check_if_all_boxes_on_target())
        metrics = {
            "action_is_valid": float(number != 0),
            "action_is_effective": float(bool(info["action.moved_player"])),
            "num_actions": 1.0,
            "success": float(solved),
        }
        return self.board(), float(reward), bool(done), False, {**info, "metrics": metrics}

    def render(self, mode: str = "rgb_array", **_: Any) -> Any:
        return super().render(mode) if self.draws else None

    def board(self) -> str:
        state = np.where((self.room_state == 5) & (self.room_fixed == 2), 6, self.room_state)
        return "\n".join(
            "".join(SYMBOLS[cell] for cell in row) for row in state.astype(int).tolist()
        )


def solution_length(board: str) -> int | None:
    """Return the number of moves of the shortest solution, or None if there is none.

    Breadth-first search on the text.
    """
    rows = board.split("\n")
    cells = {(r, c): symbol for r, row in enumerate(rows) for c, symbol in enumerate(row)}
    walls, targets = _places(cells, "#"), _places(cells, "O√S")
    (player,) = _places(cells, "PS")
    start = (player, frozenset(_places(cells, "√X")))
    lengths, queue = {start: 0}, deque([start])
    while queue:
        state = queue.popleft()
        (row, column), boxes = state
        if boxes == targets:
            return lengths[state]
        for down, right in MOVES:
            to, beyond = (row + down, column + right), (row + 2 * down, column + 2 * right)
            if to in walls or (to in boxes and (beyond in walls or beyond in boxes)):
                continue
            after = (to, boxes - {to} | {beyond} if to in boxes else boxes)
            if after not in lengths:
                lengths[after] = lengths[state] + 1
                queue.append(after)
    return None


def box_distance(board: str) -> int:
    """Least sum of Manhattan distances between boxes and the targets they are paired with."""
    rows = board.split("\n")
    cells = {(r, c): symbol for r, row in enumerate(rows) for c, symbol in enumerate(row)}
    boxes, targets = sorted(_places(cells, "√X")), sorted(_places(cells, "O√S"))
    return min(
        sum(abs(a - c) + abs(b - d) for (a, b), (c, d) in zip(boxes, pairing, strict=True))
        for pairing in itertools.permutations(targets)
    )


def _places(cells: dict[tuple[int, int], str], symbols: str) -> set[tuple[int, int]]:
    return {cell for cell, symbol in cells.items() if symbol in symbols}


def ks_p_value(ours: Sequence[int], theirs: Sequence[int], relabelings: int = 2000) -> float:
    """Two-sample Kolmogorov-Smirnov test of whole numbers.

    The p-value is the share of random relabelings of the pooled sample with at least the distance
    seen, which is exact with ties (Kolmogorov's limit is for continuous samples, and too kind
    here).
    """
    values, places = np.unique(np.concatenate([ours, theirs]), return_inverse=True)
    pooled = np.bincount(places, minlength=len(values))
    drawn = np.random.default_rng(0).multivariate_hypergeometric(
        pooled, len(ours), size=relabelings
    )
    counts = np.vstack([np.bincount(places[: len(ours)], minlength=len(values)), drawn])
    distances = np.abs(
        counts.cumsum(1) / len(ours) - (pooled - counts).cumsum(1) / len(theirs)
    ).max(1)
    return float((distances[1:] >= distances[0] - 1e-12).mean())
