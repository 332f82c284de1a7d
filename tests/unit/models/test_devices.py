"""The spec decides the device: GPUs that are reserved are used, and no others, on any machine."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console

from agenticrun_api import parse_run
from agenticrun_api.names import ENV_NODE, ENV_SIMULATED_GPUS
from agenticrun_workers.driver.local import run_locally
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.inference.actor import LOG_FOLDER, EngineActor
from agenticrun_workers.inference.builder import build_engine
from agenticrun_workers.launch.node import Node, shared_node
from agenticrun_workers.models import devices
from agenticrun_workers.models.devices import (
    HostCopies,
    MissingGpus,
    claim_device,
    collective_backends,
    compute_device,
    driver_gpus,
    gpus_of_children,
)
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.rollout.env_worker import EnvWorker
from agenticrun_workers.trainer.policy_rank import TrainerActor
from agenticrun_workers.trainer.rank import RankActor
from agenticrun_workers.trainer.reference_and_critic import CriticActor, ReferenceActor
from tiny_runs import tiny_document, tiny_run

NOWHERE: Any = None
PIPELINE = parse_run(tiny_document()).spec.pipeline
OWNER = "trainer rank 3"
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


@pytest.fixture(autouse=True)
def pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_NAME", "lake-trainer-0")
    monkeypatch.setenv(ENV_NODE, "gpu-7")
    monkeypatch.delenv(ENV_SIMULATED_GPUS, raising=False)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system. Please check\nmore")

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.init", fail)
    monkeypatch.setattr("torch.version.cuda", "13.2")
    monkeypatch.setattr(devices, "driver_gpus", lambda: (0, "libcuda.so.1: cannot open"))


@pytest.fixture(params=range(1, 9))
def visible(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A machine with 1 to 8 GPUs, as torch sees it. No tensor can be on them."""
    visible: int = request.param
    set_up_gpus(monkeypatch, visible)
    return visible


def set_up_gpus(monkeypatch: pytest.MonkeyPatch, visible: int) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: visible)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.set_device", lambda _: None)
    monkeypatch.setattr("torch.cuda.init", lambda: None)


def in_context(call: Callable[..., Any], *args: Any) -> Any:
    """Call as an actor of its own would."""
    return contextvars.copy_context().run(call, *args)


def test_an_actor_without_gpus_computes_on_the_cpu_of_any_machine(visible: int) -> None:
    def claim() -> None:
        assert compute_device() == torch.device("cpu")
        assert claim_device(OWNER, ()) == compute_device() == torch.device("cpu")

    in_context(claim)


def test_a_rank_computes_on_the_gpu_that_ray_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up_gpus(monkeypatch, 1)

    def claim(gpu: str) -> None:
        assert claim_device(OWNER, (gpu,)) == compute_device() == torch.device("cuda", 0)

    for gpu in ("0", "7", "GPU-5b07d2a1"):
        in_context(claim, gpu)


def test_actors_that_share_a_process_compute_on_different_gpus(visible: int) -> None:
    for gpu in range(visible):
        assert in_context(claim_device, OWNER, (str(gpu),)) == torch.device("cuda", gpu)


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_a_run_without_gpus_trains_on_the_cpu_of_a_machine_that_has_some(
    gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor on a GPU would fail here."""
    set_up_gpus(monkeypatch, gpus)
    # torch itself looks at the GPU's streams in an optimizer's step, and to write checkpoints.
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **_: None)
    monkeypatch.setattr("torch.cuda.current_stream", Mock())
    monkeypatch.setattr("torch.cuda.stream", lambda _: nullcontext())
    run = tiny_run(
        maxSteps=1, warmup={"steps": 1, "batchSize": 2}, algorithm={"lossKl": {"coef": 0.01}}
    )
    report = run_locally(run, tmp_path / "out", Console(quiet=True), in_process=True)
    assert report.outcome == "Succeeded"


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("rank", "role"),
    [(TrainerActor, "trainer"), (ReferenceActor, "reference"), (CriticActor, "critic")],
)
def test_a_rank_with_a_reserved_gpu_does_not_train_on_the_cpu(
    rank: type[TrainerActor | ReferenceActor | CriticActor], role: str
) -> None:
    def set_up() -> None:
        shared_node.set(Node("node", "127.0.0.1", gpus=("3",)))
        actor: RankActor = rank(2, 4, PIPELINE)
        actor.setup(NOWHERE, ("127.0.0.1", 1), 1)  # type: ignore[attr-defined]

    with pytest.raises(MissingGpus) as missing:
        in_context(set_up)
    assert str(missing.value).startswith(
        f"{role} rank 2 in pod lake-trainer-0 on node gpu-7 has 1 GPU reserved, and torch sees "
        "none (Found no NVIDIA driver on your system. Please check): check the driver of the node"
    )


@pytest.mark.parametrize("gpus", [(), ("0",)])
def test_ranks_on_gpus_allocate_segments_that_grow(
    gpus: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up_gpus(monkeypatch, 1)
    monkeypatch.setattr("agenticrun_workers.trainer.ranks.join_ranks", lambda *_: None)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    monkeypatch.setenv(ALLOCATOR, "")  # to restore it
    monkeypatch.delenv(ALLOCATOR)

    def join() -> None:
        shared_node.set(Node("node", "127.0.0.1", gpus=gpus))
        rank = TrainerActor(0, 1, PIPELINE)
        rank._join(("127.0.0.1", 1), 1)
        rank.close()

    in_context(join)
    options = os.environ.get(ALLOCATOR, "").split(",")
    assert ("expandable_segments:True" in options) == bool(gpus)


@pytest.mark.parametrize("colocated", [False, True])
async def test_only_an_engine_that_gets_the_gpus_of_ranks_shares_them(
    colocated: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only then the server is started so that it can sleep, which costs it speed and memory."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv(LOG_FOLDER, str(tmp_path))
    shared_node.set(Node("node", "127.0.0.1", gpus=() if colocated else ("2", "3")))
    found: dict[str, Any] = {}

    class Stop(Exception):
        pass

    def build(*_: Any, **arguments: Any) -> None:
        found.update(arguments)
        raise Stop

    monkeypatch.setattr("agenticrun_workers.inference.builder.build_engine", build)
    actor = EngineActor("engine-0")
    if colocated:
        await actor.use_gpus(("0", "1"))
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    with pytest.raises(Stop):
        await actor.start(PIPELINE, ModelSource(str(tmp_path)), 1)
    await actor.close()
    assert found["shares_gpus"] == colocated
    assert found["gpus"] == (("0", "1") if colocated else ("2", "3"))


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("engine", "found"),
    [
        ("transformers", "torch sees none (Found no NVIDIA driver"),
        ("sglang", "NVIDIA's driver shows none (libcuda.so.1: cannot open)"),
        ("vllm", "NVIDIA's driver shows none (libcuda.so.1: cannot open)"),
    ],
)
def test_an_engine_with_a_reserved_gpu_does_not_sample_on_the_cpu(
    engine: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agenticrun_workers.inference.builder.check_config", lambda *_, **__: None)
    monkeypatch.setattr("agenticrun_workers.inference.builder.check_weights", lambda _: None)
    pipeline = tiny_run(actorInfer={"strategy": {"name": engine}}).spec.pipeline
    with pytest.raises(MissingGpus) as missing:
        build_engine(
            pipeline,
            ModelSource(str(tmp_path)),
            str(tmp_path),
            owner="inference engine engine-0",
            gpus=("0",),
            threads=1,
            logs=tmp_path,
        )
    assert str(missing.value).startswith(
        "inference engine engine-0 in pod lake-trainer-0 on node gpu-7 has 1 GPU reserved, and "
        + found
    )


@pytest.mark.usefixtures("no_gpu")
async def test_an_env_worker_with_a_reserved_gpu_does_not_start_without_it() -> None:
    shared_node.set(Node("node", "127.0.0.1", gpus=("0",)))
    worker = EnvWorker("env-worker-0", PIPELINE)
    with pytest.raises(MissingGpus, match=r"env worker env-worker-0 in pod .* driver shows none"):
        await worker.describe()


@pytest.mark.usefixtures("no_gpu")
def test_simulated_gpus_are_computed_on_cpus(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENV_SIMULATED_GPUS, "1")
    assert in_context(claim_device, OWNER, ("0",)) == torch.device("cpu")
    assert gpus_of_children("inference engine engine-0", ("0",)) == 0
    assert caplog.messages == [
        f"the GPUs of {owner} are simulated: it computes on CPUs"
        for owner in (OWNER, "inference engine engine-0")
    ]


def test_the_development_cluster_says_that_its_gpus_are_simulated() -> None:
    plugin = Path(__file__).parents[3] / "tools/devcluster/go/fakegpu/main.go"
    assert f'"{ENV_SIMULATED_GPUS}": "1"' in plugin.read_text()


@pytest.mark.usefixtures("no_gpu")
def test_a_torch_for_cpus_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr("torch.version.hip", None)
    with pytest.raises(InvalidConfig, match=r"^spec\.image: .* sees none, because it is built for"):
        claim_device(OWNER, ("0",))


def test_a_process_that_sees_fewer_gpus_than_it_has_reserved_says_so(
    visible: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "driver_gpus", lambda: (visible, ""))
    enough, more = ([str(gpu) for gpu in range(count)] for count in (visible, visible + 1))
    assert in_context(claim_device, OWNER, enough).type == "cuda"
    assert gpus_of_children(OWNER, enough) == visible
    for subject, check in (("torch sees", claim_device), ("shows", gpus_of_children)):
        with pytest.raises(
            MissingGpus, match=rf"has {visible + 1} GPUs reserved, and .*{subject} {visible} \(it"
        ):
            check(OWNER, more)


def test_gpus_of_amd_are_left_to_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kfd").touch()
    monkeypatch.setattr(devices, "AMD_DRIVER", tmp_path / "kfd")
    monkeypatch.setattr(devices, "driver_gpus", lambda: (0, "libcuda.so.1: cannot open"))
    assert gpus_of_children(OWNER, ("0", "1")) == 2


def test_the_driver_says_how_many_gpus_it_shows_or_why_none() -> None:
    count, cause = driver_gpus()
    assert (count > 0) != bool(cause)


def test_tensors_on_a_gpu_go_by_nccl_and_those_in_host_memory_by_gloo() -> None:
    assert collective_backends(torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"
    assert collective_backends(torch.device("cpu")) == "gloo"


def test_copies_of_a_later_offload_have_the_memory_of_the_first() -> None:
    copies = HostCopies()
    first, second = torch.arange(3.0), torch.ones(2, 2)
    places = []
    for added in (0, 1):
        copy = copies.filling()
        found = [copy(first + added), copy(second + added)]
        assert [tensor.tolist() for tensor in found] == [
            (first + added).tolist(),
            (second + added).tolist(),
        ]
        places.append([tensor.data_ptr() for tensor in found])
    assert places[0] == places[1]
    assert copies.filling()(torch.zeros(5)).tolist() == [0.0] * 5


def test_a_deterministic_process_has_cublas_workspaces_of_a_fixed_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # torch refuses matrix products on GPUs without them.
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    devices.set_deterministic(True)
    try:
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8")
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        devices.set_deterministic(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_a_deterministic_run_in_one_process_has_them_before_its_engine_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    settings = []

    def record(*arguments: Any) -> None:
        settings.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))

    monkeypatch.setattr("agenticrun_workers.inference.transformers.engine.check_parity", record)
    run = tiny_run(maxSteps=1, deterministic=True)
    try:
        run_locally(run, tmp_path / "out", Console(quiet=True), in_process=True)
    finally:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    assert settings == [":4096:8"]
    assert not torch.are_deterministic_algorithms_enabled()
