"""The search of `levels` compiled by numba, for large boards.

It visits the same states in the same order, in machine integers. Floor cells are numbered from 0,
so that a set of up to 64 of them is one machine word. It runs without the interpreter lock and in
about 20 MB, where the search in Python takes 100 MB and a second for 300,000 states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

SLOTS = 1 << 20
"""Slots of the hash table of states, a power of two above `MAX_STATES`."""


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any]
    try:
        compiled = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba found no writable folder
        compiled = numba.njit(nogil=True)(function)
    return compiled


@_compiled
def _slot_of(
    player: int,
    boxes: np.uint64,
    pulled: np.uint64,
    seen_player: NDArray[np.int64],
    seen_boxes: NDArray[np.uint64],
    seen_pulled: NDArray[np.uint64],
) -> np.int64:
    """Return the slot of this state in the hash table, or the empty slot where it belongs.

    A state always has boxes, so a slot without boxes is empty.
    """
    mixed = (
        (boxes * np.uint64(0x9E3779B97F4A7C15))
        ^ (pulled * np.uint64(0xC2B2AE3D27D4EB4F))
        ^ (np.uint64(player) << np.uint64(57))
    )
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    slot = np.int64(mixed >> np.uint64(44))
    while seen_boxes[slot] and not (
        seen_boxes[slot] == boxes and seen_pulled[slot] == pulled and seen_player[slot] == player
    ):
        slot = (slot + 1) & (SLOTS - 1)
    return slot


@_compiled
def _distance(
    one: int, other: int, rows: NDArray[np.int64], columns: NDArray[np.int64]
) -> np.int64:
    """Moves between two cells of an empty board."""
    distance: np.int64 = abs(rows[one] - rows[other]) + abs(columns[one] - columns[other])
    return distance


@_compiled
def search(
    after: NDArray[np.int64],
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    homes: NDArray[np.int64],
    player: int,
    depth: int,
    max_states: int,
) -> tuple[int, np.uint64, int]:
    """Return the best level of a solved room.

    Args:
        after: the cell that each move leads to, or -1 for a wall, int64 [cells, 4], in the order in
            which they are tried. Moves 0 and 1 are opposite, and so are 2 and 3.
        rows: of each cell, int64 [cells].
        columns: of each cell, int64 [cells].
        homes: the cell of each target, int64 [boxes], in order.
        player: the player's cell.
        depth: as in `levels.pull_apart`.
        max_states: maximum number of states to visit.

    Returns:
        Score, boxes as a set of cells, player; score 0 if no box can be pulled off its target.
    """
    one = np.uint64(1)
    count = len(homes)
    targets = np.uint64(0)
    for home in homes:
        targets |= one << np.uint64(home)
    # each level of the search leaves at most 7 states behind
    room = 8 * depth + 8
    open_player, open_boxes, open_pulled = (
        np.empty(room, np.int64),
        np.empty(room, np.uint64),
        np.empty(room, np.uint64),
    )
    open_places = np.empty((room, count), np.int64)
    open_pulls, open_displacement, open_left = (
        np.empty(room, np.int64),
        np.empty(room, np.int64),
        np.empty(room, np.int64),
    )
    seen_player, seen_boxes, seen_pulled = (
        np.empty(SLOTS, np.int64),
        np.zeros(SLOTS, np.uint64),
        np.empty(SLOTS, np.uint64),
    )
    best_score, best_boxes, best_player = 0, targets, player
    open_player[0], open_boxes[0], open_pulled[0] = player, targets, 0
    open_places[0] = homes
    open_pulls[0] = open_displacement[0] = 0
    open_left[0] = depth - 2
    top, states = 1, 0
    places = np.empty(count, np.int64)
    while top:
        top -= 1
        player, boxes, pulled = open_player[top], open_boxes[top], open_pulled[top]
        slot = _slot_of(player, boxes, pulled, seen_player, seen_boxes, seen_pulled)
        if seen_boxes[slot]:
            continue
        if states >= max_states:
            break
        states += 1
        seen_player[slot], seen_boxes[slot], seen_pulled[slot] = player, boxes, pulled
        places[:] = open_places[top]
        pulls, displacement, left = open_pulls[top], open_displacement[top], open_left[top]
        if pulls * displacement > best_score and not (boxes | one << np.uint64(player)) & targets:
            best_score, best_boxes, best_player = pulls * displacement, boxes, player
        if not left:
            continue
        # pushed last, tried first: moves away from boxes, then pulls and free moves,
        # each from the last move to the first
        for is_first in range(2):
            for move in range(3, -1, -1):
                to = after[player, move]
                if to < 0 or boxes >> np.uint64(to) & one:
                    continue
                behind = after[player, move ^ 1]
                has_box = behind >= 0 and boxes >> np.uint64(behind) & one
                if not is_first and not has_box:
                    continue
                open_player[top], open_boxes[top], open_pulled[top] = to, boxes, pulled
                open_places[top] = places
                open_pulls[top], open_displacement[top], open_left[top] = (
                    pulls,
                    displacement,
                    left - 1,
                )
                if is_first and has_box:
                    here, there = one << np.uint64(player), one << np.uint64(behind)
                    open_boxes[top] = boxes ^ (here | there)
                    open_pulled[top] = (pulled & ~there) | here
                    box = np.flatnonzero(places == behind)[0]
                    open_places[top, box] = player
                    home = homes[box]
                    open_displacement[top] += _distance(player, home, rows, columns) - _distance(
                        behind, home, rows, columns
                    )
                    open_pulls[top] = pulls + 1
                top += 1
    return best_score, best_boxes, best_player
