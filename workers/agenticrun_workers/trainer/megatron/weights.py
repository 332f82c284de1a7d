"""Hugging Face weights in and out of Megatron's parallel parameters."""

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

from agenticrun_workers.models.pretrained import ModelLoadError
from agenticrun_workers.trainer.megatron.architecture import Architecture
from agenticrun_workers.trainer.megatron.model import MegatronModel
from agenticrun_workers.trainer.megatron.parallel import Place
from agenticrun_workers.trainer.megatron.pieces import LAYER, Piece, pieces_of

OUTPUT = "output_layer.weight"


@dataclass(frozen=True)
class Parameter:
    """One of this rank's parameters, under its name over the whole pipeline."""

    name: str
    tensor: nn.Parameter
    pieces: list[Piece]


class Weights:
    """This rank's parameters, and which ranks have the others. Making it is collective."""

    def __init__(self, module: MegatronModel, model: Architecture, place: Place) -> None:
        self._model, self._place = model, place
        self.parameters = [
            Parameter(name, tensor, pieces_of(name, model, place.tensor_rank, place.tensor_size))
            for name, tensor in _named(module)
        ]
        for parameter in self.parameters:
            # Megatron marks what it initialises itself; in the norm of the gradient replicas count once.
            parameter.tensor.tensor_model_parallel = not parameter.pieces[0].replicated  # type: ignore[attr-defined]
        names: list[list[str]] = [[] for _ in range(place.world)]
        dist.all_gather_object(names, [parameter.name for parameter in self.parameters])
        self._stages = [names[place.rank_of(0, stage)] for stage in range(place.stages)]
        """Names of each stage's parameters. A tied output layer on the last stage is a copy of the embedding."""
        if model.tied and place.stages > 1:
            self._stages[-1].remove(OUTPUT)

    @property
    def copied_output(self) -> bool:
        """Whether the last stage has a copy of the first one's embedding."""
        return self._model.tied and self._place.stages > 1 and self._place.last_stage

    def names(self) -> list[str]:
        """Hugging Face's names of all parameters of the model."""
        return list(self.shapes())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face's names and shapes of all parameters of the model."""
        return {
            piece.name: piece.shape
            for names in self._stages
            for name in names
            for piece in pieces_of(name, self._model, 0, 1)
        }

    def read_folder(self, path: str) -> Iterator[tuple[Parameter, Tensor]]:
        """This rank's part of the weights in a folder or hub repository, in float32 or wider. Raises `ModelLoadError`."""
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
        """Whole tensors on rank 0, from what `local` gives for each parameter of a rank. Collective; yields on rank 0 only."""
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
        """Rank 0's side: every Hugging Face tensor of a parameter, from all tensor-parallel ranks of a stage."""
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
        """Raises `ModelLoadError` if the file has no tensor of this name and shape."""
        if piece.name not in self._files:
            raise ModelLoadError(f"{self._path} lacks the weight {piece.name}")
        stored = self._files[piece.name].get_slice(piece.name)
        if tuple(stored.get_shape()) != piece.shape:
            raise ModelLoadError(
                f"{self._path}: {piece.name} has shape {stored.get_shape()}, the model's config wants {list(piece.shape)}"
            )
        part: Tensor = stored[piece.slices()]
        return part


def _travels(piece: Piece, tensor_rank: int) -> bool:
    return (tensor_rank == 0 or not piece.replicated) and all(piece.sizes)


def _named(module: MegatronModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters with layers numbered over the whole pipeline."""
    for name, parameter in module.named_parameters():
        if name.startswith(LAYER):
            number, rest = name.removeprefix(LAYER).split(".", 1)
            name = f"{LAYER}{module.decoder.layers[int(number)].layer_number - 1}.{rest}"
        yield name, parameter
