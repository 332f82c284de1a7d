"""GPUs that are not there: tensors without data, and an error where the host would wait for them.

`fake_gpu` finds, without a GPU, most of what `torch.cuda.set_sync_debug_mode("error")` finds on
one, and operands on several devices too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda", 0)
UNKNOWN = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operations with results, or shapes of results, that the host reads from the GPU."""


class GpuWait(Exception):
    """The host waits until the GPU has done its work."""


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation that runs, after composite functions are taken apart."""

    def __init__(self, called: FakeGpu, largest: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._called, self._largest = called, largest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        tensors = [each for each in tree_leaves((args, given)) if isinstance(each, Tensor)]
        if any(each.device.type == "cuda" for each in tensors):
            self._check_result(func, tensors)
        if func is torch.ops.aten.copy_.default:
            waits = not given.get("non_blocking", len(args) > 2 and args[2])
            self._check_copy(func, args[1], args[0].device, waits=waits)
        if func is torch.ops.aten._to_copy.default:
            target = given.get("device") or args[0].device
            self._check_copy(func, args[0], target, waits=not given.get("non_blocking"))
        result = func(*args, **given)
        self._called.launches += _launches(func, [*tensors, *tree_leaves(result)])
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.device.type == "cuda" and each.itemsize == 8:
                assert each.numel() < self._largest, f"{func}: {each.dtype} {tuple(each.shape)}"
        return result

    def _check_result(self, func: Any, tensors: list[Tensor]) -> None:
        # Indexing counts as unknown because it may be by a mask.
        indexes = func.name().startswith("aten::index")
        masks = [each for each in tensors[1:] if each.dtype == torch.bool]
        if (UNKNOWN & set(func.tags) and not indexes) or (indexes and masks):
            raise GpuWait(f"{func} reads values of a tensor on the GPU")

    def _check_copy(self, func: Any, source: Tensor, target: torch.device, *, waits: bool) -> None:
        pinned = any(source is each for each in self._called.pinned)
        if source.device.type != target.type and (waits or not pinned):
            raise GpuWait(
                f"{func} copies {tuple(source.shape)} from {source.device} to {target}, "
                f"{'blocking' if waits else 'in memory that is not pinned'}"
            )


def _launches(func: Any, tensors: list[Any]) -> int:
    """Return the number of kernels and copies that an operation launches on the GPU."""
    on_gpu = [each for each in tensors if isinstance(each, Tensor) and each.device.type == "cuda"]
    if not on_gpu or func.is_view or func.namespace == "prim" or "empty" in func.name():
        return 0
    # A cumulative sum of another type casts first.
    casts = func.name().startswith("aten::cumsum") and len({each.dtype for each in on_gpu}) > 1
    return 2 if casts else 1


class FakeGpu(TorchFunctionMode):
    """Operations that FakeTensorMode lacks: pinned memory, and lists of the values of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[Tensor] = []
        self.lists: list[tuple[int, ...]] = []
        """Shapes of the tensors on the GPU that were copied into lists."""
        self.launches = 0
        """Kernels and copies so far, by the operations that launch them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.pin_memory:
            self.pinned.append(args[0])
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_gpu(largest: int, mode: FakeTensorMode | None = None) -> Iterator[FakeGpu]:
    """Compute on tensors without data in the `with` block, those on the device `CUDA` included.

    Args:
        largest: number of elements from which a tensor of 8 bytes each is an error.
        mode: in which a model was made before.

    Raises:
        GpuWait: the host would wait for the GPU, other than in `Tensor.tolist`.
    """
    called = FakeGpu()

    def tolist(tensor: Tensor) -> list[Any]:
        called.lists.append(tuple(tensor.shape))
        values: list[Any] = np.zeros(tensor.shape).tolist()
        return values

    # The launch of a kernel that NVRTC compiles needs real tensors. Its result is of their type.
    one_kernel = patch.object(torch.cuda.jiterator, "_create_jit_fn", lambda _: torch.add)
    with (
        patch.object(FakeTensor, "tolist", tolist),
        one_kernel,
        mode or FakeTensorMode(),
        _Operations(called, largest),
        called,
    ):
        yield called
