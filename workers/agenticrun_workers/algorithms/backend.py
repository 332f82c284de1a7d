"""Runs token passes over all trajectories: compiled and in threads where numba is installed, else in NumPy."""

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
"""Tokens from which threads pay."""


def run(name: str, cu_N1: Integers, *arguments: Any) -> None:
    """The pass of this name over every trajectory, in as many threads as OMP_NUM_THREADS or the CPUs allow.

    Each trajectory is computed by one thread and written by nobody else: results do not depend on the number of threads.
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
    """[first, last) ranges that cover all trajectories, with about the same number of tokens each; at least one, maybe empty."""
    cuts = np.searchsorted(cu_N1, cu_N1[-1] * np.arange(1, parts) / parts)
    edges = [0, *(int(cut) for cut in cuts), len(cu_N1) - 1]
    ranges = [(first, last) for first, last in pairwise(edges) if last > first]
    return ranges or [(0, 0)]


def threads() -> int:
    """OMP_NUM_THREADS (Ray sets it to an actor's CPUs), else the CPUs of this process."""
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads(), "algorithms")
