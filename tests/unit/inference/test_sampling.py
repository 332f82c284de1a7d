"""Sampling of single tokens: the distribution, what is recorded, and independence of the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agenticrun_workers.inference.transformers.caches import sample_tokens, uniforms
from agenticrun_workers.types import SamplingParams


def draw(logits: torch.Tensor, params: SamplingParams, count: int = 20_000) -> np.ndarray:
    u = uniforms(np.full(count, 3, np.uint64), np.arange(count, dtype=np.uint64))
    tokens, _ = sample_tokens(logits.expand(count, -1), [params] * count, u)
    return np.bincount(tokens.numpy(), minlength=logits.shape[-1]) / count


LOGITS = torch.tensor([1.0, 0.0, -1.0, 2.0])


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_frequencies_are_the_softmax_at_the_temperature(temperature: float) -> None:
    frequencies = draw(LOGITS, SamplingParams(1, temperature))
    np.testing.assert_allclose(
        frequencies, torch.softmax(LOGITS / temperature, -1).numpy(), atol=0.012
    )


def test_top_k_keeps_the_k_most_likely() -> None:
    frequencies = draw(LOGITS, SamplingParams(1, top_k=2))
    kept = torch.softmax(LOGITS[[0, 3]], -1).numpy()
    np.testing.assert_allclose(frequencies, [kept[0], 0, 0, kept[1]], atol=0.012)


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    probabilities = torch.softmax(LOGITS, -1)
    frequencies = draw(LOGITS, SamplingParams(1, top_p=float(probabilities[3]) + 0.01))
    kept = torch.softmax(LOGITS[[0, 3]], -1).numpy()
    np.testing.assert_allclose(frequencies, [kept[0], 0, 0, kept[1]], atol=0.012)


def test_min_p_drops_what_is_much_less_likely_than_the_likeliest() -> None:
    ratio = float(torch.softmax(LOGITS, -1)[1] / torch.softmax(LOGITS, -1)[3])
    kept = torch.softmax(LOGITS[[0, 1, 3]], -1).numpy()
    np.testing.assert_allclose(
        draw(LOGITS, SamplingParams(1, min_p=ratio * 0.99)),
        [kept[0], kept[1], 0, kept[2]],
        atol=0.012,
    )
    kept = torch.softmax(LOGITS[[0, 3]], -1).numpy()
    np.testing.assert_allclose(
        draw(LOGITS, SamplingParams(1, min_p=ratio * 1.01)), [kept[0], 0, 0, kept[1]], atol=0.012
    )


@settings(max_examples=60)
@given(
    st.lists(
        st.integers(-4000, 4000).map(lambda n: n / 1000), min_size=2, max_size=8, unique=True
    ),  # in float32 in the same order
    st.floats(0.3, 2),
    st.integers(0, 9),
    st.floats(0.05, 1),
    st.floats(0, 1),
    st.floats(0, 1, exclude_max=True),
)
def test_truncated_sampling_equals_a_slow_definition(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, u: float
) -> None:
    shares = [math.exp(logit / temperature) for logit in logits]
    shares = [share / sum(shares) for share in shares]
    kept, before = set(), 0.0
    for rank, token in enumerate(sorted(range(len(shares)), key=lambda t: -shares[t])):
        edges = (abs(before - top_p), abs(shares[token] - min_p * max(shares)))
        assume(rank == 0 or min(edges) > 1e-5)
        if (
            (not top_k or rank < top_k)
            and (rank == 0 or before < top_p)
            and shares[token] >= min_p * max(shares)
        ):
            kept.add(token)
        before += shares[token]
    total, reached, expected = sum(shares[t] for t in kept), 0.0, None
    for token in sorted(kept):
        reached += shares[token] / total
        assume(abs(reached - u) > 1e-5)
        if expected is None and u < reached:
            expected = token
    params = SamplingParams(1, temperature, top_p, top_k, min_p)
    tokens, logprobs = sample_tokens(torch.tensor([logits]), [params], np.array([u]))
    assert tokens.tolist() == [expected]
    assert logprobs[0].item() == pytest.approx(math.log(shares[tokens[0]]), abs=1e-4)


def test_log_probs_are_recorded_at_another_temperature_where_that_is_asked_for() -> None:
    params = [SamplingParams(1, 0.5, top_k=2, record_temperature=1.0), SamplingParams(1, 0.5)]
    tokens, logprobs = sample_tokens(LOGITS.expand(2, -1), params, np.array([0.3, 0.3]))
    torch.testing.assert_close(logprobs[0], torch.log_softmax(LOGITS, -1)[tokens[0]])
    torch.testing.assert_close(logprobs[1], torch.log_softmax(LOGITS / 0.5, -1)[tokens[1]])


def test_recorded_log_probs_are_of_the_full_distribution_at_the_temperature() -> None:
    tokens, logprobs = sample_tokens(
        LOGITS[None], [SamplingParams(1, 0.5, top_k=1)], np.array([0.3])
    )
    torch.testing.assert_close(logprobs[0], torch.log_softmax(LOGITS / 0.5, -1)[tokens[0]])


def test_temperature_zero_is_greedy_and_recorded_at_one() -> None:
    tokens, logprobs = sample_tokens(LOGITS[None], [SamplingParams(1, 0.0)], np.array([0.01]))
    assert tokens.tolist() == [3]
    torch.testing.assert_close(logprobs[0], torch.log_softmax(LOGITS, -1)[3])


def test_a_row_is_sampled_the_same_whatever_its_neighbours_are() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(6, 9)).astype(np.float32))
    params = [
        SamplingParams(1, t, p, k)
        for t, p, k in [(1, 1, 0), (0, 1, 0), (0.7, 0.5, 0), (1, 1, 3), (2, 1, 0), (1, 0.9, 5)]
    ]
    u = uniforms(np.arange(6, dtype=np.uint64), np.arange(6, dtype=np.uint64))
    together = sample_tokens(logits, params, u)[0].tolist()
    alone = [
        sample_tokens(logits[i : i + 1], params[i : i + 1], u[i : i + 1])[0].item()
        for i in range(6)
    ]
    assert together == alone


def test_uniforms_are_uniform_and_unrelated_between_neighbouring_seeds_and_indices() -> None:
    seeds, indices = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300, dtype=np.uint64))
    u = uniforms(seeds.ravel(), indices.ravel()).reshape(300, 300)
    assert u.min() >= 0
    assert u.max() < 1
    counts = np.histogram(u, bins=20, range=(0, 1))[0]
    assert np.abs(counts - 4500).max() < 350
    for a, b in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02
