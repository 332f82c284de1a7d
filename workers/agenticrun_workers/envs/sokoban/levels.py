"""Levels of Sokoban: random rooms with every box on its target, and then played backwards.

A cell is its position in the board's text (row * (columns + 1) + column), so moves are additions,
and a set of cells is one integer with a bit per cell. The outermost cells are always walls, so
nothing ever moves out of the board.

Rooms have the distribution of gym-sokoban 0.0.6 (after Racanière et al. 2017, "Imagination-
augmented agents", appendix 4.2): a random walk stamps floor into solid wall, then player and
targets are put on random floor cells.

`pull_apart` then pulls the boxes off their targets, so every level can be solved by pushing them
back. The search is that of gym-sokoban 0.0.6, state for state, so levels have its difficulty: depth
first; in each state the player tries to pull up, down, left and right (without a box behind it, it
just walks), then to walk away from the boxes in the same order; a state is the position of the
player and of the boxes, and which boxes were ever pulled. The best state found is the level: the
one with the largest pulls x displacement, where pulls counts those on the way to it and
displacement is the sum of Manhattan distances between each box and the target it came from, among
states that leave every target uncovered.
"""

from __future__ import annotations

import functools
import random
import threading
from dataclasses import dataclass, replace

import numpy as np

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
    # Without a free cell beyond these, no box can be pulled.
    if len(free) <= boxes + 1:
        return None
    player = _draw(rng, free)
    targets = sum(1 << _draw(rng, free) for _ in range(boxes))
    return Room(rows, columns, floor, targets, targets, player)


def random_floor(rng: random.Random, rows: int, columns: int, walk_steps: int) -> int:
    """Cells that a random walk turned into floor."""
    # `random()` alone: other methods of `random` may draw differently in other versions of Python.
    uniform = rng.random
    stamps = _stamps_at(rows, columns)
    down, right = DIRECTIONS[int(4 * uniform())]
    row, column = 1 + int((rows - 1) * uniform()), 1 + int((columns - 1) * uniform())
    floor = 0
    for _ in range(walk_steps):
        if uniform() < TURN_PROBABILITY:
            down, right = DIRECTIONS[int(4 * uniform())]
        # The outermost cells stay walls, so that no cell lies outside of the board.
        row = min(max(row + down, 1), rows - 2)
        column = min(max(column + right, 1), columns - 2)
        floor |= stamps[row, column][int(5 * uniform())]
    return floor


def is_holdout(room: Room, share: float) -> bool:
    """Return whether rooms with these walls and targets belong to the validation holdout.

    Where player and boxes start does not matter.
    """
    size = (room.rows * room.width + 7) // 8
    # By content and not by seed, so that equal rooms of two seeds fall on the same side.
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
    # For each cell once: a walk places hundreds of stamps.
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


MAX_STATES = 300_000
"""Maximum number of states visited in one room."""

SMALL = 5_000
"""States searched in Python, so that small boards never load a compiler.

Larger searches start again, compiled.
"""

MAX_COMPILED_FLOOR = 64
"""Maximum number of floor cells for the compiled search."""

_compiled_search = threading.Lock()
"""One compiled search at a time in a process, because of its memory."""


def pull_apart(room: Room, depth: int) -> Room | None:
    """Return the best level of a solved room, or None if no box can be pulled off its target.

    Args:
        depth: the search goes back `depth` - 2 steps at most.
    """
    level, is_whole = search(room, depth, SMALL)
    if is_whole:
        return level
    # The compiled search keeps a set of cells in 64 bits.
    if room.floor.bit_count() > MAX_COMPILED_FLOOR:
        return search(room, depth, MAX_STATES)[0]
    with _compiled_search:
        return search_compiled(room, depth, MAX_STATES)


def search_compiled(room: Room, depth: int, max_states: int) -> Room | None:
    """Search like `search`, in a room with at most `MAX_COMPILED_FLOOR` floor cells.

    The first call of a process may compile for seconds.
    """
    from agenticrun_workers.envs.sokoban import compiled_search

    cells = cells_of(room.floor)
    number = {cell: index for index, cell in enumerate(cells)}
    width = room.width
    after = np.array(
        [[number.get(cell + move, -1) for move in (-width, width, -1, 1)] for cell in cells]
    )
    rows, columns = np.divmod(np.array(cells), width)
    homes = np.array([number[cell] for cell in cells_of(room.targets)])
    score, boxes, player = compiled_search.search(
        after, rows, columns, homes, number[room.player], depth, max_states
    )
    if not score:
        return None
    return replace(
        room, boxes=sum(1 << cells[index] for index in cells_of(int(boxes))), player=cells[player]
    )


def search(room: Room, depth: int, max_states: int) -> tuple[Room | None, bool]:
    """Return the best level among the first `max_states` states, and whether these were all."""
    width, floor, targets = room.width, room.floor, room.targets
    directions = (1, -1, width, -width)  # the last one is tried first
    homes = cells_of(targets)
    best: Room | None = None
    best_score = 0
    seen: set[tuple[int, int, int]] = set()
    # (player, boxes, boxes that were pulled), place of each box, pulls, displacement, steps left
    open_states = [((room.player, room.boxes, 0), tuple(homes), 0, 0, depth - 2)]
    while open_states:
        state, places, pulls, displacement, left = open_states.pop()
        if state in seen:
            continue
        if len(seen) >= max_states:
            return best, False
        seen.add(state)
        player, boxes, pulled = state
        # A box on its target is solved already, and the player must not hide one.
        if pulls * displacement > best_score and not (boxes | 1 << player) & targets:
            best, best_score = replace(room, boxes=boxes, player=player), pulls * displacement
        if not left:
            continue
        free = floor & ~boxes
        first, later = [], []
        # In this order, on which the levels of all seeds depend.
        for direction in directions:
            to = player + direction
            if not free >> to & 1:
                continue
            walked = (to, boxes, pulled)
            behind = player - direction
            if not boxes >> behind & 1:
                if walked not in seen:
                    first.append((walked, places, pulls, displacement, left - 1))
                continue
            if walked not in seen:
                # Walking away from a box that could be pulled is tried last.
                later.append((walked, places, pulls, displacement, left - 1))
            change = 1 << behind | 1 << player
            dragged = (to, boxes ^ change, pulled & ~(1 << behind) | 1 << player)
            if dragged not in seen:
                box = places.index(behind)
                moved = (*places[:box], player, *places[box + 1 :])
                home = homes[box]
                farther = (
                    displacement + _distance(home, player, width) - _distance(home, behind, width)
                )
                first.append((dragged, moved, pulls + 1, farther, left - 1))
        # On a stack: what is added last is tried first.
        open_states += later
        open_states += first
    return best, True


def _distance(one: int, other: int, width: int) -> int:
    """Return the Manhattan distance of two cells."""
    return abs(one // width - other // width) + abs(one % width - other % width)
