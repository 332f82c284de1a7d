"""Stubs for SGLang's compiled kernels, which exist for GPUs only.

On a CPU SGLang computes with plain torch, but some of its modules import names from here. Each name
is a function that raises if it is called.
"""

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} exists for GPUs only")

    return missing
