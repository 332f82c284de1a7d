"""The controller of the KL coefficient."""

from __future__ import annotations

import numpy as np
import pytest

from agenticrun_workers.algorithms import KlController, mean_kl


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.1, 0.2),
        (0.11, 0.2 * (1 + 0.1 * 64 / 1000)),
        (9.0, 0.2 * (1 + 0.2 * 0.064)),
        (0.0, 0.2 * (1 - 0.2 * 0.064)),
    ],
)
def test_the_coefficient_follows_the_relative_error_held_to_a_fifth(
    kl: float, expected: float
) -> None:
    assert KlController(0.2, target=0.1, horizon=1000).updated(kl, 64).coef == pytest.approx(
        expected
    )


def test_without_a_target_the_coefficient_stays() -> None:
    assert KlController(0.2).updated(99.0, 64) == KlController(0.2)


def test_the_controller_steers_towards_its_target() -> None:
    controller = KlController(0.001, target=0.1, horizon=100)
    for _ in range(2000):
        controller = controller.updated(kl=0.05 / (controller.coef + 0.1), samples=10)
    assert controller.coef == pytest.approx(0.4, rel=0.01)


def test_mean_kl_is_per_token_of_each_trajectory_that_spoke() -> None:
    kl = mean_kl(np.array([1.0, 3.0, 0.0, 6.0]), np.array([1, 3, 0, 2]), np.array([0, 2, 3, 4, 4]))
    assert kl == pytest.approx((4 / 4 + 6 / 2) / 2)
    assert mean_kl(np.zeros(0), np.zeros(0, np.int64), np.array([0])) == 0.0
