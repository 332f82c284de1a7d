"""FrozenLake as text: find the way over the ice to the goal without falling into a hole.

The rules, rewards and level distribution are gymnasium's (start top left, goal bottom right, every other cell frozen with
a fixed probability, only solvable maps); the rows look like ROLL's. Levels, slips and observations are computed here, on
small arrays and with random numbers of our own, so that an episode depends on nothing but its seed.

A hash of the map decides whether it belongs to the validation holdout. Training never sees a map of the holdout and
validation sees no other, so "maps never trained on" holds by construction.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from agenticrun_workers.envs.env import StepResult
from agenticrun_workers.envs.frozen_lake_picture import draw_lake
from agenticrun_workers.envs.registry import register_env
from agenticrun_workers.types import BoolArray, Stream

MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""Row and column change of Left, Down, Right, Up: gymnasium's order."""

MAX_SIZE_OF_ROWS = 8
"""Rows of this size are about 2,000 words."""

DEFAULT_ACTIONS = ("Left", "Down", "Right", "Up")


@dataclass(frozen=True, slots=True)
class Symbols:
    """One character per kind of cell."""

    player: str = "P"
    frozen: str = "_"
    hole: str = "O"
    goal: str = "G"
    fallen: str = "X"
    """The player in a hole."""
    arrived: str = "√"
    """The player on the goal."""


@register_env("frozen_lake")
class FrozenLake:
    """One episode at a time; see the module's docstring.

    Args:
        size: rows and columns, at least 2.
        frozen_probability: of each cell but start and goal, in (0, 1].
        is_slippery: move sideways instead with probability 2/3, as gymnasium does.
        holdout_share: share of all maps kept for validation, in (0, 1).
        symbols: six characters in the order player, frozen, hole, goal, fallen, arrived.
        actions: the words for left, down, right, up.
        instruction: text of the first prompt; the default explains the task.
        words: what `vocabulary` lists beside single symbols: nothing (`cells`) or every row that a board can have (`rows`),
            so that a model made for this environment reads a board of size n in n tokens.
    """

    blocking = False
    """Steps take microseconds, so no thread is needed."""

    def __init__(
        self,
        *,
        size: int = 4,
        frozen_probability: float = 0.8,
        is_slippery: bool = False,
        holdout_share: float = 0.2,
        symbols: str = "P_OGX√",
        actions: Sequence[str] = DEFAULT_ACTIONS,
        instruction: str | None = None,
        words: Literal["cells", "rows"] = "cells",
    ) -> None:
        if size < 2:
            raise ValueError(f"size must be at least 2, not {size}")
        if not 0 < frozen_probability <= 1:
            raise ValueError(f"frozenProbability must be in (0, 1], not {frozen_probability}")
        if not 0 < holdout_share < 1:
            raise ValueError(f"holdoutShare must be in (0, 1), not {holdout_share}")
        if len(set(symbols)) != 6:
            raise ValueError(f"symbols must be six different characters, not {symbols!r}")
        if len({action.lower() for action in actions}) != 4:
            raise ValueError(f"actions must be four different words, not {list(actions)}")
        if words not in ("cells", "rows"):
            raise ValueError(f"words must be cells or rows, not {words!r}")
        if words == "rows" and size > MAX_SIZE_OF_ROWS:
            raise ValueError(f"words: rows is for sizes up to {MAX_SIZE_OF_ROWS}, not {size}: use words: cells")
        self.size = size
        self.frozen_probability = frozen_probability
        self.is_slippery = is_slippery
        self.holdout_share = holdout_share
        self.symbols = Symbols(*symbols)
        self.actions = tuple(actions)
        self.instruction = self._default_instruction() if instruction is None else instruction
        self._words = words
        self._action_ids = {action.lower(): number for number, action in enumerate(actions)}
        self._holes = np.zeros((size, size), np.bool_)
        self._position = (0, 0)
        self._slips = np.random.default_rng(0)

    def reset(self, seed: int, split: Stream) -> str:
        """Begin on a solvable map of the split. Deterministic in (seed, split, configuration)."""
        rng = np.random.default_rng(seed)
        self._slips = np.random.default_rng(rng.integers(2**63))
        wants_holdout = split is Stream.VALIDATION
        while True:
            holes = random_holes(rng, self.size, self.frozen_probability)
            if is_solvable(holes) and is_holdout(holes, self.holdout_share) == wants_holdout:
                return self.start_on(holes)

    def start_on(self, holes: BoolArray) -> str:
        """Begin on this map, bool [size, size], True where there is a hole."""
        self._holes = holes
        self._position = (0, 0)
        return self.board()

    def step(self, action: str) -> StepResult:
        """Play one answer, in any case; see `StepResult`. One that is no action moves nothing."""
        number = self._action_ids.get(action.strip().lower())
        if number is None:
            return StepResult(self.board(), 0.0, False, metrics=_metrics(valid=False))
        before = self._position
        self._position = self._move(number)
        in_hole = bool(self._holes[self._position])
        success = self._position == (self.size - 1, self.size - 1)
        return StepResult(
            self.board(),
            float(success),
            terminated=success or in_hole,
            metrics=_metrics(valid=True, effective=before != self._position, success=success),
        )

    def valid_actions(self) -> list[str]:
        """All four, everywhere: a step against the border is valid and leaves the player where it is."""
        return list(self.actions)

    def vocabulary(self) -> list[str]:
        """The pieces of text that every observation, answer and the instruction are made of."""
        s = self.symbols
        cells = [s.player, s.frozen, s.hole, s.goal, s.fallen, s.arrived, "\n", *self.actions]
        return cells if self._words == "cells" else [*cells, *self._rows()]

    def _rows(self) -> list[str]:
        """Every row of a board during an episode, line break included."""
        s = self.symbols
        upper = _with_player(itertools.product((s.frozen, s.hole), repeat=self.size), s.player)
        last = _with_player(itertools.product((s.frozen, s.hole), repeat=self.size - 1), s.player)
        return [*(row + "\n" for row in upper), *(row + s.goal for row in last)]

    def render(self) -> NDArray[np.uint8]:
        """See `Renders`."""
        return draw_lake(self._holes, self._position)

    def board(self) -> str:
        """The state as rows of symbols."""
        s = self.symbols
        rows = np.where(self._holes, s.hole, s.frozen)
        rows[-1, -1] = s.goal
        if self._holes[self._position]:
            rows[self._position] = s.fallen
        elif self._position == (self.size - 1, self.size - 1):
            rows[self._position] = s.arrived
        else:
            rows[self._position] = s.player
        return "\n".join("".join(row) for row in rows)

    def _move(self, action: int) -> tuple[int, int]:
        if self.is_slippery:
            action = (action + int(self._slips.integers(-1, 2))) % 4
        row, column = self._position[0] + MOVES[action][0], self._position[1] + MOVES[action][1]
        return min(max(row, 0), self.size - 1), min(max(column, 0), self.size - 1)

    def _default_instruction(self) -> str:
        s = self.symbols
        return (
            f"You are {s.player} on a frozen lake of {s.frozen} cells. Walk to the goal {s.goal} and keep out of the holes {s.hole}. "
            f"Answer with one word: {', '.join(self.actions[:-1])} or {self.actions[-1]}."
        )


def _with_player(rows: Iterable[tuple[str, ...]], player: str) -> list[str]:
    """The rows as text, without the player and with it in each cell; each once."""
    texts: dict[str, None] = {}
    for row in rows:
        text = "".join(row)
        texts |= dict.fromkeys([text, *(text[:i] + player + text[i + 1 :] for i in range(len(text)))])
    return list(texts)


def random_holes(rng: np.random.Generator, size: int, frozen_probability: float) -> BoolArray:
    """A map that may be unsolvable, bool [size, size]; start and goal are never holes."""
    holes: BoolArray = rng.random((size, size)) >= frozen_probability
    holes[0, 0] = holes[-1, -1] = False
    return holes


def is_solvable(holes: BoolArray) -> bool:
    """Whether the goal can be reached from the start."""
    size = len(holes)
    frontier, seen = [(0, 0)], {(0, 0)}
    while frontier:
        row, column = frontier.pop()
        for down, right in MOVES:
            cell = (row + down, column + right)
            if cell in seen or not (0 <= cell[0] < size and 0 <= cell[1] < size) or holes[cell]:
                continue
            if cell == (size - 1, size - 1):
                return True
            seen.add(cell)
            frontier.append(cell)
    return False


def is_holdout(holes: BoolArray, share: float) -> bool:
    """Whether this map belongs to the validation holdout: the same answer on every machine and in every release."""
    digest = hashlib.sha256(f"frozen-lake:{len(holes)}:".encode() + np.packbits(holes).tobytes()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _metrics(valid: bool, effective: bool = False, success: bool = False) -> dict[str, float]:
    return {
        "action_is_valid": float(valid),
        "action_is_effective": float(effective),
        "num_actions": 1.0,
        "success": float(success),
    }
