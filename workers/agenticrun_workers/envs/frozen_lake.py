"""FrozenLake as text: find the way over the ice to the goal without falling into a hole.

Rules, rewards and level distribution are gymnasium's (start top left, goal bottom right, every
other cell frozen with a fixed probability, only solvable maps); the rows look like ROLL's. Levels,
slips and observations are computed here, on small integers and with our own random numbers, so that
an episode depends only on its seed.

A map is one integer with a bit per cell, row by row, the top left cell in the highest bit; 1 is a
hole. A search over a whole board is then a handful of shifts, which costs less than one call of
NumPy.

A hash of the map decides whether it belongs to the validation holdout. Training never sees a map of
the holdout and validation sees no other, so "maps never trained on" holds by construction.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import ImageDraw

from agenticrun_workers.envs.env import StepResult, register_env
from agenticrun_workers.envs.grid import (
    MAX_DRAWS,
    SIDE,
    NoLevel,
    action_numbers,
    at,
    box,
    canvas,
    check_holdout_share,
    check_symbols,
    draw_player,
    in_holdout,
    pixels,
    step_metrics,
)
from agenticrun_workers.types import BoolArray, Stream

_DIGITS = bytes.maketrans(b"\0\1", b"01")


def random_holes(seed: int, draw: int, size: int, frozen_probability: float) -> int:
    """Return map number `draw` of a seed, which may be unsolvable.

    Start (top left) and goal (bottom right) are never holes. The random numbers, 32 bits per cell,
    are a hash of seed and number. That is one call, where a new generator for each map takes five
    times as long to start, and it gives the same numbers on every machine and with every release of
    NumPy.
    """
    cells = size * size
    drawn = np.frombuffer(
        hashlib.shake_128(b"frozen-lake:%d:%d" % (seed, draw)).digest(4 * cells), "<u4"
    )
    return _from_flat(drawn < round((1 - frozen_probability) * 2**32)) & ~(1 << cells - 1 | 1)


def from_array(holes: BoolArray) -> int:
    """Return the map of a bool array [size, size], True where there is a hole."""
    return _from_flat(holes.ravel())


def to_array(holes: int, size: int) -> BoolArray:
    """Return the map as bool [size, size], True where there is a hole."""
    packed = np.frombuffer(_packed(holes, size), np.uint8)
    return np.unpackbits(packed, count=size * size).reshape(size, size).astype(np.bool_)


def is_solvable(holes: int, size: int) -> bool:
    """Return whether the goal can be reached from the start."""
    ice, leaves_right, leaves_left = _masks(size)
    ice &= ~holes
    reached, before = 1 << size * size - 1, 0
    while reached != before:
        before = reached
        reached |= (reached >> size | (reached & leaves_right) >> 1) & ice  # down and right
        reached |= (reached << size | (reached & leaves_left) << 1) & ice  # up and left
        if reached & 1:
            return True
    return False


def is_holdout(holes: int, size: int, share: float) -> bool:
    """Return whether this map belongs to the validation holdout; see `in_holdout`."""
    return in_holdout(b"frozen-lake:%d:" % size + _packed(holes, size), share)


def _from_flat(holes: BoolArray) -> int:
    return int(holes.tobytes().translate(_DIGITS), 2)


def _packed(holes: int, size: int) -> bytes:
    """Pack a map as `np.packbits` does: zero bits fill up the last byte."""
    cells = size * size
    return (holes << -cells % 8).to_bytes((cells + 7) // 8, "big")


@functools.cache
def _masks(size: int) -> tuple[int, int, int]:
    """Return masks of all cells, of those with a cell to the right, and to the left."""
    row = (1 << size) - 1
    rows = [number * size for number in range(size)]
    return (
        (1 << size * size) - 1,
        sum((row & ~1) << shift for shift in rows),
        sum((row >> 1) << shift for shift in rows),
    )


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
    """An environment that plays one episode at a time; see the module's docstring.

    Args:
        size: rows and columns, at least 2.
        frozen_probability: of each cell but start and goal, in (0, 1].
        is_slippery: move sideways instead with probability 2/3, as gymnasium does.
        holdout_share: share of all maps kept for validation, in (0, 1).
        symbols: six characters in the order player, frozen, hole, goal, fallen, arrived.
        actions: the words for left, down, right, up.
        instruction: text of the first prompt; the default explains the task.
        words: what `vocabulary` lists beside single symbols: nothing (`cells`) or every possible
            row of a board (`rows`), so that a model made for this environment reads a board of size
            n in n tokens.
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
        check_holdout_share(holdout_share)
        check_symbols(symbols, 6)
        self._action_ids = action_numbers(actions, 4)
        if words not in ("cells", "rows"):
            raise ValueError(f"words must be cells or rows, not {words!r}")
        if words == "rows" and size > MAX_SIZE_OF_ROWS:
            raise ValueError(
                f"words: rows is for sizes up to {MAX_SIZE_OF_ROWS}, not {size}: use words: cells"
            )
        self.size = size
        self.frozen_probability = frozen_probability
        self.is_slippery = is_slippery
        self.holdout_share = holdout_share
        self.symbols = Symbols(*symbols)
        self.actions = tuple(actions)
        self.instruction = self._default_instruction() if instruction is None else instruction
        self._words = words
        self._player_on = {
            self.symbols.frozen: self.symbols.player,
            self.symbols.hole: self.symbols.fallen,
        }
        self._player_on[self.symbols.goal] = self.symbols.arrived
        self._symbol_of_bit = str.maketrans("01", self.symbols.frozen + self.symbols.hole)
        self._row_slices = [slice(start, start + size) for start in range(0, size * size, size)]
        self._ends = _ends_of_moves(size)
        self._slips = np.random.default_rng(0)
        self._holes = 0
        self._ground = ""
        """The board without the player, as text."""
        self._place = 0
        """Position of the player in that text."""
        for split in (Stream.TRAIN, Stream.VALIDATION):
            self.reset(0, split)

    def reset(self, seed: int, split: Stream) -> str:
        """Begin on a solvable map of the split. Deterministic in (seed, split, configuration)."""
        if self.is_slippery:
            self._slips = np.random.default_rng(seed)
        wants_holdout = split == Stream.VALIDATION
        for draw in range(MAX_DRAWS):
            holes = random_holes(seed, draw, self.size, self.frozen_probability)
            if (
                is_solvable(holes, self.size)
                and is_holdout(holes, self.size, self.holdout_share) == wants_holdout
            ):
                return self._start_on(holes)
        raise NoLevel(split, "size, frozenProbability")

    def start_on(self, holes: BoolArray) -> str:
        """Begin on this map, bool [size, size], True where there is a hole."""
        return self._start_on(from_array(holes))

    def step(self, action: str) -> StepResult:
        """Play one answer, in any case; see `StepResult`. One that is no action moves nothing."""
        number = self._action_ids.get(action.strip().lower())
        if number is None:
            return StepResult(self.board(), 0.0, False, metrics=step_metrics(False, False, False))
        if self.is_slippery:
            number = (number + int(self._slips.integers(-1, 2))) % 4
        before = self._place
        self._place = after = self._ends[before][number]
        ground = self._ground[after]
        success = ground == self.symbols.goal
        return StepResult(
            self.board(),
            1.0 if success else 0.0,
            success or ground == self.symbols.hole,
            metrics=step_metrics(True, before != after, success),
        )

    def valid_actions(self) -> list[str]:
        """Return all four: a step against the border is valid and leaves the player in place."""
        return list(self.actions)

    def vocabulary(self) -> list[str]:
        """Return the pieces that form every observation, every answer and the instruction."""
        s = self.symbols
        cells = [s.player, s.frozen, s.hole, s.goal, s.fallen, s.arrived, "\n", *self.actions]
        return cells if self._words == "cells" else [*cells, *self._rows()]

    def _rows(self) -> list[str]:
        """Return every possible row of a board, line break included."""
        s = self.symbols
        upper = _with_player(itertools.product((s.frozen, s.hole), repeat=self.size), s.player)
        last = _with_player(itertools.product((s.frozen, s.hole), repeat=self.size - 1), s.player)
        return [*(row + "\n" for row in upper), *(row + s.goal for row in last)]

    def render(self) -> NDArray[np.uint8]:
        return draw_lake(to_array(self._holes, self.size), divmod(self._place, self.size + 1))

    def board(self) -> str:
        """Return the state as rows of symbols."""
        ground, place = self._ground, self._place
        return ground[:place] + self._player_on[ground[place]] + ground[place + 1 :]

    def _start_on(self, holes: int) -> str:
        self._holes = holes
        self._place = 0
        cells = f"{holes:0{self.size**2}b}".translate(self._symbol_of_bit)
        self._ground = "\n".join([cells[row] for row in self._row_slices])[:-1] + self.symbols.goal
        return self.board()

    def _default_instruction(self) -> str:
        s = self.symbols
        return (
            f"You are {s.player} on a frozen lake of {s.frozen} cells. Walk to the goal {s.goal} "
            f"and keep out of the holes {s.hole}. "
            f"Answer with one word: {', '.join(self.actions[:-1])} or {self.actions[-1]}."
        )


def _with_player(rows: Iterable[tuple[str, ...]], player: str) -> list[str]:
    """Return the rows as text, without the player and with it in each cell; no duplicates."""
    texts: dict[str, None] = {}
    for row in rows:
        text = "".join(row)
        texts |= dict.fromkeys(
            [text, *(text[:i] + player + text[i + 1 :] for i in range(len(text)))]
        )
    return list(texts)


def _ends_of_moves(size: int) -> list[tuple[int, ...]]:
    """Return where each move ends, from each position in the board's text.

    Line breaks are positions that the player never reaches.
    """
    width, last = size + 1, size - 1
    return [
        tuple(
            min(max(row + down, 0), last) * width + min(max(column + right, 0), last)
            for down, right in MOVES
        )
        for row in range(size)
        for column in range(width)
    ]


ICE, SNOW, CRACK = "#d7ebf5", "#eef7fb", "#a9cfe0"
WATER, DEEP = "#2f6f94", "#1d4a66"
POLE, FLAG = "#5b4636", "#d94f3d"


def draw_lake(holes: BoolArray, position: tuple[int, int]) -> NDArray[np.uint8]:
    """Return the board with its player.

    Args:
        holes: bool [size, size].
        position: row and column of the player; in a hole it is drawn as sunk.

    Returns:
        RGB, uint8 [size * CELL, size * CELL, 3].
    """
    size = len(holes)
    image, draw = canvas(size, size, CRACK)
    for row, column in np.ndindex(size, size):
        _draw_cell(draw, column * SIDE, row * SIDE, hole=bool(holes[row, column]))
    # A flag on the goal.
    x = y = (size - 1) * SIDE
    draw.ellipse(box(x, y, 0.2, 0.76, 0.6, 0.88), fill=CRACK)
    draw.rectangle(box(x, y, 0.37, 0.15, 0.43, 0.82), fill=POLE)
    draw.polygon([at(x, y, 0.43, 0.15), at(x, y, 0.86, 0.29), at(x, y, 0.43, 0.43)], fill=FLAG)
    draw_player(draw, position[1] * SIDE, position[0] * SIDE, sunk=bool(holes[position]))
    return pixels(image)


def _draw_cell(draw: ImageDraw.ImageDraw, x: int, y: int, *, hole: bool) -> None:
    draw.rectangle(box(x, y, 0.01, 0.01, 0.98, 0.98), fill=ICE)
    if hole:
        draw.ellipse(box(x, y, 0.12, 0.12, 0.88, 0.88), fill=SNOW)
        draw.ellipse(box(x, y, 0.16, 0.16, 0.84, 0.84), fill=WATER)
        draw.ellipse(box(x, y, 0.26, 0.3, 0.74, 0.8), fill=DEEP)
