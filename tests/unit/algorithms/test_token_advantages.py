"""Token-level credit against slow definitions, token by token, compiled and in NumPy."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import exp
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.algorithms import (
    CorrectionSpec,
    FilterSpec,
    KlKind,
    TokenAdvantages,
    TokenSpec,
    token_advantages,
    turn_kl,
)
from ragged_tokens import Token, Trajectory, Turn, batches, of_responses, pack

pytestmark = pytest.mark.usefixtures("both_definitions")

shares = st.floats(0, 1)


def alone(sums: np.ndarray) -> np.ndarray:
    """The reduction of one rank."""
    return sums


def advantages(spec: TokenSpec, batch: list[Trajectory], kl_coef: float = 0.0) -> TokenAdvantages:
    packed, per_turn = pack(batch)
    return token_advantages(spec, packed, per_turn, kl_coef, alone)


def slow_gae(
    trajectory: Trajectory,
    rewards: list[float],
    gamma: float,
    lambd: float,
    turn_level: bool,
    values: list[float],
    bootstrap: float,
) -> list[float]:
    """A_t = sum over later tokens of the decayed delta, every sum written out."""
    n = len(rewards)
    g = [gamma if not turn_level or end else 1.0 for end in trajectory.ends]
    gl = [gamma * lambd if not turn_level or end else 1.0 for end in trajectory.ends]
    following = [*values[1:], bootstrap]
    delta = [rewards[t] + g[t] * following[t] - values[t] for t in range(n)]
    return [sum(float(np.prod(gl[t:u])) * delta[u] for u in range(t, n)) for t in range(n)]


def trained(batch: list[Trajectory], values: list[list[float]]) -> list[list[float]]:
    return [
        row if trajectory.trains else [0.0] * len(row)
        for trajectory, row in zip(batch, values, strict=True)
    ]


def assert_rows(actual: list[list[float]], expected: list[list[float]]) -> None:
    assert [len(row) for row in actual] == [len(row) for row in expected]
    np.testing.assert_allclose(
        [x for row in actual for x in row],
        [x for row in expected for x in row],
        rtol=2e-6,
        atol=2e-6,
    )


@given(batches, shares, shares, st.booleans())
def test_gae_is_the_decayed_sum_of_deltas_over_response_tokens(
    batch: list[Trajectory], gamma: float, lambd: float, turn_level: bool
) -> None:
    packed, _ = pack(batch)
    result = advantages(TokenSpec("gae", gamma, lambd, turn_level), batch)
    values = [[token.value for token in t.response] for t in batch]
    expected = [
        slow_gae(t, t.rewards, gamma, lambd, turn_level, v, t.bootstrap) if v else []
        for t, v in zip(batch, values, strict=True)
    ]
    assert_rows(of_responses(packed, result.advantages_L), trained(batch, expected))
    assert result.returns_L is not None
    targets = [
        [a + x for a, x in zip(row, v, strict=True)]
        for row, v in zip(expected, values, strict=True)
    ]
    assert_rows(of_responses(packed, result.returns_L), targets)


@given(batches, shares)
def test_reinforce_is_the_reward_to_go_discounted_per_response_token(
    batch: list[Trajectory], gamma: float
) -> None:
    packed, _ = pack(batch)
    expected = [
        [sum(gamma ** (u - t) * r[u] for u in range(t, len(r))) for t in range(len(r))]
        for r in (t.rewards for t in batch)
    ]
    result = advantages(TokenSpec("reinforce", gamma), batch)
    assert_rows(of_responses(packed, result.advantages_L), trained(batch, expected))
    assert result.returns_L is None


@given(batches, shares)
def test_agentic_reinforce_discounts_where_turns_end_and_keeps_rewards_inside_them(
    batch: list[Trajectory], gamma: float
) -> None:
    packed, _ = pack(batch)
    expected = []
    for trajectory in batch:
        turn_of = [
            k
            for k, turn in enumerate(turn for turn in trajectory.turns if turn.response)
            for _ in turn.response
        ]
        rewards = [
            reward - 0.3 * abs(x.old - x.ref)
            for reward, x in zip(trajectory.rewards, trajectory.response, strict=True)
        ]
        reach = range(len(rewards))
        expected.append(
            [
                sum(gamma ** (turn_of[u] - turn_of[t]) * rewards[u] for u in reach if u >= t)
                for t in reach
            ]
        )
    result = advantages(TokenSpec("agentic_reinforce", gamma, reward_kl="abs"), batch, kl_coef=0.3)
    assert_rows(of_responses(packed, result.advantages_L), trained(batch, expected))


@given(batches)
def test_an_advantage_lies_on_every_response_token_of_its_turn(batch: list[Trajectory]) -> None:
    packed, _ = pack(batch)
    expected = [[turn.number for turn in t.turns for _ in turn.response] for t in batch]
    result = advantages(TokenSpec("gigpo"), batch)
    assert_rows(of_responses(packed, result.advantages_L), trained(batch, expected))
    np.testing.assert_array_equal(result.advantages_L[packed.turns_L < 0], 0)


def slow_kl(token: Token, kind: KlKind) -> float:
    d = token.old - token.ref
    return {"k1": d, "k2": d * d / 2, "k3": min(exp(-d) - 1 + d, 10.0), "abs": abs(d)}[kind]


@given(batches, st.sampled_from(["k1", "k2", "k3", "abs"]))
def test_token_kl_is_taken_from_each_response_tokens_reward_and_its_mean_reported(
    batch: list[Trajectory], kind: KlKind
) -> None:
    packed, per_turn = pack(batch)
    kl = [[slow_kl(token, kind) for token in t.response] for t in batch]
    result = advantages(TokenSpec("reinforce", 0.0, reward_kl=kind), batch, kl_coef=0.5)
    expected = [
        [r - 0.5 * x for r, x in zip(t.rewards, row, strict=True)]
        for t, row in zip(batch, kl, strict=True)
    ]
    assert_rows(of_responses(packed, result.advantages_L), trained(batch, expected))
    means = [float(np.mean(row)) for row in kl if row]
    assert result.metrics["critic/kl"] == pytest.approx(np.mean(means) if means else 0.0, abs=1e-6)
    summed = [
        sum(slow_kl(token, kind) for token in turn.response) for t in batch for turn in t.turns
    ]
    np.testing.assert_allclose(turn_kl(packed, kind, len(per_turn)), summed, rtol=1e-6, atol=1e-6)


def test_the_k3_of_one_strange_token_is_bounded() -> None:
    strange = Trajectory(((Turn(0.0, 0, (Token(-1.0, -30.0, -0.5, 0.0),)),),), 0.0, True)
    assert turn_kl(pack([strange])[0], "k3", 1).tolist() == [10.0]


@given(batches, st.floats(0.1, 2))
def test_the_second_clip_bounds_each_tokens_reward_after_its_kl(
    batch: list[Trajectory], bound: float
) -> None:
    packed, _ = pack(batch)
    rewards = [
        [r - (x.old - x.ref) for r, x in zip(t.rewards, t.response, strict=True)] for t in batch
    ]
    result = advantages(
        TokenSpec("reinforce", 0.0, reward_kl="k1", reward_clip=bound), batch, kl_coef=1.0
    )
    assert_rows(
        of_responses(packed, result.advantages_L),
        trained(batch, [[max(-bound, min(bound, r)) for r in row] for row in rewards]),
    )
    counted = [
        abs(r) > bound for t, row in zip(batch, rewards, strict=True) if t.trains for r in row
    ]
    assert result.metrics["critic/token_reward_clip_frac"] == pytest.approx(
        np.mean(counted) if counted else 0.0
    )


@given(batches)
def test_whitened_rewards_have_mean_zero_and_deviation_one_before_returns(
    batch: list[Trajectory],
) -> None:
    packed, _ = pack(batch)
    kept = np.array([r for t in batch if t.trains for r in t.rewards])
    mean = kept.mean() if len(kept) else 0.0
    std = kept.std(ddof=1) if len(kept) > 1 else 0.0
    scale = std if std > 1e-6 else 1.0
    result = advantages(TokenSpec("reinforce", 1.0, whiten_rewards=True), batch)
    whitened = [[(r - mean) / scale for r in t.rewards] for t in batch]
    assert_rows(
        of_responses(packed, result.advantages_L),
        trained(batch, [list(np.cumsum(row[::-1])[::-1]) for row in whitened]),
    )


@given(
    batches,
    st.sampled_from(["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]),
    st.none() | st.floats(0.2, 1),
)
def test_whitening_then_clip_over_the_tokens_of_the_loss(
    batch: list[Trajectory], estimator: str, bound: float | None
) -> None:
    raw = advantages(TokenSpec("gae" if estimator == "gae" else "reinforce"), batch)
    spec = TokenSpec(estimator, whiten_advantages=estimator == "gae", advantage_clip=bound)
    result = advantages(spec, batch)
    kept = raw.advantages_L[raw.mask_L].astype(np.float64)
    std = kept.std(ddof=1) if len(kept) > 1 else 0.0
    white = (kept - kept.mean()) / (std if std > 1e-6 else 1.0) if len(kept) else kept
    limit = np.inf if bound is None else bound
    np.testing.assert_allclose(
        result.advantages_L[result.mask_L], np.clip(white, -limit, limit), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_array_equal(result.advantages_L[~result.mask_L], 0)
    if raw.returns_L is not None and result.returns_L is not None:
        np.testing.assert_array_equal(result.returns_L, raw.returns_L)
    if bound is not None:
        expected = float(np.mean(np.abs(white) > bound)) if len(white) else 0.0
        assert result.metrics["critic/advantage_clip_frac"] == pytest.approx(
            expected, abs=1 / max(len(white), 1)
        )


@given(batches)
def test_only_response_tokens_of_trajectories_that_train_are_in_the_loss(
    batch: list[Trajectory],
) -> None:
    packed, _ = pack(batch)
    result = advantages(TokenSpec("reinforce"), batch)
    assert_rows(
        of_responses(packed, result.mask_L), [[float(t.trains)] * len(t.response) for t in batch]
    )
    assert not result.mask_L[packed.turns_L < 0].any()


@given(batches, st.integers(1, 4), st.sampled_from(["gae", "agentic_reinforce"]))
def test_prompt_and_observation_tokens_do_not_exist_for_returns(
    batch: list[Trajectory], more: int, estimator: str
) -> None:
    """ROLL's GAE runs through the untrained values of observations (defect C16)."""
    longer = [
        replace(
            t,
            sequences=tuple(
                tuple(replace(turn, prompt=turn.prompt + more) for turn in s) for s in t.sequences
            ),
        )
        for t in batch
    ]
    spec = TokenSpec(estimator, 0.9, 0.8)
    before, after = (
        of_responses(pack(b)[0], advantages(spec, b).advantages_L) for b in (batch, longer)
    )
    assert before == after


@given(batches)
def test_a_step_wise_trajectory_has_the_returns_of_the_same_turns_in_one_sequence(
    batch: list[Trajectory],
) -> None:
    joined = [replace(t, sequences=(tuple(t.turns),)) for t in batch]
    stepwise = [replace(t, sequences=tuple((turn,) for turn in t.turns)) for t in batch]
    spec = TokenSpec("gae", 0.9, 0.8)
    one, several = (
        of_responses(pack(b)[0], advantages(spec, b).advantages_L) for b in (joined, stepwise)
    )
    assert one == several


@given(batches, st.randoms(use_true_random=False))
def test_the_order_of_trajectories_changes_nothing(batch: list[Trajectory], random: object) -> None:
    order = np.random.default_rng(random.getrandbits(32)).permutation(len(batch))  # type: ignore[attr-defined]
    spec = TokenSpec("gae", 0.9, 0.8, whiten_advantages=True)
    straight = of_responses(pack(batch)[0], advantages(spec, batch).advantages_L)
    shuffled_batch = [batch[i] for i in order]
    shuffled = of_responses(pack(shuffled_batch)[0], advantages(spec, shuffled_batch).advantages_L)
    assert_rows(shuffled, [straight[i] for i in order])


def over_ranks(
    spec: TokenSpec, parts: list[list[Trajectory]], kl_coef: float
) -> list[TokenAdvantages]:
    """Every rank's result, the ranks in threads: each reduction adds what all of them brought."""
    barrier = threading.Barrier(len(parts), timeout=60)
    brought: list[Any] = [None] * len(parts)

    def together(rank: int, sums: np.ndarray | None) -> list[Any]:
        brought[rank] = sums
        barrier.wait()
        everything = list(brought)
        barrier.wait()
        ended = {item is None for item in everything}
        assert len(ended) == 1, "every rank must reduce equally often"
        return everything

    def run(rank: int) -> TokenAdvantages:
        packed, per_turn = pack(parts[rank])

        def reduce(sums: np.ndarray) -> np.ndarray:
            total: np.ndarray = np.sum(together(rank, np.array(sums)), axis=0)
            return total

        try:
            result = token_advantages(spec, packed, per_turn, kl_coef, reduce)
            together(rank, None)
        except BaseException:
            barrier.abort()
            raise
        return result

    with ThreadPoolExecutor(len(parts)) as threads:
        return list(threads.map(run, range(len(parts))))


@given(batches, st.lists(st.integers(0, 2), min_size=5, max_size=5))
def test_ranks_together_give_what_one_rank_gives(
    batch: list[Trajectory], rank_of: list[int]
) -> None:
    correction = CorrectionSpec(
        filters=(FilterSpec("token", 0.5, 2.0), FilterSpec("geometric", 0.6, 1.7))
    )
    spec = TokenSpec(
        "gae",
        0.9,
        0.8,
        False,
        "k1",
        whiten_rewards=True,
        whiten_advantages=True,
        reward_clip=2.0,
        advantage_clip=1.5,
        correction=correction,
    )
    whole = advantages(spec, batch, kl_coef=0.1)
    expected = of_responses(pack(batch)[0], whole.advantages_L)
    parts = [[t for t, rank in zip(batch, rank_of, strict=False) if rank == r] for r in range(3)]
    numbers = [[i for i, rank in enumerate(rank_of[: len(batch)]) if rank == r] for r in range(3)]
    for part, own, result in zip(parts, numbers, over_ranks(spec, parts, 0.1), strict=True):
        assert_rows(of_responses(pack(part)[0], result.advantages_L), [expected[i] for i in own])
        assert result.metrics.keys() == whole.metrics.keys()
        for name, value in whole.metrics.items():
            assert result.metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("values_L", TokenSpec("gae")),
        ("old_logprobs_L", TokenSpec("reinforce", reward_kl="k3")),
        ("ref_logprobs_L", TokenSpec("reinforce", reward_kl="k3")),
        (
            "engine_logprobs_L",
            TokenSpec("reinforce", correction=CorrectionSpec(filters=(FilterSpec("token", 0.5),))),
        ),
    ],
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_named_with_its_trajectory(
    name: str, spec: TokenSpec, bad: float
) -> None:
    turn = Turn(1.0, 1, (Token(-1.0, -1.0, -1.0, 0.0),))
    packed, per_turn = pack([Trajectory(((turn,),), 0.0, True)] * 3)
    array = getattr(packed, name).copy()
    array[3] = bad
    with pytest.raises(ValueError, match=f"{name}.* of trajectory 1 "):
        token_advantages(spec, replace(packed, **{name: array}), per_turn, 0.1, alone)


@pytest.mark.parametrize("name", ["values_L", "old_logprobs_L", "ref_logprobs_L"])
def test_an_array_that_is_needed_and_missing_is_named(name: str) -> None:
    packed, per_turn = pack(
        [Trajectory(((Turn(1.0, 1, (Token(-1.0, -1.0, -1.0, 0.0),)),),), 0.0, True)]
    )
    missing: dict[str, Any] = {name: None}
    with pytest.raises(ValueError, match=name):
        token_advantages(
            TokenSpec("gae", reward_kl="k1"),
            replace(packed, **missing),
            per_turn,
            0.1,
            alone,
        )


def test_a_rank_without_trajectories_has_empty_results() -> None:
    result = advantages(
        TokenSpec("gae", whiten_advantages=True, advantage_clip=1.0, correction=CorrectionSpec()),
        [],
    )
    assert len(result.advantages_L) == len(result.mask_L) == 0
    assert all(np.isfinite(value) for value in result.metrics.values())
