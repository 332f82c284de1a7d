"""Estimators that compare trajectories, against loops over groups and states."""

from __future__ import annotations

import hashlib
import statistics
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.algorithms.baselines import (
    StepCredit,
    dr_grpo,
    gigpo,
    grpo,
    rloo,
    state_sets,
    step_returns,
)
from agenticrun_workers.algorithms.normalization import Over

SCORE = st.floats(-5, 5).map(lambda x: round(x, 2))
scored = st.lists(st.tuples(st.integers(0, 3), SCORE), max_size=16)


def split(pairs: list[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([score for _, score in pairs], np.float64), np.array(
        [group for group, _ in pairs], np.int64
    )


def normalized(value: float, mean_of: list[float] | None, std_of: list[float] | None) -> float:
    centred = value - (statistics.fmean(mean_of) if mean_of is not None else 0.0)
    if std_of is None:
        return centred
    spread = statistics.stdev(std_of) if len(std_of) > 1 else 0.0
    return centred / spread if spread > 1e-6 else centred if mean_of == std_of else 0.0


@given(scored)
def test_grpo_is_the_score_centred_and_scaled_by_its_group(pairs: list[tuple[int, float]]) -> None:
    groups = {g: [s for other, s in pairs if other == g] for g, _ in pairs}
    np.testing.assert_allclose(
        grpo(*split(pairs)).values_N,
        [normalized(s, groups[g], groups[g]) for g, s in pairs],
        atol=1e-9,
    )


@given(scored)
def test_dr_grpo_is_the_centred_score(pairs: list[tuple[int, float]]) -> None:
    groups = {g: [s for other, s in pairs if other == g] for g, _ in pairs}
    np.testing.assert_allclose(
        dr_grpo(*split(pairs)).values_N,
        [s - statistics.fmean(groups[g]) for g, s in pairs],
        atol=1e-9,
    )


@given(scored)
def test_rloo_compares_with_the_mean_of_the_others_and_counts_who_has_none(
    pairs: list[tuple[int, float]],
) -> None:
    expected, alone = [], []
    for i, (group, score) in enumerate(pairs):
        others = [s for j, (g, s) in enumerate(pairs) if g == group and j != i]
        expected.append(score - statistics.fmean(others) if others else 0.0)
        alone.append(not others)
    result = rloo(*split(pairs))
    np.testing.assert_allclose(result.values_N, expected, atol=1e-9)
    assert result.degenerate_N.tolist() == alone


@dataclass(frozen=True)
class Played:
    """A trajectory: its group, and reward and state of each turn."""

    group: int
    turns: tuple[tuple[float, str], ...]


played = st.lists(
    st.builds(
        Played,
        st.integers(0, 2),
        st.lists(st.tuples(SCORE, st.sampled_from("abc")), max_size=5).map(tuple),
    ),
    max_size=7,
)


def digest(state: str) -> bytes:
    return hashlib.sha256(state.encode()).digest()


def arrays(batch: list[Played]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """rewards_K, cu_turns_N1, groups_N, states_K"""
    turns = [turn for trajectory in batch for turn in trajectory.turns]
    states = np.frombuffer(b"".join(digest(state) for _, state in turns), np.uint8).reshape(-1, 32)
    cu = np.concatenate([[0], np.cumsum([len(t.turns) for t in batch])]).astype(np.int64)
    return (
        np.array([reward for reward, _ in turns], np.float64),
        cu,
        np.array([t.group for t in batch], np.int64),
        states,
    )


def discounted(rewards: list[float], gamma: float) -> list[float]:
    return [
        sum(gamma ** (later - k) * rewards[later] for later in range(k, len(rewards)))
        for k in range(len(rewards))
    ]


@given(played, st.floats(0, 1))
def test_step_returns_are_discounted_per_turn_inside_each_trajectory(
    batch: list[Played], gamma: float
) -> None:
    rewards, cu, _, _ = arrays(batch)
    expected = [r for t in batch for r in discounted([reward for reward, _ in t.turns], gamma)]
    np.testing.assert_allclose(step_returns(rewards, cu, gamma), expected, atol=1e-9)


def run_gigpo(
    batch: list[Played],
    gamma: float = 0.9,
    w_e: float = 1.0,
    w_s: float = 1.0,
    mean: Over = "group",
    std: Over = "group",
) -> StepCredit:
    rewards, cu, groups, states = arrays(batch)
    return gigpo(
        rewards,
        cu,
        groups,
        states,
        gamma=gamma,
        episode_weight=w_e,
        step_weight=w_s,
        mean=mean,
        std=std,
    )


@given(
    played,
    st.floats(0, 1),
    st.floats(0, 2),
    st.floats(0, 2),
    st.sampled_from(["group", "batch", "none"]),
    st.sampled_from(["group", "batch", "none"]),
)
def test_gigpo_adds_the_episodes_and_the_states_comparison(
    batch: list[Played], gamma: float, w_e: float, w_s: float, mean: Over, std: Over
) -> None:
    scores = [sum(reward for reward, _ in t.turns) for t in batch]
    steps = [
        (t.group, state, value)
        for t in batch
        for (_, state), value in zip(
            t.turns, discounted([reward for reward, _ in t.turns], gamma), strict=True
        )
    ]

    def of_scores(over: Over, group: int) -> list[float] | None:
        return (
            None
            if over == "none"
            else [
                s for s, t in zip(scores, batch, strict=True) if over == "batch" or t.group == group
            ]
        )

    def of_steps(over: Over, group: int, state: str) -> list[float] | None:
        return (
            None
            if over == "none"
            else [v for g, s, v in steps if over == "batch" or (g, s) == (group, state)]
        )

    episode = [
        normalized(s, of_scores(mean, t.group), of_scores(std, t.group))
        for s, t in zip(scores, batch, strict=True)
    ]
    step = [normalized(v, of_steps(mean, g, s), of_steps(std, g, s)) for g, s, v in steps]
    spread = [a for a, t in zip(episode, batch, strict=True) for _ in t.turns]
    expected = [w_e * a + w_s * b for a, b in zip(spread, step, strict=True)]
    np.testing.assert_allclose(
        run_gigpo(batch, gamma, w_e, w_s, mean, std).values_K, expected, atol=1e-8
    )


def test_equal_states_of_different_groups_are_never_compared() -> None:
    """ROLL merges them (defect C6): it gives [-7.5, -5.5, 1.5, 11.5] here."""
    batch = [
        Played(0, ((1.0, "start"),)),
        Played(0, ((3.0, "start"),)),
        Played(1, ((10.0, "start"),)),
        Played(1, ((20.0, "start"),)),
    ]
    assert run_gigpo(batch, w_e=0.0, std="none").values_K.tolist() == [-1, 1, -5, 5]


def test_each_trajectory_counts_once_in_the_episodes_statistics_however_many_turns_it_has() -> None:
    """ROLL takes them over turns, so that long trajectories weigh more (defect C6)."""
    batch = [Played(0, ((0.0, "a"),) * 9), Played(0, ((1.0, "b"),))]
    assert run_gigpo(batch, w_s=0.0, std="none").episode_N.tolist() == [-0.5, 0.5]


def test_a_state_seen_once_says_nothing() -> None:
    credit = run_gigpo([Played(0, ((1.0, "a"), (2.0, "b"))), Played(0, ((5.0, "c"),))], w_e=0.0)
    assert credit.values_K.tolist() == [0, 0, 0]
    assert credit.degenerate_K.all()


def test_digests_of_every_dtype_and_with_trailing_zeros_are_told_apart() -> None:
    raw = [b"\1" * 32, b"\1" * 31 + b"\0", b"\0" * 32, b"\1" * 32]
    groups = np.array([0, 0, 0, 0])
    for states in (
        np.array(raw, "S32"),
        np.array(raw, "V32"),
        np.frombuffer(b"".join(raw), np.uint8).reshape(-1, 32),
    ):
        sets = state_sets(groups, states)
        assert sets[0] == sets[3]
        assert len(set(sets.tolist())) == 3


@given(played)
def test_the_order_of_trajectories_changes_nothing(batch: list[Played]) -> None:
    straight, reverse = run_gigpo(batch).values_K, run_gigpo(batch[::-1]).values_K
    cuts = np.cumsum([len(t.turns) for t in batch])[:-1].tolist() if batch else []
    expected = [x for part in np.split(straight, cuts)[::-1] for x in part] if batch else []
    np.testing.assert_allclose(reverse, expected, atol=1e-9)
