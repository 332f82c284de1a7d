"""How kernels are compiled: without the interpreter lock, and kept on disk where a folder for that can be written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compiled by numba, every operation in the order that it is written in."""
    return cast(F, _compile(function, fastmath=False))


def compiled_in_lanes(function: F) -> F:
    """The same, but sums may be taken in lanes: the same bits at every call, not those of the plain loop."""
    return cast(F, _compile(function, fastmath={"reassoc"}))


def _compile(function: Callable[..., Any], **options: Any) -> Any:
    try:
        return numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # numba found no writable folder
        return numba.njit(nogil=True, **options)(function)
