"""Checkpoints of Megatron's parallel state, in the format of the other strategies.

Names and shapes are theirs too. A rank writes and reads its rectangles of Hugging Face's tensors,
so a checkpoint does not depend on the parallel layout.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from agenticrun_workers.trainer.checkpoint import (
    HostBuffers,
    Location,
    ModuleState,
    Snapshot,
    load_state,
)
from agenticrun_workers.trainer.megatron.architecture import Architecture
from agenticrun_workers.trainer.megatron.parallel import Place
from agenticrun_workers.trainer.megatron.updater import MOMENTS, MegatronOptimizer
from agenticrun_workers.trainer.megatron.weights import Parameter, Piece, Weights

MODULE = "model."
"""Prefix of Hugging Face's names in the other strategies' module."""
MASTER = "master"


class Rectangles(Tensor):
    """A rank's parts of one tensor, which torch.distributed.checkpoint can write and read.

    They implement its protocol `_Checkpointable`. The class is a tensor without memory of its own,
    because torch looks for the protocol on tensors only.
    """

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype) -> Rectangles:
        made: Rectangles = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        return made

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:  # noqa: ARG002  # the arguments of `__new__`
        self._parts: dict[torch.Size, Tensor] = {}

    @classmethod
    def __torch_dispatch__(cls, func: object, *_: object) -> object:
        raise NotImplementedError(f"{func}: rectangles are saved and loaded, never computed with")

    def include(self, offset: tuple[int, ...], values: Tensor) -> None:
        """Add `values` to the parts that are written, or that a read overwrites."""
        self._parts[torch.Size(offset)] = values

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, part.shape) for offset, part in self._parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._parts[index.offset]


class Checkpoints:
    """Saves and loads weights and optimizer of one model. All calls are collective."""

    def __init__(
        self, model: Architecture, weights: Weights, updater: MegatronOptimizer, place: Place
    ) -> None:
        self._model, self._weights, self._updater, self._place = model, weights, updater, place
        self._buffers = HostBuffers()

    @torch.no_grad()
    def snapshot(self, progress: dict[str, int]) -> Snapshot:
        """Copy this rank's part. See `checkpoint.snapshot`."""
        tensors = self._empty()
        for number, parameter in enumerate(self._weights.parameters):
            for kind in (MASTER, *MOMENTS):
                local = self._whole_local(parameter, kind)
                for piece in self._saved_pieces(number, parameter):
                    held = self._buffers.copy(_buffer(kind, piece), piece.read(local))
                    tensors[kind][piece.name].include(piece.offset, held)
        return Snapshot.of(self._state(tensors, self._steps()), progress)

    def reserve(self) -> Callable[[], None]:
        """Return a function that allocates what `snapshot` needs, for any thread."""
        shapes = {
            _buffer(kind, piece): torch.empty(piece.sizes, dtype=self._dtype, device="meta")
            for number, parameter in enumerate(self._weights.parameters)
            for piece in self._saved_pieces(number, parameter)
            for kind in (MASTER, *MOMENTS)
        }
        return lambda: self._buffers.reserve(shapes)

    def _saved_pieces(self, number: int, parameter: Parameter) -> list[Piece]:
        """Return the pieces of a parameter that this rank saves."""
        data_ranks = self._place.groups.dp_cp
        if number % data_ranks.size() != data_ranks.rank():
            return []
        if self._weights.copied_output and parameter.name.startswith("output_layer."):
            return []
        return [
            piece
            for piece in parameter.pieces
            if all(piece.sizes) and not (piece.replicated and self._place.tensor_rank)
        ]

    @torch.no_grad()
    def load(self, location: Location, progress: dict[str, int]) -> dict[str, int]:
        """Read this rank's part. See `load_state`."""
        tensors = self._empty()
        targets: list[tuple[Parameter, str, list[tuple[Piece, Tensor]]]] = []
        for parameter in self._weights.parameters:
            for kind in (MASTER, *MOMENTS):
                parts = [
                    (piece, torch.zeros(piece.sizes, dtype=self._dtype))
                    for piece in parameter.pieces
                    if all(piece.sizes)
                ]
                for piece, values in parts:
                    tensors[kind][piece.name].include(piece.offset, values)
                targets.append((parameter, kind, parts))
        state = self._state(tensors, 0.0)
        progress = load_state(location, state, progress)
        steps = next(iter(state.optimizer["state"].values()))["step"]
        for parameter, kind, parts in targets:
            self._set(parameter, kind, parts, steps)
        self._updater.publish()
        return progress

    @property
    def _dtype(self) -> torch.dtype:
        """Return the dtype of masters and moments."""
        return next(shard.master.dtype for _, shard in self._updater.shards())

    def _empty(self) -> dict[str, dict[str, Rectangles]]:
        """Return every tensor of the model by kind and name, without parts."""
        shapes = self._weights.shapes()
        return {
            kind: {name: Rectangles(shape, self._dtype) for name, shape in shapes.items()}
            for kind in (MASTER, *MOMENTS)
        }

    def _state(self, tensors: dict[str, dict[str, Rectangles]], steps: float) -> ModuleState:
        """Return the state dicts of a module with torch's AdamW."""
        group = {
            key: value
            for key, value in torch.optim.AdamW([torch.zeros(0)]).param_groups[0].items()
            if key != "params"
        }
        ours = {
            key: value for key, value in self._updater.adam.param_groups[0].items() if key in group
        }
        names = list(tensors[MASTER])
        moments = {
            MODULE + name: {kind: tensors[kind][name] for kind in MOMENTS}
            | {"step": torch.tensor(steps)}
            for name in names
        }
        model = {MODULE + name: tensors[MASTER][name] for name in names}
        if self._model.tied:  # a module's state dict has a tied weight under both names
            model[MODULE + "lm_head.weight"] = model[MODULE + "model.embed_tokens.weight"]
        return ModuleState(
            architecture=self._model.model_type,
            parameters=sum(torch.Size(shape).numel() for shape in self._weights.shapes().values()),
            adapters=None,
            model=model,
            optimizer={
                "state": moments,
                "param_groups": [group | ours | {"params": [MODULE + name for name in names]}],
            },
        )

    def _whole_local(self, parameter: Parameter, kind: str) -> Tensor:
        """Return the master or a moment of this rank's whole parameter.

        It is combined from the data-parallel ranks that update parts of it.
        """
        shard = self._updater.shard(parameter)
        whole = torch.zeros(
            parameter.tensor.shape, dtype=self._dtype, device=parameter.tensor.device
        )
        if shard is not None:
            values = (
                shard.master if kind == MASTER else self._updater.adam.state[shard.master].get(kind)
            )
            if values is not None:  # moments begin with the first step
                whole.view(-1)[shard.start : shard.end] = values.view(-1)
        if self._updater.distributed:
            dist.all_reduce(whole, group=self._place.groups.dp_cp)
        return whole

    def _steps(self) -> float:
        return next(
            (
                float(self._updater.adam.state[shard.master].get("step", 0.0))
                for _, shard in self._updater.shards()
            ),
            0.0,
        )

    def _set(
        self, parameter: Parameter, kind: str, parts: list[tuple[Piece, Tensor]], steps: Tensor
    ) -> None:
        shard = self._updater.shard(parameter)
        if shard is None:
            return
        whole = torch.zeros(parameter.tensor.shape, dtype=self._dtype)
        for piece, values in parts:
            piece.write(whole, values)
        if kind == MASTER:
            self._updater.set_master(parameter, whole)
        else:
            mine = (
                whole.view(-1)[shard.start : shard.end]
                .view(shard.master.shape)
                .to(shard.master.device)
            )
            self._updater.adam.state[shard.master] |= {kind: mine.clone(), "step": steps.clone()}


def _buffer(kind: str, piece: Piece) -> str:
    """Return the name of the host memory of a piece."""
    return f"{kind}.{piece.name}.{piece.offset}"
