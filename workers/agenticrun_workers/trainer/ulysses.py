"""Ulysses sequence parallelism: a group of ranks computes each sequence together.

Source: Jacobs et al. 2023, arXiv 2309.14509. Each rank holds a piece of every row, and all layers
work on pieces. Only attention needs whole rows: an all-to-all before it exchanges pieces of all
heads for whole rows of some heads, and another one after it reverses the exchange.

The group combines its log-probs, so that each rank can compute the loss of whole sequences. The
gradient of a rank's own log-probs flows into its piece, and the gradients of the parameters are
summed over the ranks as under data parallelism.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typing_extensions import override

from agenticrun_workers.models.heads import UnsupportedModel
from agenticrun_workers.trainer.micro_batch import MicroBatch
from agenticrun_workers.trainer.modules import Sequences, packed_probe, probe_tolerance
from agenticrun_workers.trainer.ranks import Ranks

NAME = "ulysses"
"""Name of the attention function in transformers."""
KERNELS = ("sdpa", "flash_attention_2")
"""Attention functions that work on any number of heads. (Eager ones belong to their models.)"""


@dataclass(frozen=True, slots=True)
class Rows:
    """Properties of whole rows, which the decoder passes to each layer's attention function."""

    group: dist.ProcessGroup
    attend: Callable[..., tuple[Tensor, Tensor | None]]
    position_ids_BT: Tensor | None
    """Position ids of the whole rows; None if every row is one sequence."""
    mask: Tensor | None
    """Mask of layers that attend to everything before a token; None: causal."""
    sliding_mask: Tensor | None
    """Mask of layers that attend to a window."""


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
        self._config: PretrainedConfig = copy.deepcopy(decoder.config)
        kernel, heads = str(self._config._attn_implementation), self._config.num_attention_heads
        if kernel not in KERNELS:
            raise UnsupportedModel(
                f"ulysses_sequence_parallel_size needs the attention "
                f"{' or '.join(KERNELS)}, not {kernel}"
            )
        if heads % self._size:
            raise UnsupportedModel(
                f"ulysses_sequence_parallel_size {self._size} does not divide "
                f"the {heads} attention heads"
            )
        self._attend = ALL_ATTENTION_FUNCTIONS[kernel]
        self._slides = "sliding_attention" in (getattr(self._config, "layer_types", None) or ())
        self._check(decoder, ranks, device, packed)

    @override
    def hidden(self, decoder: PreTrainedModel, batch: MicroBatch) -> Tensor:
        pieces_BtH = self._pieces(decoder, batch.ids_BT, batch.position_ids_BT)
        mine_n = self._mine(batch)
        return pieces_BtH[
            batch.rows_N[mine_n], batch.columns_N[mine_n] - self._place * pieces_BtH.shape[1]
        ]

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
        self, decoder: PreTrainedModel, ids_BT: Tensor, position_ids_BT: Tensor | None
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
            rows=self._rows(ids_BT, None if position_ids_BT is None else positions_BT),
        )
        pieces_BtH: Tensor = output.last_hidden_state
        return pieces_BtH

    def _rows(self, ids_BT: Tensor, positions_BT: Tensor | None) -> Rows:
        facts: dict[str, Any] = {
            "config": self._config,
            "inputs_embeds": torch.empty(*ids_BT.shape, 0, device=ids_BT.device),
            "attention_mask": None,
            "past_key_values": None,
            "position_ids": positions_BT,
        }
        sliding = create_sliding_window_causal_mask(**facts) if self._slides else None
        return Rows(self._group, self._attend, positions_BT, create_causal_mask(**facts), sliding)

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
        ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
        decoder.set_attn_implementation(NAME)
        width = self._piece(ids.shape[1])
        mine_tH = whole_TH[self._place * width : (self._place + 1) * width]
        found_tH = self._pieces(decoder, ids, positions)[0, : len(mine_tH)]
        off = float((found_tH - mine_tH).abs().max()) if len(mine_tH) else 0.0
        if ranks.max([off])[0] > probe_tolerance(whole_TH):
            raise UnsupportedModel(
                f"{type(decoder).__name__} does not give the same in pieces: "
                "leave ulysses_sequence_parallel_size out"
            )


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 (of pieces; `rows` has that of whole rows)
    *,
    rows: Rows | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention on whole rows, from pieces to pieces, in transformers' interface.

    Shapes: query, key and value [B, heads, t, D]; result [B, t, heads, D].
    """
    if rows is None:
        raise UnsupportedModel(
            f"{type(module).__name__} does not learn from its model how sequences are cut"
        )
    size = dist.get_world_size(rows.group)
    heads, few = query.shape[1], key.shape[1]
    repeats = size // math.gcd(
        few, size
    )  # so often each key-value head is sent, until every rank can get as many
    if repeats > 1:
        repeats = repeats if heads % (few * repeats) == 0 else heads // few
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    seen = module if repeats == 1 else _Grouped(module, heads // (few * repeats))
    parts = [_cut(x, size) for x in (query, key, value)]
    sizes = [part.shape[2] for part in parts]
    sent_SBhtD = torch.cat(parts, dim=2).transpose(0, 1)
    rows_BhTD = _exchange(sent_SBhtD, rows.group).permute(1, 2, 0, 3, 4).flatten(2, 3)
    mask = rows.mask if sliding_window is None else rows.sliding_mask
    kwargs["position_ids"] = rows.position_ids_BT
    out_BThD, _ = rows.attend(
        seen, *torch.split(rows_BhTD, sizes, dim=1), mask, sliding_window=sliding_window, **kwargs
    )
    pieces_SBthD = _exchange(_cut(out_BThD, size).transpose(0, 1), rows.group)
    return pieces_SBthD.permute(1, 2, 0, 3, 4).flatten(2, 3), None


def _cut(x: Tensor, parts: int) -> Tensor:
    """Reshape [B, P * n, ...] to [B, P, n, ...]."""
    return x.reshape(x.shape[0], parts, -1, *x.shape[2:])


class _Grouped:
    """Stand-in for an attention module after its key-value heads were repeated."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module = module
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _exchange(sent_S: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send part s of the first dimension to rank s of the group.

    Part s of the result is the part that rank s sent.
    """
    received_S: Tensor = _AllToAll.apply(sent_S, group)
    return received_S


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent_S: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received_S = torch.empty(sent_S.shape, dtype=sent_S.dtype, device=sent_S.device)
        dist.all_to_all_single(received_S, sent_S.contiguous(), group=group)
        return received_S

    @staticmethod
    def backward(ctx: Any, gradient_S: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradient_S, ctx.group), None


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
