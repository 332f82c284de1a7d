"""How kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compiled by numba without the interpreter lock, and kept on disk where a folder for that can be written."""
    try:
        return cast(F, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:  # numba found no writable folder
        return cast(F, numba.njit(nogil=True)(function))
