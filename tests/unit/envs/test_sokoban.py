"""Sokoban's rules against gym-sokoban's own, its texts, its configuration and its pictures."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.envs import EnvConfigError, Renders, Sokoban, make_env
from agenticrun_workers.envs.grid import CELL
from agenticrun_workers.envs.sokoban.levels import Room
from agenticrun_workers.types import Stream
from sokoban_reference import ReferenceSokoban

WORDS = ("Up", "Down", "Left", "Right")


def room_of(board: str) -> Room:
    """A room written in the default symbols."""
    rows = board.split("\n")

    def places(symbols: str) -> int:
        return sum(1 << cell for cell, symbol in enumerate(board) if symbol in symbols)

    return Room(
        len(rows),
        len(rows[0]),
        places("_OS√XP"),
        places("OS√"),
        places("√X"),
        places("PS").bit_length() - 1,
    )


def playing(board: str) -> Sokoban:
    rows = board.split("\n")
    env = Sokoban(rows=len(rows), columns=len(rows[0]), boxes=board.count("X") + board.count("√"))
    env.start_on(room_of(board))
    return env


CORRIDOR = "#######\n#######\n#P_X_O#\n#######\n#######"


@given(
    seed=st.integers(0, 2**40),
    boxes=st.integers(1, 3),
    actions=st.lists(
        st.sampled_from([*WORDS, " up ", "DOWN", "jump", ""]), min_size=1, max_size=60
    ),
)
def test_every_step_is_gym_sokobans_in_the_same_room(
    seed: int, boxes: int, actions: list[str]
) -> None:
    env, reference = (
        Sokoban(rows=6, columns=7, boxes=boxes),
        ReferenceSokoban(6, 7, boxes, draws=False),
    )
    reference.start_on(env.reset(seed, Stream.TRAIN))
    for action in actions:
        ours = env.step(action)
        board, reward, terminated, truncated, info = reference.play(action)
        assert (ours.observation, ours.reward, ours.terminated, ours.truncated) == (
            board,
            reward,
            terminated,
            truncated,
        )
        assert {name: ours.metrics[name] for name in info["metrics"]} == info["metrics"]


def test_gym_sokobans_own_levels_are_played_alike_to_the_end() -> None:
    """Random walks in its levels, so that boxes also come off targets and the last one onto it."""
    reference, rng = ReferenceSokoban(draws=False), random.Random(0)
    seen = set()
    for seed in range(80):
        board, _ = reference.reset(seed)
        env = playing(board)
        for _ in range(100):
            action = rng.choice(WORDS)
            ours, (board, reward, ended, *_) = env.step(action), reference.play(action)
            assert (ours.observation, ours.reward, ours.terminated) == (board, reward, ended)
            seen.add((round(reward, 1), ended))
            if ended:
                break
    assert seen == {(-0.1, False), (10.9, True)}


def test_a_box_is_pushed_along_and_the_last_one_on_its_target_ends_the_episode() -> None:
    env = playing(CORRIDOR)
    steps = [env.step("right") for _ in range(3)]
    assert [step.observation.split("\n")[2] for step in steps] == ["#_PX_O#", "#__PXO#", "#___P√#"]
    assert [step.reward for step in steps] == [-0.1, -0.1, pytest.approx(10.9)]
    assert [step.terminated for step in steps] == [False, False, True]
    assert [step.metrics["success"] for step in steps] == [0.0, 0.0, 1.0]
    assert [step.metrics["boxes_on_target"] for step in steps] == [0, 0, 1]


def test_a_box_on_and_off_its_target_gives_and_takes_one() -> None:
    env = playing("#########\n#_______#\n#PXO___X#\n#______O#\n#########")
    on, off = env.step("Right"), env.step("Right")
    assert (on.reward, on.metrics["boxes_on_target"], on.observation.split("\n")[2]) == (
        0.9,
        1,
        "#_P√___X#",
    )
    assert (off.reward, off.metrics["boxes_on_target"], off.observation.split("\n")[2]) == (
        -1.1,
        0,
        "#__SX__X#",
    )
    assert not on.terminated
    assert not off.terminated


@pytest.mark.parametrize(
    ("action", "valid", "effective"),
    [
        ("Left", 1.0, 0.0),
        ("Up", 1.0, 0.0),
        ("Right", 1.0, 1.0),
        ("right ", 1.0, 1.0),
        ("push right", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_every_answer_costs_a_step_and_says_whether_it_was_one(
    action: str, valid: float, effective: float
) -> None:
    env = playing(CORRIDOR)
    result = env.step(action)
    assert (result.reward, result.terminated) == (-0.1, False)
    assert (result.observation != CORRIDOR) == bool(effective)
    assert result.metrics == {
        "action_is_valid": valid,
        "action_is_effective": effective,
        "num_actions": 1.0,
        "success": 0.0,
        "boxes_on_target": 0,
    }


@pytest.mark.parametrize("row", ["#_PXX_O_O#", "#__PX#__O#"])
def test_a_box_in_front_of_a_box_or_a_wall_does_not_move(row: str) -> None:
    board = "\n".join(["#" * len(row), "#" * len(row), row, "#" * len(row), "#" * len(row)])
    env = playing(board)
    result = env.step("Right")
    assert (result.observation, result.metrics["action_is_effective"]) == (board, 0.0)


def test_symbols_and_actions_can_be_chosen() -> None:
    env = make_env(
        "sokoban", {"rows": 5, "columns": 7, "symbols": "W.t*b@+", "actions": ["n", "s", "w", "e"]}
    )
    assert isinstance(env, Sokoban)
    env.start_on(room_of(CORRIDOR))
    assert [env.step("E").observation.split("\n")[2] for _ in range(3)] == [
        "W.@b.tW",
        "W..@btW",
        "W...@*W",
    ]
    assert env.valid_actions() == ["n", "s", "w", "e"]
    assert all(
        part in env.instruction
        for part in ("walls W and floor .", "every box b onto a target t", "n, s, w or e")
    )


@pytest.mark.parametrize("words", ["cells", "rows"])
def test_every_text_is_made_of_the_vocabulary(words: str) -> None:
    env, rng = Sokoban(rows=5, boxes=2, words=words), random.Random(7)  # type: ignore[arg-type]
    vocabulary = set(env.vocabulary())
    for seed in range(60):
        boards = [
            env.reset(seed, Stream.TRAIN),
            *(env.step(rng.choice(WORDS)).observation for _ in range(20)),
        ]
        for board in boards:
            pieces = [*board] if words == "cells" else board.splitlines(keepends=True)
            assert vocabulary.issuperset(pieces)


def test_a_small_board_is_played_at_once_and_a_large_one_in_a_thread() -> None:
    assert not Sokoban().blocking
    assert Sokoban(rows=10, columns=10, boxes=4).blocking


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"dimRoom": [6, 6]}, "dimRoom.*known: rows, columns, boxes, searchDepth"),
        ({"rows": 3}, "rows must be at least 4, not 3"),
        ({"columns": 2}, "columns must be at least 4"),
        ({"boxes": 0}, "boxes must be at least 1"),
        ({"boxes": 15}, "boxes: 15 do not fit"),
        ({"searchDepth": 2}, "searchDepth must be at least 3"),
        ({"walkSteps": 0}, "walkSteps must be at least 1"),
        ({"holdoutShare": 0}, "holdoutShare"),
        ({"symbols": "#_O"}, "symbols must be 7 different characters"),
        ({"symbols": "#_O√XP\n"}, "symbols"),
        ({"actions": ["a", "A", "b", "c"]}, "actions must be 4 different words"),
        ({"actions": "udlr"}, "actions"),
        ({"words": "lines"}, "words must be cells or rows"),
        ({"words": "rows", "columns": 8}, "words: rows is for up to 7 columns"),
    ],
)
def test_a_wrong_config_is_refused_by_name(config: dict[str, object], message: str) -> None:
    with pytest.raises(EnvConfigError, match=message):
        make_env("sokoban", config)


def cells_of_picture(env: Sokoban) -> dict[str, bytes]:
    """A picture of each symbol on the board."""
    picture = env.render()
    assert picture.dtype == np.uint8
    assert picture.shape == (env.rows * CELL, env.columns * CELL, 3)
    return {
        symbol: picture[
            row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL
        ].tobytes()
        for row, text in enumerate(env.board().split("\n"))
        for column, symbol in enumerate(text)
    }


def test_the_picture_shows_every_kind_of_cell_in_its_own_way() -> None:
    env = playing("#########\n#_______#\n#PXO___X#\n#______O#\n#########")
    assert isinstance(env, Renders)
    looks = cells_of_picture(env)
    env.step("Right")
    looks |= cells_of_picture(env)
    env.step("Right")
    looks |= cells_of_picture(env)
    assert set(looks) == set("#_O√XPS")
    assert len(set(looks.values())) == 7
