"""The compiled kernels: equal to their NumPy definition, for any number of threads."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import numpy_kernels
from agenticrun_workers.algorithms import (
    CorrectionSpec,
    FilterSpec,
    TokenAdvantages,
    Tokens,
    TokenSpec,
    WeightSpec,
    compiled,
)
from agenticrun_workers.algorithms.correction import fast_exp
from agenticrun_workers.algorithms.token_advantages import token_advantages

SPEC = TokenSpec(
    "gae",
    0.99,
    0.95,
    True,
    "k3",
    whiten_advantages=True,
    correction=CorrectionSpec(WeightSpec(), (FilterSpec("segment", 0.9, 1.1),)),
)


def many_tokens() -> tuple[Tokens, np.ndarray]:
    """97 trajectories of different lengths, enough tokens for threads."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 6000, 97)
    turns = [np.where(np.arange(n) % 7 > 2, np.arange(n) // 70, -1) for n in lengths]
    firsts = np.concatenate([[0], np.cumsum([row.max(initial=-1) + 1 for row in turns])])
    turns_L = np.concatenate(
        [np.where(row >= 0, row + first, -1) for row, first in zip(turns, firsts, strict=False)]
    ).astype(np.int32)
    size = len(turns_L)
    assert size > compiled.SERIAL_BELOW
    old = -rng.random(size, np.float32)
    cu = np.concatenate([[0], np.cumsum(lengths)])
    others = [(old + 0.1 * rng.standard_normal(size)).astype(np.float32) for _ in range(3)]
    tokens = Tokens(
        cu,
        cu,
        turns_L,
        rng.random(97) < 0.8,
        others[0],
        old,
        others[1],
        others[2],
        rng.standard_normal(97),
    )
    return tokens, rng.standard_normal(int(firsts[-1]))


def run() -> TokenAdvantages:
    tokens, per_turn = many_tokens()
    return token_advantages(SPEC, tokens, per_turn, 0.1, lambda sums: sums)


def test_any_number_of_threads_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for threads in ("1", "2", "5"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        results.append(run())
    for other in results[1:]:
        np.testing.assert_array_equal(other.advantages_L, results[0].advantages_L)
        assert other.metrics == results[0].metrics


def test_numpy_and_numba_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    numba = run()
    numpy_kernels.use_numpy(monkeypatch)
    numpy = run()
    np.testing.assert_array_equal(numpy.mask_L, numba.mask_L)
    assert numpy.returns_L is not None
    assert numba.returns_L is not None
    assert numpy.weights_L is not None
    assert numba.weights_L is not None
    np.testing.assert_allclose(numpy.advantages_L, numba.advantages_L, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(numpy.returns_L, numba.returns_L, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(numpy.weights_L, numba.weights_L, rtol=1e-6)
    assert numpy.metrics == pytest.approx(numba.metrics, rel=1e-9)


@given(st.floats(-708, 709))
def test_the_vectorised_exponential_is_right_to_thirteen_digits(x: float) -> None:
    assert fast_exp(x) == pytest.approx(math.exp(x), rel=1e-13)


@pytest.mark.parametrize(("x", "expected"), [(float("-inf"), 0.0), (-800.0, 0.0)])
def test_the_vectorised_exponential_of_what_has_no_double_is_nothing(
    x: float, expected: float
) -> None:
    assert fast_exp(x) == pytest.approx(expected, abs=1e-300)


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 6))
def test_ranges_cover_every_trajectory_once(lengths: list[int], parts: int) -> None:
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ranges = compiled.even_ranges(cu, parts)
    assert [n for first, last in ranges for n in range(first, last)] == list(range(len(lengths)))
    assert len(ranges) <= max(parts, 1)
