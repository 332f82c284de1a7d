"""A tiny model in the dtype that a test asks for, and a process group that does not stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from loaded_models import loaded
from ragged_samples import make_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def load(folder: Path) -> Callable[[], PreTrainedModel]:
    return lambda: loaded(folder, torch.float64)


@pytest.fixture
def load_float32(folder: Path) -> Callable[[], PreTrainedModel]:
    return lambda: loaded(folder, torch.float32)


@pytest.fixture
def _one_rank() -> Iterator[None]:
    """Take the process group of a single rank away again."""
    if dist.is_initialized():  # by a test of another file
        dist.destroy_process_group()
    yield
    dist.destroy_process_group()
