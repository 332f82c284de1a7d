"""Sampling of single tokens: the distribution, what is recorded, and independence of the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from agenticrun_workers.inference.server_path.agenticrun_sampling import (
    BLOCK,
    MOST,
    sample,
    streams,
    truncate,
    uniforms,
    uniforms_on_device,
)
from agenticrun_workers.inference.transformers.caches import sample_tokens
from agenticrun_workers.types import SamplingParams
from sampling_definition import sample as defined_sample
from sampling_definition import truncate as defined_truncate
from sampling_definition import uniform

CPU = torch.device("cpu")


def numbers(seeds: Sequence[int], indices: Sequence[int]) -> torch.Tensor:
    return uniforms_on_device(streams(seeds, [0] * len(seeds)), indices, CPU)


def draw(logits: torch.Tensor, params: SamplingParams, count: int = 20_000) -> np.ndarray:
    u = numbers([3] * count, range(count))
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
    tokens, logprobs = sample_tokens(
        torch.tensor([logits]), [params], torch.tensor([u], dtype=torch.float64)
    )
    assert tokens.tolist() == [expected]
    assert logprobs[0].item() == pytest.approx(math.log(shares[tokens[0]]), abs=1e-4)


def test_log_probs_are_recorded_at_another_temperature_where_that_is_asked_for() -> None:
    params = [SamplingParams(1, 0.5, top_k=2, record_temperature=1.0), SamplingParams(1, 0.5)]
    tokens, logprobs = sample_tokens(LOGITS.expand(2, -1), params, torch.tensor([0.3, 0.3]))
    torch.testing.assert_close(logprobs[0], torch.log_softmax(LOGITS, -1)[tokens[0]])
    torch.testing.assert_close(logprobs[1], torch.log_softmax(LOGITS / 0.5, -1)[tokens[1]])


def test_recorded_log_probs_are_of_the_full_distribution_at_the_temperature() -> None:
    tokens, logprobs = sample_tokens(
        LOGITS[None], [SamplingParams(1, 0.5, top_k=1)], torch.tensor([0.3])
    )
    torch.testing.assert_close(logprobs[0], torch.log_softmax(LOGITS / 0.5, -1)[tokens[0]])


def test_temperature_zero_is_greedy_and_recorded_at_one() -> None:
    tokens, logprobs = sample_tokens(LOGITS[None], [SamplingParams(1, 0.0)], torch.tensor([0.01]))
    assert tokens.tolist() == [3]
    torch.testing.assert_close(logprobs[0], torch.log_softmax(LOGITS, -1)[3])


def test_a_row_is_sampled_the_same_whatever_its_neighbours_are() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(6, 9)).astype(np.float32))
    params = [
        SamplingParams(1, t, p, k)
        for t, p, k in [(1, 1, 0), (0, 1, 0), (0.7, 0.5, 0), (1, 1, 3), (2, 1, 0), (1, 0.9, 5)]
    ]
    u = numbers(range(6), range(6))
    together = sample_tokens(logits, params, u)[0].tolist()
    alone = [
        sample_tokens(logits[i : i + 1], params[i : i + 1], u[i : i + 1])[0].item()
        for i in range(6)
    ]
    assert together == alone


def test_uniforms_are_uniform_and_unrelated_between_neighbouring_seeds_and_indices() -> None:
    seeds, indices = torch.meshgrid(torch.arange(300), torch.arange(300), indexing="xy")
    u = numbers(seeds.ravel().tolist(), indices.ravel().tolist()).reshape(300, 300).numpy()
    assert u.min() >= 0
    assert u.max() < 1
    counts = np.histogram(u, bins=20, range=(0, 1))[0]
    assert np.abs(counts - 4500).max() < 350
    for a, b in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02


@given(
    st.lists(
        st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**20), st.integers(-(2**20), 2**20)),
        min_size=1,
        max_size=5,
    )
)
@example([(0, 0, 0), (1, 0, 5), (2**63 - 1, 7, 0), (2**63, 2**31 - 1, -3), (2**64 - 1, 123_456, 9)])
def test_uniforms_are_those_of_splitmix64_on_the_host_and_on_a_device(
    requests: list[tuple[int, int, int]],
) -> None:
    seeds, _, starts = zip(*requests, strict=True)
    expected = [uniform(seed, index) for seed, index, _ in requests]
    streams_B = streams(seeds, starts)
    counted = [index + start for _, index, start in requests]
    assert uniforms_on_device(streams_B, counted, CPU).tolist() == expected
    for dtype in (torch.int64, torch.int32):
        numbers_B = torch.tensor(counted, dtype=dtype)
        found_B = uniforms(torch.from_numpy(streams_B), numbers_B)
        assert (found_B.dtype, found_B.tolist()) == (torch.float64, expected)


def sums_of_the_whole_vocabulary(weights_BV: torch.Tensor, uniforms_B: torch.Tensor) -> list[int]:
    sums_BV = weights_BV.double().cumsum(-1)
    thresholds_B1 = uniforms_B[:, None] * sums_BV[:, -1:]
    tokens: list[int] = torch.searchsorted(sums_BV, thresholds_B1, right=True)[:, 0].tolist()
    return tokens


@pytest.mark.parametrize("vocabulary", [2, BLOCK - 1, BLOCK, BLOCK + 1, 50_257])
def test_tokens_are_those_of_one_sum_in_float64_over_the_vocabulary(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits_BV = 3 * torch.randn(200, vocabulary, generator=generator)
    logits_BV[:, ::3] = -torch.inf
    weights_BV = logits_BV.softmax(-1)
    uniforms_B = numbers(range(200), range(200))
    assert sample(weights_BV, uniforms_B).tolist() == sums_of_the_whole_vocabulary(
        weights_BV, uniforms_B
    )


def test_a_token_without_weight_is_never_sampled() -> None:
    """Also where rounding takes the largest random number to the sum of all weights."""
    weights_BV = torch.zeros(3, 3 * BLOCK)
    weights_BV[0, BLOCK + 5] = weights_BV[1, 7] = weights_BV[2, -1] = 0.1
    for u in (0.0, 0.5, MOST):
        tokens = sample(weights_BV, torch.full((3,), u, dtype=torch.float64))
        assert tokens.tolist() == [BLOCK + 5, 7, 3 * BLOCK - 1]


def test_a_share_of_a_block_that_rounds_to_all_of_it_ends_at_its_last_weight() -> None:
    weights_BV = torch.zeros(1, 3 * BLOCK)
    # The sums before and after the second block are 1.5 and 2 ulp beside its weight: ties.
    weights_BV[0, 7], weights_BV[0, BLOCK + 5] = 3 * 2.0**-53, 1 + 2.0**-23
    tokens = sample(weights_BV, torch.tensor([MOST], dtype=torch.float64))
    assert tokens.tolist() == [BLOCK + 5]


def test_a_row_of_nan_still_gets_a_token_of_the_vocabulary() -> None:
    """An index beyond it would end the process on a GPU."""
    tokens = sample(torch.full((1, BLOCK + 1), torch.nan), torch.tensor([0.5], dtype=torch.float64))
    assert 0 <= int(tokens) <= BLOCK


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=12).filter(any),
    st.integers(1, 13),
    st.integers(1, 40).map(lambda n: n / 40),
    st.integers(0, 12).map(lambda n: n / 12),
)
def test_of_equal_weights_the_first_count_as_the_more_likely_ones(
    weights: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept, before = set(), 0
    for rank, token in enumerate(order):
        assume(abs(before - top_p * sum(weights)) > 1e-4 or top_p == 1)
        assume(abs(weights[token] - min_p * max(weights)) > 1e-4 or min_p in (0, 1))
        if (
            rank < top_k
            and (top_p == 1 or before < top_p * sum(weights))
            and weights[token] >= min_p * max(weights)
        ):
            kept.add(token)
        before += weights[token]
    expected = [weight * (token in kept) for token, weight in enumerate(weights)]
    found = truncate(
        torch.tensor([weights], dtype=torch.float32),
        torch.tensor([top_k]),
        torch.tensor([top_p]),
        torch.tensor([min_p]),
    )
    assert found[0].tolist() == expected


@st.composite
def batches(draw: st.DrawFn) -> torch.Tensor:
    """Weights of all kinds: rounded, equal, 0, tiny, alone; vocabularies around whole blocks."""
    rows = draw(st.integers(1, 4))
    vocabulary = draw(
        st.sampled_from([1, 2, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 5])
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits_BV = draw(st.sampled_from([0.0, 0.5, 4.0, 40.0])) * torch.randn(
        rows, vocabulary + 3, generator=generator
    )
    if draw(st.booleans()):
        logits_BV = logits_BV.bfloat16().float()
    without = torch.rand(logits_BV.shape, generator=generator) < draw(st.sampled_from([0, 0.5, 1]))
    without[:, draw(st.integers(0, vocabulary - 1))] = False
    weights_BV = logits_BV.masked_fill(without, -torch.inf)[:, :vocabulary].softmax(-1)
    scale = draw(st.sampled_from([1.0, 3.0, 1e-3]))
    # Rows of a wider tensor are not contiguous.
    return torch.nn.functional.pad(weights_BV * scale, (0, draw(st.integers(0, 1))))[:, :vocabulary]


@given(batches(), st.data())
def test_tokens_are_bit_for_bit_those_of_the_definition(
    weights_BV: torch.Tensor, data: st.DataObject
) -> None:
    """Random numbers on the boundary between two blocks or two tokens too."""
    sums_BV = weights_BV.double().cumsum(-1)
    shares = sums_BV[:, : data.draw(st.integers(1, sums_BV.shape[1]))][:, -1] / sums_BV[:, -1]
    steps = data.draw(st.sampled_from([-1, 0, 1]))
    boundary_B = (shares.view(torch.int64) + steps).view(torch.float64)
    free_B = torch.tensor(
        data.draw(
            st.lists(
                st.floats(0, MOST) | st.sampled_from([0.0, MOST]),
                min_size=len(weights_BV),
                max_size=len(weights_BV),
            )
        ),
        dtype=torch.float64,
    )
    for uniforms_B in (free_B, boundary_B.nan_to_num(0.0).clamp(0, MOST)):
        assert torch.equal(sample(weights_BV, uniforms_B), defined_sample(weights_BV, uniforms_B))


@given(batches(), st.data())
def test_truncated_weights_are_bit_for_bit_those_of_the_definition(
    weights_BV: torch.Tensor, data: st.DataObject
) -> None:
    rows, vocabulary = weights_BV.shape

    def column(values: st.SearchStrategy[float], dtype: torch.dtype) -> torch.Tensor | None:
        if data.draw(st.booleans()):
            return None
        return torch.tensor(data.draw(st.lists(values, min_size=rows, max_size=rows)), dtype=dtype)

    cuts = (
        column(st.integers(1, vocabulary + 1) | st.just(2**30), torch.int32),
        column(st.floats(0.001, 1) | st.just(1.0), torch.float32),
        column(st.floats(0, 1), torch.float32),
    )
    found = truncate(weights_BV, *cuts)
    assert torch.equal(found, defined_truncate(weights_BV, *cuts))


@pytest.mark.parametrize("vocabulary", [5, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_rows_without_a_sum_get_the_token_of_the_definition(vocabulary: int) -> None:
    weights_BV = torch.rand(4, vocabulary).softmax(-1)
    weights_BV[0], weights_BV[1, 0], weights_BV[2, -1] = torch.nan, torch.nan, torch.nan
    weights_BV[3] = 0
    uniforms_B = torch.full((4,), 0.5, dtype=torch.float64)
    assert torch.equal(sample(weights_BV, uniforms_B), defined_sample(weights_BV, uniforms_B))
