"""Deltas against the definition: after a patch, every bit is that of the new version."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.weights.delta import encode, encoded_bytes, patch

UNSIGNED = [np.uint8, np.uint16, np.uint32, np.uint64]


def delta_between(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    indices = np.array([i for i in range(len(old)) if old[i] != new[i]], np.int64)
    return encode(indices, new[indices])


@given(st.sampled_from(UNSIGNED), st.integers(0, 300), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_a_patched_copy_is_the_new_version_bit_for_bit(
    dtype: type[np.unsignedinteger[Any]], length: int, share: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    top = np.iinfo(dtype).max
    old = random.integers(top, size=length, dtype=dtype, endpoint=True)
    new = np.where(
        random.random(length) < share,
        random.integers(top, size=length, dtype=dtype, endpoint=True),
        old,
    )
    delta = delta_between(old, new)
    copy = old.copy()
    assert patch(copy, delta) == int((old != new).sum())
    np.testing.assert_array_equal(copy, new)
    assert len(delta) <= encoded_bytes(int((old != new).sum()), length, old.itemsize)


@pytest.mark.parametrize(
    "positions",
    [
        [],
        [0],
        [65534],
        [65535],
        [65536],
        [131070],
        [0, 65535, 200000],
        [199999, 200000],
        [262139, 262140],
    ],
)
def test_gaps_around_the_escape_are_exact(positions: list[int]) -> None:
    old = np.zeros(262144, np.uint16)
    new = old.copy()
    new[positions] = np.arange(1, len(positions) + 1)
    copy = old.copy()
    patch(copy, delta_between(old, new))
    np.testing.assert_array_equal(copy, new)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_two_percent_of_changed_elements_take_less_than_eight_percent_of_the_bytes(
    dtype: type[np.unsignedinteger[Any]],
) -> None:
    old = np.zeros(2_000_000, dtype)
    new = old.copy()
    new[np.random.default_rng(0).choice(len(old), len(old) // 50, replace=False)] = 7
    assert len(delta_between(old, new)) < 0.08 * old.nbytes
