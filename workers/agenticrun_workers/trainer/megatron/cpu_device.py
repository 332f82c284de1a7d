"""Megatron-Core on a machine without CUDA.

Megatron's own code names the device "cuda". Inside `megatron_device()` such tensors are made on the
CPU, and the few calls of `torch.cuda` that training reaches do nothing. With CUDA the context
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


@contextmanager
def megatron_device() -> Iterator[None]:
    """Enter the context in which Megatron may be called. It applies to the current thread."""
    if torch.cuda.is_available():
        yield
        return
    replaced: list[tuple[Any, str, object]] = [
        (torch.cuda, "current_device", lambda: CPU),
        (torch.cuda, "synchronize", lambda *_: None),
        (random, "_CUDA_RNG_STATE_TRACKER", _NoTracker()),
        (random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True),
        (random, "_get_cuda_rng_state", lambda *_, **__: torch.zeros(0)),
        (random, "_set_cuda_rng_state", lambda *_, **__: None),
    ]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        with _CudaIsCpu():
            yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


class _CudaIsCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0]
        if (
            func is Tensor.type and len(args) == 1 and not kwargs
        ):  # Megatron compares names of types: torch.cuda.FloatTensor
            return str(func(*args)).replace("torch.", "torch.cuda.")
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if func is Tensor.to:
            args = tuple(CPU if _is_cuda(value) else value for value in args)
        return func(*args, **kwargs)


class _NoTracker(random.CudaRNGStatesTracker):  # type: ignore[misc]  # Megatron's functions have no types
    """Tracker of random states that does nothing: dropout is off."""

    def fork(self, _: str = "") -> nullcontext[None]:
        return nullcontext()


def _is_cuda(device: object) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")
