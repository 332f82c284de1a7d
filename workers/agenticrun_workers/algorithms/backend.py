"""Runner of token passes over all trajectories.

The passes are compiled and run in threads if numba is installed, else they run in NumPy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np

from agenticrun_workers.algorithms import plain
from agenticrun_workers.algorithms.segments import Integers

try:
    from agenticrun_workers.algorithms import kernels

    passes: ModuleType = kernels
except ModuleNotFoundError as error:
    if error.name != "numba":
        raise
    passes = plain

SERIAL_BELOW = 200_000
"""Number of tokens from which threads are worth their cost."""


def run(name: str, cu_N1: Integers, *arguments: Any) -> None:
    """Run a pass over every trajectory, in up to `threads()` threads.

    One thread computes and writes each trajectory, so results do not depend on the number of
    threads.

    Args:
        name: of the function in `kernels` or `plain`.
        cu_N1: offsets of the trajectories.
        arguments: of the function, after `cu_N1`.
    """
    function: Callable[..., None] = getattr(passes, name)
    workers = 1 if passes is plain or cu_N1[-1] < SERIAL_BELOW else threads()
    ranges = even_ranges(cu_N1, workers)
    if len(ranges) == 1:
        function(*ranges[0], cu_N1, *arguments)
        return
    for future in [
        _pool().submit(function, first, last, cu_N1, *arguments) for first, last in ranges
    ]:
        future.result()


def even_ranges(cu_N1: Integers, parts: int) -> list[tuple[int, int]]:
    """Return ranges [first, last) that cover all trajectories.

    They hold about the same number of tokens each. There is at least one, which may be empty.
    """
    cuts = np.searchsorted(cu_N1, cu_N1[-1] * np.arange(1, parts) / parts)
    edges = [0, *(int(cut) for cut in cuts), len(cu_N1) - 1]
    ranges = [(first, last) for first, last in pairwise(edges) if last > first]
    return ranges or [(0, 0)]


def threads() -> int:
    """Return OMP_NUM_THREADS (Ray sets it to an actor's CPUs), else the CPUs of this process."""
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads(), "algorithms")
