"""Tells growth of a series of samples from noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DEVIATIONS = 3.0
"""Number of standard deviations that count as noise."""


@dataclass(frozen=True)
class Trend:
    """Growth and noise of a series from its first to its last sample, in its unit."""

    growth: float
    """Rise of the line through the samples."""
    noise: float
    """Rise that is no finding."""

    @property
    def grows(self) -> bool:
        return self.growth > self.noise


def trend(times: Sequence[float], values: Sequence[float], resolution: float) -> Trend:
    """Fit a line by Theil and Sen: the median of the slopes of all pairs, which no peak moves.

    Noise is `DEVIATIONS` standard deviations of the distances from the line, estimated from their
    median.

    Args:
        times: of the samples, ascending, shape [N].
        values: as many.
        resolution: least noise.
    """
    t_N, v_N = np.asarray(times, np.float64), np.asarray(values, np.float64)
    first, second = np.triu_indices(len(t_N), 1)
    slope = float(np.median((v_N[second] - v_N[first]) / (t_N[second] - t_N[first])))
    distances_N = v_N - slope * t_N
    deviation = 1.4826 * float(np.median(np.abs(distances_N - np.median(distances_N))))
    return Trend(slope * float(t_N[-1] - t_N[0]), max(DEVIATIONS * deviation, resolution))
