"""Random numbers that depend only on a request's seed and the token's index: splitmix64.

The embedded engine has the same. Servers have this file on their PYTHONPATH, so it imports nothing
of ours. Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds_B: NDArray[np.uint64], indices_B: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, index), float64 [B]."""
    with np.errstate(over="ignore"):
        mixed_B = _mix(_mix(seeds_B + _GAMMA) + (indices_B + np.uint64(1)) * _GAMMA)
    return (mixed_B >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state_B: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state_B = (state_B ^ (state_B >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state_B = (state_B ^ (state_B >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state_B ^ (state_B >> np.uint64(31))
