"""A process that has GPUs reserved computes on them, or ends with the reason."""

from __future__ import annotations

import contextvars
from pathlib import Path
from typing import Any

import pytest

from agenticrun_api import parse_run
from agenticrun_api.names import ENV_SIMULATED_GPUS
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.inference.builder import build_engine
from agenticrun_workers.launch.launcher import Node, shared_node
from agenticrun_workers.models.devices import MissingGpus, require_gpus
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.trainer.policy_rank import TrainerActor
from agenticrun_workers.trainer.rank import RankActor
from agenticrun_workers.trainer.reference_and_critic import CriticActor, ReferenceActor
from tiny_runs import tiny_document

NOWHERE: Any = None
PIPELINE = parse_run(tiny_document()).spec.pipeline


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system. Please check\nmore")

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.init", fail)
    monkeypatch.setattr("torch.version.cuda", "13.2")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("rank", [TrainerActor, ReferenceActor, CriticActor])
def test_a_rank_with_a_reserved_gpu_does_not_train_on_the_cpu(
    rank: type[TrainerActor | ReferenceActor | CriticActor],
) -> None:
    def set_up() -> None:
        shared_node.set(Node("node", "127.0.0.1", gpus=("3",)))
        actor: RankActor = rank(0, 1, PIPELINE)
        actor.setup(NOWHERE, ("127.0.0.1", 1), 1)  # type: ignore[attr-defined]

    with pytest.raises(MissingGpus) as missing:
        contextvars.copy_context().run(set_up)
    assert str(missing.value).startswith(
        "this process has 1 GPU reserved, and torch sees none (Found no NVIDIA driver on your "
        "system. Please check): check the driver of the node"
    )


@pytest.mark.usefixtures("no_gpu")
def test_an_engine_with_a_reserved_gpu_does_not_sample_on_the_cpu(tmp_path: Path) -> None:
    source = ModelSource(str(tmp_path))
    with pytest.raises(MissingGpus, match="this process has 1 GPU reserved, and torch sees none"):
        build_engine(PIPELINE, source, str(tmp_path), gpus=1, threads=1, logs=tmp_path)


@pytest.mark.usefixtures("no_gpu")
def test_simulated_gpus_are_computed_on_cpus(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENV_SIMULATED_GPUS, "1")
    require_gpus(1)
    assert "the GPUs of this process are simulated" in caplog.text


def test_the_development_cluster_says_that_its_gpus_are_simulated() -> None:
    plugin = Path(__file__).parents[3] / "tools/devcluster/go/fakegpu/main.go"
    assert f'"{ENV_SIMULATED_GPUS}": "1"' in plugin.read_text()


@pytest.mark.usefixtures("no_gpu")
def test_a_torch_for_cpus_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr("torch.version.hip", None)
    with pytest.raises(InvalidConfig, match=r"^spec\.image: .* sees none, because it is built for"):
        require_gpus(1)


def test_a_process_that_sees_fewer_gpus_than_it_has_reserved_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.init", lambda: None)
    require_gpus(0)
    require_gpus(1)
    with pytest.raises(MissingGpus, match=r"has 2 GPUs reserved, and torch sees 1 \(it sees fewer"):
        require_gpus(2)
