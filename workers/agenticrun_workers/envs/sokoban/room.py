"""Rooms of Sokoban as small integers, and random ones with every box on its target.

A cell is its position in the board's text (row * (columns + 1) + column), so moves are additions,
and a set of cells is one integer with a bit per cell. The outermost cells are always walls, so
nothing ever moves out of the board. `level_search` pulls the boxes off their targets.

Rooms have the distribution of gym-sokoban 0.0.6 (after Racanière et al. 2017, "Imagination-
augmented agents", appendix 4.2): a random walk stamps floor into solid wall, then player and
targets are put on random floor cells.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

from agenticrun_workers.envs.grid import in_holdout

TURN_PROBABILITY = 0.35
"""Probability of a new direction at each step of the walk."""

STEPS_PER_SIDE = 1.7
"""Steps of the walk for each row and each column."""

STAMPS = (
    ("...", "###", "..."),
    (".#.", ".#.", ".#."),
    ("...", "##.", ".#."),
    ("...", "##.", "##."),
    ("...", ".##", ".#."),
)
"""Cells around the walker that a step of the walk turns into floor."""

DIRECTIONS = ((1, 0), (0, 1), (-1, 0), (0, -1))


@dataclass(frozen=True, slots=True)
class Room:
    """Walls, and what stands where."""

    rows: int
    columns: int
    floor: int
    """Cells that are no wall, targets included."""
    targets: int
    boxes: int
    player: int

    @property
    def width(self) -> int:
        """Places in the text from a cell to the one below it."""
        return self.columns + 1


def random_room(
    rng: random.Random, rows: int, columns: int, boxes: int, walk_steps: int
) -> Room | None:
    """Return a solved room, or None if the floor has no space for player, boxes and a free cell."""
    floor = random_floor(rng, rows, columns, walk_steps)
    free = cells_of(floor)
    if len(free) <= boxes + 1:
        return None
    player = _draw(rng, free)
    targets = sum(1 << _draw(rng, free) for _ in range(boxes))
    return Room(rows, columns, floor, targets, targets, player)


def random_floor(rng: random.Random, rows: int, columns: int, walk_steps: int) -> int:
    """Cells that a random walk turned into floor."""
    uniform = rng.random
    stamps = _stamps_at(rows, columns)
    down, right = DIRECTIONS[int(4 * uniform())]
    row, column = 1 + int((rows - 1) * uniform()), 1 + int((columns - 1) * uniform())
    floor = 0
    for _ in range(walk_steps):
        if uniform() < TURN_PROBABILITY:
            down, right = DIRECTIONS[int(4 * uniform())]
        row = min(max(row + down, 1), rows - 2)
        column = min(max(column + right, 1), columns - 2)
        floor |= stamps[row, column][int(5 * uniform())]
    return floor


def is_holdout(room: Room, share: float) -> bool:
    """Return whether rooms with these walls and targets belong to the validation holdout.

    Where player and boxes start does not matter.
    """
    size = (room.rows * room.width + 7) // 8
    cells = room.floor.to_bytes(size, "big") + room.targets.to_bytes(size, "big")
    return in_holdout(b"sokoban:%d:%d:" % (room.rows, room.columns) + cells, share)


def cells_of(mask: int) -> list[int]:
    """The cells of a set, in order."""
    cells = []
    while mask:
        lowest = mask & -mask
        cells.append(lowest.bit_length() - 1)
        mask ^= lowest
    return cells


def _draw(rng: random.Random, cells: list[int]) -> int:
    """Take a random cell out of the list."""
    return cells.pop(int(len(cells) * rng.random()))


@functools.lru_cache(maxsize=64)
def _stamps_at(rows: int, columns: int) -> dict[tuple[int, int], list[int]]:
    """Floor that each stamp makes around each inner cell, without the outermost cells."""
    width = columns + 1
    return {
        (row, column): [
            sum(
                1 << (row + y) * width + column + x
                for y in (-1, 0, 1)
                for x in (-1, 0, 1)
                if stamp[y + 1][x + 1] == "#"
                and 0 < row + y < rows - 1
                and 0 < column + x < columns - 1
            )
            for stamp in STAMPS
        ]
        for row in range(1, rows - 1)
        for column in range(1, columns - 1)
    }
