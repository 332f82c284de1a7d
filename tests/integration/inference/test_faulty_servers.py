"""A run goes on while a real server of SGLang or vLLM answers badly, late or not at all.

A drill of minutes for each engine: `make drills` sets AGENTICRUN_SERVER_FAULTS=1. Each fault begins
at a random moment of a step. AGENTICRUN_FAULT_SEED repeats the order of the faults,
AGENTICRUN_FAULT_NAMES=RESET,SLOW chooses some. With
AGENTICRUN_DRILLS_TABLE=benchmarks/results/bad-answers.md the results go into that page.
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
from agenticrun_workers.inference.slow_engines import SlowEngines
from agenticrun_workers.launch import Node
from agenticrun_workers.launch.node import shared_node
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

STUCK_SECONDS = float(os.environ.get("AGENTICRUN_FROZEN_SECONDS", "60"))
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
"""Text in the log about an engine with this fault. A slow one is ejected, but not replaced."""
KNOWN_STEPS = 40
"""Steps before an engine becomes slow: then the usual speed of both is known."""
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
        http = self.server._started.http
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
    """One line of the table in benchmarks/results/bad-answers.md."""

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

    After steps without a fault comes one in which a fault begins and is found, one in which two
    engines serve again, and one that is timed.
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
        self._faults: dict[int, Fault] = {}
        """By the step in which they begin."""
        self.steps = 1
        for fault in faults:
            self.steps += KNOWN_STEPS if fault is Fault.SLOW else 0
            self._faults[self.steps] = fault
            self.steps += 3
        self._struck: dict[Fault, tuple[str, FaultyServer]] = {}
        self._proxies: dict[str, FaultyServer] = {}
        self.exits = AsyncExitStack()
        self._exits: dict[str, AsyncExitStack] = {}
        """By engine. One that was replaced would end with its process, which here lives on."""
        self._found: dict[Fault, float] = {}
        """Seconds until the engine was replaced; of a slow one, until it was ejected."""
        self.tokens = 0

    async def engine(self, name: str) -> EngineActor:
        actor, exits = Actor(name), await self.exits.enter_async_context(AsyncExitStack())
        self._exits[name] = exits
        exits.push_async_callback(actor.close)
        await actor.start(self._pipeline, self._source, 1)
        proxy = await exits.enter_async_context(FaultyServer(actor.server.url).serve())
        await actor.go_through(proxy.url)
        self._proxies[name] = proxy
        return actor

    async def sync(self) -> None:
        await self.engine_pool.update_weights(self._weights, self.version)

    async def strike(self) -> None:
        if ended := self._faults.get(self.version - 3):
            self.report(ended, self.version - 3)
        if (fault := self._faults.get(self.version)) is None:
            await eventually_in_loop(lambda: len(self.engine_pool.serving) == 2, 120, "two serve")
            return
        await asyncio.sleep(self.rng.uniform(0, 0.3))  # later, the step might be over
        name = self.rng.choice(list(self.engine_pool.serving))
        proxy = self._proxies[name]
        self._struck[fault] = name, proxy
        if fault is Fault.SLOW:
            records = self.engine_pool._slow._records
            known = [each for each in records if records[each].speed(prompts=True)]
            assert len(known) == 2, f"raise KNOWN_STEPS: only the speeds of {known} are known"
        proxy.fault = fault
        began = asyncio.get_running_loop().time()
        serving = 1 if fault is Fault.SLOW else 2
        await eventually_in_loop(
            lambda: (
                name not in self.engine_pool.serving and len(self.engine_pool.serving) == serving
            ),
            REPLACE_SECONDS,
            f"{serving} engines serve without {name}, {fault}",
        )
        self._found[fault] = asyncio.get_running_loop().time() - began
        if fault is Fault.SLOW:
            proxy.fault = None
        else:
            await self._exits[name].aclose()

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

    def report(self, fault: Fault, begin: int) -> None:
        """Check how a fault went that began in a step, and write its row."""
        name, proxy = self._struck[fault]
        assert proxy.hits, fault
        seconds = self._found[fault]
        if fault is Fault.SLOW:
            (message,) = (each for each in self._log.messages if f"{name} samples" in each)
            found = message.partition(": ")[0].removeprefix(f"{name} ")
            replaced = f"not replaced; ejected after {seconds:.0f} s, for a minute"
        else:
            (message,) = (each for each in self._log.messages if f"{name} died and is rep" in each)
            assert FOUND[fault] in message, (fault, message)
            found = re.sub(r" of http\S+", "", message.splitlines()[0].partition(": ")[2])
            found = re.sub(r": <.*", '")', found.partition(": it is stuck")[0])
            replaced = f"{seconds:.0f} s"
        step, normal = self.seconds[begin], self.seconds[begin + 2]
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
        row = Row(f"{self._name}: {fault.value}", date, found, replaced, step, normal)
        print(row.line(), flush=True)
        if table := os.environ.get("AGENTICRUN_DRILLS_TABLE"):
            page, order = (
                Path(table),
                [f"{each}: {item.value}" for each in CONFIGS for item in Fault],
            )
            page.write_text(with_row(page.read_text(), row, order, TABLE_HEAD))
        usual = self.usual
        assert normal < 3 * usual + 5, f"{fault}: the step after it takes {normal} s, not {usual}"

    @property
    def usual(self) -> float:
        """Median time of a step that is not one of a fault, or the one after it."""
        with_faults = {*self._faults, *(begin + 1 for begin in self._faults)}
        return median(time for step, time in enumerate(self.seconds) if step not in with_faults)


@pytest.mark.parametrize("slow", [False, True], ids=["bad", "slow"])
@pytest.mark.parametrize("engine", list(CONFIGS))
@pytest.mark.timeout(7200)
async def test_bad_answers_of_servers_cost_no_episode_and_are_never_trained_on(
    engine: str,
    slow: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not slow:  # one that computes nothing would be ejected, and its end takes minutes longer
        monkeypatch.setattr(SlowEngines, "poll", lambda *_: "")
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
    faults = [Fault.SLOW] if slow else rng.sample(list(FOUND), len(FOUND))
    if wanted := os.environ.get("AGENTICRUN_FAULT_NAMES"):
        faults = [fault for fault in faults if fault.name in wanted.split(",")]
        if not faults:
            pytest.skip(f"AGENTICRUN_FAULT_NAMES={wanted} names none of the faults of this drill")
    print(f"{engine}: seed {seed}: {[fault.name for fault in faults]}", flush=True)
    world = ServerWorld(folder, rng, engine, faults, caplog)
    async with world.exits:
        await world.start()
        position = await world.train(world.steps, BATCH_SECONDS)
        await world.close()
    assert world.lost_nothing(position), f"seed {seed}"
    lost = [
        record
        for record in caplog.records
        if record.name == "asyncio" and "web_protocol" not in record.getMessage()
    ]  # tasks of the proxies do not count
    assert not lost, [(each.getMessage(), each.exc_info) for each in lost]
    world.report(faults[-1], world.steps - 3)
    print(f"{engine}: {world.tokens} tokens checked; a step without a fault: {world.usual:.1f} s")
