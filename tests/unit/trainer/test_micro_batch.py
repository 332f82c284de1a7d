"""Splitting samples into padded or packed micro-batches."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.trainer.micro_batch import filler, responses_and_end, split, weighted
from agenticrun_workers.trainer.samples import Sample

CPU = torch.device("cpu")


def sample(weights: list[float], start: int = 0) -> Sample:
    weight_T = np.array(weights, np.float32)
    tokens_T = np.arange(start, start + len(weights), dtype=np.int32)
    return Sample(tokens_T, weight_T, weight_T, np.where(weight_T > 0, 0, -1).astype(np.int32))


weights = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=9)


rows_and_budget = given(st.lists(weights, max_size=12), st.integers(1, 30), st.booleans())


@rows_and_budget
def test_every_weighted_token_is_in_exactly_one_micro_batch(
    rows: list[list[float]], budget: int, packed: bool
) -> None:
    samples = [sample(row, start=100 * i) for i, row in enumerate(rows)]
    batches = split(samples, weighted, budget, CPU, packed=packed)
    seen = [int(t) for batch in batches for t in batch.targets_N]
    expected = [100 * i + t for i, row in enumerate(rows) for t, w in enumerate(row) if w and t > 0]
    assert sorted(seen) == expected


@rows_and_budget
def test_a_prediction_is_read_at_the_token_before_in_the_right_position(
    rows: list[list[float]], budget: int, packed: bool
) -> None:
    samples = [sample(row, start=100 * i) for i, row in enumerate(rows)]
    for batch in split(samples, weighted, budget, CPU, packed=packed):
        before_N = batch.ids_BT[batch.rows_N, batch.columns_N]
        assert torch.equal(before_N + 1, batch.targets_N)
        positions_BT = batch.position_ids_BT
        places_N = (
            batch.columns_N if positions_BT is None else positions_BT[batch.rows_N, batch.columns_N]
        )
        assert places_N.tolist() == [t - 1 for positions in batch.positions for t in positions]


@rows_and_budget
def test_the_budget_holds_except_for_a_sequence_that_is_longer_alone(
    rows: list[list[float]], budget: int, packed: bool
) -> None:
    for batch in split([sample(row) for row in rows], weighted, budget, CPU, packed=packed):
        assert batch.ids_BT.numel() <= budget or len(batch.samples) == 1


@given(st.lists(weights, min_size=1, max_size=12))
def test_packed_rows_are_no_longer_than_the_longest_sequence_and_waste_no_more_than_padded_ones(
    rows: list[list[float]],
) -> None:
    samples = [sample([*row, 1.0]) for row in rows]
    [padded], [packed] = (
        split(samples, weighted, 10_000, CPU, packed=packed) for packed in (False, True)
    )
    assert packed.ids_BT.shape[1] == padded.ids_BT.shape[1]
    assert packed.ids_BT.shape[0] <= padded.ids_BT.shape[0]
    assert packed.used == padded.used


groups = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=5),
    ),
    max_size=4,
)


@given(groups, st.integers(1, 120), st.randoms(use_true_random=False))
def test_equal_first_tokens_are_laid_out_once(
    drawn: list[tuple[int, list[list[int]]]], budget: int, random: Random
) -> None:
    """Each prediction has the sample's tokens before it in its place, by way of the prefix."""
    texts = [
        ([7 + group] * size, rest) for group, (size, rests) in enumerate(drawn) for rest in rests
    ]
    samples = []
    for prompt, answer in random.sample(texts, len(texts)):
        weight_T = np.array([random.random() < 0.1 for _ in prompt] + [True] * len(answer))
        tokens_T = np.array(prompt + answer, np.int32)
        samples.append(
            Sample(tokens_T, weight_T.astype(np.float32), weight_T, np.where(weight_T, 0, -1))
        )
    read = []
    for batch in split(samples, weighted, budget, CPU, shared=True):
        assert batch.ids_BT.numel() <= budget or len(batch.samples) == 1
        assert batch.used == sum(end - start for _, start, end in batch.spans)
        assert int(batch.real_BT.sum()) == sum(
            int(np.flatnonzero(samples[i].weight_T)[-1]) for i in batch.samples
        )
        if batch.prefixes:
            assert batch.used == batch.ids_BT.numel()
        for n, (row, column) in enumerate(
            zip(batch.rows_N.tolist(), batch.columns_N.tolist(), strict=True)
        ):
            [start] = [s for r, s, end in batch.bounds if r == row and s <= column < end]
            first, count = batch.prefixes.get(start, (0, 0))
            columns = [*range(first, first + count), *range(start, column + 1)]
            i = batch.samples[int(batch.sequence_N[n])]
            before_T = samples[i].tokens_T[: len(columns)]
            assert batch.ids_BT[row, columns].tolist() == before_T.tolist()
            positions_BT = batch.position_ids_BT
            if positions_BT is not None:
                assert positions_BT[row, columns].tolist() == list(range(len(columns)))
            assert int(batch.targets_N[n]) == samples[i].tokens_T[len(columns)]
            read.append((i, len(columns)))
    assert sorted(read) == [(i, t) for i, each in enumerate(samples) for t in weighted(each)]


def test_the_division_of_samples_saves_the_most_tokens() -> None:
    """The middle sample begins as all others do, but shares more with the second two."""
    prompts = [[1] * 20, [1] * 20, [1] * 18 + [2] * 22, [1] * 18 + [2] * 22, [3] * 30]
    samples = [sample([0.0] * len(prompt) + [1.0] * 2) for prompt in prompts]
    for number, (each, prompt) in enumerate(zip(samples, prompts, strict=True)):
        each.tokens_T[: len(prompt)], each.tokens_T[len(prompt) :] = prompt, 10 + number
    [batch] = split(samples, weighted, 1000, CPU, shared=True)
    # The last token is no context of a prediction.
    assert batch.used == (20 + 2) + (40 + 2) + 31
    assert sorted(count for _, count in batch.prefixes.values()) == [20, 40]


@pytest.mark.parametrize(("prompt", "answer"), [(15, 20), (40, 83)])
def test_few_equal_first_tokens_are_computed_apart(prompt: int, answer: int) -> None:
    """15 are too few, and 40 are less than a third of all."""
    samples = [sample([0.0] * prompt + [1.0] * answer) for _ in range(2)]
    samples[1].tokens_T[prompt:] += 500
    [batch] = split(samples, weighted, 1000, CPU, shared=True)
    assert not batch.prefixes


def test_short_sequences_share_a_row() -> None:
    samples = [sample([0, 1, 1], 10), sample([0, 1, 1, 1, 1], 20), sample([0, 0, 1], 30)]
    [batch] = split(samples, weighted, 100, CPU, packed=True)
    assert batch.ids_BT.tolist() == [[20, 21, 22, 23], [10, 11, 30, 31]]
    assert batch.position_ids_BT is not None
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 3], [0, 1, 0, 1]]
    assert batch.targets_N.tolist() == [11, 12, 21, 22, 23, 24, 32]
    assert batch.sequence_N.tolist() == [0, 0, 1, 1, 1, 1, 2]


def test_what_no_prediction_needs_is_not_computed() -> None:
    [batch] = split([sample([0, 1, 0, 0, 0])], weighted, 100, CPU)
    assert batch.ids_BT.tolist() == [[0]]
    assert batch.used == 1


def test_the_place_after_the_last_token_can_be_read_too() -> None:
    [batch] = split([sample([0, 0, 1, 0], 10)], responses_and_end, 100, CPU)
    assert batch.ids_BT.tolist() == [[10, 11, 12, 13]]
    assert batch.columns_N.tolist() == [1, 3]


@pytest.mark.parametrize("packed", [False, True])
def test_values_follow_their_tokens_there_and_back(packed: bool) -> None:
    samples = [sample([0, 0, 0, 1], 10), sample([0, 1], 20), sample([0, 1, 1], 30)]
    [batch] = split(samples, weighted, 100, CPU, packed=packed)
    values = [
        np.arange(len(s.tokens_T), dtype=np.float32) + 1000 * i for i, s in enumerate(samples)
    ]
    samples = [replace(s, returns_T=values_T) for s, values_T in zip(samples, values, strict=True)]
    assert batch.targets_N.tolist() == [13, 21, 31, 32]
    picked_N = batch.pick(samples, "returns_T", torch.float64)
    assert picked_N.tolist() == [3.0, 1001.0, 2001.0, 2002.0]
    into = [np.zeros(len(s.tokens_T), np.float32) for s in samples]
    batch.put(picked_N, into)
    assert [array.tolist() for array in into] == [[0, 0, 0, 3], [0, 1001], [0, 2001, 2002]]


def test_an_array_that_a_sample_lacks_is_an_error() -> None:
    [batch] = split([sample([0, 1])], weighted, 100, CPU)
    with pytest.raises(ValueError, match="sample 0 lacks returns_T"):
        batch.pick([sample([0, 1])], "returns_T", torch.float64)


def test_a_filler_has_no_weighted_token() -> None:
    batch = filler(CPU)
    assert len(batch.targets_N) == 0
    assert len(batch.pick([], "returns_T", torch.float64)) == 0
