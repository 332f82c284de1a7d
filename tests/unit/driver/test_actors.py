"""The driver's watch over its actors."""

from __future__ import annotations

import asyncio
import gc
import re
from types import SimpleNamespace
from typing import Any

import pytest

from agenticrun_api import Role, parse_run
from agenticrun_workers.driver.actors import ActorStarter, torch_threads
from agenticrun_workers.driver.pools import ActorPools
from agenticrun_workers.driver.rank_handles import RankHandles
from agenticrun_workers.driver.run_actors import until_death
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.launch import ActorUnavailable
from agenticrun_workers.launch.liveness import FROZEN_POLLS, POLL_SECONDS
from agenticrun_workers.models.source import ModelSource, ModelSources, TokenizerCorpus
from agenticrun_workers.placement import Placement
from agenticrun_workers.sizing.models import run_shapes
from rollout_fakes import Remote
from runs import Change, run_with
from virtual_clock import on_virtual_clock

LIMIT = FROZEN_POLLS * POLL_SECONDS


def test_a_store_may_take_any_time_to_start_and_is_given_up_when_it_freezes_later() -> None:
    started, froze = 10 * LIMIT, 20 * LIMIT

    class Store:
        async def health(self) -> None:
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(started - now if now < started else POLL_SECONDS)
            if asyncio.get_running_loop().time() >= froze:
                await asyncio.Event().wait()

    async def watch() -> float:
        store = Remote(Store())
        with pytest.raises(ActorUnavailable, match="has not answered for 60 s"):
            await until_death(store)
        assert store.killed
        return asyncio.get_running_loop().time()

    assert froze < on_virtual_clock(watch()) <= froze + LIMIT + POLL_SECONDS


async def test_nobody_keeps_the_handle_of_an_env_worker_that_is_gone() -> None:
    class Worker:
        def __init__(self, number: int) -> None:
            self.number = number

        async def placement(self) -> Placement:
            return Placement(f"w{self.number}", Role.ENV, "node", f"pod-{self.number}", 1)

        async def describe(self) -> TokenizerCorpus:
            return TokenizerCorpus((), ())

        async def setup(self, source: object) -> None: ...

    class Launcher:
        started = 0

        def start(self, *_: Any, **__: Any) -> Any:
            self.started += 1
            return Remote(Worker(self.started))

        def put(self, value: Any) -> Any:
            raise AssertionError

        def offers(self, node_id: str) -> tuple[str, ...]:
            return (Role.ENV.value,)

    run = parse_run(run_with())
    starter = ActorStarter(run.spec, Launcher())
    pools = ActorPools(run, starter)
    source: Any = SimpleNamespace(tokenizer=lambda: None)
    pools.source.set_result(source)
    handles: list[Any] = [await pools._spawn_env_worker() for _ in range(3)]
    assert (len(starter._actors), len(starter._places)) == (3, 3)
    del handles[:2]
    await asyncio.sleep(0)
    gc.collect()
    assert (list(starter._actors), list(starter._places)) == (handles, handles)
    assert starter.vacant_pods(Role.ENV, handles) == ["pod-1", "pod-2"]
    await pools.stop()
    starter.kill_all()
    assert handles[0].killed


CPUS: tuple[Change, ...] = (
    ("spec.roles.trainer", {"cpus": "2"}),
    ("spec.roles.inference", {"cpus": "3"}),
)
ON_CLUSTER: Change = ("metadata.uid", "1234")
ASYNCHRONOUS: Change = ("spec.pipeline.staleness", {"max": 1, "offPolicy": "Ignore"})
CRITIC: tuple[Change, ...] = (
    ("spec.roles.critic", {}),
    ("spec.pipeline.algorithm", {"name": "gae"}),
    ("spec.pipeline.critic", {}),
)


GPU_RUN = (
    ("spec.roles", {"trainer": {"gpus": 1}, "inference": {"gpus": 1}}),
    ("spec.model", {"path": "Qwen/Qwen3-8B", "dtype": "bfloat16"}),
)


class RankWithGpu:
    """The first rank of a run, on a GPU."""

    def __init__(self, gpu: tuple[str, int] | None) -> None:
        self._gpu = gpu
        self.asked = 0

    async def describe(self, sources: ModelSources) -> Any:
        self.asked += 1
        if self._gpu is None:
            return None
        assert sources.policy.path is not None
        run = parse_run(run_with(*GPU_RUN), local=True)
        policy = run_shapes(run.spec)[Role.TRAINER]
        return *self._gpu, dict.fromkeys((Role.TRAINER, Role.REFERENCE, Role.CRITIC), policy)


async def times_described(gpu: tuple[str, int] | None, *changes: Change) -> int:
    run = parse_run(run_with(*GPU_RUN, *changes), local=True)
    rank = RankWithGpu(gpu)
    remote: Any = Remote(rank)
    source = ModelSource.of(run.spec.model)
    starter: Any = None  # the check starts nothing
    ranks = RankHandles(run, starter, [remote], [], [])
    await ranks.check_fit(ModelSources.of(source, run.spec.pipeline))
    return rank.asked


async def test_a_model_that_its_gpu_cannot_hold_is_refused_before_it_is_loaded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(InvalidConfig, match=r"needs .* GiB .*AdamW 61\.0.* has 79\.6 GiB.*; with"):
        await times_described(("NVIDIA H100 80GB HBM3", 81_559 * 2**20))
    caplog.clear()
    caplog.set_level("INFO")
    lora = ("spec.pipeline.actorTrain", {"lora": {"rank": 16}})
    large = ("NVIDIA B200", 183_359 * 2**20)
    assert await times_described(large, lora) == 1
    (line,) = (record.message for record in caplog.records if "plan for" in record.message)
    assert line.startswith("plan for NVIDIA B200: trainer: the GPU of the rank needs ")
    assert re.search(r"a step takes [0-9.]+ s at least$", line)


async def test_without_gpus_no_fit_is_checked() -> None:
    assert await times_described(None) == 1
    cpus: Change = ("spec.roles", {"trainer": {}, "inference": {}})
    assert await times_described(("NVIDIA L4", 1), cpus) == 0


def threads(*changes: Change) -> tuple[int, int]:
    """Return the threads of a rank and of an engine on 16 cores."""
    run = parse_run(run_with(*changes))
    return torch_threads(run, Role.TRAINER, 16), torch_threads(run, Role.INFERENCE, 16)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ((), (16, 16)),
        (CPUS, (2, 3)),
        ((ASYNCHRONOUS,), (8, 8)),
        ((("spec.roles.inference", {"replicas": 3}),), (16, 5)),
        ((("spec.roles.inference", {"replicas": 3}), ASYNCHRONOUS), (4, 4)),
        (CRITIC, (8, 16)),
    ],
    ids=["alternating", "requests", "asynchronous", "engines", "asynchronous engines", "critic"],
)
def test_on_one_machine_all_cores_compute_unless_cpus_are_given(
    changes: tuple[Change, ...], expected: tuple[int, int]
) -> None:
    assert threads(*changes) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [((), (1, 1)), (CPUS, (2, 3)), ((*CPUS, ASYNCHRONOUS), (2, 3))],
    ids=["defaults", "requests", "asynchronous"],
)
def test_pods_keep_to_their_requests(
    changes: tuple[Change, ...], expected: tuple[int, int]
) -> None:
    assert threads(ON_CLUSTER, *changes) == expected


@pytest.mark.parametrize("where", [(), (ON_CLUSTER,)], ids=["machine", "cluster"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("spec.pipeline.deterministic", True), (2, 3)),
        (("spec.pipeline.actorInfer", {"strategy": {"name": "vllm"}}), (2, 3)),
    ],
    ids=["deterministic", "server"],
)
def test_deterministic_runs_and_servers_keep_to_their_requests(
    where: tuple[Change, ...], change: Change, expected: tuple[int, int]
) -> None:
    assert threads(*where, *CPUS, change) == expected


def test_ranks_with_gpus_share_the_request_of_their_pod() -> None:
    assert threads(ON_CLUSTER, ("spec.roles.trainer", {"gpus": 4, "cpus": "8"}))[0] == 2
