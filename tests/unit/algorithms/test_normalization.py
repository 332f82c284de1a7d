"""Normalisation against statistics taken set by set."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.algorithms.normalization import (
    Over,
    moments,
    normalization,
    zero_variance_share,
)

scored = st.lists(
    st.tuples(st.integers(0, 4), st.floats(-10, 10).map(lambda x: round(x, 3))), max_size=24
)
overs = st.sampled_from(["batch", "group", "none"])


def split(pairs: list[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([score for _, score in pairs], np.float64), np.array(
        [number for number, _ in pairs], np.int64
    )


@given(scored, overs, overs)
def test_scores_are_centred_and_scaled_by_the_set_that_was_asked_for(
    pairs: list[tuple[int, float]], mean: Over, std: Over
) -> None:
    def members(over: Over, number: int) -> list[float]:
        return [score for other, score in pairs if over == "batch" or other == number]

    expected, degenerate = [], []
    for number, score in pairs:
        centred = score - (statistics.fmean(members(mean, number)) if mean != "none" else 0.0)
        spread = (
            statistics.stdev(members(std, number))
            if std != "none" and len(members(std, number)) > 1
            else 0.0
        )
        same = mean == std or (
            mean != "none" and std != "none" and members(mean, number) == members(std, number)
        )
        degenerate.append(std != "none" and spread <= 1e-6)
        expected.append(
            centred
            if std == "none"
            else centred / spread
            if spread > 1e-6
            else centred
            if same
            else 0.0
        )
    scores, sets = split(pairs)
    result = normalization(scores, sets, mean, std)
    np.testing.assert_allclose(result.apply(scores), expected, atol=1e-9)
    assert result.degenerate_N.tolist() == degenerate


def test_a_set_without_spread_is_zero_where_another_mean_was_taken() -> None:
    scores, sets = np.array([2.0, 2.0, 5.0, 1.0]), np.array([0, 0, 1, 1])
    result = normalization(scores, sets, "batch", "group")
    assert result.apply(scores)[:2].tolist() == [0.0, 0.0]
    assert result.degenerate_N.tolist() == [True, True, False, False]


def test_a_set_of_one_is_scaled_by_the_batch() -> None:
    scores, sets = np.array([1.0, 3.0, 8.0]), np.array([0, 0, 1])
    values = normalization(scores, sets, "batch", "batch").apply(scores)
    assert values[2] == pytest.approx(4.0 / statistics.stdev(scores))


def test_nothing_is_added_to_a_small_deviation() -> None:
    scores = np.array([0.0, 2e-5])
    values = normalization(scores, np.zeros(2, np.int64), "group", "group").apply(scores)
    assert values.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-9)


def test_a_large_common_offset_does_not_cost_the_spread_its_digits() -> None:
    scores = 1e6 + np.array([0.0, 1.0, 2.0])
    np.testing.assert_allclose(
        normalization(scores, np.zeros(3, np.int64), "batch", "batch").apply(scores),
        [-1, 0, 1],
        atol=1e-6,
    )


def one_ulp_above(score: float) -> list[float]:
    """Return seven equal rewards, as float32 rounds them differently."""
    return [float(np.float32(score))] * 5 + [float(np.nextafter(np.float32(score), 1e38))] * 2


@pytest.mark.parametrize("score", [1e-7, 0.1, 1.3, 16.0, 100.0, 1e9, 3e38, -100.0])
@pytest.mark.parametrize("std", ["group", "batch", "none"])
@pytest.mark.parametrize("mean", ["group", "batch"])
def test_rounding_of_equal_rewards_is_no_advantage(score: float, mean: Over, std: Over) -> None:
    scores, sets = np.array(one_ulp_above(score)), np.zeros(7, np.int64)
    assert normalization(scores, sets, mean, std).apply(scores).tolist() == [0.0] * 7
    assert zero_variance_share(scores, sets) == 1.0


@pytest.mark.parametrize("size", [1e-30, 1e-7, 1.0, 1e4, 1e30])
def test_rewards_of_any_size_are_scaled(size: float) -> None:
    scores, sets = size * np.array([0.0, 1.0]), np.zeros(2, np.int64)
    values = normalization(scores, sets, "group", "group").apply(scores)
    assert values.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])
    assert zero_variance_share(scores, sets) == 0.0


def test_what_is_left_of_large_rewards_that_cancel_is_rounding() -> None:
    scores = np.array([float(np.float32(a) - np.float32(b)) for a, b in ((1000.1, 1000), (0.1, 0))])
    sets, sizes = np.zeros(2, np.int64), np.array([2000.1, 0.1])
    assert normalization(scores, sets, "group", "group").degenerate_N.tolist() == [False] * 2
    assert normalization(scores, sets, "group", "group", sizes).apply(scores).tolist() == [0.0] * 2


@pytest.mark.parametrize(
    ("values", "size", "scale"),
    [
        ([100.0, 100.00000763], 0.0, 1.0),
        ([1e-7, 3e-7], 0.0, 1.0 / statistics.stdev([1e-7, 3e-7])),
        ([-1e-8, 1e-8], 0.1, 1.0),
        ([-1e-8, 1e-8], 0.0, 1.0 / statistics.stdev([-1e-8, 1e-8])),
    ],
)
def test_whitening_does_not_scale_rounding(values: list[float], size: float, scale: float) -> None:
    found = moments(
        len(values),
        sum(values),
        lambda center: np.array(
            [sum(x - center for x in values), sum((x - center) ** 2 for x in values)]
        ),
        lambda sums: sums,
    )
    assert found.scale(size) == pytest.approx(scale)


@pytest.mark.parametrize(
    ("pairs", "share"),
    [([], 0.0), ([(0, 1.0), (0, 1.0), (1, 0.0), (1, 3.0)], 0.5), ([(3, 7.0)], 1.0)],
)
def test_the_share_of_sets_whose_scores_are_all_equal(
    pairs: list[tuple[int, float]], share: float
) -> None:
    assert zero_variance_share(*split(pairs)) == share
