"""FrozenLake against gymnasium's own, and the promise that validation maps are never trained on."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.envs import EnvConfigError, FrozenLake, Renders, make_env
from agenticrun_workers.envs.frozen_lake import (
    from_array,
    is_holdout,
    is_solvable,
    random_holes,
    to_array,
)
from agenticrun_workers.envs.grid import CELL, NoLevel
from agenticrun_workers.types import Stream


def all_maps(size: int) -> list[np.ndarray]:
    """Every board of this size, start and goal free."""
    boards = []
    for cells in itertools.product((False, True), repeat=size * size - 2):
        boards.append(np.array([False, *cells, False]).reshape(size, size))
    return boards


def holes_of(env: FrozenLake) -> np.ndarray:
    return to_array(env._holes, env.size)


def place(env: FrozenLake, row: int, column: int) -> None:
    env._place = row * (env.size + 1) + column


def position(env: FrozenLake) -> tuple[int, int]:
    return divmod(env._place, env.size + 1)


@pytest.mark.parametrize("size", [3, 4])
def test_every_transition_equals_gymnasiums_on_the_same_map(size: int) -> None:
    for seed in range(8):
        holes = to_array(random_holes(seed, 0, size, 0.7), size)
        rows = ["".join("H" if hole else "F" for hole in row) for row in holes]
        rows[0] = "S" + rows[0][1:]
        rows[-1] = rows[-1][:-1] + "G"
        theirs = gymnasium.make("FrozenLake-v1", desc=rows, is_slippery=False).unwrapped
        assert isinstance(theirs, FrozenLakeEnv)
        env = FrozenLake(size=size)
        for state, action in itertools.product(range(size * size), range(4)):
            cell = divmod(state, size)
            if holes[cell] or cell == (size - 1, size - 1):
                continue
            [(_, expected_state, expected_reward, expected_end)] = theirs.P[state][action]
            env.start_on(holes)
            place(env, *cell)
            result = env.step(env.actions[action])
            assert position(env) == divmod(expected_state, size)
            assert (result.reward, result.terminated) == (expected_reward, expected_end)
            assert result.metrics["action_is_effective"] == float(expected_state != state)


def test_a_slippery_step_goes_ahead_or_sideways_with_a_third_each() -> None:
    env = FrozenLake(size=5, is_slippery=True)
    env.reset(3, Stream.TRAIN)
    ends: Counter[tuple[int, int]] = Counter()
    for _ in range(3000):
        env.start_on(np.zeros((5, 5), np.bool_))
        place(env, 2, 2)
        env.step("Right")
        ends[position(env)] += 1
    assert set(ends) == {(2, 3), (1, 2), (3, 2)}
    assert all(900 < count < 1100 for count in ends.values())


def test_levels_have_gymnasiums_distribution_of_holes() -> None:
    """Compare the number of holes by chi-square, 3000 levels of each.

    The bound is the 0.999 quantile for 7 degrees of freedom.
    """
    env = FrozenLake()
    ours: Counter[int] = Counter()
    for seed in range(3000):
        env.reset(seed, Stream.TRAIN)
        ours[min(int(holes_of(env).sum()), 7)] += 1
    theirs: Counter[int] = Counter()
    for seed in range(3000):
        theirs[min("".join(generate_random_map(4, 0.8, seed=seed)).count("H"), 7)] += 1
    bins = sorted(set(ours) | set(theirs))
    statistic = sum((ours[k] - theirs[k]) ** 2 / (ours[k] + theirs[k]) for k in bins)
    assert len(bins) == 8
    assert statistic < 24.3


def test_each_cell_is_a_hole_as_often_as_in_gymnasium() -> None:
    env = FrozenLake()
    ours, theirs = np.zeros((4, 4)), np.zeros((4, 4))
    for seed in range(3000):
        env.reset(seed, Stream.TRAIN)
        ours += holes_of(env)
        theirs += np.array(
            [[cell == "H" for cell in row] for row in generate_random_map(4, 0.8, seed=seed)]
        )
    assert np.abs(ours - theirs).max() / 3000 < 0.045


def test_training_and_validation_share_no_map_of_all_that_exist() -> None:
    holdout = {board.tobytes() for board in all_maps(4) if is_holdout(from_array(board), 4, 0.2)}
    env = FrozenLake()
    for seed in range(1500):
        env.reset(seed, Stream.VALIDATION)
        assert holes_of(env).tobytes() in holdout
        for stream in (Stream.TRAIN, Stream.WARMUP):
            env.reset(seed, stream)
            assert holes_of(env).tobytes() not in holdout


def test_the_holdout_has_its_share_of_all_maps() -> None:
    solvable = [board for board in all_maps(4) if is_solvable(from_array(board), 4)]
    assert np.mean([is_holdout(from_array(board), 4, 0.2) for board in solvable]) == pytest.approx(
        0.2, abs=0.02
    )


def test_the_holdout_never_changes() -> None:
    """The sum over all maps is fixed.

    If it changed, checkpoints would be validated on maps that they were trained on.
    """
    assert (
        sum(
            number
            for number, board in enumerate(all_maps(4))
            if is_holdout(from_array(board), 4, 0.2)
        )
        == 27616903
    )


def test_every_level_is_solvable() -> None:
    env = FrozenLake(frozen_probability=0.4)
    for seed in range(200):
        env.reset(seed, Stream.TRAIN)
        assert is_solvable(env._holes, 4)


def breadth_first(board: np.ndarray) -> bool:
    last = len(board) - 1
    reached, frontier = {(0, 0)}, [(0, 0)]
    for row, column in frontier:
        for cell in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            if min(cell) >= 0 and max(cell) <= last and cell not in reached and not board[cell]:
                reached.add(cell)
                frontier.append(cell)
    return (last, last) in reached


@pytest.mark.parametrize("size", [2, 3, 4])
def test_solvable_means_that_breadth_first_search_finds_the_goal(size: int) -> None:
    for board in all_maps(size):
        assert is_solvable(from_array(board), size) == breadth_first(board)


@given(size=st.integers(5, 11), share=st.floats(0.2, 0.6), seed=st.integers(0, 2**32))
def test_large_boards_are_integers_too(size: int, share: float, seed: int) -> None:
    board = np.random.default_rng(seed).random((size, size)) < share
    board[0, 0] = board[-1, -1] = False
    assert is_solvable(from_array(board), size) == breadth_first(board)
    assert (to_array(from_array(board), size) == board).all()


@pytest.mark.parametrize(
    "config", [{"frozen_probability": 1.0}, {"size": 30, "frozen_probability": 0.3}]
)
def test_a_configuration_without_levels_is_refused_and_does_not_hang(
    config: dict[str, Any],
) -> None:
    """gymnasium would look forever."""
    with pytest.raises(
        NoLevel,
        match="in 10000 random ones: choose another size, frozenProbability or holdoutShare",
    ):
        FrozenLake(**config)


def test_the_same_seed_and_split_give_the_same_episode() -> None:
    one, two = FrozenLake(is_slippery=True), FrozenLake(is_slippery=True)
    for seed in range(20):
        assert one.reset(seed, Stream.TRAIN) == two.reset(seed, Stream.TRAIN)
        for action in ("Right", "Down", "Right", "Down"):
            assert one.step(action) == two.step(action)


def test_the_board_shows_player_holes_and_goal() -> None:
    env = FrozenLake()
    holes = np.zeros((4, 4), np.bool_)
    holes[1, 1] = True
    assert env.start_on(holes) == "P___\n_O__\n____\n___G"
    assert env.step("down").observation == "____\nPO__\n____\n___G"
    fall = env.step("Right")
    assert fall.observation == "____\n_X__\n____\n___G"
    assert fall.terminated
    assert (fall.reward, fall.metrics["success"]) == (0.0, 0.0)


def test_the_goal_gives_one_and_ends_the_episode() -> None:
    env = FrozenLake(size=2)
    env.start_on(np.zeros((2, 2), np.bool_))
    env.step("Right")
    result = env.step("Down")
    assert result.observation == "__\n_√"
    assert result.terminated
    assert (result.reward, result.metrics["success"]) == (1.0, 1.0)


def test_an_answer_that_is_no_action_moves_nothing() -> None:
    env = FrozenLake()
    before = env.reset(1, Stream.TRAIN)
    result = env.step("sideways")
    assert (result.observation, result.reward, result.terminated) == (before, 0.0, False)
    assert result.metrics == {
        "action_is_valid": 0.0,
        "action_is_effective": 0.0,
        "num_actions": 1.0,
        "success": 0.0,
    }


def test_a_step_against_the_border_is_valid_but_without_effect() -> None:
    env = FrozenLake()
    env.reset(1, Stream.TRAIN)
    metrics = env.step("Up").metrics
    assert (metrics["action_is_valid"], metrics["action_is_effective"]) == (1.0, 0.0)


def test_the_picture_shows_holes_the_goal_and_where_the_player_is() -> None:
    env = FrozenLake(size=3)
    assert isinstance(env, Renders)
    env.start_on(np.array([[0, 1, 0], [0, 0, 0], [0, 0, 0]], np.bool_))
    start = env.render()
    assert start.shape == (3 * CELL, 3 * CELL, 3)
    assert start.dtype == np.uint8

    def cells(picture: np.ndarray) -> dict[tuple[int, int], bytes]:
        return {
            (r, c): picture[r * CELL : (r + 1) * CELL, c * CELL : (c + 1) * CELL].tobytes()
            for r, c in np.ndindex(3, 3)
        }

    before = cells(start)
    assert len(set(before.values())) == 4  # player, hole, goal, ice
    env.step("Down")
    after = cells(env.render())
    assert {cell for cell in before if before[cell] != after[cell]} == {(0, 0), (1, 0)}
    assert (after[1, 0], after[0, 0]) == (before[0, 0], before[1, 0])


def test_symbols_and_actions_can_be_chosen() -> None:
    env = make_env(
        "frozen_lake",
        {"symbols": "@.#$x!", "actions": ["west", "south", "east", "north"], "size": 2},
    )
    assert isinstance(env, FrozenLake)
    env.start_on(np.zeros((2, 2), np.bool_))
    assert env.step("east").observation == ".@\n.$"
    assert env.valid_actions() == ["west", "south", "east", "north"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"isSlipery": True}, "isSlipery.*known: size, frozenProbability, isSlippery"),
        ({"size": 1}, "size must be at least 2"),
        ({"frozenProbability": 0}, "frozenProbability"),
        ({"holdoutShare": 1}, "holdoutShare"),
        ({"formatPenalty": -0.1}, "no config key 'formatPenalty'"),
        ({"symbols": "PPPPPP"}, "symbols"),
        ({"words": "lines"}, "words must be cells or rows"),
        ({"words": "rows", "size": 9}, "words: rows is for sizes up to 8"),
        ({"actions": ["a", "A", "b", "c"]}, "actions"),
    ],
)
def test_a_wrong_config_is_refused_by_name(config: dict[str, object], message: str) -> None:
    with pytest.raises(EnvConfigError, match=message):
        make_env("frozen_lake", config)
