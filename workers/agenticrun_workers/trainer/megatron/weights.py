"""Conversion of weights between Hugging Face's tensors and Megatron's parallel parameters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn

from agenticrun_workers.models.folder import ModelLoadError, check_weights
from agenticrun_workers.models.pretrained import check_finite
from agenticrun_workers.trainer.megatron.architecture import Architecture, vocabulary_rows
from agenticrun_workers.trainer.megatron.model import MegatronModel
from agenticrun_workers.trainer.megatron.parallel import Place

LAYER = "decoder.layers."
OUTPUT = "output_layer.weight"
COPIES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
}
"""Hugging Face's names of the layer parameters that every tensor-parallel rank holds whole.

Keys are Megatron's names.
"""


@dataclass(frozen=True)
class Piece:
    """A rectangle of a Hugging Face tensor inside a local parameter."""

    name: str
    """Hugging Face's name of the tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    """First index of the rectangle in the whole tensor."""
    sizes: tuple[int, ...]
    view: Callable[[Tensor], Tensor]
    """View of the rectangle's elements, in order, in the local parameter or its gradient.

    It may have any shape.
    """
    replicated: bool = False
    """True if every tensor-parallel rank has it."""

    def read(self, local: Tensor) -> Tensor:
        """Return the rectangle, contiguous."""
        return self.view(local).reshape(self.sizes).contiguous()

    def write(self, local: Tensor, values: Tensor) -> None:
        view = self.view(local)
        view.copy_(values.reshape(view.shape))

    def slices(self) -> tuple[slice, ...]:
        """Return the position of the rectangle in the whole tensor."""
        return tuple(
            slice(start, start + size) for start, size in zip(self.offset, self.sizes, strict=True)
        )


def pieces_of(name: str, model: Architecture, tensor_rank: int, tensor_size: int) -> list[Piece]:
    """Return the contents of a tensor-parallel rank's parameter.

    Args:
        name: of the parameter, with layers numbered over the whole pipeline.
        model: shape of the network.
        tensor_rank: of the rank.
        tensor_size: number of tensor-parallel ranks.
    """
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
    """Return the pieces in the order of Megatron's rows.

    For each key-value head: its query heads, the key, the value.
    """
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


@dataclass(frozen=True)
class Parameter:
    """One of this rank's parameters, under its name over the whole pipeline."""

    name: str
    tensor: nn.Parameter
    pieces: list[Piece]


class Weights:
    """This rank's parameters, and the ranks that hold the others. Collective to construct."""

    def __init__(self, module: MegatronModel, model: Architecture, place: Place) -> None:
        self._model, self._place = model, place
        self.parameters = [
            Parameter(name, tensor, pieces_of(name, model, place.tensor_rank, place.tensor_size))
            for name, tensor in _named(module)
        ]
        for parameter in self.parameters:
            # Megatron sets this mark on parameters that it initialises. It counts replicas once in
            # the norm of the gradient.
            parameter.tensor.tensor_model_parallel = not parameter.pieces[0].replicated  # type: ignore[attr-defined]
        names: list[list[str]] = [[] for _ in range(place.world)]
        dist.all_gather_object(names, [parameter.name for parameter in self.parameters])
        self._stages = [names[place.rank_of(0, stage)] for stage in range(place.stages)]
        """Names of each stage's parameters, without a copied output layer.

        If it is tied, the output layer on the last stage is a copy of the embedding.
        """
        if model.tied and place.stages > 1:
            self._stages[-1].remove(OUTPUT)

    @property
    def copied_output(self) -> bool:
        """True if the last stage has a copy of the first stage's embedding."""
        return self._model.tied and self._place.stages > 1 and self._place.last_stage

    def names(self) -> list[str]:
        """Return Hugging Face's names of all parameters of the model."""
        return list(self.shapes())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return Hugging Face's names and shapes of all parameters of the model."""
        return {
            piece.name: piece.shape
            for names in self._stages
            for name in names
            for piece in pieces_of(name, self._model, 0, 1)
        }

    def read_folder(self, path: str) -> Iterator[tuple[Parameter, Tensor]]:
        """Yield this rank's part of the weights, in float32 or a wider dtype.

        Args:
            path: folder or hub repository.

        Raises:
            ModelLoadError: the folder cannot be read, or its weights do not fit the config.
        """
        with ExitStack() as stack:
            files = _Safetensors(path, stack)
            for parameter in self.parameters:
                wide = torch.promote_types(parameter.tensor.dtype, torch.float32)
                values = torch.zeros(
                    parameter.tensor.shape, dtype=wide
                )  # zeros: the rows that pad the vocabulary
                for piece in parameter.pieces:
                    piece.write(values, files.read(piece))
                yield parameter, values

    def whole(self, local: Callable[[Parameter], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors on rank 0; nothing on the others. Collective.

        Args:
            local: returns the values of one of this rank's parameters.
        """
        mine = {parameter.name: parameter for parameter in self.parameters}
        place = self._place
        sends = place.data_rank == place.context_rank == 0
        for stage, names in enumerate(self._stages):
            for name in names:
                if place.rank == 0:
                    yield from self._collect(name, stage, local, mine)
                elif sends and place.stage == stage:
                    source = local(mine[name])
                    for piece in mine[name].pieces:
                        if _travels(piece, place.tensor_rank):
                            dist.send(piece.read(source), 0)

    def _collect(
        self,
        name: str,
        stage: int,
        local: Callable[[Parameter], Tensor],
        mine: dict[str, Parameter],
    ) -> Iterator[tuple[str, Tensor]]:
        """Receive the Hugging Face tensors of a parameter, on rank 0.

        They come from all tensor-parallel ranks of a stage.
        """
        source = local(mine[name]) if stage == 0 else local(self.parameters[0])
        whole: dict[str, Tensor] = {}
        for tensor_rank in range(self._place.tensor_size):
            for piece in pieces_of(name, self._model, tensor_rank, self._place.tensor_size):
                if not _travels(piece, tensor_rank):
                    continue
                rank = self._place.rank_of(tensor_rank, stage)
                if rank == 0:
                    part = piece.read(source)
                else:
                    part = source.new_empty(piece.sizes)
                    dist.recv(part, rank)
                if piece.name not in whole:
                    whole[piece.name] = (
                        part if part.shape == piece.shape else part.new_empty(piece.shape)
                    )
                whole[piece.name][piece.slices()] = part
        yield from whole.items()


class _Safetensors:
    """The tensors of a model folder."""

    def __init__(self, path: str, stack: ExitStack) -> None:
        check_weights(path)
        folder = Path(path)
        if not folder.is_dir():
            folder = Path(
                snapshot_download(
                    path, allow_patterns=["*.safetensors", "*.safetensors.index.json"]
                )
            )
        files = sorted(folder.glob("*.safetensors"))
        if (index := folder / "model.safetensors.index.json").exists():
            files = [
                folder / name
                for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))
            ]
        if not files:
            raise ModelLoadError(
                f"{path} holds no safetensors files, which the strategy megatron reads"
            )
        self._path = path
        self._files: dict[str, Any] = {}
        for file in files:
            opened = stack.enter_context(safe_open(file, framework="pt"))
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def read(self, piece: Piece) -> Tensor:
        """Read a piece from the file that holds its tensor.

        Raises:
            ModelLoadError: the file has no tensor of this name and shape.
        """
        if piece.name not in self._files:
            raise ModelLoadError(f"{self._path} lacks the weight {piece.name}: download it again")
        stored = self._files[piece.name].get_slice(piece.name)
        if tuple(stored.get_shape()) != piece.shape:
            raise ModelLoadError(
                f"{self._path}: {piece.name} has shape {stored.get_shape()}, the model's config "
                f"wants {list(piece.shape)}"
            )
        part: Tensor = stored[piece.slices()]
        check_finite(self._path, piece.name, part)
        return part


def _travels(piece: Piece, tensor_rank: int) -> bool:
    return (tensor_rank == 0 or not piece.replicated) and all(piece.sizes)


def _named(module: MegatronModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters with layers numbered over the whole pipeline."""
    for name, parameter in module.named_parameters():
        if name.startswith(LAYER):
            number, rest = name.removeprefix(LAYER).split(".", 1)
            layer = module.decoder.layers[int(number)].layer_number - 1
            yield f"{LAYER}{layer}.{rest}", parameter
        else:
            yield name, parameter
