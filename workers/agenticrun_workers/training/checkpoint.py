"""Model, optimizer and counters of all ranks in one folder (torch.distributed.checkpoint), readable by any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from agenticrun_workers.training.strategy import CheckpointMismatch


def save(folder: Path, policy: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, int]) -> None:
    """Write this rank's shards. Collective."""
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "progress": dict(progress), "rng": torch.get_rng_state()}
    save_shards(state, checkpoint_id=str(folder))


def load(folder: Path, policy: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, int]) -> dict[str, int]:
    """Restore what `save` wrote and return its counters. Collective.

    Raises:
        CheckpointMismatch: naming the first parameter that is missing, unknown or of another shape. Nothing has changed then.
    """
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    _check(folder, model_state)
    state: dict[str, Any] = {
        "model": model_state,
        "optimizer": optimizer_state,
        "progress": dict(progress),
        "rng": torch.get_rng_state(),
    }
    load_shards(state, checkpoint_id=str(folder))
    set_state_dict(policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    torch.set_rng_state(state["rng"])
    restored: dict[str, int] = state["progress"]
    return restored


def _check(folder: Path, model_state: dict[str, Any]) -> None:
    if not (folder / ".metadata").is_file():
        raise CheckpointMismatch(f"{folder} holds no trainer checkpoint")
    stored = {
        name.removeprefix("model."): tuple(entry.size)
        for name, entry in FileSystemReader(folder).read_metadata().state_dict_metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    wanted = {name: tuple(value.shape) for name, value in model_state.items() if isinstance(value, Tensor)}
    for name in [*wanted, *stored]:
        if stored.get(name) != wanted.get(name):
            raise CheckpointMismatch(
                f"{name.removeprefix('model.')}: the model has {_shape(wanted.get(name))}, "
                f"the checkpoint in {folder} has {_shape(stored.get(name))}"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "no such parameter" if shape is None else f"shape {list(shape)}"
