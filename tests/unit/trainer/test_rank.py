"""Warnings that ranks give the driver while they load their models."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agenticrun_api import Role
from agenticrun_workers.driver import rank_handles
from agenticrun_workers.models import pretrained
from agenticrun_workers.models.initialize import InitializeSpec, initialize_model
from agenticrun_workers.models.source import ModelSource, ModelSources
from agenticrun_workers.trainer.policy_rank import TrainerActor
from agenticrun_workers.trainer.rank import RankActor

LOG = logging.getLogger("agenticrun_workers.models.pretrained")


class Rank(RankActor):
    role = Role.TRAINER

    def rendezvous(self) -> tuple[str, int]:
        return "localhost", 1

    def setup(self, _sources: ModelSources, rendezvous: tuple[str, int], threads: int) -> None:
        self._join(rendezvous, threads)
        LOG.warning("%s holds 1 weights that its model does not use", "folder")
        LOG.info("not a warning")


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    monkeypatch.setattr("agenticrun_workers.trainer.ranks.join_ranks", lambda *_: None)
    threads = torch.get_num_threads()
    rank = Rank(0, 1, SimpleNamespace(deterministic=False))  # type: ignore[arg-type]
    yield rank
    rank.close()
    torch.set_num_threads(threads)


class Handle:
    """A handle of an actor in a process of another id."""

    def __init__(self, actor: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
        self.actor = actor
        self.patched = monkeypatch

    async def call(self, method: Callable[[Rank], Any]) -> Any:
        with self.patched.context() as patched:
            patched.setattr(os, "getpid", lambda: -1)
            return method(self.actor)


async def test_warnings_of_a_process_of_its_own_are_in_the_log_of_the_driver(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sources: Any = None
    handle: Any = Handle(rank, monkeypatch)
    await rank_handles.load_on([handle], sources, 1)
    repeated = [each.message for each in caplog.records if each.name == rank_handles.__name__]
    assert repeated == ["folder holds 1 weights that its model does not use"]


def test_an_actor_in_the_process_of_the_driver_repeats_nothing(rank: Rank) -> None:
    rank._join(("localhost", 1), 1)
    LOG.warning("once")
    assert rank.warnings(os.getpid()) == []
    assert rank.warnings(-1) == ["once"]
    rank.close()
    LOG.warning("later")
    assert rank.warnings(-1) == ["once"]


@pytest.mark.parametrize("number", [0, 1])
def test_the_first_rank_looks_for_nan_on_behalf_of_all(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[bool] = []

    def load(*_: Any, check_values: bool, **__: Any) -> None:
        checked.append(check_values)

    monkeypatch.setattr(pretrained, "load_model", load)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: number)
    pretrained.load_source(ModelSource("folder"))
    assert checked == [number == 0]


def test_nan_is_found_only_by_a_load_that_looks_for_it(tmp_path: Path) -> None:
    initialize_model(tmp_path, InitializeSpec(("a", "b"), hidden_size=16, heads=2))
    model = pretrained.load_model(str(tmp_path))
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    model.save_pretrained(tmp_path)
    pretrained.load_model(str(tmp_path), check_values=False)
    with pytest.raises(pretrained.ModelLoadError, match="hold NaN"):
        pretrained.load_model(str(tmp_path))


def test_a_rank_describes_its_gpu_and_the_models_before_it_loads_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    initialize_model(tmp_path, InitializeSpec(words=("up", "down")))
    source = ModelSource(str(tmp_path))
    trainer = TrainerActor(0, 1, SimpleNamespace(deterministic=False))  # type: ignore[arg-type]
    sources = ModelSources(source, source, source)
    assert trainer.describe(sources) is None
    gpu = SimpleNamespace(name="NVIDIA L4", total_memory=24)
    monkeypatch.setattr(TrainerActor, "_claim_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(pretrained, "load_model", None)
    found = trainer.describe(sources)
    assert found is not None
    assert found[:2] == ("NVIDIA L4", 24)
    model = pretrained.load_config(str(tmp_path))
    assert found[2][Role.TRAINER].vocabulary == model.vocab_size
    assert set(found[2]) == {Role.TRAINER, Role.REFERENCE, Role.CRITIC}
    missing = ModelSource("/models/missing")
    assert trainer.describe(ModelSources(missing, missing, missing)) is None
