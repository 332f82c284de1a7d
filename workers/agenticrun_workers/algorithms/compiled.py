"""Compilation of kernels by numba, and their run over many trajectories in threads.

Compiled code runs without the interpreter lock, and is kept on disk if a folder for it is writable.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar, cast

import numba
import numpy as np

from agenticrun_workers.algorithms.segments import Integers

SERIAL_BELOW = 200_000
"""Number of tokens from which threads are worth their cost."""

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile a function; operations keep the order in which they are written."""
    return cast(F, _compile(function, fastmath=False))


def compiled_in_lanes(function: F) -> F:
    """Compile a function, with sums that may be split into vector lanes.

    The result has the same bits at every call, but not those of the plain loop.
    """
    return cast(F, _compile(function, fastmath={"reassoc"}))


def _compile(function: Callable[..., Any], **options: Any) -> Any:
    try:
        return numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # numba found no writable folder
        return numba.njit(nogil=True, **options)(function)


def run(kernel: Callable[..., None], cu_N1: Integers, *arguments: Any) -> None:
    """Run a kernel over every trajectory, in up to `threads()` threads.

    One thread computes and writes each trajectory, so results do not depend on the number of
    threads.

    Args:
        kernel: called as kernel(first, last, cu_N1, *arguments); it writes the results of the
            trajectories [first, last) and of no others.
        cu_N1: offsets of the trajectories.
        arguments: arrays and numbers of the kernel.
    """
    # Below that, starting threads takes longer than the work.
    workers = 1 if cu_N1[-1] < SERIAL_BELOW else threads()
    ranges = even_ranges(cu_N1, workers)
    if len(ranges) == 1:
        kernel(*ranges[0], cu_N1, *arguments)
        return
    for future in [
        _pool().submit(kernel, first, last, cu_N1, *arguments) for first, last in ranges
    ]:
        future.result()


def even_ranges(cu_N1: Integers, parts: int) -> list[tuple[int, int]]:
    """Return ranges [first, last) that cover all trajectories.

    They hold about the same number of tokens each. There is at least one, which may be empty.
    """
    # By tokens, not by trajectories: one long trajectory may equal many short ones.
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
