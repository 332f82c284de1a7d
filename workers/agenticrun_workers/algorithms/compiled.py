"""Compilation of kernels by numba.

Compiled code runs without the interpreter lock, and is kept on disk if a folder for it is writable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

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
