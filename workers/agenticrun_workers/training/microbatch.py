"""Samples into padded micro-batches of about equal lengths, bounded by a token budget.

Right padding under causal attention needs no mask: a token never looks to its right. It is therefore exact and takes the
fastest attention kernel, and sorting by length keeps the waste small. (Packing with transformers' defaults is not exact.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agenticrun_workers.training.strategy import Sample


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B sequences padded to length T, and the N weighted tokens in them, ordered by sequence and position."""

    samples: list[int]
    """Index of each row's sample in the list that was split."""
    ids_BT: Tensor
    rows_N: Tensor
    columns_N: Tensor
    """Row and position of each weighted token; its prediction is read one position earlier."""

    @property
    def targets_N(self) -> Tensor:
        return self.ids_BT[self.rows_N, self.columns_N]

    def pick(self, values: list[np.ndarray], dtype: torch.dtype) -> Tensor:
        """One value per weighted token, [N], from arrays [T] of all samples in their original order."""
        flat = np.zeros(tuple(self.ids_BT.shape), np.float64)
        for row, sample in enumerate(self.samples):
            row_T = values[sample][: flat.shape[1]]
            flat[row, : len(row_T)] = row_T
        return torch.from_numpy(flat).to(self.ids_BT.device, dtype)[self.rows_N, self.columns_N]


def split(samples: list[Sample], max_tokens: int, device: torch.device) -> list[MicroBatch]:
    """Micro-batches of at most `max_tokens` padded tokens each; a longer sample is one of its own. Each sample is in one.

    What follows the last weighted token of a sequence is not computed. Samples without weighted tokens are left out.
    """
    lengths = {i: used for i, sample in enumerate(samples) if (used := _used(sample)) > 0}
    batches: list[list[int]] = []
    for i in sorted(lengths, key=lambda i: (lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[i] <= max_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return [_pad(samples, batch, max(lengths[i] for i in batch), device) for batch in batches]


def filler(device: torch.device) -> MicroBatch:
    """A micro-batch without weighted tokens, so that every rank can run the same number of them."""
    nothing = torch.zeros(0, dtype=torch.long, device=device)
    return MicroBatch([], torch.zeros(1, 2, dtype=torch.long, device=device), nothing, nothing)


def _used(sample: Sample) -> int:
    """Length up to the last weighted token; the first token has no prediction."""
    weighted = np.flatnonzero(sample.weight_T[1:])
    return int(weighted[-1]) + 2 if len(weighted) else 0


def _pad(samples: list[Sample], batch: list[int], length: int, device: torch.device) -> MicroBatch:
    ids = np.zeros((len(batch), length), np.int64)
    weighted = np.zeros((len(batch), length), np.bool_)
    for row, i in enumerate(batch):
        tokens_T = samples[i].tokens_T[:length]
        ids[row, : len(tokens_T)] = tokens_T
        weighted[row, 1 : len(tokens_T)] = samples[i].weight_T[1:length] != 0
    rows, columns = np.nonzero(weighted)
    return MicroBatch(batch, torch.from_numpy(ids).to(device), torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device))
