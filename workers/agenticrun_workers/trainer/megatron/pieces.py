"""Which part of which Hugging Face tensor a rank's parameter holds.

Megatron fuses queries, keys and values (by key-value head), and gate and up projection, and cuts them over the tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from agenticrun_workers.trainer.megatron.architecture import Architecture

LAYER = "decoder.layers."
COPIES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
}
"""Parameters of a layer that every tensor-parallel rank has whole, and their Hugging Face names."""


@dataclass(frozen=True)
class Piece:
    """A rectangle of a Hugging Face tensor inside a local parameter."""

    name: str
    """Hugging Face's."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    """Where the rectangle begins in it."""
    sizes: tuple[int, ...]
    view: Callable[[Tensor], Tensor]
    """From the local parameter (or its gradient) to the rectangle's elements in order, in any shape."""
    replicated: bool = False
    """Every tensor-parallel rank has it."""

    def read(self, local: Tensor) -> Tensor:
        """The rectangle, contiguous."""
        return self.view(local).reshape(self.sizes).contiguous()

    def write(self, local: Tensor, values: Tensor) -> None:
        view = self.view(local)
        view.copy_(values.reshape(view.shape))

    def slices(self) -> tuple[slice, ...]:
        """Where it lies in the whole tensor."""
        return tuple(
            slice(start, start + size) for start, size in zip(self.offset, self.sizes, strict=True)
        )


def padded_vocabulary(model: Architecture, tensor_size: int) -> int:
    """Rows of Megatron's embedding over all ranks: the same number on each."""
    return -(-model.vocabulary // tensor_size) * tensor_size


def vocabulary_rows(model: Architecture, tensor_rank: int, tensor_size: int) -> tuple[int, int]:
    """The first token id of a rank, and how many it has; the rows after them are padding."""
    rows = padded_vocabulary(model, tensor_size) // tensor_size
    first = min(tensor_rank * rows, model.vocabulary)
    return first, min(rows, model.vocabulary - first)


def pieces_of(name: str, model: Architecture, tensor_rank: int, tensor_size: int) -> list[Piece]:
    """What a tensor-parallel rank's parameter of this name holds. Layers are numbered over the whole pipeline."""
    if name == "decoder.final_layernorm.weight":
        return [_copy("model.norm.weight", model.hidden)]
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        hf = (
            "lm_head.weight"
            if name == "output_layer.weight" and not model.tied
            else "model.embed_tokens.weight"
        )
        first, count = vocabulary_rows(model, tensor_rank, tensor_size)
        return [
            Piece(
                hf,
                (model.vocabulary, model.hidden),
                (first, 0),
                (count, model.hidden),
                lambda local: local[:count],
            )
        ]
    number, part = name.removeprefix(LAYER).split(".", 1)
    layer = f"model.layers.{number}."
    match part:
        case "self_attention.linear_qkv.weight" | "self_attention.linear_qkv.bias":
            return _queries_keys_values(
                layer, part.rpartition(".")[2], model, tensor_rank, tensor_size
            )
        case "self_attention.linear_proj.weight":
            columns = model.heads * model.head_size
            return [
                _columns(
                    layer + "self_attn.o_proj.weight",
                    model.hidden,
                    columns,
                    tensor_rank,
                    tensor_size,
                )
            ]
        case "mlp.linear_fc1.weight":
            rows = model.feed_forward // tensor_size
            shape, sizes, offset = (
                (model.feed_forward, model.hidden),
                (rows, model.hidden),
                (tensor_rank * rows, 0),
            )
            return [
                Piece(
                    layer + "mlp.gate_proj.weight", shape, offset, sizes, lambda local: local[:rows]
                ),
                Piece(
                    layer + "mlp.up_proj.weight", shape, offset, sizes, lambda local: local[rows:]
                ),
            ]
        case "mlp.linear_fc2.weight":
            return [
                _columns(
                    layer + "mlp.down_proj.weight",
                    model.hidden,
                    model.feed_forward,
                    tensor_rank,
                    tensor_size,
                )
            ]
    return [
        _copy(layer + COPIES[part], model.head_size if "self_attention" in part else model.hidden)
    ]


def _copy(name: str, size: int) -> Piece:
    return Piece(name, (size,), (0,), (size,), lambda local: local, replicated=True)


def _columns(name: str, rows: int, columns: int, tensor_rank: int, tensor_size: int) -> Piece:
    mine = columns // tensor_size
    return Piece(name, (rows, columns), (0, tensor_rank * mine), (rows, mine), lambda local: local)


def _queries_keys_values(
    layer: str, kind: str, model: Architecture, tensor_rank: int, tensor_size: int
) -> list[Piece]:
    """Megatron's rows: for each key-value head its queries' heads, the key, the value."""
    groups, size = model.groups // tensor_size, model.head_size
    queries = model.heads // model.groups * size
    rest = (model.hidden,) if kind == "weight" else ()

    def piece(letter: str, start: int, rows: int) -> Piece:
        def view(local: Tensor) -> Tensor:
            return local.view(groups, queries + 2 * size, *rest)[:, start : start + rows]

        offset = (tensor_rank * groups * rows, *(0 for _ in rest))
        return Piece(
            f"{layer}self_attn.{letter}_proj.{kind}",
            (model.groups * rows, *rest),
            offset,
            (groups * rows, *rest),
            view,
        )

    return [piece("q", 0, queries), piece("k", queries, size), piece("v", queries + size, size)]
