"""Levels of Sokoban are gym-sokoban's state for state, solvable, and never in both splits."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.envs import Sokoban
from agenticrun_workers.envs.grid import NoLevel
from agenticrun_workers.envs.sokoban import levels as level_maker
from agenticrun_workers.envs.sokoban.levels import (
    Room,
    cells_of,
    is_holdout,
    pull_apart,
    random_floor,
    random_room,
    search,
    search_compiled,
)
from agenticrun_workers.types import Stream
from sokoban_reference import (
    ReferenceSokoban,
    box_distance,
    ks_p_value,
    room_utils,
    solution_length,
    walk_steps,
)


def solved_room(rng: random.Random, rows: int, columns: int, boxes: int) -> Room:
    while True:
        room = random_room(rng, rows, columns, boxes, walk_steps(rows, columns))
        if room is not None:
            return room


def pulled_apart_by_gym_sokoban(room: Room, depth: int) -> Room | None:
    """The same room, searched by the reference's own code."""
    fixed = np.zeros((room.rows, room.columns))
    for cells, kind in ((room.floor, 1), (room.targets, 2)):
        for cell in cells_of(cells):
            fixed[divmod(cell, room.width)] = kind
    state = np.where(fixed == 2, 4, fixed)
    state[divmod(room.player, room.width)] = 5
    boxes = {
        (int(row), int(column)): (int(row), int(column)) for row, column in np.argwhere(fixed == 2)
    }
    room_utils.explored_states, room_utils.num_boxes = set(), len(boxes)
    room_utils.best_room_score, room_utils.best_room, room_utils.best_box_mapping = -1, None, boxes
    room_utils.depth_first_search(state, fixed, boxes, box_swaps=0, last_pull=(-1, -1), ttl=depth)
    if room_utils.best_room_score <= 0:
        return None

    def places(*kinds: int) -> list[int]:
        return [
            int(row * room.width + column)
            for row, column in np.argwhere(np.isin(room_utils.best_room, kinds))
        ]

    (player,) = places(5)
    return Room(
        room.rows,
        room.columns,
        room.floor,
        room.targets,
        sum(1 << cell for cell in places(3, 4)),
        player,
    )


@pytest.mark.parametrize(
    ("rows", "columns", "boxes", "depth", "rooms"),
    [
        (6, 6, 1, 300, 60),
        (6, 6, 2, 300, 30),
        (5, 8, 3, 300, 20),
        (8, 8, 2, 300, 4),
        (7, 7, 1, 3, 40),
        (7, 7, 2, 9, 30),
    ],
)
def test_a_room_is_pulled_apart_into_the_level_of_gym_sokoban(
    rows: int, columns: int, boxes: int, depth: int, rooms: int
) -> None:
    rng = random.Random(rows + 10 * columns + 100 * boxes + depth)
    levels = []
    for _ in range(rooms):
        room = solved_room(rng, rows, columns, boxes)
        levels.append(pull_apart(room, depth))
        assert levels[-1] == pulled_apart_by_gym_sokoban(room, depth)
    assert any(levels)


@pytest.mark.parametrize(
    ("rows", "columns", "boxes", "depth", "states", "rooms"),
    [
        (6, 6, 1, 300, 10**6, 40),
        (6, 7, 3, 300, 300, 40),
        (10, 10, 4, 40, 1000, 10),
        (9, 9, 2, 5, 10**6, 20),
        (10, 10, 4, 300, 8000, 3),
    ],
)
def test_the_compiled_search_looks_at_the_same_states(
    rows: int, columns: int, boxes: int, depth: int, states: int, rooms: int
) -> None:
    """Searches that are cut after some number of states included: any other order would show."""
    rng = random.Random(rows + columns + boxes + depth)
    for _ in range(rooms):
        room = solved_room(rng, rows, columns, boxes)
        assert search_compiled(room, depth, states) == search(room, depth, states)[0]


def test_a_large_search_goes_on_compiled_and_a_room_too_large_for_that_in_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(5)
    rooms = [solved_room(rng, 7, 7, 2) for _ in range(20)]
    whole = [search(room, 300, level_maker.MAX_STATES)[0] for room in rooms]
    monkeypatch.setattr(level_maker, "SMALL", 3)
    assert [pull_apart(room, 300) for room in rooms] == whole
    monkeypatch.setattr(level_maker, "MAX_COMPILED_FLOOR", 2)
    monkeypatch.setattr(level_maker, "search_compiled", None)
    assert [pull_apart(room, 300) for room in rooms] == whole


def test_a_small_board_loads_no_compiler() -> None:
    """Which would cost every env worker a second."""
    code = "import sys; from agenticrun_workers.envs import Sokoban; "
    code += "Sokoban().reset(0, 'train'); print('numba' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout
        == "False\n"
    )


def test_the_floor_is_that_of_gym_sokobans_random_walk() -> None:
    """Compare 1,200 rooms of each: floor sizes by a KS test, and how often each cell is floor.

    The bound is 5 standard deviations of a difference.
    """
    rng = random.Random(1)
    random.seed(1)
    ours = np.zeros((1200, 6, 8), np.int64)
    for floor in ours:
        for cell in cells_of(random_floor(rng, 6, 8, 23)):
            floor[divmod(cell, 9)] = 1
    theirs = np.array([room_utils.room_topology_generation((6, 8), 0.35, 23) for _ in range(1200)])
    assert ks_p_value(ours.sum((1, 2)), theirs.sum((1, 2))) > 0.01
    assert np.abs(ours.mean(0) - theirs.mean(0)).max() < 5 * np.sqrt(2 * 0.25 / 1200)


def test_one_step_of_the_walk_stamps_what_gym_sokobans_does() -> None:
    """Compare how often one step makes each floor on a 5 x 6 board, in 4,000 rooms of each.

    The bound is 5 standard deviations of a difference.
    """
    rng = random.Random(1)
    random.seed(2)
    ours = Counter(
        tuple(divmod(cell, 7) for cell in cells_of(random_floor(rng, 5, 6, 1))) for _ in range(4000)
    )
    floors = (room_utils.room_topology_generation((5, 6), 0.35, 1) for _ in range(4000))
    theirs = Counter(
        tuple((int(row), int(column)) for row, column in np.argwhere(floor)) for floor in floors
    )
    assert set(ours) == set(theirs)
    assert all(
        abs(ours[floor] - theirs[floor]) < 5 * (ours[floor] + theirs[floor]) ** 0.5
        for floor in ours
    )


def test_player_and_targets_stand_anywhere_with_equal_chance() -> None:
    """On the full floor of a 4 x 4 board, each of 4 x 3 ways; 5 standard deviations."""
    rng = random.Random(2)
    counts: dict[tuple[int, int], int] = {}
    while sum(counts.values()) < 2400:
        room = random_room(rng, 4, 4, 1, 20)
        if room is not None and room.floor.bit_count() == 4:
            counts[room.player, room.targets] = counts.get((room.player, room.targets), 0) + 1
    assert len(counts) == 12
    assert all(abs(count - 200) < 5 * 200**0.5 for count in counts.values())


def test_levels_are_as_hard_as_gym_sokobans() -> None:
    """Two-sample KS tests, 400 levels of each; the benchmark does 2,000."""
    env, reference = Sokoban(), ReferenceSokoban()
    ours = [env.reset(seed, Stream.TRAIN) for seed in range(400)]
    theirs = [reference.reset(seed)[0] for seed in range(400)]
    for measure in (solution_length, box_distance):
        assert (
            ks_p_value(
                [measure(board) or -1 for board in ours], [measure(board) or -1 for board in theirs]
            )
            > 0.01
        )


def test_the_ks_test_notices_one_step_more() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.poisson(6, 400).tolist()
    assert ks_p_value(lengths, rng.poisson(6, 400).tolist()) > 0.01
    assert ks_p_value(lengths, (rng.poisson(6, 400) + 1).tolist()) < 0.001


@given(
    rows=st.integers(5, 7),
    columns=st.integers(5, 8),
    boxes=st.integers(1, 2),
    seed=st.integers(0, 2**63 - 1),
    split=st.sampled_from(Stream),
)
def test_every_level_can_be_solved_and_begins_unsolved(
    rows: int, columns: int, boxes: int, seed: int, split: Stream
) -> None:
    board = Sokoban(rows=rows, columns=columns, boxes=boxes).reset(seed, split)
    assert [len(row) for row in board.split("\n")] == [columns] * rows
    assert (board.count("X"), board.count("O"), board.count("P")) == (boxes, boxes, 1)
    assert solution_length(board)


def test_training_and_validation_share_no_room() -> None:
    """A room is its walls and targets, without boxes and player."""
    env = Sokoban(rows=5, columns=6)
    rooms: dict[Stream, set[str]] = {split: set() for split in Stream}
    for split, seen in rooms.items():
        for seed in range(600):
            seen.add(env.reset(seed, split).replace("X", "_").replace("P", "_"))
    assert all(len(seen) > 50 for seen in rooms.values())
    assert not rooms[Stream.VALIDATION] & (rooms[Stream.TRAIN] | rooms[Stream.WARMUP])


def test_the_holdout_has_its_share_of_rooms() -> None:
    rng = random.Random(3)
    rooms = [solved_room(rng, 6, 6, 1) for _ in range(3000)]
    assert np.mean([is_holdout(room, 0.2) for room in rooms]) == pytest.approx(0.2, abs=0.03)


def test_where_the_player_starts_does_not_decide_the_split() -> None:
    room = solved_room(random.Random(4), 6, 6, 1)
    cells = [cell for cell in cells_of(room.floor) if not room.targets >> cell & 1]
    assert (
        len(
            {
                is_holdout(Room(6, 6, room.floor, room.targets, room.boxes, cell), 0.5)
                for cell in cells
            }
        )
        == 1
    )


@pytest.mark.parametrize(
    "config",
    [
        {"boxes": 3, "walk_steps": 1},
        {"rows": 4, "columns": 4},
        {"rows": 20, "columns": 20, "boxes": 3, "walk_steps": 1},
    ],
)
def test_a_configuration_without_levels_is_refused_and_does_not_hang(
    config: dict[str, Any],
) -> None:
    with pytest.raises(
        NoLevel,
        match=r"no train level in 10000 random ones: choose another rows, "
        r".* walkSteps or holdoutShare",
    ):
        Sokoban(**config)
