"""Actor losses against definitions in plain Python floats, one token at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.algorithms.losses import StepTotals, kl_loss, ppo_loss, token_coefficients

logprob = st.floats(-6, 0)
tokens = st.lists(st.tuples(logprob, logprob, st.floats(-3, 3)), min_size=1, max_size=12)


def columns(rows: list[tuple[float, float, float]]) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)]


@given(tokens, st.floats(0, 0.9), st.floats(0, 2), st.none() | st.floats(1.1, 5))
def test_ppo_is_the_pessimistic_of_plain_and_clipped(rows, low: float, high: float, dual: float | None) -> None:
    expected = []
    for new, old, advantage in rows:
        ratio = math.exp(new - old)
        loss = max(-ratio * advantage, -min(max(ratio, 1 - low), 1 + high) * advantage)
        if dual is not None and advantage < 0:
            loss = min(loss, -dual * advantage)
        expected.append(loss)
    torch.testing.assert_close(ppo_loss(*columns(rows), low, high, dual).loss_N, torch.tensor(expected, dtype=torch.float64))


@given(tokens, st.none() | st.floats(1.1, 5))
def test_clipped_tokens_are_exactly_those_without_gradient(rows, dual: float | None) -> None:
    new_N, old_N, advantages_N = columns(rows)
    new_N.requires_grad_()
    result = ppo_loss(new_N, old_N, advantages_N, 0.2, 0.2, dual)
    (gradient_N,) = torch.autograd.grad(result.loss_N.sum(), new_N)
    still_N = (gradient_N == 0) & (advantages_N * result.ratio_N != 0)
    assert torch.equal(result.clipped_N & (advantages_N * result.ratio_N != 0), still_N)


def test_at_the_old_policy_the_gradient_is_minus_the_advantage() -> None:
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([2.0, -3.0], dtype=torch.float64)
    ppo_loss(logprobs, logprobs.detach(), advantages, 0.2, 0.2).loss_N.sum().backward()
    torch.testing.assert_close(logprobs.grad, -advantages)


@given(tokens)
def test_kl_estimates_equal_their_formulas(rows) -> None:
    new, ref, _ = columns(rows)
    torch.testing.assert_close(kl_loss(new, ref, "k2"), (ref - new) ** 2 / 2)
    torch.testing.assert_close(kl_loss(new, ref, "k3"), torch.exp(ref - new) - (ref - new) - 1)


def test_the_mean_of_k3_is_the_kl_divergence() -> None:
    """Expectation over a small vocabulary, computed exactly."""
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    expected = (p * (p.log() - q.log())).sum()
    torch.testing.assert_close((p * kl_loss(p.log(), q.log(), "k3")).sum(), expected)


ragged = st.lists(st.lists(st.tuples(st.floats(-2, 2), st.sampled_from([0.0, 1.0, 0.5])), min_size=1, max_size=6), min_size=1, max_size=5)


@given(ragged)
def test_every_aggregation_equals_its_definition(sequences) -> None:
    weighted = [[(loss, weight) for loss, weight in sequence] for sequence in sequences]
    live = [s for s in weighted if sum(w for _, w in s) > 0]
    total = sum(w for s in live for _, w in s)
    if not live:
        return
    sums = [sum(loss * w for loss, w in s) for s in live]
    expected = {
        "token-mean": sum(sums) / total,
        "seq-mean-token-sum": sum(sums) / len(live),
        "seq-mean-token-mean": sum(x / sum(w for _, w in s) for x, s in zip(sums, live, strict=True)) / len(live),
        "seq-mean-token-sum-norm": sum(sums) / (len(live) * 7.0),
    }
    losses = torch.tensor([loss for s in weighted for loss, _ in s], dtype=torch.float64)
    weights = torch.tensor([w for s in weighted for _, w in s], dtype=torch.float64)
    index = torch.tensor([i for i, s in enumerate(weighted) for _ in s])
    totals = StepTotals(weight=total, sequences=len(live))
    for name, value in expected.items():
        result = (token_coefficients(weights, index, totals, name, 7.0) * losses).sum()
        assert result.item() == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("name", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_splitting_by_sequence_changes_no_coefficient(name) -> None:
    weights = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    index = torch.tensor([0, 0, 0, 1, 1])
    totals = StepTotals(weight=4.0, sequences=2.0)
    whole = token_coefficients(weights, index, totals, name, 3.0)
    parts = [token_coefficients(weights[s], index[s] - index[s][0], totals, name, 3.0) for s in (slice(0, 3), slice(3, 5))]
    torch.testing.assert_close(torch.cat(parts), whole)
