"""What policy, reference and critic share on one rank: the sharded module, micro-batches and sums over all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

from agenticrun_workers.algorithms.aggregation import StepTotals
from agenticrun_workers.training.microbatch import MicroBatch, Positions, filler, split
from agenticrun_workers.training.modules import PolicyModule, ValueModule
from agenticrun_workers.training.packing import can_pack
from agenticrun_workers.training.ranks import Ranks
from agenticrun_workers.training.strategy import Sample

log = logging.getLogger(__name__)

Module = TypeVar("Module", PolicyModule, ValueModule)


class TorchBackend(Generic[Module]):
    """Plain torch on one rank, fully sharded data parallelism (FSDP2) on more.

    With more than one rank `torch.distributed` must be initialised before. Every rank must bring the same weights.

    Args:
        module: put into evaluation mode: without dropout, log-probs are a function of the weights.
        max_tokens: tokens of one micro-batch, padding included.
        packing: several sequences in a row, if the model proves to keep them apart; else this says so and pads.
    """

    def __init__(self, module: Module, *, max_tokens: int, packing: bool) -> None:
        module.eval()
        self.module: Module = module
        self.device = next(module.parameters()).device
        self.ranks = Ranks(self.device)
        self.packing = packing and can_pack(module.decoder)
        if packing and not self.packing:
            log.warning("%s mixes packed sequences: training goes on with padding", type(module.decoder).__name__)
        self._max_tokens = max_tokens
        names = module.decoder._no_split_modules or ()
        self.ranks.shard(module, [part for part in module.modules() if type(part).__name__ in names])

    def micro_batches(self, samples: list[Sample], select: Callable[[Sample], Positions]) -> list[MicroBatch]:
        """This rank's micro-batches, filled up to the number of the rank that has most. Collective."""
        batches = split(samples, select, self._max_tokens, self.device, packed=self.packing)
        most = int(self.ranks.max([float(len(batches))])[0])
        return batches + [filler(self.device)] * (most - len(batches))

    def totals(self, samples: list[Sample]) -> StepTotals:
        """The denominators of an optimizer step on all ranks' samples. Collective."""
        weights = [float(sample.weight_T[1:].sum(dtype=np.float64)) for sample in samples]
        weight, sequences = self.ranks.sum([sum(weights), float(sum(w > 0 for w in weights))])
        return StepTotals(weight, sequences)

    def padding_waste(self, batches: list[MicroBatch]) -> float:
        """Share of all ranks' computed tokens that were padding. Collective."""
        used, computed = self.ranks.sum([float(sum(b.used for b in batches)), float(sum(b.ids_BT.numel() for b in batches))])
        return 1 - used / computed if computed else 0.0
