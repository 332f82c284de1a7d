"""What policy, reference and critic share on one rank: the sharded module, micro-batches and sums over all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from agenticrun_workers.algorithms.aggregation import StepTotals
from agenticrun_workers.trainer.micro_batch import MicroBatch, Positions, filler, split
from agenticrun_workers.trainer.modules import PolicyModule, ValueModule
from agenticrun_workers.trainer.options import DEFAULTS, FsdpOptions
from agenticrun_workers.trainer.over_ranks import balance, step_totals
from agenticrun_workers.trainer.packing import can_pack
from agenticrun_workers.trainer.ranks import Ranks
from agenticrun_workers.trainer.strategy import Sample
from agenticrun_workers.trainer.ulysses import UlyssesSequences

log = logging.getLogger(__name__)

Module = TypeVar("Module", PolicyModule, ValueModule)


class TorchBackend(Generic[Module]):
    """Plain torch on one rank, fully sharded data parallelism (FSDP2) on more.

    With more than one rank `torch.distributed` must be initialised before. Every rank must bring the same weights.

    Args:
        module: put into evaluation mode: without dropout, log-probs are a function of the weights.
        max_tokens: tokens of one micro-batch, padding included.
        packing: several sequences in a row, if the model proves to keep them apart; else this says so and pads.
        dtype: to compute in; default: the parameters', which keep theirs in any case.
        shard: False leaves the module as it is: the caller makes the ranks' gradients one.

    Raises:
        UnsupportedModel: the model does not bear the options.
        ValueError: the options do not fit the number of ranks.
    """

    def __init__(
        self,
        module: Module,
        *,
        max_tokens: int,
        packing: bool,
        dtype: torch.dtype | None = None,
        options: FsdpOptions = DEFAULTS,
        shard: bool = True,
    ) -> None:
        module.eval()
        parameter = next(module.parameters())
        self.module: Module = module
        self.device = parameter.device
        self.dtype = dtype or parameter.dtype
        self.ranks = Ranks(self.device, options.ulysses_sequence_parallel_size)
        self.packing = packing and can_pack(module.decoder)
        if packing and not self.packing:
            log.warning(
                "%s mixes packed sequences: training goes on with padding",
                type(module.decoder).__name__,
            )
        self._max_tokens = max_tokens
        self.home = torch.device("cpu") if options.offload_policy else self.device
        if options.ulysses_sequence_parallel_size > 1:
            module.sequences = UlyssesSequences(module.decoder, self.ranks, packed=self.packing)
        names = module.decoder._no_split_modules or ()
        layers = [part for part in module.modules() if type(part).__name__ in names]
        if options.gradient_checkpointing:
            for layer in layers:  # transformers' own checkpoints nothing in evaluation mode
                layer.forward = partial(
                    checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
                )
        if shard:
            self.ranks.shard(module, layers, self.dtype, options)

    def micro_batches(
        self, samples: list[Sample], select: Callable[[Sample], Positions]
    ) -> list[MicroBatch]:
        """This rank's micro-batches, filled up to the number of the rank that has most. Collective."""
        batches = split(samples, select, self._max_tokens, self.device, packed=self.packing)
        most = int(self.ranks.max([float(len(batches))])[0])
        return batches + [filler(self.device)] * (most - len(batches))

    def totals(self, samples: list[Sample]) -> StepTotals:
        """The denominators of an optimizer step on all ranks' samples. Collective."""
        return step_totals(samples, self.ranks.sum)

    def balance(self, batches: list[MicroBatch]) -> dict[str, float]:
        """How evenly the tokens lie: the share of computed ones that was padding, and the fullest rank's over the mean. Collective."""
        return balance(batches, self.ranks.data_size, self.ranks.sum, self.ranks.max)

    def reshard(self) -> None:
        """Free the parameters that a forward pass gathered and no backward pass followed. Until then they hide the master weights."""
        for unit in self.module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()

    def offload(self) -> None:
        """Leave the device's memory to an engine. Nothing can be computed until `onload`."""
        self.reshard()
        self.module.to("cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Come back to the device."""
        self.module.to(self.home)
