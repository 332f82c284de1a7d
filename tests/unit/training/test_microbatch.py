"""Splitting samples into padded micro-batches."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agenticrun_workers.training import Sample
from agenticrun_workers.training.microbatch import filler, split

CPU = torch.device("cpu")


def sample(weights: list[float], start: int = 0) -> Sample:
    weight_T = np.array(weights, np.float32)
    tokens_T = np.arange(start, start + len(weights), dtype=np.int32)
    return Sample(tokens_T, weight_T, weight_T, weight_T)


weights = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=9)


@settings(deadline=None)
@given(st.lists(weights, max_size=12), st.integers(1, 30))
def test_every_weighted_token_is_in_exactly_one_micro_batch(rows: list[list[float]], budget: int) -> None:
    samples = [sample(row, start=100 * i) for i, row in enumerate(rows)]
    seen = [int(t) for batch in split(samples, budget, CPU) for t in batch.targets_N]
    expected = [100 * i + t for i, row in enumerate(rows) for t, w in enumerate(row) if w and t > 0]
    assert sorted(seen) == expected


@settings(deadline=None)
@given(st.lists(weights, max_size=12), st.integers(1, 30))
def test_the_budget_holds_except_for_a_sequence_that_is_longer_alone(rows: list[list[float]], budget: int) -> None:
    for batch in split([sample(row) for row in rows], budget, CPU):
        assert batch.ids_BT.numel() <= budget or len(batch.samples) == 1


def test_what_follows_the_last_weighted_token_is_not_computed() -> None:
    [batch] = split([sample([0, 1, 0, 0, 0])], 100, CPU)
    assert batch.ids_BT.tolist() == [[0, 1]]


def test_values_follow_their_tokens_through_sorting_and_padding() -> None:
    samples = [sample([0, 0, 0, 1], 10), sample([0, 1], 20), sample([0, 1, 1], 30)]
    [batch] = split(samples, 100, CPU)
    values = [np.arange(len(s.tokens_T)) + 1000.0 * i for i, s in enumerate(samples)]
    assert batch.targets_N.tolist() == [21, 31, 32, 13]
    assert batch.pick(values, torch.float64).tolist() == [1001.0, 2001.0, 2002.0, 3.0]


def test_a_filler_has_no_weighted_token() -> None:
    batch = filler(CPU)
    assert len(batch.targets_N) == 0
    assert len(batch.pick([], torch.float64)) == 0
