"""The soak tells a leak from noise (benchmarks/trend.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
MINUTES = np.arange(0, 20, 1 / 12)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def grows(values: np.ndarray) -> bool:
    from trend import trend

    return trend(MINUTES.tolist(), values.tolist(), resolution=1.0).grows


def noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(100.0, 2.0, len(MINUTES))


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_grow_and_a_leak_of_a_few_deviations_does(seed: int) -> None:
    assert not grows(noise(seed))
    assert grows(noise(seed) + 8.0 * MINUTES / MINUTES[-1])
    assert not grows(noise(seed) - 8.0 * MINUTES / MINUTES[-1])


def test_peaks_are_no_leak_also_if_they_come_late() -> None:
    peaks = np.where(np.arange(len(MINUTES)) % 10 == 9, 500.0, 0.0) * (MINUTES[-1] / 2 < MINUTES)
    assert not grows(noise(0) + peaks)


def test_a_thread_that_stays_behind_every_four_minutes_is_a_leak_and_one_alone_is_not() -> None:
    assert grows(10 + np.floor(MINUTES / 4))
    assert not grows(np.where(MINUTES[-1] / 3 < MINUTES, 11.0, 10.0))
