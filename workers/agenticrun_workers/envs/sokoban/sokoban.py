"""Sokoban as text: push every box onto a target.

Rules and rewards are gym-sokoban 0.0.6's, and so is the distribution of levels
(`levels`); symbols and actions are ROLL's. Levels are made by playing backwards, so every one
can be solved. An episode depends only on its seed.

A hash of walls and targets decides whether a room belongs to the validation holdout. Training never
sees a room of the holdout, wherever boxes and player start, and validation sees no other.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import ImageDraw

from agenticrun_workers.envs.env import MetricMode, StepResult, register_env
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
    pixels,
    step_metrics,
)
from agenticrun_workers.envs.sokoban.levels import (
    STEPS_PER_SIDE,
    Room,
    cells_of,
    is_holdout,
    pull_apart,
    random_room,
)
from agenticrun_workers.types import Stream

DEFAULT_ACTIONS = ("Up", "Down", "Left", "Right")

STEP_REWARD, ON_TARGET, OFF_TARGET, SOLVED = -0.1, 1.0, -1.0, 10.0
"""Reward of each step; of a box pushed onto a target, or off one; of the last box."""

MAX_COLUMNS_OF_ROWS = 7
"""Wider boards would have many thousands of possible rows."""

FAST_SIZE = 100
"""Rows x columns x boxes up to which making a level takes well under a millisecond on average."""

MODES: dict[str, MetricMode] = {"boxes_on_target": "last"}


@dataclass(frozen=True, slots=True)
class Symbols:
    """One character per kind of cell, in gym-sokoban's order."""

    wall: str = "#"
    floor: str = "_"
    target: str = "O"
    box_on_target: str = "√"
    box: str = "X"
    player: str = "P"
    player_on_target: str = "S"


@register_env("sokoban")
class Sokoban:
    """An environment that plays one episode at a time; see the module's docstring.

    Args:
        rows: of the board, walls included, at least 4.
        columns: of the board, walls included, at least 4.
        boxes: number of boxes and of targets, at least 1.
        search_depth: how far a level is played backwards: `search_depth` - 2 steps, at least 3.
        walk_steps: of the random walk that makes the floor; default: 1.7 for each row and column.
        holdout_share: share of all rooms kept for validation, in (0, 1).
        symbols: seven characters in the order wall, floor, target, box on target, box, player,
            player
            on target.
        actions: the words for up, down, left, right.
        instruction: text of the first prompt; the default explains the task.
        words: what `vocabulary` lists beside single symbols: nothing (`cells`) or every possible
            row of
            a board (`rows`), so that a model made for this environment reads a board of n rows in n
            tokens.
    """

    def __init__(
        self,
        *,
        rows: int = 6,
        columns: int = 6,
        boxes: int = 1,
        search_depth: int = 300,
        walk_steps: int | None = None,
        holdout_share: float = 0.2,
        symbols: str = "#_O√XPS",
        actions: Sequence[str] = DEFAULT_ACTIONS,
        instruction: str | None = None,
        words: Literal["cells", "rows"] = "cells",
    ) -> None:
        steps = int(STEPS_PER_SIDE * (rows + columns)) if walk_steps is None else walk_steps
        for name, value, least in (
            ("rows", rows, 4),
            ("columns", columns, 4),
            ("boxes", boxes, 1),
            ("searchDepth", search_depth, 3),
            ("walkSteps", steps, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if (rows - 2) * (columns - 2) < boxes + 2:
            raise ValueError(
                f"boxes: {boxes} do not fit into a room of {rows} x {columns} cells: player, boxes "
                "and a free cell are inside"
            )
        check_holdout_share(holdout_share)
        check_symbols(symbols, 7)
        self._action_ids = action_numbers(actions, 4)
        if words not in ("cells", "rows"):
            raise ValueError(f"words must be cells or rows, not {words!r}")
        if words == "rows" and columns > MAX_COLUMNS_OF_ROWS:
            raise ValueError(
                f"words: rows is for up to {MAX_COLUMNS_OF_ROWS} columns, not {columns}: use "
                "words: cells"
            )
        self.rows, self.columns, self.boxes = rows, columns, boxes
        self.search_depth = search_depth
        self.walk_steps = steps
        self.holdout_share = holdout_share
        self.symbols = s = Symbols(*symbols)
        self.actions = tuple(actions)
        self.instruction = self._default_instruction() if instruction is None else instruction
        self.blocking = rows * columns * boxes > FAST_SIZE
        """Small levels take microseconds and need no thread; large ones may take a second."""
        self._words = words
        self._moves = (-columns - 1, columns + 1, -1, 1)
        self._with_box = {s.floor: s.box, s.target: s.box_on_target}
        self._without_box = {s.box: s.floor, s.box_on_target: s.target}
        self._with_player = {s.floor: s.player, s.target: s.player_on_target}
        self._without_player = {s.player: s.floor, s.player_on_target: s.target}
        self._cells: list[str] = []
        """The board's text, one character each."""
        self._player = 0
        """Position of the player in it."""
        self._on_target = 0
        for split in (Stream.TRAIN, Stream.VALIDATION):
            self._check_that_there_are_levels(split)

    def reset(self, seed: int, split: Stream) -> str:
        """Begin on a level of the split. Deterministic in (seed, split, configuration)."""
        levels = (pull_apart(room, self.search_depth) for room in self._solved_rooms(seed, split))
        return self.start_on(next(level for level in levels if level is not None))

    def start_on(self, room: Room) -> str:
        """Begin in this room, with rows, columns and boxes as in the configuration."""
        s = self.symbols
        cells = list("\n".join([s.wall * self.columns] * self.rows))
        for cell in cells_of(room.floor):
            cells[cell] = s.floor
        for cell in cells_of(room.targets):
            cells[cell] = s.target
        for cell in cells_of(room.boxes):
            cells[cell] = self._with_box[cells[cell]]
        cells[room.player] = self._with_player[cells[room.player]]
        self._cells, self._player = cells, room.player
        self._on_target = (room.boxes & room.targets).bit_count()
        return self.board()

    def step(self, action: str) -> StepResult:
        """Play one answer, in any case; see `StepResult`.

        An invalid answer costs a step and moves nothing.
        """
        number = self._action_ids.get(action.strip().lower())
        before = self._on_target
        moved = number is not None and self._move(self._moves[number])
        solved = self._on_target == self.boxes
        reward = STEP_REWARD
        if self._on_target != before:
            reward += ON_TARGET if self._on_target > before else OFF_TARGET
        if solved:
            reward += SOLVED
        metrics = step_metrics(number is not None, moved, solved)
        metrics["boxes_on_target"] = self._on_target
        return StepResult(self.board(), reward, solved, metrics=metrics, modes=MODES)

    def valid_actions(self) -> list[str]:
        """Return all four: a step against a wall is valid and changes nothing."""
        return list(self.actions)

    def vocabulary(self) -> list[str]:
        """The pieces of text that every observation, answer and the instruction are made of."""
        cells = [*astuple(self.symbols), "\n", *self.actions]
        return cells if self._words == "cells" else [*cells, *self._rows()]

    def render(self) -> NDArray[np.uint8]:
        kinds = {symbol: number for number, symbol in enumerate(astuple(self.symbols))}
        return draw_room(
            np.array(
                [[kinds[symbol] for symbol in row] for row in self.board().split("\n")], np.uint8
            )
        )

    def board(self) -> str:
        """The state as rows of symbols."""
        return "".join(self._cells)

    def _move(self, change: int) -> bool:
        """Walk or push; whether the player moved."""
        cells, player = self._cells, self._player
        to = player + change
        if cells[to] in self._without_box:
            beyond = to + change
            if cells[beyond] not in self._with_box:
                return False
            cells[beyond] = self._with_box[cells[beyond]]
            self._on_target += (cells[beyond] == self.symbols.box_on_target) - (
                cells[to] == self.symbols.box_on_target
            )
            cells[to] = self._without_box[cells[to]]
        elif cells[to] not in self._with_player:
            return False
        cells[player] = self._without_player[cells[player]]
        cells[to] = self._with_player[cells[to]]
        self._player = to
        return True

    def _solved_rooms(self, seed: int, split: Stream) -> Iterator[Room]:
        """Random rooms of the split. Raises `NoLevel` instead of searching forever."""
        rng = random.Random(seed)
        wants_holdout = split == Stream.VALIDATION
        for _ in range(MAX_DRAWS):
            room = random_room(rng, self.rows, self.columns, self.boxes, self.walk_steps)
            if room is not None and is_holdout(room, self.holdout_share) == wants_holdout:
                yield room
        raise NoLevel(split, "rows, columns, boxes, searchDepth, walkSteps")

    def _check_that_there_are_levels(self, split: Stream) -> None:
        """Raise `NoLevel` if the split has none.

        Of large boards only the rooms are checked, since one level may take a second.
        """
        if self.blocking:
            next(self._solved_rooms(0, split))
        else:
            self.reset(0, split)

    def _rows(self) -> list[str]:
        """Return every possible row of a board, line break included; the last row is all walls."""
        s = self.symbols
        rows = []
        for inner in itertools.product(astuple(s), repeat=self.columns - 2):
            boxes = inner.count(s.box) + inner.count(s.box_on_target)
            targets = (
                inner.count(s.target)
                + inner.count(s.box_on_target)
                + inner.count(s.player_on_target)
            )
            players = inner.count(s.player) + inner.count(s.player_on_target)
            if boxes <= self.boxes and targets <= self.boxes and players <= 1:
                rows.append(s.wall + "".join(inner) + s.wall + "\n")
        return [*rows, s.wall * self.columns]

    def _default_instruction(self) -> str:
        s = self.symbols
        return (
            f"You are {s.player} in a warehouse of walls {s.wall} and floor {s.floor}. Push every "
            f"box {s.box} onto a target {s.target}; "
            f"there a box is {s.box_on_target} and you are {s.player_on_target}. Boxes can be "
            "pushed, one at a time, and never pulled. "
            f"Answer with one word: {', '.join(self.actions[:-1])} or {self.actions[-1]}."
        )


MORTAR, BRICK, BRICK_LIGHT = "#4d4a52", "#8a6f66", "#9b7f74"
FLOOR, SEAM = "#e9e2d3", "#d8cfbb"
TARGET, TARGET_LIGHT = "#c8453b", "#f0b7ae"
CRATE, PLANK = "#c48a4a", "#8a5a26"
CRATE_DONE, PLANK_DONE = "#7fae5a", "#47702b"

WALL, FLOOR_CELL, TARGET_CELL, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)


def draw_room(kinds: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The board with its boxes and its player.

    Args:
        kinds: uint8 [rows, columns], 0 to 6 in the order wall, floor, target, box on target, box,
            player, player on target.

    Returns:
        RGB, uint8 [rows * CELL, columns * CELL, 3].
    """
    image, draw = canvas(kinds.shape[0], kinds.shape[1], SEAM)
    for row, column in np.ndindex(kinds.shape):
        _draw_cell(draw, column * SIDE, row * SIDE, int(kinds[row, column]))
    return pixels(image)


def _draw_cell(draw: ImageDraw.ImageDraw, x: int, y: int, kind: int) -> None:
    if kind == WALL:
        _draw_bricks(draw, x, y)
        return
    draw.rectangle(box(x, y, 0.01, 0.01, 0.98, 0.98), fill=FLOOR)
    if kind in (TARGET_CELL, BOX_ON_TARGET, PLAYER_ON_TARGET):
        rings = ((0.06, TARGET), (0.14, TARGET_LIGHT), (0.3, TARGET), (0.38, TARGET_LIGHT))
        for inset, fill in rings:
            draw.ellipse(box(x, y, inset, inset, 1 - inset, 1 - inset), fill=fill)
    if kind in (BOX, BOX_ON_TARGET):
        # A crate with a cross of planks; on its target it is green and shows the rim.
        fill, plank = (CRATE_DONE, PLANK_DONE) if kind == BOX_ON_TARGET else (CRATE, PLANK)
        width = SIDE // 16
        draw.rectangle(box(x, y, 0.14, 0.14, 0.86, 0.86), fill=fill, outline=plank, width=width)
        draw.line([at(x, y, 0.18, 0.18), at(x, y, 0.82, 0.82)], fill=plank, width=width)
        draw.line([at(x, y, 0.18, 0.82), at(x, y, 0.82, 0.18)], fill=plank, width=width)
    if kind in (PLAYER, PLAYER_ON_TARGET):
        draw_player(draw, x, y)


def _draw_bricks(draw: ImageDraw.ImageDraw, x: int, y: int) -> None:
    """Three courses, each shifted by half a brick."""
    draw.rectangle(box(x, y, 0, 0, 1, 1), fill=MORTAR)
    for course in range(3):
        edges = (0, 0.5, 1) if course % 2 else (0, 0.25, 0.75, 1)
        for left, right in itertools.pairwise(edges):
            fill = BRICK if (course + round(4 * left)) % 2 else BRICK_LIGHT
            draw.rectangle(
                box(x, y, left + 0.02, course / 3 + 0.025, right - 0.02, (course + 1) / 3 - 0.025),
                fill=fill,
            )
