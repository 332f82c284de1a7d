"""Checkpoint of one module and its optimizer, in the format of torch.distributed.checkpoint.

Training stops only while each rank copies its state into host memory (`Snapshot`). A thread then
writes the copy (`SnapshotWriter`): every rank its shards, and rank 0 last `module.json`, with the
size and checksum of every file. Any number of ranks can read a checkpoint; each compares every file
that it reads with these entries.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

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

from agenticrun_workers.models.devices import compute_device
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


class HostBuffers:
    """Host memory for the copies of a rank's tensors, by name; allocated once, then reused.

    It is page-locked if the rank computes on a GPU, so that copies have the speed of the bus.
    """

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}
        """By name."""
        # Here, because a thread that reserves memory has claimed no device.
        self._pinned = compute_device().type == "cuda"

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """Copy a tensor, or this rank's shard of it. The next copy of this name overwrites it."""
        held = self.held.get(name)
        if held is None or (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
            held = self.held[name] = self._allocate(tensor)
        held.copy_(tensor.detach())
        return held

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate the memory for tensors before their first copy.

        Args:
            tensors: by name; they may be on the meta device.
        """
        for name, tensor in tensors.items():
            self.held[name] = self._allocate(tensor)

    def _allocate(self, like: Tensor) -> Tensor:
        return torch.empty_like(like, device="cpu", pin_memory=self._pinned, requires_grad=False)


@dataclass(frozen=True)
class Snapshot:
    """All that a rank writes, as it was at one moment. Its tensors are in host memory."""

    state: ModuleState
    progress: dict[str, int]
    random: dict[str, Tensor]

    @staticmethod
    def of(state: ModuleState, progress: dict[str, int]) -> Snapshot:
        """Take a state of which no tensor changes any longer, and this process's random state."""
        return Snapshot(state, dict(progress), _random_state())


def snapshot(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    progress: dict[str, int],
    buffers: HostBuffers | None = None,
) -> Snapshot:
    """Copy this rank's shards of a module. Collective.

    Args:
        module: sharded or whole.
        optimizer: its optimizer; None saves the weights alone.
        progress: counters to keep in the record.
        buffers: holds the copies until the next snapshot; default: memory of their own.
    """
    state = _module_state(module, optimizer)
    held = buffers or HostBuffers()

    def copied(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return held.copy(name, value)
        if isinstance(value, dict):
            return {key: copied(f"{name}.{key}", each) for key, each in value.items()}
        return copy.deepcopy(value)

    with torch.no_grad():
        return Snapshot.of(
            replace(
                state,
                model=copied("model", state.model),
                optimizer=copied("optimizer", state.optimizer),
            ),
            progress,
        )


def reserve(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, buffers: HostBuffers
) -> Callable[[], None]:
    """Return a function that allocates what `snapshot` needs, for any thread. Collective.

    AdamW's moments may not exist yet: they are as large as the parameters.
    """
    state = _module_state(module, None).model
    sizes = {f"model.{name}": value for name, value in state.items() if isinstance(value, Tensor)}
    if optimizer is not None:
        trained = {name for name, each in module.named_parameters() if each.requires_grad}
        sizes |= {
            f"optimizer.state.{name}.{moment}": state[name]
            for name in state
            if name in trained
            for moment in ("exp_avg", "exp_avg_sq")
        }
    # Only sizes: while the thread reads them, the parameters may leave the GPU.
    shapes = {name: torch.empty_like(value, device="meta") for name, value in sizes.items()}
    return lambda: buffers.reserve(shapes)


def load(
    location: Location,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    progress: dict[str, int],
) -> dict[str, int]:
    """Restore what `save` wrote into a module. See `load_state`."""
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


def save(location: Location, snapshot: Snapshot, group: dist.ProcessGroup | None = None) -> None:
    """Write this rank's part of a snapshot. Collective; the files are durable when it returns.

    Args:
        location: new folder.
        snapshot: of this rank.
        group: all ranks; default: the default group.
    """
    folder = Folder(location)
    state = snapshot.state
    rank, ranks = _rank()
    whole = {
        "model": state.model,
        "optimizer": state.optimizer,
        "rng": {str(rank): snapshot.random},
    }
    writer = ShardWriter(folder)
    _unwrapped(
        lambda: save_shards(whole, storage_writer=writer, process_group=group, no_dist=ranks == 1)
    )
    written: list[dict[str, FileEntry]] = [{}] * ranks
    if ranks > 1:
        dist.all_gather_object(written, writer.written, group)
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
            progress=snapshot.progress,
            files={name: entry for part in written for name, entry in sorted(part.items())},
            adapters=state.adapters,
        )
        folder.write(MODULE_RECORD, record.to_bytes())


def load_state(location: Location, state: ModuleState, progress: dict[str, int]) -> dict[str, int]:
    """Read a checkpoint into the tensors of `state`. Collective.

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
    saved = whole["rng"][str(source)]
    if source != rank:
        torch.manual_seed(zlib.crc32(saved["cpu"].numpy().tobytes(), rank))
    else:
        torch.set_rng_state(saved["cpu"])
        if "cuda" in saved:
            torch.cuda.set_rng_state(saved["cuda"])
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


def _rank() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _unwrapped(work: Callable[[], object]) -> None:
    """Run `work`; raise the first rank's own error instead of torch's `CheckpointException`.

    `CheckpointException` is not an `Exception`.
    """
    # One rank needs none. For good, because `catch_warnings` is not for threads.
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    try:
        work()
    except CheckpointException as error:
        cause, _ = error.failures[min(error.failures)]
        raise cause from error


class Snapshots(Protocol):
    """A rank's part of a model, as `SnapshotWriter` saves it."""

    def snapshot(self) -> Snapshot: ...

    def reserve_snapshot(self) -> Callable[[], None]: ...


class SnapshotWriter:
    """Writes snapshots of this rank's models in a thread, one after the other.

    Made on all ranks together; they write the same snapshots in the same order. The thread has a
    process group of its own, because the collectives of a group must not overlap.
    """

    def __init__(self) -> None:
        several = dist.is_initialized() and dist.get_world_size() > 1
        group = dist.new_group(backend="gloo") if several else None
        assert not isinstance(group, int), "every rank is a member"
        self._group = group
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._reserved: Future[None] | None = None
        self._writes: dict[str, Future[None]] = {}

    def reserve(self, model: Snapshots) -> None:
        """Allocate the memory of a model's first snapshot in the background. Collective.

        Page-locking takes seconds.
        """
        self._reserved = self._thread.submit(model.reserve_snapshot())

    def write(self, name: str, model: Snapshots, location: Location) -> None:
        """Copy the state of a model, and start to write it. Collective.

        Args:
            name: of the model.
            location: new folder.
        """
        # The last write reads the memory that the snapshot overwrites.
        wait([future for future in (self._reserved, self._writes.get(name)) if future])
        taken = model.snapshot()
        self._writes[name] = self._thread.submit(save, location, taken, self._group)

    def is_durable(self, name: str) -> bool:
        """Return True once the last snapshot of a model is durable, or raise why it is not."""
        write = self._writes[name]
        if not write.done():
            return False
        write.result()
        return True

    def close(self) -> None:
        """End the thread after the write that it is in."""
        self._thread.shutdown(cancel_futures=True)


class ShardWriter(FileSystemWriter):
    """Writer of a rank's shards into a new folder; each file is durable once it is complete."""

    def __init__(self, folder: Folder) -> None:
        # All tensors are in host memory. To copy ahead, torch would start CUDA in this thread.
        super().__init__(folder.uri, sync_files=False, per_thread_copy_ahead=0)
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
