"""A device's memory left to someone else for a while."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage


class Parked:
    """The contents of tensors, kept in host memory while they have none on their device. Views of one storage stay views of it."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {
            storage.data_ptr(): storage
            for storage in (tensor.untyped_storage() for tensor in tensors)
            if storage.nbytes()
        }
        self._kept: list[tuple[UntypedStorage, UntypedStorage]] = []
        for storage in storages.values():
            kept = torch.UntypedStorage(storage.nbytes(), device="cpu")  # type: ignore[no-untyped-call]
            kept.copy_(storage, False)
            self._kept.append((storage, kept))
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Give every tensor its memory and contents back."""
        for storage, kept in self._kept:
            storage.resize_(kept.nbytes())
            storage.copy_(kept, False)
        self._kept = []
