"""Ulysses sequence parallelism: a group of ranks computes each sequence together.

Source: Jacobs et al. 2023, arXiv 2309.14509. Each rank holds a piece of every row, and all layers
work on pieces. Only attention needs whole rows: an all-to-all before it exchanges pieces of all
heads for whole rows of some heads, and another one after it reverses the exchange.

The group combines its log-probs, so that each rank can compute the loss of whole sequences. The
gradient of a rank's own log-probs flows into its piece, and the gradients of the parameters are
summed over the ranks as under data parallelism.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel
from typing_extensions import override

from agenticrun_workers.models.heads import UnsupportedModel
from agenticrun_workers.trainer.micro_batch import Bounds, MicroBatch
from agenticrun_workers.trainer.modules import (
    Sequences,
    packed_probe,
    probe_bounds,
    probe_tolerance,
)
from agenticrun_workers.trainer.ranks import Ranks
from agenticrun_workers.trainer.varlen import Rows, use_varlen


class UlyssesSequences(Sequences):
    """`Sequences` for a decoder with the attention of this module. Collective to construct.

    It replaces the decoder's attention.

    Args:
        device: of the computation.
        packed: rows will hold several sequences.

    Raises:
        UnsupportedModel: the number of heads, the implementation of attention or the structure of
            the model is not supported.
    """

    def __init__(
        self, decoder: PreTrainedModel, ranks: Ranks, device: torch.device, *, packed: bool
    ) -> None:
        self._size = ranks.size // ranks.data_size
        self._place = ranks.group_rank
        mesh = init_device_mesh(
            device.type, (ranks.data_size, self._size), mesh_dim_names=("data", "sequence")
        )
        self._group = mesh["sequence"].get_group()
        kernel, heads = str(decoder.config._attn_implementation), decoder.config.num_attention_heads
        if kernel != "sdpa":
            raise UnsupportedModel(
                f"ulysses_sequence_parallel_size needs the attention sdpa, not {kernel}"
            )
        if heads % self._size:
            raise UnsupportedModel(
                f"ulysses_sequence_parallel_size {self._size} does not divide "
                f"the {heads} attention heads"
            )
        self._check(decoder, ranks, device, packed)

    @override
    def hidden(self, decoder: PreTrainedModel, batch: MicroBatch) -> Tensor:
        pieces_BtH = self._pieces(decoder, batch.ids_BT, batch.position_ids_BT, batch.bounds)
        mine_n = self._mine(batch)
        return pieces_BtH[
            batch.rows_N[mine_n], batch.columns_N[mine_n] - self._place * pieces_BtH.shape[1]
        ]

    @override
    def real(self, batch: MicroBatch) -> Tensor:
        width = self._piece(batch.ids_BT.shape[1])
        padded_BT = nn.functional.pad(
            batch.real_BT, (0, width * self._size - batch.ids_BT.shape[1])
        )
        return padded_BT[:, self._place * width : (self._place + 1) * width].flatten()

    @override
    def mine(self, batch: MicroBatch, values_N: Tensor) -> Tensor:
        return values_N[self._mine(batch)]

    @override
    def all(self, batch: MicroBatch, values_n: Tensor) -> Tensor:
        placed_N = values_n.new_zeros(len(batch.columns_N)).index_copy(
            0, self._mine(batch), values_n
        )
        total_N: Tensor = _Sum.apply(placed_N, self._group)
        return total_N

    def _piece(self, batch_width: int) -> int:
        return math.ceil(batch_width / self._size)

    def _mine(self, batch: MicroBatch) -> Tensor:
        """Return the indices [n] of selected tokens with a prediction in this rank's piece."""
        return (batch.columns_N // self._piece(batch.ids_BT.shape[1]) == self._place).nonzero()[
            :, 0
        ]

    def _pieces(
        self,
        decoder: PreTrainedModel,
        ids_BT: Tensor,
        position_ids_BT: Tensor | None,
        bounds: Bounds,
    ) -> Tensor:
        """Return the last hidden states [B, t, H] of this rank's piece of each row.

        The last piece is padded.
        """
        width = self._piece(ids_BT.shape[1])
        padding = width * self._size - ids_BT.shape[1]
        positions_BT = torch.arange(width * self._size, device=ids_BT.device).expand(
            len(ids_BT), -1
        )
        if position_ids_BT is not None:
            positions_BT = torch.cat([position_ids_BT, positions_BT[:, ids_BT.shape[1] :]], 1)
        ids_BT = nn.functional.pad(ids_BT, (0, padding))
        piece = slice(self._place * width, (self._place + 1) * width)
        output = decoder(
            input_ids=ids_BT[:, piece],
            position_ids=positions_BT[:, piece],
            use_cache=False,
            rows=Rows.of(bounds, (len(ids_BT), ids_BT.shape[1]), ids_BT.device, self._group),
        )
        pieces_BtH: Tensor = output.last_hidden_state
        return pieces_BtH

    @torch.no_grad()
    def _check(
        self, decoder: PreTrainedModel, ranks: Ranks, device: torch.device, packed: bool
    ) -> None:
        """Replace the attention, and check that pieces have the same hidden states as whole rows.

        A model may compute attention in a way of its own that pieces break.
        """
        ids, packed_positions = packed_probe(decoder, device)
        positions = packed_positions if packed else None
        whole_TH: Tensor = decoder(
            input_ids=ids, position_ids=positions, use_cache=False
        ).last_hidden_state[0]
        use_varlen(decoder)
        width = self._piece(ids.shape[1])
        mine_tH = whole_TH[self._place * width : (self._place + 1) * width]
        bounds = probe_bounds() if packed else ((0, 0, ids.shape[1]),)
        found_tH = self._pieces(decoder, ids, positions, bounds)[0, : len(mine_tH)]
        off = float((found_tH - mine_tH).abs().max()) if len(mine_tH) else 0.0
        if ranks.max([off])[0] > probe_tolerance(whole_TH):
            raise UnsupportedModel(
                f"{type(decoder).__name__} does not give the same in pieces: "
                "leave ulysses_sequence_parallel_size out"
            )


class _Sum(torch.autograd.Function):
    """Sum over the group, with the gradient of this rank's own term.

    Every rank computes the same loss from the sum, and the loss counts once.
    """

    @staticmethod
    def forward(ctx: Any, values_N: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ARG004
        total_N = values_N.clone()
        dist.all_reduce(total_N, group=group)
        return total_N

    @staticmethod
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return gradient_N, None
