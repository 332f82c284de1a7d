"""Penalties, and which turn carries a reward."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.algorithms.rewards import carriers, clip, on_last_turn, overlong_penalty


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0), (80, 0), (85, -0.5), (90, -1), (100, -2), (500, -2)]
)
def test_the_overlong_penalty_grows_over_the_buffer_up_to_the_limit(
    tokens: int, expected: float
) -> None:
    """DAPO eq. 13 with L_max 100, L_cache 20, times 2."""
    assert overlong_penalty(np.array([tokens]), 100, 20, 2.0)[0] == expected


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=4))
def test_a_turn_without_tokens_hands_its_reward_to_the_nearest_earlier_one_with_tokens_else_later(
    lengths: list[list[int]],
) -> None:
    expected, begin = [], 0
    for row in lengths:
        spoke = [k for k, tokens in enumerate(row) if tokens]
        for k in range(len(row)):
            earlier = [j for j in spoke if j <= k]
            expected.append(begin + (earlier[-1] if earlier else spoke[0] if spoke else k))
        begin += len(row)
    cu = np.concatenate([[0], np.cumsum([len(row) for row in lengths])]).astype(np.int64)
    assert (
        carriers(np.array([x for row in lengths for x in row], np.int64), cu).tolist() == expected
    )


def test_a_trajectory_without_turns_has_no_last_turn() -> None:
    assert on_last_turn(np.array([5.0, 6.0, 7.0]), np.array([0, 2, 2, 3])).tolist() == [0, 5, 7]


def test_clip_bounds_both_sides_and_none_leaves_all() -> None:
    assert clip(np.array([-9.0, 0.5, 9.0]), 1.0).tolist() == [-1, 0.5, 1]
    assert clip(np.array([-9.0, 9.0]), None).tolist() == [-9, 9]
