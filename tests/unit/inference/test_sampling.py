"""Sampling of single tokens: the distribution, what is recorded, and independence of the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agenticrun_workers.inference.sampling import sample_tokens, uniforms
from agenticrun_workers.types import SamplingParams


def draw(logits: torch.Tensor, params: SamplingParams, count: int = 20_000) -> np.ndarray:
    u = uniforms(np.full(count, 3, np.uint64), np.arange(count, dtype=np.uint64))
    tokens, _ = sample_tokens(logits.expand(count, -1), [params] * count, u)
    return np.bincount(tokens.numpy(), minlength=logits.shape[-1]) / count


LOGITS = torch.tensor([1.0, 0.0, -1.0, 2.0])


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_frequencies_are_the_softmax_at_the_temperature(temperature: float) -> None:
    frequencies = draw(LOGITS, SamplingParams(1, temperature))
    np.testing.assert_allclose(frequencies, torch.softmax(LOGITS / temperature, -1).numpy(), atol=0.012)


def test_top_k_keeps_the_k_most_likely() -> None:
    frequencies = draw(LOGITS, SamplingParams(1, top_k=2))
    kept = torch.softmax(LOGITS[[0, 3]], -1).numpy()
    np.testing.assert_allclose(frequencies, [kept[0], 0, 0, kept[1]], atol=0.012)


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    probabilities = torch.softmax(LOGITS, -1)
    frequencies = draw(LOGITS, SamplingParams(1, top_p=float(probabilities[3]) + 0.01))
    kept = torch.softmax(LOGITS[[0, 3]], -1).numpy()
    np.testing.assert_allclose(frequencies, [kept[0], 0, 0, kept[1]], atol=0.012)


def test_recorded_log_probs_are_of_the_full_distribution_at_the_temperature() -> None:
    tokens, logprobs = sample_tokens(LOGITS[None], [SamplingParams(1, 0.5, top_k=1)], np.array([0.3]))
    torch.testing.assert_close(logprobs[0], torch.log_softmax(LOGITS / 0.5, -1)[tokens[0]])


def test_temperature_zero_is_greedy_and_recorded_at_one() -> None:
    tokens, logprobs = sample_tokens(LOGITS[None], [SamplingParams(1, 0.0)], np.array([0.01]))
    assert tokens.tolist() == [3]
    torch.testing.assert_close(logprobs[0], torch.log_softmax(LOGITS, -1)[3])


def test_a_row_is_sampled_the_same_whatever_its_neighbours_are() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(6, 9)).astype(np.float32))
    params = [SamplingParams(1, t, p, k) for t, p, k in [(1, 1, 0), (0, 1, 0), (0.7, 0.5, 0), (1, 1, 3), (2, 1, 0), (1, 0.9, 5)]]
    u = uniforms(np.arange(6, dtype=np.uint64), np.arange(6, dtype=np.uint64))
    together = sample_tokens(logits, params, u)[0].tolist()
    alone = [sample_tokens(logits[i : i + 1], params[i : i + 1], u[i : i + 1])[0].item() for i in range(6)]
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
