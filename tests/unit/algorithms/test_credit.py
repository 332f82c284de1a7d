"""The order of operations on the driver, against a slow definition and case by case."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_api import algorithm as api
from agenticrun_workers.algorithms import Credit, CreditSpec, Episodes, assign_credit
from agenticrun_workers.algorithms.credit import ESTIMATORS as TABLE
from agenticrun_workers.algorithms.normalization import Grouping, Over

ESTIMATORS = tuple(TABLE)
REWARDS = (
    "gae",
    "reinforce",
    "agentic_reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
)


@dataclass(frozen=True)
class Turn:
    reward: float
    invalid: bool = False
    tokens: int = 1
    state: str = "a"
    kl: float = 0.0


@dataclass(frozen=True)
class Played:
    turns: tuple[Turn, ...]
    group: int = 0
    tag: int = 0
    penalty: float = 0.0
    truncated: bool = False
    trainable: bool = True


def episodes(batch: list[Played]) -> Episodes:
    turns = [turn for trajectory in batch for turn in trajectory.turns]
    return Episodes(
        cu_turns_N1=np.concatenate([[0], np.cumsum([len(t.turns) for t in batch])]).astype(
            np.int64
        ),
        rewards_K=np.array([turn.reward for turn in turns], np.float64),
        invalid_K=np.array([turn.invalid for turn in turns], np.bool_),
        response_tokens_K=np.array([turn.tokens for turn in turns], np.int64),
        groups_N=np.array([t.group for t in batch], np.int64),
        tags_N=np.array([t.tag for t in batch], np.int64),
        format_penalty_N=np.array([t.penalty for t in batch], np.float64),
        truncated_N=np.array([t.truncated for t in batch], np.bool_),
        trainable_N=np.array([t.trainable for t in batch], np.bool_),
        states_K=np.array([hashlib.sha256(turn.state.encode()).digest() for turn in turns], "S32"),
        kl_K=np.array([turn.kl for turn in turns], np.float64),
    )


def credit(spec: CreditSpec, batch: list[Played], kl_coef: float = 0.0) -> Credit:
    return assign_credit(spec, episodes(batch), kl_coef)


def per_trajectory(result: Credit, batch: list[Played]) -> list[list[float]]:
    cuts = np.cumsum([len(t.turns) for t in batch])[:-1]
    return [part.tolist() for part in np.split(result.per_turn_K, cuts)] if batch else []


def turn_of(number: int) -> Turn:
    """Return one of the turns with a reward in [-3, 3] and a KL in [0, 1].

    One number is drawn several times as fast as five fields, and most draws are of turns.
    """
    number, reward = divmod(number, 601)
    number, kl = divmod(number, 256)
    number, tokens = divmod(number, 4)
    return Turn(round(reward / 100 - 3, 2), number % 2 == 1, tokens, "ab"[number // 2], kl / 255)


turns = st.integers(0, 601 * 256 * 4 * 4 - 1).map(turn_of)
played = st.builds(
    Played,
    st.lists(turns, max_size=4).map(tuple),
    st.integers(0, 2),
    st.integers(0, 1),
    st.sampled_from([0.0, -0.5]),
    st.booleans(),
    st.booleans(),
)
batches = st.lists(played, max_size=6)
overs = st.sampled_from(["batch", "group", "none"])


def slow_normalized(
    value: float, mean_of: list[float] | None, std_of: list[float] | None
) -> tuple[float, float]:
    """Shift and scale."""
    shift = statistics.fmean(mean_of) if mean_of is not None else 0.0
    if std_of is None:
        return shift, 1.0
    spread = statistics.stdev(std_of) if len(std_of) > 1 else 0.0
    return shift, 1 / spread if spread > 1e-6 else 1.0 if mean_of == std_of else 0.0


def slow_turn_rewards(t: Played, spec: CreditSpec) -> list[float]:
    rewards = [turn.reward for turn in t.turns]
    if spec.truncated == "zero_reward" and t.truncated:
        rewards = [0.0] * len(rewards)
    rewards = [
        r + (t.penalty if turn.invalid else 0.0) for r, turn in zip(rewards, t.turns, strict=True)
    ]
    if spec.truncated == "soft_penalty" and rewards:
        length = sum(turn.tokens for turn in t.turns)
        grown = (length - (spec.overlong_limit - spec.overlong_buffer)) / spec.overlong_buffer
        rewards[-1] -= spec.overlong_penalty * min(max(grown, 0.0), 1.0)
    return rewards


def bounded(value: float, bound: float | None) -> float:
    return value if bound is None else max(-bound, min(bound, value))


def slow_placed(t: Played, values: list[float]) -> list[float]:
    """Values moved to turns that have tokens."""
    spoke = [k for k, turn in enumerate(t.turns) if turn.tokens]
    placed = [0.0] * len(values)
    for k, value in enumerate(values):
        earlier = [j for j in spoke if j <= k]
        placed[earlier[-1] if earlier else spoke[0] if spoke else k] += value
    return placed


@given(
    batches,
    st.sampled_from(["gae", "reinforce", "agentic_reinforce", "reinforce_plus_plus"]),
    st.sampled_from(["trajectory", "turn"]),
    st.sampled_from(["train", "mask", "zero_reward", "soft_penalty"]),
    st.none() | st.floats(0.5, 3),
    st.sampled_from(["batch", "group", "tag"]),
    overs,
    overs,
)
def test_rewards_are_shaped_clipped_normalised_and_placed_in_this_order(
    batch: list[Played],
    estimator: str,
    placement: str,
    truncated: str,
    bound: float | None,
    grouping: str,
    mean: str,
    std: str,
) -> None:
    spec = CreditSpec(
        estimator, placement, bound, truncated, 6.0, 4.0, 0.7,  # type: ignore[arg-type]
        norm_grouping=grouping, norm_mean=mean, norm_std=std,  # type: ignore[arg-type]
    )  # fmt: skip
    shaped = [slow_turn_rewards(t, spec) for t in batch]
    if placement == "turn":
        shaped = [[bounded(r, bound) for r in row] for row in shaped]
    else:
        shaped = [
            [*[0.0] * (len(row) - 1), bounded(sum(row), bound)] if row else [] for row in shaped
        ]
    scores = [sum(row) for row in shaped]

    def members(over: str, of: Played) -> list[float] | None:
        same: dict[str, Callable[[Played], bool]] = {
            "batch": lambda t: True,
            "group": lambda t: t.group == of.group,
            "tag": lambda t: t.tag == of.tag,
        }
        chosen = same["batch"] if over == "batch" else same[grouping]
        return (
            None
            if over == "none"
            else [s for s, t in zip(scores, batch, strict=True) if t.trainable and chosen(t)]
        )

    expected = []
    for t, row, score in zip(batch, shaped, scores, strict=True):
        if not t.trainable or not row:
            expected.append([0.0] * len(row))
            continue
        shift, scale = slow_normalized(score, members(mean, t), members(std, t))
        expected.append(
            slow_placed(t, [*[r * scale for r in row[:-1]], row[-1] * scale - shift * scale])
        )
        assert sum(expected[-1]) == pytest.approx((score - shift) * scale, abs=1e-8)
    result = credit(spec, batch)
    flat = [x for row in expected for x in row]
    np.testing.assert_allclose(result.per_turn_K, flat, atol=1e-8)
    assert result.trains_N.tolist() == [
        t.trainable and not (t.truncated and truncated == "mask") for t in batch
    ]


@given(batches, st.sampled_from(["grpo", "rloo", "dr_grpo"]), st.floats(0, 1))
def test_group_estimators_subtract_the_trajectorys_kl_before_their_baseline(
    batch: list[Played], estimator: str, coef: float
) -> None:
    spec = CreditSpec(estimator)
    scores = [
        sum(slow_turn_rewards(t, spec)) - coef * sum(turn.kl for turn in t.turns)
        if t.turns
        else 0.0
        for t in batch
    ]
    expected = []
    for i, (t, score) in enumerate(zip(batch, scores, strict=True)):
        group = [
            s
            for s, other in zip(scores, batch, strict=True)
            if other.trainable and other.group == t.group
        ]
        others = [
            s
            for j, (s, o) in enumerate(zip(scores, batch, strict=True))
            if o.trainable and o.group == t.group and j != i
        ]
        if not t.trainable:
            value = 0.0
        elif estimator == "rloo":
            value = score - statistics.fmean(others) if others else 0.0
        else:
            shift, scale = slow_normalized(score, group, group if estimator == "grpo" else None)
            value = (score - shift) * scale
        expected += [value] * len(t.turns)
    result = credit(spec, batch, coef)
    np.testing.assert_allclose(result.per_turn_K, expected, atol=1e-7)


@given(
    batches,
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from(["batch", "group", "state"]),
    overs,
    overs,
)
def test_step_reinforce_normalises_the_discounted_returns_of_turns(
    batch: list[Played], gamma: float, coef: float, grouping: Grouping, mean: Over, std: Over
) -> None:
    spec = CreditSpec(
        "step_reinforce",
        norm_grouping=grouping,
        norm_mean=mean,
        norm_std=std,
        step_reward_gamma=gamma,
    )
    steps: list[tuple[Played, Turn, float]] = []
    for t in batch:
        rewards = [
            r - coef * turn.kl for r, turn in zip(slow_turn_rewards(t, spec), t.turns, strict=True)
        ]
        for k, turn in enumerate(t.turns):
            steps.append(
                (t, turn, sum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))))
            )

    def members(over: str, of: Played, at: Turn) -> list[float] | None:
        if over == "none":
            return None

        def together(t: Played, turn: Turn) -> bool:
            if over == "batch" or grouping == "batch":
                return True
            return t.group == of.group and (grouping == "group" or turn.state == at.state)

        return [value for t, turn, value in steps if t.trainable and together(t, turn)]

    expected = []
    for t, turn, value in steps:
        if t.trainable:
            shift, scale = slow_normalized(value, members(mean, t, turn), members(std, t, turn))
            expected.append((value - shift) * scale)
        else:
            expected.append(0.0)
    np.testing.assert_allclose(credit(spec, batch, coef).per_turn_K, expected, atol=1e-7)


def test_step_reinforce_without_discount_scores_each_turn_by_its_own_reward() -> None:
    batch = [Played((Turn(1.0), Turn(2.0))), Played((Turn(6.0),))]
    spec = CreditSpec(
        "step_reinforce", norm_grouping="group", norm_mean="group", step_reward_gamma=0.0
    )
    assert per_trajectory(credit(spec, batch), batch) == [[-2.0, -1.0], [3.0]]


def test_the_score_of_a_step_wise_trajectory_is_that_of_all_its_turns() -> None:
    batch = [Played((Turn(1.0), Turn(2.0))), Played((Turn(6.0),))]
    found = credit(CreditSpec("grpo", group_std="none"), batch)
    assert per_trajectory(found, batch) == [[-1.5, -1.5], [1.5]]


def test_gigpo_takes_kl_from_each_turns_reward_and_their_sum_from_the_score() -> None:
    batch = [Played((Turn(1.0, kl=0.5), Turn(0.0, kl=0.5, state="b"))), Played((Turn(2.0),))]
    spec = CreditSpec("gigpo", group_std="none", step_reward_gamma=1.0)
    result = credit(spec, batch, kl_coef=1.0)
    # scores 0 and 2: A_E = -1, 1. Returns at state a 0 and 2: A_S = -1, 1; state b was seen once.
    assert per_trajectory(result, batch) == [[-2.0, -1.0], [2.0]]


def test_reinforce_plus_plus_baseline_subtracts_the_groups_mean_where_the_trajectory_ends() -> None:
    batch = [Played((Turn(1.0), Turn(2.0))), Played((Turn(5.0),)), Played((Turn(9.0),), group=1)]
    result = credit(CreditSpec("reinforce_plus_plus_baseline", "turn"), batch)
    assert per_trajectory(result, batch) == [[1.0, -2.0], [1.0], [0.0]]


def test_the_api_and_the_formulas_have_the_same_estimators() -> None:
    assert set(TABLE) == set(api.ESTIMATORS)
    for name, facts in api.ESTIMATORS.items():
        assert TABLE[name].whitens == facts.whitens
        assert TABLE[name].compares_group == facts.compares_group
        assert (TABLE[name].kind == "reward") == ("reward_placement" in facts.reads)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(batch=batches)
def test_who_may_not_be_trained_on_is_in_no_statistic(estimator: str, batch: list[Played]) -> None:
    spec = CreditSpec(estimator, norm_mean="batch", norm_std="batch")
    with_all = per_trajectory(credit(spec, batch), batch)
    kept = [t for t in batch if t.trainable]
    alone = per_trajectory(credit(spec, kept), kept)
    assert [row for row, t in zip(with_all, batch, strict=True) if t.trainable] == alone
    assert not any(any(row) for row, t in zip(with_all, batch, strict=True) if not t.trainable)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(batch=batches)
def test_the_order_of_trajectories_and_the_names_of_groups_change_nothing(
    estimator: str, batch: list[Played]
) -> None:
    spec = CreditSpec(estimator, norm_mean="batch", norm_std="group", norm_grouping="group")
    straight = per_trajectory(credit(spec, batch), batch)
    turned = [replace(t, group=77 - 3 * t.group) for t in batch[::-1]]
    reverse = per_trajectory(credit(spec, turned), turned)[::-1]
    np.testing.assert_allclose(
        [x for row in reverse for x in row], [x for row in straight for x in row], atol=1e-8
    )


def test_a_masked_truncated_trajectory_still_sets_its_groups_mean() -> None:
    batch = [Played((Turn(4.0),), truncated=True), Played((Turn(0.0),))]
    result = credit(CreditSpec("dr_grpo", truncated="mask"), batch)
    assert per_trajectory(result, batch) == [[2.0], [-2.0]]
    assert result.trains_N.tolist() == [False, True]


def test_zeroed_rewards_keep_the_format_penalty() -> None:
    batch = [Played((Turn(4.0, invalid=True),), penalty=-0.5, truncated=True)]
    assert credit(CreditSpec("reinforce", truncated="zero_reward"), batch).per_turn_K.tolist() == [
        -0.5
    ]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "dr_grpo", "gigpo"])
@pytest.mark.parametrize("score", [1.3, 100.0])
def test_rounding_of_equal_rewards_teaches_nothing(estimator: str, score: float) -> None:
    other = float(np.nextafter(np.float32(score), 1e9))
    batch = [Played((Turn(x),)) for x in [float(np.float32(score))] * 5 + [other] * 2]
    result = credit(CreditSpec(estimator), batch)
    assert result.per_turn_K.tolist() == [0.0] * 7
    assert result.metrics["group/zero_variance_share"] == 1.0


def test_rewards_of_turns_that_cancel_teach_nothing() -> None:
    paid = [(0.1, 0.2, -0.3), (0.1, -0.1), (0.0,), (100.1, -100.0, -0.1)]
    batch = [Played(tuple(Turn(float(np.float32(x))) for x in rewards)) for rewards in paid]
    result = credit(CreditSpec("grpo"), batch)
    assert not result.per_turn_K.any()
    assert result.metrics["group/zero_variance_share"] == 1.0


def test_equal_scores_of_gigpo_count_only_if_its_turns_are_equal_too() -> None:
    early = [Played((Turn(1.0), Turn(0.0, state="b"))), Played((Turn(0.0), Turn(1.0, state="b")))]
    equal = [Played((Turn(1.0),), group=1), Played((Turn(1.0),), group=1)]
    result = credit(CreditSpec("gigpo"), [*early, *equal])
    assert result.per_turn_K[:4].all()
    assert result.metrics["group/zero_variance_share"] == 0.5


@pytest.mark.parametrize(
    "spec",
    [
        CreditSpec("reinforce_plus_plus"),
        CreditSpec("gae"),
        CreditSpec("reinforce", norm_mean="batch", norm_std="batch"),
        CreditSpec("step_reinforce"),
        CreditSpec("gigpo", group_mean="none"),
    ],
)
def test_estimators_that_do_not_compare_groups_report_no_equal_groups(spec: CreditSpec) -> None:
    metrics = credit(spec, [Played((Turn(1.0),)), Played((Turn(1.0),))]).metrics
    assert "group/zero_variance_share" not in metrics


def test_groups_whose_members_all_score_the_same_are_reported() -> None:
    batch = [Played((Turn(x),), group=g) for g, x in ((0, 1.0), (0, 1.0), (1, 0.0), (1, 3.0))]
    metrics = credit(CreditSpec("grpo"), batch).metrics
    assert metrics["group/zero_variance_share"] == 0.5
    assert metrics["group/degenerate"] == 2
    assert (
        metrics["critic/score/mean"],
        metrics["critic/score/max"],
        metrics["critic/score/min"],
    ) == (1.25, 3.0, 0.0)


def test_the_share_of_clipped_rewards_is_reported() -> None:
    batch = [Played((Turn(2.0), Turn(2.0))), Played((Turn(1.0),))]
    assert (
        credit(CreditSpec("reinforce", reward_clip=3.0), batch).metrics["critic/reward_clip_frac"]
        == 0.5
    )
    assert (
        credit(CreditSpec("reinforce", "turn", reward_clip=3.0), batch).metrics[
            "critic/reward_clip_frac"
        ]
        == 0.0
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_named_with_its_trajectory(bad: float) -> None:
    batch = [Played((Turn(bad),), trainable=False), Played((Turn(0.0), Turn(bad)))]
    with pytest.raises(ValueError, match="rewards_K of trajectory 1"):
        credit(CreditSpec(), batch)
    assert credit(CreditSpec(), batch[:1]).per_turn_K.tolist() == [0.0]


def test_what_an_estimator_needs_and_misses_is_named() -> None:
    whole = episodes([Played((Turn(1.0),))])
    with pytest.raises(ValueError, match="gigpo needs states_K"):
        assign_credit(CreditSpec("gigpo"), replace(whole, states_K=None))
    with pytest.raises(ValueError, match="needs kl_K"):
        assign_credit(CreditSpec("grpo"), replace(whole, kl_K=None), kl_coef=0.1)
    with pytest.raises(ValueError, match="grouping state compares turns"):
        assign_credit(CreditSpec("reinforce", norm_grouping="state", norm_mean="group"), whole)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_batch_of_nothing_gives_nothing(estimator: str) -> None:
    for batch in ([], [Played(())], [Played((Turn(1.0),), trainable=False)]):
        result = credit(
            CreditSpec(estimator, norm_mean="batch", norm_std="group"), batch, kl_coef=0.1
        )
        assert not result.per_turn_K.any()
        assert all(np.isfinite(value) for value in result.metrics.values())


steps = st.lists(
    st.lists(
        st.tuples(st.integers(0, 1), st.floats(-10, 10).map(lambda x: round(x, 2))), max_size=6
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("grouping", ["batch", "tag"])
@given(steps=steps)
def test_running_moments_are_those_of_all_rewards_so_far(
    grouping: Any, steps: list[list[tuple[int, float]]]
) -> None:
    spec = CreditSpec("reinforce", norm_grouping=grouping, norm_mean="running", norm_std="running")
    running: Any = None
    seen: dict[int, list[float]] = {0: [], 1: []}
    for step in steps:
        batch = [Played((Turn(reward),), group=n, tag=tag) for n, (tag, reward) in enumerate(step)]
        forth = assign_credit(spec, episodes(batch), running=running)
        back = assign_credit(spec, episodes(batch[::-1]), running=running)
        assert forth.running == back.running
        for tag, reward in step:
            seen[tag if grouping == "tag" else 0].append(reward)
        for (tag, reward), value in zip(step, forth.per_turn_K, strict=True):
            rewards = seen[tag if grouping == "tag" else 0]
            std = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
            expected = (reward - statistics.fmean(rewards)) / std if std > 1e-5 else 0.0
            assert value == pytest.approx(expected, abs=1e-6)
        running = forth.running
    for number, rewards in seen.items():
        if rewards:
            assert running[number].count == len(rewards)
            assert running[number].mean == pytest.approx(statistics.fmean(rewards), abs=1e-9)


@pytest.mark.parametrize(
    ("mean", "std", "expected"),
    [
        ("running", "none", [3.0 - 2.5, 5.0 - 2.5]),
        (
            "none",
            "running",
            [3.0 / statistics.stdev([0, 2, 3, 5]), 5.0 / statistics.stdev([0, 2, 3, 5])],
        ),
        (
            "batch",
            "running",
            [-1.0 / statistics.stdev([0, 2, 3, 5]), 1.0 / statistics.stdev([0, 2, 3, 5])],
        ),
        ("running", "batch", [0.5 / math.sqrt(2), 2.5 / math.sqrt(2)]),
    ],
)
def test_a_running_part_goes_with_any_other(mean: Any, std: Any, expected: list[float]) -> None:
    spec = CreditSpec("reinforce", norm_mean=mean, norm_std=std)
    first = assign_credit(spec, episodes([Played((Turn(0.0),)), Played((Turn(2.0),))]))
    batch = episodes([Played((Turn(3.0),)), Played((Turn(5.0),))])
    assert assign_credit(spec, batch, running=first.running).per_turn_K == pytest.approx(expected)


def test_rounding_of_equal_rewards_has_no_running_deviation() -> None:
    spec = CreditSpec("reinforce", norm_mean="running", norm_std="running")
    rewards = [100.0, float(np.nextafter(np.float32(100), 1e9))]
    result = assign_credit(spec, episodes([Played((Turn(x),)) for x in rewards]))
    assert result.per_turn_K.tolist() == [0.0, 0.0]
    assert result.metrics["group/degenerate"] == 2
