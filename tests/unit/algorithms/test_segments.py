"""Ragged primitives against loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.algorithms.segments import (
    codes,
    discounted_suffix,
    last_of_each,
    owners,
    segment_sums,
    take_segments,
)

rows = st.lists(st.lists(st.tuples(st.floats(-3, 3), st.floats(0, 1)), max_size=9), max_size=6)


def offsets(values: list[list[tuple[float, float]]]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum([len(row) for row in values])]).astype(np.int64)


@given(rows)
def test_a_discounted_suffix_is_the_recurrence_from_the_back_of_each_segment(
    values: list[list[tuple[float, float]]],
) -> None:
    expected: list[float] = []
    for row in values:
        following, backwards = 0.0, []
        for value, decay in reversed(row):
            following = value + decay * following
            backwards.append(following)
        expected += backwards[::-1]
    cu = offsets(values)
    flat = np.array([pair for row in values for pair in row]).reshape(-1, 2)
    decays = np.where(last_of_each(cu), 0.0, flat[:, 1])
    np.testing.assert_allclose(
        discounted_suffix(flat[:, 0], decays, max(map(len, values), default=0)), expected, atol=1e-9
    )


@given(rows)
def test_sums_and_owners_know_empty_segments(values: list[list[tuple[float, float]]]) -> None:
    cu = offsets(values)
    flat = np.array([x for row in values for x, _ in row])
    np.testing.assert_allclose(
        segment_sums(flat, cu), [sum(x for x, _ in row) for row in values], atol=1e-9
    )
    assert owners(cu).tolist() == [n for n, row in enumerate(values) for _ in row]
    assert last_of_each(cu).tolist() == [
        i == len(row) - 1 for row in values for i in range(len(row))
    ]


@given(rows, st.data())
def test_taken_segments_keep_their_values(
    values: list[list[tuple[float, float]]], data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=4)) if values else []
    flat = np.array([x for row in values for x, _ in row])
    cu, positions = take_segments(offsets(values), np.array(chosen, np.int64))
    assert flat[positions].tolist() == [x for n in chosen for x, _ in values[n]]
    assert cu.tolist() == offsets([values[n] for n in chosen]).tolist()


@pytest.mark.parametrize("keys", [["b", "a", "b"], []])
def test_codes_number_equal_keys_equally(keys: list[str]) -> None:
    assert codes(np.array(keys, "S1")).tolist() == [sorted(set(keys)).index(key) for key in keys]
