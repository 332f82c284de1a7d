"""Forward and backward passes over micro-batches, by Megatron's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from agenticrun_workers.trainer.megatron.model import even_rows
from agenticrun_workers.trainer.micro_batch import MicroBatch

PartLoss = Callable[[MicroBatch, Tensor, Tensor], Tensor]
"""A micro-batch's part of the loss, from its log-probs and entropies, [N] each. Called on the last stage only."""


class Passes:
    """Runs the model of all stages; the calls are collective over the ranks of a data rank, gradients over all.

    Args:
        config: the module's; gets the functions that Megatron's schedules call back.
        row_multiple: what the length of a row must be a multiple of.
    """

    def __init__(
        self, module: DistributedDataParallel, config: TransformerConfig, row_multiple: int
    ) -> None:
        self._module = module
        self._row_multiple = row_multiple
        config.no_sync_func = module.no_sync
        config.finalize_model_grads_func = _finalize

    def backward(self, batches: list[MicroBatch], temperature: float, loss: PartLoss) -> None:
        """Add the gradient of the parts' sum, summed over data ranks, to the parameters'."""

        def part(batch: MicroBatch, scores_2N: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            total = loss(batch, *scores_2N)
            return total, torch.zeros((), dtype=torch.int, device=total.device), {}

        self._run(batches, temperature, part, forward_only=False)

    @torch.no_grad()
    def forward(
        self,
        batches: list[MicroBatch],
        temperature: float,
        read: Callable[[MicroBatch, Tensor], None],
    ) -> None:
        """Show `read` the log-probs [N] of each micro-batch, on the last stage only."""

        def part(batch: MicroBatch, scores_2N: Tensor, **_: bool) -> None:
            read(batch, scores_2N[0])

        self._run(batches, temperature, part, forward_only=True, collect_non_loss_data=True)

    def _run(
        self,
        batches: list[MicroBatch],
        temperature: float,
        part: Callable[..., Any],
        **options: bool,
    ) -> None:
        even = [even_rows(batch, self._row_multiple) for batch in batches]

        def step(
            batches_left: Iterator[MicroBatch], module: DistributedDataParallel
        ) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(batches_left)
            return module(batch, temperature), lambda scores_2N, **named: part(
                batch, scores_2N, **named
            )

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(even),
            model=[self._module],
            num_microbatches=len(even),
            seq_length=self._row_multiple,  # unused: every micro-batch has its own
            micro_batch_size=1,
            **options,
        )


def _finalize(module: list[DistributedDataParallel], _: Tensor | None, **options: Any) -> None:
    """Megatron's sums over ranks, without its division by a number of tokens: ours is in the loss."""
    finalize_model_grads(module, None, **options)
