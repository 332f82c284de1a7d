"""Attention over the sequences of packed rows, without a mask of the row, whole or in pieces.

The bounds of the sequences go through the decoder to each layer's attention function, which
transformers knows under `NAME`. On a GPU one kernel computes all sequences; elsewhere, and in
float32, each is computed apart. A mask of [T, T] would turn fast kernels off, and would take the
square of a row's length.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from inspect import signature
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from agenticrun_workers.models.heads import UnsupportedModel
from agenticrun_workers.trainer.micro_batch import Bounds, Prefixes

NAME = "agenticrun_varlen"
"""Name of the attention function in transformers."""
KERNEL_DTYPES = {torch.bfloat16, torch.float16}
UNSUPPORTED = ("position_bias", "softcap", "s_aux")
"""Arguments of attention functions that change scores."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Whole rows of a micro-batch, [B, T], for the attention function of each layer."""

    bounds: Bounds
    """Sequences, and the padding after them, in the order of the rows put end to end."""
    starts_N: Tensor
    """Start of each in the rows put end to end, and the end of the last one; int32."""
    longest: int
    """Keys of a sequence at most."""
    whole: bool
    """Each row is one sequence, padding included."""
    group: dist.ProcessGroup | None
    """Ranks that hold pieces of these rows; None: this rank holds them whole."""
    prefixes: Prefixes
    """Not on a GPU."""

    @staticmethod
    def of(
        bounds: Bounds,
        shape: tuple[int, int],
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        prefixes: Prefixes = MappingProxyType({}),
    ) -> Rows:
        """Return the rows of some sequences; padding becomes sequences of its own."""
        rows, width = shape
        ends = dict.fromkeys(range(rows), 0) | {row: end for row, _, end in sorted(bounds)}
        padding = [(row, end, width) for row, end in ends.items() if end < width]
        filled = tuple(sorted([*bounds, *padding]))
        starts = [row * width + start for row, start, _ in filled] + [rows * width]
        return Rows(
            filled,
            torch.from_numpy(np.array(starts, np.int32)).to(device),
            max(
                end - start + (prefixes[start][1] if start in prefixes else 0)
                for _, start, end in filled
            ),
            len(filled) == rows,
            group,
            prefixes,
        )


def use_varlen(decoder: PreTrainedModel) -> None:
    """Make `attention` the decoder's attention function."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    decoder.set_attn_implementation(NAME)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: Rows | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each sequence, in transformers' interface.

    If ranks hold pieces of the rows, an all-to-all exchanges pieces of all heads for whole rows of
    some heads, and another one reverses the exchange.

    Shapes: query, key and value [B, heads, t, D]; result [B, t, heads, D].
    """
    if rows is None:
        raise UnsupportedModel(
            f"{type(module).__name__} does not learn from its model how sequences are cut"
        )
    if attention_mask is not None or any(kwargs.get(name) is not None for name in UNSUPPORTED):
        raise UnsupportedModel(f"{type(module).__name__} changes the scores of its attention")
    if sliding_window is None:
        sliding_window = _window_of_mask(module)
    if rows.group is None:
        return _attend(module, query, key, value, rows, scaling, sliding_window), None
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
    query, key, value = torch.split(rows_BhTD, sizes, dim=1)
    out_BThD = _attend(seen, query, key, value, rows, scaling, sliding_window)
    pieces_SBthD = _exchange(_cut(out_BThD, size).transpose(0, 1), rows.group)
    return pieces_SBthD.permute(1, 2, 0, 3, 4).flatten(2, 3), None


def _window_of_mask(module: nn.Module) -> int | None:
    """Return the window of a layer that only the model's masks know, as those of Qwen2-MoE."""
    config = getattr(module, "config", None)
    window: int | None = getattr(config, "sliding_window", None)
    if config is None or not window:
        return None
    if kinds := getattr(config, "layer_types", None):
        return window if kinds[module.layer_idx] == "sliding_attention" else None
    makes_masks = hasattr(sys.modules[type(module).__module__], "create_sliding_window_causal_mask")
    return window if makes_masks else None


def has_kernel(query: Tensor) -> bool:
    """Return True if one kernel computes all sequences of these queries."""
    return query.is_cuda and query.dtype in KERNEL_DTYPES


def _attend(
    module: Any,
    query_BhTD: Tensor,
    key_BkTD: Tensor,
    value_BkTD: Tensor,
    rows: Rows,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Return attention on whole rows, [B, T, h, D].

    Args:
        window: number of tokens that a token attends to, itself included; None: all before it.
    """
    limited = window is not None and window < rows.longest
    if rows.whole and not limited:
        whole_BThD: Tensor
        whole_BThD, _ = sdpa_attention_forward(
            module, query_BhTD, key_BkTD, value_BkTD, None, scaling=scaling
        )
        return whole_BThD
    if has_kernel(query_BhTD):
        from torch.nn.attention.varlen import varlen_attn

        queries, keys, values = (
            x.transpose(1, 2).flatten(0, 1) for x in (query_BhTD, key_BkTD, value_BkTD)
        )
        grouped: dict[str, Any] = {}
        if queries.shape[1] != keys.shape[1]:
            if "enable_gqa" in signature(varlen_attn).parameters:
                grouped = {"enable_gqa": True}
            else:  # torch 2.11
                repeats = queries.shape[1] // keys.shape[1]
                keys, values = (x.repeat_interleave(repeats, dim=1) for x in (keys, values))
        out: Any = varlen_attn(
            queries,
            keys,
            values,
            rows.starts_N,
            rows.starts_N,
            rows.longest,
            rows.longest,
            scale=scaling,
            window_size=(window - 1 if limited and window is not None else -1, 0),
            **grouped,
        )
        return out.reshape(len(query_BhTD), -1, *out.shape[1:])  # type: ignore[no-any-return]
    # One `split`: the gradient of a slice is as large as the whole tensor, and each would be added.
    sizes = [end - start for _, start, end in rows.bounds]
    query_parts, key_parts, value_parts = (
        torch.split(x.transpose(1, 2).flatten(0, 1), sizes)
        for x in (query_BhTD, key_BkTD, value_BkTD)
    )
    places = {start: place for place, (_, start, _) in enumerate(rows.bounds)}
    parts = []
    for (_, start, _), length, *piece in zip(
        rows.bounds, sizes, query_parts, key_parts, value_parts, strict=True
    ):
        first, before = rows.prefixes.get(start, (0, 0))
        if before:
            # The last `length` keys are those of the queries.
            piece[1:] = (
                torch.cat([of[places[first]][:before], own])
                for of, own in zip((key_parts, value_parts), piece[1:], strict=True)
            )
        mask = None
        if before or (window is not None and window < length):
            position = torch.arange(before + length, device=query_BhTD.device)
            distance = position[before:, None] - position
            mask = ((distance >= 0) & (distance < (window or before + length)))[None, None]
        query_1hLD, key_1kLD, value_1kLD = (x_LhD.transpose(0, 1)[None] for x_LhD in piece)
        part_1LhD, _ = sdpa_attention_forward(
            module, query_1hLD, key_1kLD, value_1kLD, mask, scaling=scaling
        )
        parts.append(part_1LhD)
    return torch.cat(parts, 1).reshape(
        len(query_BhTD), query_BhTD.shape[2], query_BhTD.shape[1], -1
    )


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
