"""A run goes on while a real server of SGLang or vLLM answers badly, late or not at all.

A drill of minutes for each engine: `make drills` sets AGENTICRUN_SERVER_FAULTS=1. Each fault begins
at a random moment of a step. AGENTICRUN_FAULT_SEED repeats the order of the faults,
AGENTICRUN_FAULT_NAMES=RESET,SLOW chooses some. With
AGENTICRUN_DRILLS_TABLE=docs/drills.md the results go into that page.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np
import pytest
import xxhash

from agenticrun_api import Pipeline, Role
from agenticrun_workers.envs import FrozenLake
from agenticrun_workers.inference import actor as actor_module
from agenticrun_workers.inference import server_process
from agenticrun_workers.inference.actor import EngineActor
from agenticrun_workers.launch import Node
from agenticrun_workers.launch.launcher import shared_node
from agenticrun_workers.models.initialize import InitializeSpec, initialize_model
from agenticrun_workers.models.pretrained import load_model
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.models.tokenizer import words_of
from agenticrun_workers.placement import Placement
from agenticrun_workers.types import Trajectory
from agenticrun_workers.weights.sync import SyncReport
from agenticrun_workers.weights.transports import Receiver, Transport
from drills import with_row
from faulty_server import Fault, FaultyServer
from rollout_world import World
from tiny_model import plain_logprobs, weight_parts
from waiting import eventually_in_loop

pytestmark = pytest.mark.skipif(
    not os.environ.get("AGENTICRUN_SERVER_FAULTS"), reason="a drill: AGENTICRUN_SERVER_FAULTS=1"
)

STUCK_SECONDS = float(os.environ.get("AGENTICRUN_FROZEN_SECONDS", "40"))
"""Instead of five minutes: a server that does not answer is frozen, one that computes nothing is
stuck."""
BATCH_SECONDS = 400.0
MAX_TOKENS = 40
"""Longest response."""
REPLACE_SECONDS = 1200.0
FOUND = {
    Fault.ERRORS: "answered 500",
    Fault.NO_JSON: "cannot be read",
    Fault.FOREIGN_IDS: "token ids outside",
    Fault.HUGE_IDS: "cannot be read",
    Fault.NO_IDS: "cannot be read",
    Fault.FEW_LOGPROBS: "log-probs",
    Fault.LOST_EVENT: "versions of",
    Fault.TRUNCATED: "ended before the response",
    Fault.RESET: "failed: ",
    Fault.SILENT: "is frozen",
    Fault.DEAF: "it is stuck",
}
"""What the log says about an engine with this fault. A slow one is not replaced."""
CONFIGS: dict[str, dict[str, int]] = {
    "sglang": {},
    "vllm": {
        "kv_cache_memory_bytes": 64 * 2**20,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 64,
    },
}


def pipeline_of(engine: str) -> Pipeline:
    return Pipeline.model_validate(
        {
            "maxSteps": 1,
            "rolloutBatchSize": 16,
            "sequenceLength": 512,
            "evalSteps": 0,
            "envs": [
                {"tag": "A", "type": "frozen_lake", "maxSteps": 4, "maxTokensPerStep": MAX_TOKENS}
            ],
            "trainEnvs": {"groups": 4, "groupSize": 4, "tags": ["A"]},
            "actorInfer": {"strategy": {"name": engine, "config": CONFIGS[engine]}},
        }
    )


class Actor(EngineActor):
    """The real actor in this process, behind a proxy from when it has started."""

    async def placement(self) -> Placement:
        return Placement(self._name, Role.INFERENCE, "node", "pod", 1)

    @property
    def server(self) -> Any:
        """The engine, whose server is a real one."""
        return self._engine

    async def go_through(self, proxy: str) -> None:
        http = self.server._http
        await http._session.close()
        http._session = aiohttp.ClientSession(
            proxy,
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=server_process.KEEP_ALIVE_SECONDS
            ),
            timeout=aiohttp.ClientTimeout(total=None),
        )


class SameWeights:
    """A sync of the same weights under another version. See `WeightSync`."""

    def __init__(self, files: list[Path]) -> None:
        self._files = [(str(file), xxhash.xxh3_64_intdigest(file.read_bytes())) for file in files]
        self.version: int | None = None

    async def update(
        self, receivers: Mapping[str, Receiver[EngineActor]], version: int, _: object
    ) -> SyncReport:
        self.version = version
        loads = (self.join(name, receiver) for name, receiver in receivers.items())
        outcomes = zip(receivers, await asyncio.gather(*loads, return_exceptions=True), strict=True)
        failed = {name: error for name, error in outcomes if error is not None}
        return SyncReport(Transport.OBJECT_STORE, 0, 1.0, failed)

    async def join(self, _: str, receiver: Receiver[EngineActor]) -> None:
        version = self.version
        assert version is not None
        await receiver.handle.call(lambda engine: engine.begin_update(version))
        for path, checksum in self._files:
            await receiver.handle.call(lambda engine: engine.take_bucket(path, checksum))
        await receiver.handle.call(lambda engine: engine.finish_update())


@dataclass(frozen=True)
class Row:
    """One line of the table in docs/drills.md."""

    drill: str
    date: str
    found: str
    replaced: str
    step: float
    normal: float

    def line(self) -> str:
        """As Markdown."""
        cells = (self.drill, self.date, self.found, self.replaced)
        return f"| {' | '.join(cells)} | {self.step:.0f} s | {self.normal:.0f} s |"


TABLE_HEAD = (
    "| bad answers | date (UTC) | found by | another server serves after | step with the fault "
    "| step after it |\n|---|---|---|---|---|---|\n"
)


class ServerWorld(World):
    """A run on two real servers.

    Steps come in threes: one without a fault, which is timed; one in which a fault begins; one in
    which the engine is replaced.
    """

    def __init__(
        self,
        folder: Path,
        rng: random.Random,
        engine: str,
        faults: list[Fault],
        log: pytest.LogCaptureFixture,
    ) -> None:
        super().__init__(folder, rng, pipeline_of(engine))
        self._name, self._log = engine, log
        self._source = ModelSource(str(folder))
        self._model = load_model(str(folder))
        self._weights: Any = SameWeights(weight_parts(folder, folder / "parts"))
        self._faults = faults
        self._struck: dict[Fault, tuple[str, FaultyServer]] = {}
        self._proxies: dict[str, FaultyServer] = {}
        self.exits = AsyncExitStack()
        self._exits: dict[str, AsyncExitStack] = {}
        """By engine. One that was replaced would end with its process, which here lives on."""
        self._replaced: dict[Fault, tuple[str, float]] = {}
        """The engine that had the fault, and the seconds until there was another."""
        self.tokens = 0

    async def engine(self, name: str) -> EngineActor:
        actor, exits = Actor(name), await self.exits.enter_async_context(AsyncExitStack())
        self._exits[name] = exits
        exits.push_async_callback(actor.close)
        await actor.start(self._pipeline, self._source, 0, 1)
        proxy = await exits.enter_async_context(FaultyServer(actor.server.url).serve())
        await actor.go_through(proxy.url)
        self._proxies[name] = proxy
        return actor

    async def sync(self) -> None:
        await self.engine_pool.update_weights(self._weights, self.version)

    async def strike(self) -> None:
        if not self.version % 3:
            return
        fault = self._faults[self.version // 3]
        if self.version % 3 == 1:
            if self.version > 1:
                self.report(self.version // 3 - 1)
            await asyncio.sleep(self.rng.uniform(0, 0.3))  # later, the step might be over
            await eventually_in_loop(lambda: len(self.engine_pool.engines) == 2, 60, "two serve")
            name = self.rng.choice(list(self.engine_pool.engines))
            self._proxies[name].fault = fault
            began = asyncio.get_running_loop().time()
            self._struck[fault] = name, self._proxies[name]
            if fault in FOUND:
                await eventually_in_loop(
                    lambda: (
                        name not in self.engine_pool.engines and len(self.engine_pool.engines) == 2
                    ),
                    REPLACE_SECONDS,
                    f"another engine instead of {name}, {fault}",
                )
                self._replaced[fault] = name, asyncio.get_running_loop().time() - began
                await self._exits[name].aclose()
        elif fault not in FOUND:
            proxy = self._struck[fault][1]
            await eventually_in_loop(lambda: bool(proxy.hits), 60, "the slow one is asked")
            proxy.fault = None

    def check(self, trajectory: Trajectory) -> None:
        """A trainer computes these log-probs from these tokens: none of them is garbage."""
        tokens_T, mask_T = trajectory.tokens_T, trajectory.response_mask_T
        assert mask_T.any()
        assert int(trajectory.versions_T[mask_T].min()) >= 0
        assert int(trajectory.versions_T.max()) <= self.version
        logprobs_T = plain_logprobs(self._model, tokens_T[:1], tokens_T[1:])
        np.testing.assert_allclose(
            trajectory.logprobs_T[1:][mask_T[1:]], logprobs_T[mask_T[1:]], atol=1e-3
        )
        self.tokens += int(mask_T.sum())

    def report(self, number: int) -> None:
        """Check how a fault went, when the step after it has been made, and write its row."""
        fault = self._faults[number]
        assert self._struck[fault][1].hits, fault
        found, replaced = "nothing: it was over too soon", "not replaced"
        if any(each.startswith(f"{self._struck[fault][0]} samples") for each in self._log.messages):
            found = "its speed: its responses went on at the other engine"
        if fault in FOUND:
            name, seconds = self._replaced[fault]
            (message,) = (each for each in self._log.messages if f"{name} died and is rep" in each)
            assert FOUND[fault] in message, (fault, message)
            found = re.sub(r" of http\S+", "", message.splitlines()[0].partition(": ")[2])
            found = re.sub(r": <.*", '")', found.partition(": it is stuck")[0])
            replaced = f"{seconds:.0f} s"
        step, normal = self.seconds[3 * number + 1], self.seconds[3 * number + 3]
        usual = median(self.seconds[::3])
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
        row = Row(f"{self._name}: {fault.value}", date, found, replaced, step, normal)
        print(row.line(), flush=True)
        if table := os.environ.get("AGENTICRUN_DRILLS_TABLE"):
            page, order = (
                Path(table),
                [f"{each}: {item.value}" for each in CONFIGS for item in Fault],
            )
            page.write_text(with_row(page.read_text(), row, order, TABLE_HEAD))
        slow = MAX_TOKENS if fault is Fault.SLOW else 0  # the last slow response ends in that step
        limit = 3 * usual + 5 + slow
        assert normal < limit, f"{fault}: the step after it takes {normal} s, not {usual}"


@pytest.mark.parametrize("engine", list(CONFIGS))
@pytest.mark.timeout(7200)
async def test_bad_answers_of_servers_cost_no_episode_and_are_never_trained_on(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (server_process, actor_module):
        monkeypatch.setattr(module, "STEP_SECONDS", STUCK_SECONDS)
    monkeypatch.setenv(actor_module.LOG_FOLDER, str(tmp_path / "logs"))
    shared_node.set(Node("here", "127.0.0.1"))
    lake = FrozenLake()
    words = [*lake.vocabulary(), *words_of(lake.instruction), *map(str, range(10))]
    folder = tmp_path / "model"
    folder.mkdir()
    initialize_model(
        folder,
        InitializeSpec(
            tuple(words), heads=4, key_value_heads=2, max_position_embeddings=512, seed=1
        ),
    )
    seed = int(os.environ.get("AGENTICRUN_FAULT_SEED", random.SystemRandom().randrange(2**32)))
    rng = random.Random(seed)
    faults = rng.sample(list(Fault), len(Fault))
    if wanted := os.environ.get("AGENTICRUN_FAULT_NAMES"):
        faults = [fault for fault in faults if fault.name in wanted.split(",")]
    print(f"{engine}: seed {seed}: {[fault.name for fault in faults]}", flush=True)
    world = ServerWorld(folder, rng, engine, faults, caplog)
    async with world.exits:
        await world.start()
        position = await world.train(3 * len(faults) + 1, BATCH_SECONDS)
        await world.close()
    assert world.lost_nothing(position), f"seed {seed}"
    lost = [
        record
        for record in caplog.records
        if record.name == "asyncio" and "web_protocol" not in record.getMessage()
    ]  # tasks of the proxies do not count
    assert not lost, [(each.getMessage(), each.exc_info) for each in lost]
    world.report(len(faults) - 1)
    usual = median(world.seconds[::3])
    print(f"{engine}: {world.tokens} tokens checked; a step without a fault: {usual:.1f} s")
