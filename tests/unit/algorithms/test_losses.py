"""Losses against definitions in plain Python floats, one token at a time.

Their gradients are compared with finite differences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.algorithms.losses import VARIANTS as TABLE
from agenticrun_workers.algorithms.losses import (
    Aggregation,
    Cispo,
    Decoupled,
    Kimi15,
    KlKind,
    LossTokens,
    Ppo,
    RatioLevel,
    StepTotals,
    Tis,
    Topr,
    Vanilla,
    Variant,
    importance_ratio,
    kl_loss,
    policy_loss,
    token_coefficients,
    value_loss,
)
from ragged_samples import LOSSES as RANK_LOSSES

VARIANTS: list[Variant] = [
    Vanilla(),
    Ppo(0.2, 0.3),
    Ppo(0.1, 0.1, dual_clip=1.3),
    Decoupled(0.2, 0.2, cap=1.1),
    Decoupled(0.1, 0.3, dual_clip=1.5, cap=5.0),
    Tis(0.5, 1.2),
    Topr(0.7, 1.4),
    Cispo(0.1, 0.2),
    Cispo(0.1, 0.2, unified_mask=True),
    Kimi15(0.3),
]
LEVELS: list[RatioLevel] = ["token", "segment", "sequence"]
seeds = st.integers(0, 2**32 - 1)


@dataclass(frozen=True)
class Token:
    old: float
    engine: float
    advantage: float
    sequence: int
    turn: int
    score: float
    weight: float


def draw(seed: int) -> tuple[list[Token], list[float]]:
    """Ragged sequences of ragged turns, one-token turns among them, and the current log-probs."""
    rng = np.random.default_rng(seed)
    tokens, new = [], []
    for sequence in range(rng.integers(1, 4)):
        score = rng.normal()
        for turn in range(rng.integers(1, 4)):
            for _ in range(rng.integers(1, 5)):
                old = rng.uniform(-5, -0.5)
                tokens.append(
                    Token(
                        old,
                        old + rng.normal() * 0.4,
                        rng.normal(),
                        sequence,
                        turn,
                        score,
                        rng.uniform(0, 1.2),
                    )
                )
                new.append(old + rng.normal() * 0.4)
    return tokens, new


def packed(variant: Variant, tokens: list[Token], new: list[float]) -> LossTokens:
    def column(name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.tensor([getattr(token, name) for token in tokens], dtype=dtype)

    return LossTokens(
        torch.tensor(new, dtype=torch.float64, requires_grad=True),
        column("old"),
        column("advantage"),
        column("sequence", torch.int64),
        column("turn", torch.int64),
        column("score"),
        engine_logprobs_N=column("engine"),
        is_weights_N=None if isinstance(variant, Decoupled) else column("weight"),
    )


def slow_ratios(level: RatioLevel, tokens: list[Token], new: list[float]) -> list[float]:
    def together(a: Token, b: Token) -> bool:
        return (
            a is b
            if level == "token"
            else a.sequence == b.sequence and (level == "sequence" or a.turn == b.turn)
        )

    ratios = []
    for token in tokens:
        differences = [
            new[i] - other.old for i, other in enumerate(tokens) if together(token, other)
        ]
        ratios.append(math.exp(sum(differences) / len(differences)))
    return ratios


def slow_losses(
    variant: Variant, level: RatioLevel, tokens: list[Token], new: list[float], base: list[float]
) -> list[float]:
    """Loss of each token at log-probs `new`, where whatever is detached is computed from `base`."""
    live, fixed = slow_ratios(level, tokens, new), slow_ratios(level, tokens, base)
    losses = []
    for token, lp, ratio, weight in zip(tokens, new, live, fixed, strict=True):
        a = token.advantage
        match variant:
            case Ppo():
                loss = -min(
                    ratio * a, min(max(ratio, 1 - variant.clip_low), 1 + variant.clip_high) * a
                )
                if variant.dual_clip is not None and a < 0:
                    loss = min(loss, -variant.dual_clip * a)
                if isinstance(variant, Decoupled):
                    loss *= min(math.exp(token.old - token.engine), variant.cap)
            case Vanilla():
                loss = -a * lp
            case Tis():
                loss = -min(max(weight, variant.lower_bound), variant.upper_bound) * a * lp
            case Topr():
                loss = (
                    -(
                        variant.positive_weight
                        if token.score > 0
                        else variant.negative_weight * min(weight, 1)
                    )
                    * a
                    * lp
                )
            case Cispo():
                low, high = 1 - variant.epsilon_low, 1 + variant.epsilon_high
                masked = variant.unified_mask and (
                    (a > 0 and weight > high) or (a < 0 and weight < low)
                )
                loss = 0.0 if masked else -min(max(weight, low), high) * a * lp
            case Kimi15():
                loss = -a * lp + variant.tau / 2 * (lp - token.old) ** 2
            case _:
                raise AssertionError(f"add {variant} here")
        losses.append(loss if isinstance(variant, Decoupled) else loss * token.weight)
    return losses


def test_every_loss_of_the_table_is_compared_with_its_formula_here_and_on_real_ranks() -> None:
    assert {type(variant) for variant in VARIANTS} == set(TABLE.values())
    assert {type(spec.variant) for spec in RANK_LOSSES.values()} == set(TABLE.values())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@given(seeds)
def test_every_variant_equals_its_formula(variant: Variant, level: RatioLevel, seed: int) -> None:
    tokens, new = draw(seed)
    result = policy_loss(variant, level, packed(variant, tokens, new))
    assert result.loss_N.tolist() == pytest.approx(
        slow_losses(variant, level, tokens, new, new), rel=1e-12, abs=1e-14
    )
    assert result.ratio_N.tolist() == pytest.approx(slow_ratios(level, tokens, new), rel=1e-12)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_gradient_is_that_of_finite_differences_with_the_detached_factors_held(
    variant: Variant, level: RatioLevel
) -> None:
    h = 1e-6
    for seed in range(10):
        tokens, new = draw(seed)
        inputs = packed(variant, tokens, new)
        policy_loss(variant, level, inputs).loss_N.sum().backward()
        assert inputs.logprobs_N.grad is not None
        for i, found in enumerate(inputs.logprobs_N.grad.tolist()):
            up, down = ([lp + sign * h * (j == i) for j, lp in enumerate(new)] for sign in (1, -1))
            difference = sum(slow_losses(variant, level, tokens, up, new)) - sum(
                slow_losses(variant, level, tokens, down, new)
            )
            assert found == pytest.approx(difference / (2 * h), abs=1e-7)


@given(seeds, st.none() | st.floats(1.1, 5))
def test_clipped_tokens_are_exactly_those_without_gradient(seed: int, dual: float | None) -> None:
    tokens, new = draw(seed)
    inputs = packed(Ppo(), tokens, new)
    result = policy_loss(Ppo(dual_clip=dual), "token", inputs)
    result.loss_N.sum().backward()
    assert inputs.logprobs_N.grad is not None
    assert torch.equal(result.clipped_N, inputs.logprobs_N.grad == 0)


@pytest.mark.parametrize("level", LEVELS)
def test_at_the_old_policy_every_ratio_loss_has_the_policy_gradient(level: RatioLevel) -> None:
    """Compare gradients of PPO, TIS, CISPO and vanilla where ratios are 1.

    They are the gradient of -A lp; per turn or sequence, A is the mean.
    """
    tokens, _ = draw(3)
    on_policy = [token.old for token in tokens]
    for variant in (Vanilla(), Ppo(), Tis(), Cispo()):
        inputs = replace(packed(variant, tokens, on_policy), is_weights_N=None)
        policy_loss(variant, level, inputs).loss_N.sum().backward()
        mean = [token.advantage for token in tokens]
        if isinstance(variant, Ppo) and level != "token":
            alike = [
                [
                    o
                    for o in tokens
                    if o.sequence == t.sequence and (level == "sequence" or o.turn == t.turn)
                ]
                for t in tokens
            ]
            mean = [sum(o.advantage for o in others) / len(others) for others in alike]
        assert inputs.logprobs_N.grad is not None
        assert inputs.logprobs_N.grad.tolist() == pytest.approx([-a for a in mean])


def test_a_token_that_a_filter_removed_does_not_cut_its_turn_in_two() -> None:
    token = Token(-1.0, -1.0, 1.0, sequence=0, turn=0, score=1.0, weight=1.0)
    kept = packed(Ppo(), [token, token], [-0.8, -1.6])  # the token between them is not in the loss
    assert importance_ratio(kept, "segment").tolist() == pytest.approx([math.exp(-0.2)] * 2)


@pytest.mark.parametrize("level", LEVELS)
def test_sequences_given_together_or_alone_have_the_same_ratios(level: RatioLevel) -> None:
    tokens, new = draw(5)
    together = importance_ratio(packed(Ppo(), tokens, new), level).tolist()
    alone = []
    for sequence in sorted({token.sequence for token in tokens}):
        own = [i for i, token in enumerate(tokens) if token.sequence == sequence]
        alone += importance_ratio(
            packed(Ppo(), [tokens[i] for i in own], [new[i] for i in own]), level
        ).tolist()
    assert together == pytest.approx(alone, rel=1e-14)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_no_tokens_give_no_loss_and_no_error(variant: Variant, level: RatioLevel) -> None:
    result = policy_loss(variant, level, packed(variant, [], []))
    result.loss_N.sum().backward()
    assert len(result.loss_N) == 0


def test_decoupled_needs_the_engine_s_log_probs_and_excludes_importance_weights() -> None:
    tokens, new = draw(0)
    inputs = packed(Decoupled(), tokens, new)
    for wrong in (
        replace(inputs, engine_logprobs_N=None),
        replace(inputs, is_weights_N=torch.ones(len(new))),
    ):
        with pytest.raises(ValueError, match="decoupled PPO needs"):
            policy_loss(Decoupled(), "token", wrong)


pairs = st.lists(st.tuples(st.floats(-6, 0), st.floats(-6, 0)), min_size=1, max_size=12)


@given(pairs, st.none() | st.floats(0.1, 5))
def test_kl_estimates_equal_their_formulas(
    rows: list[tuple[float, float]], limit: float | None
) -> None:
    new, ref = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    top = math.inf if limit is None else limit
    k2 = [(r - n) ** 2 / 2 for n, r in rows]
    k3 = [min(math.exp(r - n) - (r - n) - 1, top) for n, r in rows]
    assert kl_loss(new, ref, "k2", limit).tolist() == pytest.approx(k2, abs=1e-12)
    assert kl_loss(new, ref, "k3", limit).tolist() == pytest.approx(k3, abs=1e-12)


def test_k2_has_no_limit() -> None:
    new = torch.tensor([-9.0, -1.0], requires_grad=True)
    estimate = kl_loss(new, torch.tensor([-1.0, -1.5]), "k2")
    estimate.sum().backward()
    assert estimate.tolist() == [32.0, 0.125]
    assert new.grad is not None
    assert new.grad.tolist() == [-8.0, 0.5]


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_gradients_of_kl_estimates_are_those_of_finite_differences(kind: KlKind) -> None:
    rng = np.random.default_rng(0)
    new = torch.tensor(rng.uniform(-5, -1, 20), requires_grad=True)
    ref = torch.tensor(rng.uniform(-5, -1, 20), requires_grad=True)
    assert torch.autograd.gradcheck(lambda lp: kl_loss(lp, ref.detach(), kind), new)
    kl_loss(new, ref, kind).sum().backward()
    assert ref.grad is None


def test_the_mean_of_k3_is_the_kl_divergence() -> None:
    """Expectation over a small vocabulary, computed exactly."""
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    expected = (p * (p.log() - q.log())).sum()
    torch.testing.assert_close((p * kl_loss(p.log(), q.log(), "k3")).sum(), expected)


def test_an_enormous_kl_is_limited_without_breaking_the_gradient() -> None:
    new = torch.tensor([-500.0, -1.0], requires_grad=True)
    estimate = kl_loss(new, torch.tensor([-1.0, -1.5]), "k3", 10.0)
    estimate.sum().backward()
    assert estimate[0].item() == 10
    assert new.grad is not None
    assert new.grad[0] == 0
    assert new.grad[1] != 0


ragged = st.lists(
    st.lists(st.tuples(st.floats(-2, 2), st.sampled_from([0.0, 1.0, 0.5])), min_size=1, max_size=6),
    min_size=1,
    max_size=5,
)


@given(ragged)
def test_every_aggregation_equals_its_definition(
    sequences: list[list[tuple[float, float]]],
) -> None:
    live = [s for s in sequences if sum(w for _, w in s) > 0]
    total = sum(w for s in live for _, w in s)
    if not live:
        return
    sums = [sum(loss * w for loss, w in s) for s in live]
    expected: dict[Aggregation, float] = {
        "token-mean": sum(sums) / total,
        "seq-mean-token-sum": sum(sums) / len(live),
        "seq-mean-token-mean": sum(
            x / sum(w for _, w in s) for x, s in zip(sums, live, strict=True)
        )
        / len(live),
        "seq-mean-token-sum-norm": sum(sums) / (len(live) * 7.0),
    }
    losses = torch.tensor([loss for s in sequences for loss, _ in s], dtype=torch.float64)
    weights = torch.tensor([w for s in sequences for _, w in s], dtype=torch.float64)
    index = torch.tensor([i for i, s in enumerate(sequences) for _ in s])
    totals = StepTotals(weight=total, sequences=len(live))
    for name, value in expected.items():
        result = (token_coefficients(weights, index, totals, name, 7.0) * losses).sum()
        assert result.item() == pytest.approx(value, abs=1e-12)


def test_token_mean_ignores_what_the_mask_removes() -> None:
    """Check a difference from ROLL (C1).

    There a filtered token keeps its loss, and the mean of ones is not one.
    """
    weights = torch.tensor([1.0, 0.0, 0.0, 1.0])
    losses = torch.tensor([1.0, 100.0, -50.0, 1.0])
    coefficients = token_coefficients(
        weights, torch.tensor([0, 0, 1, 1]), StepTotals(2.0, 2.0), "token-mean"
    )
    assert (coefficients * losses).sum() == 1


@pytest.mark.parametrize(
    "name", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_splitting_by_sequence_changes_no_coefficient(name: Aggregation) -> None:
    weights = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    index = torch.tensor([0, 0, 0, 1, 1])
    totals = StepTotals(weight=4.0, sequences=2.0)
    whole = token_coefficients(weights, index, totals, name, 3.0)
    parts = [
        token_coefficients(weights[s], index[s] - index[s][0], totals, name, 3.0)
        for s in (slice(0, 3), slice(3, 5))
    ]
    torch.testing.assert_close(torch.cat(parts), whole)


values = st.lists(
    st.tuples(st.floats(-3, 3), st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=12
)


@given(values, st.none() | st.floats(0.01, 2))
def test_the_value_loss_is_the_worse_of_plain_and_clipped(
    rows: list[tuple[float, float, float]], clip: float | None
) -> None:
    expected = []
    for value, target, old in rows:
        squares = [(value - target) ** 2]
        if clip is not None:
            squares.append((min(max(value, old - clip), old + clip) - target) ** 2)
        expected.append(max(squares) / 2)
    values, targets, olds = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3).unbind(1)
    assert value_loss(values, targets, olds, clip).loss_N.tolist() == pytest.approx(
        expected, abs=1e-12
    )


@pytest.mark.parametrize("clip", [None, 0.3])
def test_the_gradient_of_the_value_loss_is_that_of_finite_differences(clip: float | None) -> None:
    rng = np.random.default_rng(1)
    value, target, old = (torch.tensor(rng.normal(size=30)) for _ in range(3))
    value.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, target, old, clip).loss_N, value)
    result = value_loss(value, target, old, clip)
    result.loss_N.sum().backward()
    assert value.grad is not None
    assert torch.equal(result.clipped_N, value.grad == 0)
    assert result.clipped_N.any() == (clip is not None)


def test_the_value_clip_needs_old_values() -> None:
    with pytest.raises(ValueError, match="values at the batch's start"):
        value_loss(torch.zeros(1), torch.zeros(1), None, 0.2)
