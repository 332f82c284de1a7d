"""Advantages against slow definitions written from the formulas, trajectory by trajectory."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.algorithms import AdvantageSpec, batch_advantages
from agenticrun_workers.algorithms.advantages import clip, dr_grpo, grpo, place_reward, reward_to_go, rloo, whiten
from agenticrun_workers.algorithms.grouping import normalize

scores = st.lists(st.tuples(st.integers(0, 4), st.floats(-10, 10, allow_nan=False).map(lambda x: round(x, 3))), min_size=1, max_size=24)


def by_group(pairs: list[tuple[int, float]]) -> dict[int, list[float]]:
    groups: dict[int, list[float]] = {}
    for group, score in pairs:
        groups.setdefault(group, []).append(score)
    return groups


def std(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def split(pairs: list[tuple[int, float]]) -> tuple[np.ndarray, list[int]]:
    return np.array([score for _, score in pairs]), [group for group, _ in pairs]


@given(scores)
def test_grpo_is_the_score_centred_and_scaled_by_its_group(pairs: list[tuple[int, float]]) -> None:
    groups = by_group(pairs)
    expected = []
    for group, score in pairs:
        members = groups[group]
        centred = score - statistics.fmean(members)
        expected.append(centred / std(members) if std(members) > 1e-6 else centred)
    np.testing.assert_allclose(grpo(*split(pairs)).values_N, expected, atol=1e-9)


@given(scores)
def test_grpo_with_batch_std_centres_by_group_and_scales_by_the_batch(pairs: list[tuple[int, float]]) -> None:
    groups = by_group(pairs)
    spread = std([score for _, score in pairs])
    expected = [(s - statistics.fmean(groups[g])) / spread if spread > 1e-6 else 0.0 for g, s in pairs]
    np.testing.assert_allclose(grpo(*split(pairs), std="batch").values_N, expected, atol=1e-9)


@given(scores)
def test_dr_grpo_is_the_centred_score(pairs: list[tuple[int, float]]) -> None:
    groups = by_group(pairs)
    expected = [s - statistics.fmean(groups[g]) for g, s in pairs]
    np.testing.assert_allclose(dr_grpo(*split(pairs)).values_N, expected, atol=1e-9)


@given(scores)
def test_rloo_compares_with_the_mean_of_the_others(pairs: list[tuple[int, float]]) -> None:
    expected = []
    for number, (group, score) in enumerate(pairs):
        others = [s for i, (g, s) in enumerate(pairs) if g == group and i != number]
        expected.append(score - statistics.fmean(others) if others else 0.0)
    np.testing.assert_allclose(rloo(*split(pairs)).values_N, expected, atol=1e-9)


@given(scores)
def test_batch_mean_and_std_ignore_the_groups(pairs: list[tuple[int, float]]) -> None:
    values = [score for _, score in pairs]
    spread = std(values) if std(values) > 1e-6 else 1.0
    expected = [(score - statistics.fmean(values)) / spread for score in values]
    np.testing.assert_allclose(normalize(*split(pairs), "batch", "batch").values_N, expected, atol=1e-9)


def test_no_mean_and_no_std_change_nothing() -> None:
    np.testing.assert_array_equal(normalize(np.array([1.0, 5.0]), [0, 0], "none", "none").values_N, [1.0, 5.0])


def test_a_set_without_spread_is_zero_where_another_mean_was_taken_and_counted() -> None:
    result = normalize(np.array([2.0, 2.0, 5.0, 1.0]), [0, 0, 1, 1], "batch", "group")
    np.testing.assert_allclose(result.values_N[:2], [0.0, 0.0])
    assert result.degenerate_N.tolist() == [True, True, False, False]


@given(st.lists(st.tuples(st.booleans(), st.floats(-5, 5)), min_size=1, max_size=20), st.floats(0, 1))
def test_reward_to_go_is_the_discounted_sum_over_later_response_tokens(tokens: list[tuple[bool, float]], gamma: float) -> None:
    mask = np.array([float(m) for m, _ in tokens])
    rewards = np.array([r if m else 0.0 for m, r in tokens])
    positions = [t for t, m in enumerate(mask) if m]
    expected = np.zeros(len(tokens))
    for order, t in enumerate(positions):
        expected[t] = sum(gamma**k * rewards[later] for k, later in enumerate(positions[order:]))
    np.testing.assert_allclose(reward_to_go(rewards, mask, gamma), expected, atol=1e-9)


def test_the_reward_lies_on_the_last_response_token() -> None:
    np.testing.assert_array_equal(place_reward(3.0, np.array([0, 1, 1, 0])), [0, 0, 3, 0])
    np.testing.assert_array_equal(place_reward(3.0, np.zeros(2)), [0, 0])


@given(st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=6), min_size=1, max_size=5))
def test_whitening_gives_mean_zero_and_deviation_one_over_masked_tokens(rows: list[list[float]]) -> None:
    masks = [np.arange(len(row)) % 2 == 0 for row in rows]
    white = whiten([np.array(row) for row in rows], masks)
    kept = np.concatenate([a[m] for a, m in zip(white, masks, strict=True)])
    before = np.concatenate([np.array(r)[m] for r, m in zip(rows, masks, strict=True)])
    assert kept.mean() == pytest.approx(0, abs=1e-6)
    if len(before) > 1 and before.std(ddof=1) > 1e-6:
        assert kept.std(ddof=1) == pytest.approx(1, abs=1e-6)
    assert all((a[~m] == 0).all() for a, m in zip(white, masks, strict=True))


def test_clip_bounds_both_sides_and_none_leaves_all() -> None:
    np.testing.assert_array_equal(clip(np.array([-9.0, 0.5, 9.0]), 1.0), [-1, 0.5, 1])
    np.testing.assert_array_equal(clip(np.array([-9.0, 9.0]), None), [-9, 9])


MASKS = [np.array([0.0, 1.0, 1.0]), np.array([0.0, 1.0]), np.array([0.0, 0.0, 1.0]), np.array([1.0])]


def test_one_value_per_trajectory_lies_on_its_response_tokens_only() -> None:
    result = batch_advantages(AdvantageSpec("dr_grpo"), [1.0, 0.0, 0.0, 3.0], ["a", "a", "b", "b"], MASKS, [True] * 4)
    assert [a.tolist() for a in result.per_token] == [[0, 0.5, 0.5], [0, -0.5], [0, 0, -1.5], [1.5]]


def test_a_trajectory_that_may_not_be_trained_on_is_in_no_statistic() -> None:
    spec = AdvantageSpec("dr_grpo")
    result = batch_advantages(spec, [1.0, 0.0, 999.0, 0.0], ["a"] * 4, MASKS, [True, True, False, True])
    assert result.per_token[0][1] == pytest.approx(2 / 3)
    assert not result.per_token[2].any()


def test_groups_whose_members_all_score_the_same_are_reported() -> None:
    result = batch_advantages(AdvantageSpec("grpo"), [1.0, 1.0, 0.0, 3.0], ["a", "a", "b", "b"], MASKS, [True] * 4)
    assert result.zero_variance_share == 0.5
    assert result.degenerate == 2


def test_rewards_are_clipped_before_the_baseline_and_advantages_at_the_end() -> None:
    spec = AdvantageSpec("dr_grpo", reward_clip=2.0, advantage_clip=0.6)
    result = batch_advantages(spec, [9.0, 0.0, 1.0, 2.0], ["a", "a", "b", "b"], MASKS, [True] * 4)
    assert [a.max() if i % 2 == 0 else a.min() for i, a in enumerate(result.per_token)][:2] == [0.6, -0.6]
    assert result.per_token[3].tolist() == [0.5]


def test_reinforce_discounts_per_response_token_after_its_normalisation() -> None:
    spec = AdvantageSpec("reinforce", gamma=0.5, norm_mean="batch")
    result = batch_advantages(spec, [4.0, 0.0], ["a", "b"], MASKS[:2], [True, True])
    assert [a.tolist() for a in result.per_token] == [[0, 1, 2], [0, -2]]


def test_reinforce_can_be_normalised_by_other_sets_than_groups() -> None:
    spec = AdvantageSpec("reinforce", norm_mean="group")
    result = batch_advantages(spec, [4.0, 0.0, 1.0], ["a", "b", "c"], MASKS[:3], [True] * 3, ["x", "x", "y"])
    assert [float(a.sum()) for a in result.per_token] == [4.0, -2.0, 0.0]


def test_a_batch_with_nothing_to_train_on_is_all_zero() -> None:
    result = batch_advantages(AdvantageSpec(), [1.0, 2.0], ["a", "a"], MASKS[:2], [False, False])
    assert not any(a.any() for a in result.per_token)
    assert result.zero_variance_share == 0.0
