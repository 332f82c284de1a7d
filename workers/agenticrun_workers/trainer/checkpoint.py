"""Checkpoint of one module and its optimizer, in the format of torch.distributed.checkpoint.

Any number of ranks can read it. Every rank writes its shards; rank 0 writes `module.json` last,
with the size and checksum of every file. A rank that loads a checkpoint compares every file that it
reads with these entries.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import (
    FileSystemBase,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from agenticrun_workers.models.lora import describe_lora
from agenticrun_workers.storage import MODULE_RECORD, DamagedFile, FileEntry, Folder
from agenticrun_workers.trainer.ranks import agreed

Location = str | os.PathLike[str]
"""A local path or an fsspec URI."""
FilePath = str | os.PathLike[str]


class CheckpointMismatch(Exception):
    """A checkpoint of another model or layout."""


@dataclass(frozen=True)
class Record:
    """Contents of `module.json`."""

    architecture: str
    parameters: int
    """Number of elements in all parameters."""
    shapes: str
    """SHA-256 of the sorted names and shapes of the parameters."""
    ranks: int
    torch: str
    progress: dict[str, int]
    files: dict[str, FileEntry]
    adapters: dict[str, Any] | None = None
    """Description of the low-rank adapters (`describe_lora`); None for whole weights."""

    def to_bytes(self) -> bytes:
        return json.dumps(
            {**vars(self), "files": {name: entry.to_json() for name, entry in self.files.items()}},
            indent=1,
        ).encode()

    @staticmethod
    def read(folder: Folder) -> Record:
        """Read the record of a checkpoint.

        Raises:
            CheckpointMismatch: the folder has no record.
            DamagedFile: the record cannot be parsed.
        """
        try:
            value = json.loads(folder.read(MODULE_RECORD))
            return Record(
                **{
                    **value,
                    "files": {
                        name: FileEntry.from_json(entry) for name, entry in value["files"].items()
                    },
                }
            )
        except FileNotFoundError as error:
            raise CheckpointMismatch(f"{folder} holds no trainer checkpoint") from error
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedFile(f"{folder}/{MODULE_RECORD}", f"cannot be read ({error})") from error


@dataclass(frozen=True)
class ModuleState:
    """State of a module, as state dicts of torch.distributed.checkpoint.

    The tensors are whole, DTensors, or objects that know which part of a tensor they hold.
    """

    architecture: str
    parameters: int
    """Number of elements in all parameters."""
    adapters: dict[str, Any] | None
    model: dict[str, Any]
    """Tensors by parameter name; only the adapters if the model has any."""
    optimizer: dict[str, Any]
    """Result of `get_optimizer_state_dict`; empty for a frozen module."""


def save(
    location: Location,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    progress: dict[str, int],
) -> None:
    """Write this rank's shards of a module. Collective.

    The files are durable when the function returns.

    Args:
        location: new folder.
        module: sharded or whole.
        optimizer: its optimizer; None saves the weights alone.
        progress: counters to keep in the record.
    """
    save_state(location, _module_state(module, optimizer), progress)


def load(
    location: Location,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    progress: dict[str, int],
) -> dict[str, int]:
    """Restore what `save` or `save_state` wrote into a module. See `load_state`."""
    state = _module_state(module, optimizer)
    progress = load_state(location, state, progress)
    # The kernel of AdamW is this optimizer's, whichever wrote the checkpoint.
    for group in state.optimizer.get("param_groups", ()):
        group["fused"] = optimizer is not None and optimizer.defaults["fused"]
    set_state_dict(
        module,
        _listed(optimizer),
        model_state_dict=state.model,
        optim_state_dict=state.optimizer,
        options=_options(module, strict=False),
    )
    return progress


def save_state(location: Location, state: ModuleState, progress: dict[str, int]) -> None:
    """Write this rank's part of a state. Collective; the files are durable when it returns."""
    folder = Folder(location)
    rank, ranks = _rank()
    whole = {
        "model": state.model,
        "optimizer": state.optimizer,
        "rng": {str(rank): _random_state()},
    }
    writer = ShardWriter(folder)
    _unwrapped(lambda: save_shards(whole, storage_writer=writer, no_dist=ranks == 1))
    written: list[dict[str, FileEntry]] = [{}] * ranks
    if ranks > 1:
        dist.all_gather_object(written, writer.written)
    else:
        written = [writer.written]
    if rank == 0:
        shapes = {name: list(shape) for name, shape in sorted(_shapes(state.model).items())}
        record = Record(
            architecture=state.architecture,
            parameters=state.parameters,
            shapes=hashlib.sha256(json.dumps(shapes).encode()).hexdigest(),
            ranks=ranks,
            torch=torch.__version__,
            progress=dict(progress),
            files={name: entry for part in written for name, entry in sorted(part.items())},
            adapters=state.adapters,
        )
        folder.write(MODULE_RECORD, record.to_bytes())


def load_state(location: Location, state: ModuleState, progress: dict[str, int]) -> dict[str, int]:
    """Read a checkpoint of `save_state` into the tensors of `state`. Collective.

    The number of ranks may differ from the number that wrote it. Each rank continues with its own
    random state; a rank without a saved one derives it from its number and rank 0's state.

    Args:
        location: folder of the checkpoint.
        state: its tensors are overwritten.
        progress: defaults of counters that the checkpoint lacks.

    Returns:
        the counters of the checkpoint.

    Raises:
        CheckpointMismatch: a parameter is missing, unknown or of another shape; names the first
            one. Nothing has changed. Every rank raises the same error.
        DamagedFile: a file is broken. The tensors may hold a mixture of values: load another
            checkpoint into them, or discard them. Every rank raises the same error.
    """
    folder = Folder(location)

    def look() -> tuple[Record, ShardReader, Metadata]:
        record = Record.read(folder)
        reader = ShardReader(folder, record.files)
        metadata = reader.read_metadata()
        _check_adapters(folder, record.adapters, state.adapters)
        _check(folder, metadata, state.model)
        return record, reader, metadata

    record, reader, metadata = agreed(look)
    rank, ranks = _rank()
    source = rank if rank < record.ranks else 0
    random = {
        kind: value
        for kind, value in _random_state().items()
        if f"rng.{source}.{kind}" in metadata.state_dict_metadata
    }
    whole: dict[str, Any] = {
        "model": state.model,
        "optimizer": state.optimizer,
        "rng": {str(source): random},
    }
    _unwrapped(lambda: load_shards(whole, storage_reader=reader, no_dist=ranks == 1))
    _set_random_state(whole["rng"][str(source)], None if source == rank else rank)
    return progress | record.progress


def _module_state(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> ModuleState:
    if optimizer is not None:
        _complete(optimizer)
    model_state, optimizer_state = get_state_dict(
        module, _listed(optimizer), options=_options(module)
    )
    if (
        describe_lora(module) is not None
    ):  # torch leaves frozen ones in under the second names of tied parameters
        frozen = {
            name
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad
        }
        model_state = {name: value for name, value in model_state.items() if name not in frozen}
    parameters = sum(parameter.numel() for parameter in module.parameters())
    return ModuleState(
        architecture_of(module), parameters, describe_lora(module), model_state, optimizer_state
    )


@torch.no_grad()
def _complete(optimizer: torch.optim.Optimizer) -> None:
    """Give trained parameters that have no optimizer state the state of step 0.

    A parameter has none until its first gradient, and some never get one, such as those of the
    sparse indexer of DeepSeek V3.2. A checkpoint holds the state of all, as all trainers read it.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    new = [parameter for parameter in trained if not optimizer.state.get(parameter)]
    if not new:
        return
    gradients = [parameter.grad for parameter in trained]
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in trained:
        parameter.grad = None
    for parameter in new:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in new:  # zero gradients do not count as a step
        optimizer.state[parameter]["step"].zero_()
    for parameter, gradient in zip(trained, gradients, strict=True):
        parameter.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _options(module: nn.Module, *, strict: bool = True) -> StateDictOptions:
    """Return the options of state dicts; a model with adapters saves only these."""
    return StateDictOptions(ignore_frozen_params=describe_lora(module) is not None, strict=strict)


def _listed(optimizer: torch.optim.Optimizer | None) -> list[torch.optim.Optimizer]:
    return [] if optimizer is None else [optimizer]


def _check(folder: Folder, metadata: Metadata, model_state: dict[str, Any]) -> None:
    stored = {
        name.removeprefix("model."): tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    wanted = _shapes(model_state)
    for name in [*wanted, *stored]:
        if stored.get(name) != wanted.get(name):
            raise CheckpointMismatch(
                f"{name.removeprefix('model.')}: the model has {_shape(wanted.get(name))}, "
                f"the checkpoint in {folder} has {_shape(stored.get(name))}; "
                "set spec.model to the model that was trained, or spec.checkpoint.resume to Never"
            )


def _check_adapters(
    folder: Folder, stored: dict[str, Any] | None, wanted: dict[str, Any] | None
) -> None:
    if stored == wanted:
        return
    if stored is None or wanted is None:
        difference = [
            "the model has no adapters, the checkpoint has",
            "the model has adapters, the checkpoint has none",
        ][stored is None]
    else:
        name = next(name for name in wanted if stored.get(name) != wanted[name])
        difference = f"the model has {name} {wanted[name]}, the checkpoint {stored.get(name)}"
    raise CheckpointMismatch(
        f"lora: {difference} ({folder}); set spec.pipeline.actorTrain.lora to "
        "what was trained, or spec.checkpoint.resume to Never"
    )


def _shapes(model_state: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(value.shape) for name, value in model_state.items() if hasattr(value, "shape")
    }


def _shape(shape: tuple[int, ...] | None) -> str:
    return "no such parameter" if shape is None else f"shape {list(shape)}"


def architecture_of(module: nn.Module) -> str:
    """Return Hugging Face's name of the model type.

    A module without a config has the name of its class, less FSDP's prefix.
    """
    types = (
        getattr(getattr(part, "config", None), "model_type", None) for part in module.modules()
    )
    return next((str(name) for name in types if name), type(module).__name__.removeprefix("FSDP"))


def _random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else state  # type: ignore[no-untyped-call]


def _set_random_state(state: dict[str, Tensor], new_rank: int | None) -> None:
    if new_rank is not None:
        torch.manual_seed(zlib.crc32(state["cpu"].numpy().tobytes(), new_rank))
        return
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _rank() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _unwrapped(work: Callable[[], object]) -> None:
    """Run `work`; raise the first rank's own error instead of torch's `CheckpointException`.

    `CheckpointException` is not an `Exception`.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "torch.distributed is disabled"
            )  # one rank needs none
            work()
    except CheckpointException as error:
        cause, _ = error.failures[min(error.failures)]
        raise cause from error


class ShardWriter(FileSystemWriter):
    """Writer of a rank's shards into a new folder; each file is durable once it is complete."""

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder.uri, sync_files=False)
        self._files = _Files(folder, {})
        self.fs = self._files  # type: ignore[assignment]  # as FsspecWriter does
        self.path = ""

    @property
    def written(self) -> dict[str, FileEntry]:
        """Return the entries of the files that this rank has written."""
        return self._files.entries


class ShardReader(FileSystemReader):
    """Reader of shards.

    Args:
        entries: expected size and checksum of each file. A read raises `DamagedFile` for a file
            that differs.
    """

    def __init__(self, folder: Folder, entries: Mapping[str, FileEntry]) -> None:
        super().__init__(folder.uri)
        self.fs = _Files(folder, dict(entries))  # type: ignore[assignment]
        self.path = ""
        self._metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """Return the metadata of the shards; the file is read once."""
        if self._metadata is None:
            self._metadata = super().read_metadata()
        return self._metadata


class _Files(FileSystemBase):
    """File access by name inside a folder."""

    def __init__(self, folder: Folder, entries: dict[str, FileEntry]) -> None:
        self._folder = folder
        self.entries = entries

    @contextmanager
    def create_stream(self, path: FilePath, mode: str) -> Iterator[io.IOBase]:
        name = os.fspath(path)
        if mode == "wb":
            with self._folder.create(name) as writer:
                yield cast(io.IOBase, writer)
            self.entries[name] = writer.entry
            return
        if name not in self.entries:
            raise DamagedFile(f"{self._folder}/{name}", "is unknown to the record of its folder")
        with self._folder.open_verified(name, self.entries[name]) as file:
            yield cast(io.IOBase, file)

    def concat_path(self, _: FilePath, suffix: str) -> str:
        return suffix

    def rename(self, path: FilePath, new_path: FilePath) -> None:
        self._folder.rename(os.fspath(path), os.fspath(new_path))
        self.entries[os.fspath(new_path)] = self.entries.pop(os.fspath(path))

    def init_path(self, path: FilePath) -> FilePath:
        return path

    def mkdir(self, _: FilePath) -> None:
        """Do nothing: a folder appears with its first file."""

    @classmethod
    def validate_checkpoint_id(cls, _: FilePath) -> bool:
        return True

    def exists(self, path: FilePath) -> bool:
        return os.fspath(path) in self.entries

    def rm_file(self, path: FilePath) -> None:
        self._folder.remove(os.fspath(path))

    def ls(self, _: FilePath) -> list[str]:
        return list(self.entries)
