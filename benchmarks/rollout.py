"""Measure how busy rollout keeps the engines, and the cost of a turn in the env worker.

    python benchmarks/rollout.py [--quick] [--json FILE]

**Utilization**, in virtual time: our controller, gate, env pool, env workers and clients play
batches of 64 groups of 8 on 4 simulated engines. An engine samples for 32 requests at once, 50
tokens per second each; others wait. Tokens per turn and the environment's seconds per turn are
log-normal; one episode in 100 has a turn whose environment takes 20 times the mean. A training step
takes 0.9 of the time in which engines that never wait play a batch.

- `utilization_eta<n>`: the least time in which an oracle, which knows all episodes beforehand,
  could have done the same steps, divided by the time taken with `staleness.max: <n>`. The oracle's
  time is a lower bound: engines never idle, or the longest episode decides.
  `_in_order_of_arrival`: engines do not know which requests are urgent. `_future_known`: engines
  begin with the episode that has most seconds left. In truth that is unknown, so no order of
  requests can be expected to do better. `_uneven_engines`: engines of 1.6, 1.2, 0.8 and 0.4 times
  the speed. `_streamed`: each step is four batches of 16 groups, trained as soon as they have
  finished; weights go to the engines after every fourth, and the age of tokens, in optimizer steps,
  has the same bound (docs/algorithms.md, "Train while a batch is still being played").
- `baseline_utilization`: the same for a barrier with ROLL's synchronous rules: one thread for each
  environment, tied to the engine with the fewest environments; all groups begin together; the
  training step waits for the slowest one, and the engines for the training step.
- `speedup_over_barrier`: time of the barrier over our time with `staleness.max: 1`,
  `_streamed` or not.

**Hand-offs**, in real time: one env worker runs 10,000 episodes at once against an engine that
answers at once, from another process. A hand-off is one request and its answer, with the agent's
and the environment's part of the turn. `handoff_p99_ms` is the time from the request to the
agent's next line at half of that load. `_traced`: while `agenticrun trace` records.

**Bytes**: `bytes_per_500_token_trajectory` is what a trajectory of 4 turns takes on its way to its
store, and `bytes_over_arrays_1024x8192` what a step of 1,024 trajectories of 8 turns takes, over
the bytes of its arrays. Tokens never pass through the driver: it gets
`driver_bytes_per_8192_token_trajectory`.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import logging
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from agenticrun_api import Pipeline
from agenticrun_workers.agents import Episode, Generate, register_agent
from agenticrun_workers.driver.trace import MAX_SPANS_EACH
from agenticrun_workers.envs import FrozenLake
from agenticrun_workers.envs.env import Env
from agenticrun_workers.inference.engine import ABORTED_UNSAMPLED
from agenticrun_workers.inference.request_port import Address, RequestPort
from agenticrun_workers.models.source import TokenizerSource
from agenticrun_workers.models.tokenizer import build_task_tokenizer, words_of
from agenticrun_workers.rollout.controller import (
    RolloutController,
    StalenessGate,
)
from agenticrun_workers.rollout.env_pool import EnvPool
from agenticrun_workers.rollout.env_worker import EnvWorker
from agenticrun_workers.rollout.groups import Endpoints, EpisodeResult, EpisodeTask, GroupPlan
from agenticrun_workers.rollout.trajectory_store import TrajectoryStore
from agenticrun_workers.serialization import pack
from agenticrun_workers.types import (
    EpisodeKey,
    FinishReason,
    Generation,
    GenerationRequest,
    IntArray,
    RolloutPosition,
    SamplingParams,
    StopReason,
    Stream,
    Trajectory,
    Turn,
)

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
from rollout_fakes import Remote
from virtual_clock import on_virtual_clock

GROUPS, GROUP_SIZE = 64, 8
ENGINES, SEATS = 4, 32
TOKENS_PER_SECOND = 50.0
MEAN_TOKENS, MEAN_WAIT, SIGMA = 64.0, 1.0, 1.0
STRAGGLERS, STRAGGLER_FACTOR = 0.01, 20.0
WORKERS = 4
UNEVEN = (1.6, 1.2, 0.8, 0.4)
"""Speeds of engines; their mean is 1."""
TRAINING_SHARE = 0.9
PARTS = 4
"""Batches of a step that is streamed."""
SEED = 7


@dataclass(frozen=True)
class Script:
    """The course of one episode: the tokens of each turn, and the environment's seconds."""

    tokens_K: tuple[int, ...]
    waits_K: tuple[float, ...]

    def seconds_from(self, turn: int) -> float:
        """Seconds left at the beginning of a turn."""
        return sum(self.tokens_K[turn:]) / TOKENS_PER_SECOND + sum(self.waits_K[turn:])

    @property
    def seat_seconds(self) -> float:
        """Seconds for which the episode uses an engine."""
        return sum(self.tokens_K) / TOKENS_PER_SECOND

    @property
    def seconds(self) -> float:
        """Duration on engines that are never full."""
        return self.seconds_from(0)


@cache
def script(group: int, member: int) -> Script:
    """Return the script of an episode: the same for us, the baseline and the oracle."""
    rng = np.random.default_rng((SEED, group, member))
    turns = int(rng.integers(2, 9))
    shift = -SIGMA * SIGMA / 2  # so that the means are 1
    tokens = MEAN_TOKENS * rng.lognormal(shift, SIGMA, turns)
    waits = MEAN_WAIT * rng.lognormal(shift, SIGMA, turns)
    if rng.random() < STRAGGLERS:
        waits[rng.integers(turns)] = STRAGGLER_FACTOR * MEAN_WAIT
    return Script(tuple(int(n) for n in np.clip(tokens, 1, 2048)), tuple(waits.tolist()))


def scripts(step: int) -> list[Script]:
    """Return the episodes of the groups that are started for a step."""
    groups = range(step * GROUPS, (step + 1) * GROUPS)
    return [script(group, member) for group in groups for member in range(GROUP_SIZE)]


def ideal_seconds(step: int) -> float:
    """Return the time of engines that never idle for the episodes of a step."""
    return sum(each.seat_seconds for each in scripts(step)) / (ENGINES * SEATS)


TRAINING_SECONDS = TRAINING_SHARE * float(np.mean([ideal_seconds(step) for step in range(10)]))


def oracle_seconds(steps: int, staleness: int, parts: int = 1) -> float:
    """Return a lower bound of the time of these steps for a schedule that knows all scripts.

    The groups of step v may begin when the engines have version v - staleness, as for us. From then
    on the last of them ends no earlier than the longest episode, and no earlier than engines that
    never idle finish all episodes of the steps from then on up to v.

    Args:
        parts: a step is trained as so many batches. Only the last one waits for all groups.
    """
    work = [ideal_seconds(step) for step in range(steps)]
    longest = [max(each.seconds for each in scripts(step)) for step in range(steps)]
    last_part = TRAINING_SECONDS / parts
    ends: list[float] = []

    def may_begin(step: int) -> float:
        return ends[step - staleness - 1] if step > staleness else 0.0

    for step in range(steps):
        played = max(
            may_begin(step) + longest[step],
            *(may_begin(first) + sum(work[first : step + 1]) for first in range(step + 1)),
        )
        trained = (ends[-1] if ends else 0.0) + TRAINING_SECONDS - last_part
        ends.append(max(played, trained) + last_part)
    return ends[-1]


Order = Callable[[GenerationRequest], int]
"""Returns the rank of a request: waiting requests with the smallest one go first."""


def by_priority(request: GenerationRequest) -> int:
    """Rank requests as our episodes ask for."""
    return request.priority


def by_arrival(_: GenerationRequest) -> int:
    """Rank all requests the same, so that the earliest goes first."""
    return 0


def by_future(request: GenerationRequest) -> int:
    """Rank requests by their step, then by how long their episode still takes."""
    _, group, member, *_, turn = request.request_id.rpartition("/")[2].split("-")
    milliseconds = int(1000 * script(int(group), int(member)).seconds_from(int(turn)))
    return int(group) // GROUPS * 10**9 - milliseconds


class SimulatedEngine:
    """An engine that samples for so many requests at once; others wait in this order."""

    def __init__(self, order: Order = by_priority, speed: float = 1.0) -> None:
        self.version = 0
        self._order = order
        self._speed = speed
        self._free = SEATS
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()
        self._sampling: dict[str, asyncio.Task[int]] = {}
        self._port = RequestPort(self._generate, self._abort)
        self._port.seats = SEATS

    async def requests_address(self) -> Address:
        return await self._port.address()

    async def close(self) -> None:
        """End all connections."""
        await self._port.close()

    async def sample(self, tokens: int, rank: int = 0) -> int:
        """Wait for a seat and sample; return the policy version of the first token."""
        await self._seat(rank)
        try:
            version = self.version
            await asyncio.sleep(tokens / TOKENS_PER_SECOND / self._speed)
        finally:
            self._leave()
        return version

    async def _seat(self, rank: int) -> None:
        if self._free:
            self._free -= 1
            return
        called = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (rank, next(self._arrivals), called))
        await called

    def _leave(self) -> None:
        self._free += 1
        while self._free and self._waiting:
            _, _, called = heapq.heappop(self._waiting)
            if not called.done():
                self._free -= 1
                called.set_result(None)

    async def _generate(self, request: GenerationRequest) -> Generation:
        tokens = request.sampling.max_new_tokens
        sampling = asyncio.create_task(self.sample(tokens, self._order(request)))
        self._sampling[request.request_id] = sampling
        try:
            return answer(tokens, await sampling)
        except asyncio.CancelledError:  # `_abort`
            return ABORTED_UNSAMPLED
        finally:
            del self._sampling[request.request_id]

    async def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if request_id in self._sampling:
                self._sampling[request_id].cancel()


def answer(tokens: int, version: int = 0) -> Generation:
    """Return a response of so many tokens."""
    return Generation(
        np.full(tokens, 5, np.int32),
        np.full(tokens, -1.0, np.float32),
        np.full(tokens, version, np.int32),
        FinishReason.STOP,
    )


PROMPT_T = np.arange(20, dtype=np.int32)


@register_agent("scripted")
class ScriptedAgent:
    """Plays the script of its episode."""

    def __init__(self, tokenizer: object, limits: object) -> None:
        pass

    async def collect_trajectory(
        self,
        episode: Episode,
        env: Env,  # noqa: ARG002  # the protocol has it
        generate: Generate,
    ) -> Trajectory:
        plan, turns = script(episode.key.group, episode.key.member), []
        for number, (tokens, wait) in enumerate(zip(plan.tokens_K, plan.waits_K, strict=True)):
            sampling = SamplingParams(max_new_tokens=tokens)
            request = episode.request(str(number), PROMPT_T, sampling, (number,))
            made = await generate(request)
            await asyncio.sleep(wait)
            turns.append(Turn(PROMPT_T, made.tokens_T, made.logprobs_T, made.versions_T, 1.0))
        return Trajectory(episode.key, episode.tag, tuple(turns), StopReason.COMPLETED)


def pipeline(agent: str, groups: int, places: int, agent_config: Any = None) -> Pipeline:
    """Return the settings of a run on FrozenLake.

    Args:
        agent: type of the agent.
        groups: groups of a batch.
        places: episodes that an env worker runs at once.
        agent_config: of the agent.
    """
    return Pipeline.model_validate(
        {
            "maxSteps": 1,
            "rolloutBatchSize": groups * GROUP_SIZE,
            "sequenceLength": 4096,
            "evalSteps": 0,
            "envs": [
                {
                    "tag": "A",
                    "type": "frozen_lake",
                    "maxSteps": 1000,
                    "agent": {"type": agent, "config": agent_config or {}},
                }
            ],
            "trainEnvs": {
                "groups": groups,
                "groupSize": GROUP_SIZE,
                "tags": ["A"],
                "maxEnvsPerWorker": places,
            },
        }
    )


async def env_worker(name: str, asked: Pipeline) -> EnvWorker:
    """Return an env worker that is ready."""
    lake = FrozenLake()
    words = [*lake.vocabulary(), *words_of(lake.instruction), *map(str, range(10))]
    worker = EnvWorker(name, asked)
    await worker.describe()
    with tempfile.TemporaryDirectory() as folder:
        build_task_tokenizer(words, 512).save_pretrained(folder)
        await worker.setup(TokenizerSource(folder))
    return worker


@dataclass(frozen=True)
class Played:
    """The outcome of a run of some steps."""

    seconds: float
    largest_age: int
    stale: int
    """Groups that were too old, and were played for nothing."""


EVEN = (1.0,) * ENGINES


async def play(
    staleness: int,
    steps: int,
    order: Order = by_priority,
    speeds: Sequence[float] = EVEN,
    parts: int = 1,
) -> Played:
    """Train for some steps with our rollout, in virtual time, on engines of these speeds.

    Args:
        staleness: of whole steps.
        parts: each step is trained as so many batches, each as soon as its groups have finished;
            the engines get new weights once per whole step. No token is trained on after more
            optimizer steps than as mini-batches of a whole batch.
    """
    size, max_age = GROUPS // parts, parts * (1 + staleness) - 1
    engines = [SimulatedEngine(order, speed) for speed in speeds]
    store, numbers = TrajectoryStore(), itertools.count()
    asked = pipeline("scripted", GROUPS, (1 + staleness) * GROUPS * GROUP_SIZE // WORKERS)

    async def spawn() -> Any:
        return Remote(await env_worker(f"env-worker-{next(numbers)}", asked))

    async def discard(results: list[EpisodeResult]) -> None:
        await store.discard([result.key for result in results])

    pool = EnvPool(spawn, WORKERS)
    await pool.start()
    handles = {f"engine-{number}": Remote(engine) for number, engine in enumerate(engines)}
    await pool.set_endpoints(handles, [Remote(store)])
    controller = RolloutController(
        pool,
        StalenessGate(size, (1 + staleness) * GROUPS, max_age),
        GroupPlan.of(asked),
        discard=discard,
        position=RolloutPosition(),
    )
    loop, largest_age, stale = asyncio.get_running_loop(), 0, 0
    began = loop.time()
    for step in range(steps * parts):
        loaded = step - step % parts
        for engine in engines:
            engine.version = loaded
        controller.advance(step, loaded)
        batch = await controller.batch()
        largest_age = max(largest_age, *(step - group.oldest_version for group in batch.groups))
        stale += batch.counts.stale
        await asyncio.sleep(TRAINING_SECONDS / parts)
        await discard(batch.results)
    seconds = loop.time() - began
    await controller.stop()
    await pool.stop()
    for engine in engines:
        await engine.close()
    return Played(seconds, largest_age, stale)


async def play_with_barrier(steps: int) -> float:
    """Train for some steps as ROLL does without `async_generation_ratio`; returns the seconds."""
    engines = [SimulatedEngine() for _ in range(ENGINES)]

    async def episode(number: int, plan: Script) -> None:
        engine = engines[number % ENGINES]  # the one with the fewest environments
        for tokens, wait in zip(plan.tokens_K, plan.waits_K, strict=True):
            await engine.sample(tokens)
            await asyncio.sleep(wait)

    loop = asyncio.get_running_loop()
    began = loop.time()
    for step in range(steps):
        await asyncio.gather(*(episode(n, plan) for n, plan in enumerate(scripts(step))))
        await asyncio.sleep(TRAINING_SECONDS)
    return loop.time() - began


def measure_utilization(steps: int) -> dict[str, float]:
    """Return the figures in virtual time."""
    figures: dict[str, float] = {}
    ours: dict[int, Played] = {}
    for staleness in (0, 1, 2):
        played = ours[staleness] = on_virtual_clock(play(staleness, steps))
        assert played.largest_age <= staleness, played
        streamed = on_virtual_clock(play(staleness, steps, parts=PARTS))
        assert streamed.largest_age < PARTS * (1 + staleness), streamed
        streamed_oracle = oracle_seconds(steps, staleness, PARTS)
        oracle = oracle_seconds(steps, staleness)
        others = {
            "in_order_of_arrival": play(staleness, steps, by_arrival),
            "future_known": play(staleness, steps, by_future),
            "uneven_engines": play(staleness, steps, speeds=UNEVEN),
        }
        figures[f"utilization_eta{staleness}"] = oracle / played.seconds
        for name, other in others.items():
            seconds = on_virtual_clock(other).seconds
            figures[f"utilization_eta{staleness}_{name}"] = oracle / seconds
        figures |= {
            f"stale_groups_eta{staleness}": float(played.stale),
            f"seconds_per_step_eta{staleness}": played.seconds / steps,
            f"seconds_per_step_eta{staleness}_streamed": streamed.seconds / steps,
            f"utilization_eta{staleness}_streamed": streamed_oracle / streamed.seconds,
        }
    barrier = on_virtual_clock(play_with_barrier(steps))
    return figures | {
        "baseline_utilization": oracle_seconds(steps, 1) / barrier,
        "seconds_per_step_baseline": barrier / steps,
        "speedup_over_barrier": barrier / ours[1].seconds,
        "speedup_over_barrier_streamed": (
            barrier / steps / figures["seconds_per_step_eta1_streamed"]
        ),
    }


@dataclass
class Load:
    """Settings and measurements of the endless agents of this process."""

    pause: float = 0.0
    """Mean seconds between two turns of an episode."""
    ended: bool = False
    turns: int = 0
    seconds: list[float] = field(default_factory=list)
    """Duration of each hand-off."""


LOAD = Load()


@register_agent("endless")
class EndlessAgent:
    """Asks for one short response after the other."""

    def __init__(self, tokenizer: object, limits: object) -> None:
        pass

    async def collect_trajectory(
        self,
        episode: Episode,
        env: Env,  # noqa: ARG002  # the protocol has it
        generate: Generate,
    ) -> Trajectory:
        rng = random.Random(str(episode.key))
        for number in itertools.count():
            if LOAD.ended:
                break
            if LOAD.pause:
                await asyncio.sleep(rng.uniform(0, 2 * LOAD.pause))
            await generate(episode.request(str(number), PROMPT_T, SamplingParams(8), (number,)))
        return Trajectory(episode.key, episode.tag, (), StopReason.ABORTED)


class NullEngine:
    """Answers at once, always the same."""

    def __init__(self, response: Generation) -> None:
        self._response = response
        self._port = RequestPort(self._generate, self._abort)

    async def serve(self, addresses: Any) -> None:
        """Send the address through the pipe, and serve until the process is ended."""
        addresses.send(await self._port.address())
        await asyncio.Event().wait()

    async def _generate(self, _: GenerationRequest) -> Generation:
        return self._response

    async def _abort(self, request_ids: list[str]) -> None:
        pass


def serve_null_engine(addresses: Any, response: Generation) -> None:
    """Run a null engine in this process."""
    asyncio.run(NullEngine(response).serve(addresses))


class Elsewhere:
    """The handle's end of an engine in another process."""

    def __init__(self, address: Address) -> None:
        self._address = address

    async def requests_address(self) -> Address:
        return self._address


def worker_process(results: Any, agent: str, episodes: int, seconds: float, traced: bool) -> None:
    """Measure hand-offs in this process, which is one env worker."""
    results.send(asyncio.run(hand_over(agent, episodes, seconds, traced)))


async def hand_over(agent: str, episodes: int, seconds: float, traced: bool) -> dict[str, float]:
    """Run so many episodes at once, and measure for some seconds.

    Args:
        agent: type of the agent.
        episodes: number of them.
        seconds: duration of each measurement.
        traced: record a trace during the measurement.

    Returns:
        `rate` of hand-offs per second, `mib` of the process at its largest, and with the endless
        agent `p99` in seconds at half of that rate.
    """
    worker = await env_worker("env-worker", pipeline(agent, episodes // GROUP_SIZE, episodes))
    generate = worker._client.generate

    async def timed(request: GenerationRequest) -> Generation:
        began = time.perf_counter()
        generation = await generate(request)
        LOAD.seconds.append(time.perf_counter() - began)
        LOAD.turns += 1
        return generation

    worker._client.generate = timed  # type: ignore[method-assign]
    up_T = worker._runner._chat.answer("Up")  # which never leaves the first field of the lake
    response = replace(answer(len(up_T)), tokens_T=up_T)
    mine, its = multiprocessing.Pipe()
    engine = multiprocessing.Process(target=serve_null_engine, args=(its, response), daemon=True)
    engine.start()
    address = await asyncio.to_thread(mine.recv)
    endpoints = Endpoints(1, {"engine": Remote(Elsewhere(address))}, [Remote(TrajectoryStore())])
    await worker.set_endpoints(endpoints)
    tasks = [
        EpisodeTask(EpisodeKey(Stream.TRAIN, group, member), "A")
        for group in range(episodes // GROUP_SIZE)
        for member in range(GROUP_SIZE)
    ]
    if traced:
        worker.begin_trace(MAX_SPANS_EACH)
    await worker.submit(tasks)
    await asyncio.sleep(seconds / 2)
    figures = {"rate": await measured_rate(seconds)}
    if agent == "endless" and not traced:
        LOAD.pause = 2 * episodes / figures["rate"]
        await asyncio.sleep(2 * LOAD.pause)
        LOAD.seconds.clear()
        await measured_rate(seconds)
        figures["p99"] = float(np.percentile(LOAD.seconds, 99))
        LOAD.ended = True
    engine.kill()
    figures["mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return figures


async def measured_rate(seconds: float) -> float:
    """Return the hand-offs per second of the next seconds."""
    began, before = time.perf_counter(), LOAD.turns
    await asyncio.sleep(seconds)
    return (LOAD.turns - before) / (time.perf_counter() - began)


def measure_hand_offs(episodes: int, seconds: float) -> dict[str, float]:
    """Return the figures in real time."""
    figures: dict[str, float] = {}
    agents = (("endless", ""), ("multi_turn", "_with_tokenizer"))
    for (agent, of), traced in itertools.product(agents, (False, True)):
        mine, its = multiprocessing.Pipe()
        asked = (its, agent, episodes, seconds, traced)
        work = multiprocessing.Process(target=worker_process, args=asked)
        work.start()
        found = mine.recv()
        work.kill()
        name = of + "_traced" * traced
        figures[f"handoffs_per_second{name}"] = found["rate"]
        figures[f"env_worker_mib{name}"] = found["mib"]
        if "p99" in found:
            figures["handoff_p99_ms"] = 1000 * found["p99"]
    return figures


def trajectory(turns: int, prompt: int, response: int, member: int = 0) -> Trajectory:
    """Return a trajectory of random tokens.

    Args:
        prompt: tokens of each turn's prompt, and `response` of its answer.
        member: others have other tokens.
    """
    rng = np.random.default_rng((SEED, member))

    def tokens(number: int) -> IntArray:
        return rng.integers(0, 50_000, number).astype(np.int32)

    played = tuple(
        Turn(
            tokens(prompt),
            tokens(response),
            -rng.random(response, np.float32),
            np.full(response, 3, np.int32),
            float(number),
            state=rng.bytes(32),
            action="Right",
            engine="engine-1",
        )
        for number in range(turns)
    )
    key = EpisodeKey(Stream.TRAIN, 1, member)
    return Trajectory(key, "FrozenLake", played, StopReason.COMPLETED, {"success": 1.0})


def measure_bytes() -> dict[str, float]:
    """Return what trajectories take on their way to a store, and what the driver gets of them."""
    short, long = trajectory(4, 93, 32), trajectory(8, 512, 512)
    assert (short.num_tokens, long.num_tokens) == (500, 8192)
    arrays = [
        array
        for turn in long.turns
        for array in (turn.prompt_T, turn.response_T, turn.logprobs_T, turn.versions_T)
    ]
    step = [trajectory(8, 512, 512, member) for member in range(1024)]
    return {
        "bytes_per_500_token_trajectory": float(len(pack([short]))),
        "bytes_over_arrays_1024x8192": len(pack(step)) / (1024 * sum(a.nbytes for a in arrays)),
        "driver_bytes_per_8192_token_trajectory": float(len(pack([EpisodeResult.of(long)]))),
    }


def main() -> None:
    """Measure, and print the figures."""
    from record import write_record  # imports torch, which no env worker has

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few steps and episodes")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    quick = arguments.quick
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # connections to engines that have ended
    figures = {
        **measure_utilization(4 if quick else 16),
        **measure_hand_offs(1000 if quick else 10_000, 2.0 if quick else 10.0),
        **measure_bytes(),
    }
    for name, figure in figures.items():
        print(f"{name:44} {figure:10.3f}")
    if arguments.json:
        write_record(arguments.json, figures)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
