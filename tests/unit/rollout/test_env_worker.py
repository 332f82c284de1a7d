"""An env worker and the pool around it, without Ray: what is asked, told, stopped and judged."""

from __future__ import annotations

import asyncio
import gc
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from agenticrun_api import Pipeline
from agenticrun_workers.agents import ChatFormat, Episode
from agenticrun_workers.envs import FrozenLake, StepResult
from agenticrun_workers.envs.isolated import IsolatedEnv, Isolation
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.inference.request_port import Address
from agenticrun_workers.models.source import TokenizerSource
from agenticrun_workers.models.tokenizer import build_task_tokenizer, words_of
from agenticrun_workers.pod_memory import PodMemory
from agenticrun_workers.rollout import episode_runner
from agenticrun_workers.rollout.env_pool import EnvPool
from agenticrun_workers.rollout.env_worker import (
    GC_THRESHOLDS,
    EnvWorker,
    agent_limits,
    describe_envs,
)
from agenticrun_workers.rollout.groups import Endpoints, EpisodeResult, EpisodeTask, VersionBounds
from agenticrun_workers.rollout.trajectory_store import TrajectoryStore
from agenticrun_workers.types import EpisodeKey, StopReason, Stream, Trajectory, Turn
from rollout_fakes import FakeEngine, Remote
from tiny_runs import tiny_run
from waiting import eventually_in_loop

TOKENIZER = build_task_tokenizer(
    [*FrozenLake().vocabulary(), *words_of(FrozenLake().instruction), "word", *map(str, range(10))],
    512,
)
CHAT = ChatFormat(TOKENIZER)


@pytest.fixture(autouse=True)
async def _process_ends(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Close what a worker and an engine keep for as long as their process lives."""
    engines: set[FakeEngine] = set()
    isolations: set[Isolation] = set()
    envs: list[IsolatedEnv] = []
    workers: list[EnvWorker] = []
    requests_address, start = FakeEngine.requests_address, Isolation.start
    setup = EnvWorker.setup

    async def noted_address(engine: FakeEngine) -> Address:
        engines.add(engine)
        return await requests_address(engine)

    async def noted_start(isolation: Isolation) -> IsolatedEnv:
        isolations.add(isolation)
        envs.append(await start(isolation))
        return envs[-1]

    async def noted_setup(worker: EnvWorker, source: TokenizerSource) -> None:
        workers.append(worker)
        await setup(worker, source)

    monkeypatch.setattr(EnvWorker, "setup", noted_setup)
    monkeypatch.setattr(FakeEngine, "requests_address", noted_address)
    monkeypatch.setattr(Isolation, "start", noted_start)
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    tasks = [task for worker in workers for task in worker._tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for env in envs:
        env.end()
    for isolation in isolations:
        isolation.stop()
    for engine in engines:
        await engine.close()
    await asyncio.sleep(0)  # the loop closes the connections


class Recall:
    """Shows its item; right is to repeat it."""

    instruction = ""
    blocking = False

    def set_item(self, item: dict[str, Any]) -> None:
        self.word = str(item["word"])

    def reset(self, seed: int, split: Stream) -> str:
        return self.word

    def step(self, action: str) -> StepResult:
        return StepResult(self.word, float(action == self.word), True)

    def valid_actions(self) -> list[str]:
        return [self.word]


def pipeline(env: dict[str, Any] | None = None, **fields: Any) -> Pipeline:
    document: dict[str, Any] = {
        "maxSteps": 1,
        "rolloutBatchSize": 4,
        "valBatchSize": 4,
        "sequenceLength": 256,
        "envs": [
            {"tag": "A", "type": "frozen_lake", "maxSteps": 3, "maxTokensPerStep": 2, **(env or {})}
        ],
        "trainEnvs": {"groups": 2, "groupSize": 2, "tags": ["A"]},
        "valEnvs": {"groups": 2, "tags": ["A"]},
    }
    return Pipeline.model_validate(document | fields)


class World:
    """One worker with an engine that always says `answer`, and a store."""

    def __init__(self, asked: Pipeline, folder: Path, answer: str = "Up") -> None:
        TOKENIZER.save_pretrained(folder)
        self.pipeline = asked
        self.folder = folder
        self.engine = FakeEngine(CHAT.answer(answer))
        self.store = TrajectoryStore()

    async def spawn(self) -> EnvWorker:
        worker = EnvWorker("w", self.pipeline)
        await worker.describe()
        await worker.setup(TokenizerSource(str(self.folder)))
        return worker

    async def pool(self) -> EnvPool:
        async def spawn() -> Remote:
            return Remote(await self.spawn())

        pool = EnvPool(spawn, 1)
        await pool.start()
        await pool.set_endpoints({"engine-0": Remote(self.engine)}, [Remote(self.store)])
        return pool

    async def play(self, *tasks: EpisodeTask) -> list[EpisodeResult]:
        pool = await self.pool()
        try:
            return await played(pool, *tasks)
        finally:
            await pool.stop()


async def played(pool: EnvPool, *tasks: EpisodeTask) -> list[EpisodeResult]:
    return await asyncio.wait_for(asyncio.gather(*map(pool.run, tasks)), 60)


def episode(
    member: int = 0, stream: Stream = Stream.TRAIN, group: int = 0, **options: Any
) -> EpisodeTask:
    return EpisodeTask(EpisodeKey(stream, group, member), "A", **options)


def members(number: int = 2, stream: Stream = Stream.TRAIN, **options: Any) -> list[EpisodeTask]:
    """The tasks of one group."""
    return [episode(member, stream, **options) for member in range(number)]


async def test_a_result_is_told_when_its_trajectory_lies_in_the_store(tmp_path: Path) -> None:
    world = World(pipeline(), tmp_path)
    results = await world.play(*members())
    assert [(r.key.member, r.stop_reason, r.store) for r in results] == [
        (0, "max_turns", 0),
        (1, "max_turns", 0),
    ]
    assert await world.store.size() == 2


async def test_calls_that_overtake_each_other_change_nothing(tmp_path: Path) -> None:
    """Ray promises no order for the calls of an async actor."""
    world = World(pipeline(), tmp_path)
    newest = Endpoints(2, {"engine-0": Remote(world.engine)}, [Remote(world.store)])
    worker = await world.spawn()
    playing = asyncio.create_task(worker.submit(members()))
    await asyncio.sleep(0)
    assert not playing.done()
    await worker.set_endpoints(newest)
    await worker.set_endpoints(
        Endpoints(1, {"engine-1": Remote(FakeEngine(CHAT.answer("Down")))}, [])
    )
    await asyncio.wait_for(playing, 60)
    results: list[EpisodeResult] = []
    while len(results) < 2:
        results += await asyncio.wait_for(worker.collect(), 60)
    assert [result.stop_reason for result in results] == ["max_turns"] * 2
    assert await world.store.size() == 2


async def test_an_episode_that_is_aborted_before_its_first_step_has_a_result(
    tmp_path: Path,
) -> None:
    """Both calls may arrive together, and a task that is cancelled before it began never runs."""
    world = World(pipeline(), tmp_path)
    worker = await world.spawn()
    await worker.set_endpoints(
        Endpoints(1, {"engine-0": Remote(world.engine)}, [Remote(world.store)])
    )
    await worker.submit(members())
    await worker.abort([(episode(1).key, 0)])
    results: list[EpisodeResult] = []
    async with asyncio.timeout(60):
        while len(results) < 2:
            results += await worker.collect()
    assert {r.key.member: r.stop_reason for r in results} == {0: "max_turns", 1: "aborted"}
    assert not worker._running


async def test_full_memory_does_not_make_a_worker_look_for_garbage_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look at all objects blocks the event loop, and memory stays full for long."""
    searches: list[float] = []
    clock = [0.0]
    worker = await World(pipeline(), tmp_path).spawn()
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "time", lambda: clock[0])
        patch.setattr(gc, "collect", lambda: searches.append(clock[0]))
        for clock[0] in range(30):
            worker._make_room()
    assert searches == [0, 10, 20]


async def test_what_goes_wrong_in_the_worker_itself_is_told_to_who_collects(tmp_path: Path) -> None:
    world = World(pipeline(), tmp_path)
    worker = await world.spawn()
    await worker.set_endpoints(
        Endpoints(1, {"engine-0": Remote(world.engine)}, [Remote(BrokenStore())])
    )
    await worker.submit(members())
    with pytest.raises(OSError, match="no memory left"):
        await collected_for_ever(worker)


async def test_an_engine_that_cannot_be_listened_to_is_told_to_who_collects(tmp_path: Path) -> None:
    world = World(pipeline(), tmp_path)
    worker = await world.spawn()
    await worker.set_endpoints(
        Endpoints(1, {"engine-0": Remote(Mumbling())}, [Remote(world.store)])
    )
    await worker.submit(members())
    with pytest.raises(TypeError, match="no address"):
        await collected_for_ever(worker)


async def collected_for_ever(worker: EnvWorker) -> None:
    """An answer may be empty: nothing has finished for some seconds."""
    async with asyncio.timeout(60):
        while True:
            await worker.collect()


class Mumbling:
    """An engine with an address that the client cannot read."""

    async def requests_address(self) -> Mumbling:
        return self

    @property
    def host(self) -> str:
        raise TypeError("no address")


class BrokenStore:
    async def put(self, trajectories: list[Trajectory], worker: int) -> None:
        raise OSError("no memory left")


async def test_a_transcript_shows_every_turn_as_the_policy_saw_it_of_the_first_member_only(
    tmp_path: Path,
) -> None:
    first, second = await World(
        pipeline({"agent": {"config": {"systemTemplate": ""}}}), tmp_path
    ).play(episode(0, transcript=True), episode(1))
    board = first.transcript.split("<|user|>")[1].split("<|end|>")[0]
    assert board.startswith("P")
    assert first.transcript == (
        f"--- turn 1 ---\n<|user|>{board}<|end|><|assistant|>\n"
        "--- answer 1: action 'Up', valid, reward 0 ---\nUp<|end|>\n"
        f"--- turn 2 ---\n<|user|>{board}<|end|><|assistant|>\n"
        "--- answer 2: action 'Up', valid, reward 0 ---\nUp<|end|>\n"
        f"--- turn 3 ---\n<|user|>{board}<|end|><|assistant|>\n"
        "--- answer 3: action 'Up', valid, reward 0 ---\nUp<|end|>\n"
        "--- end: max_turns, score 0 ---\n"
    )
    assert second.transcript == ""


async def test_frames_show_each_state_of_the_first_member(tmp_path: Path) -> None:
    first, second = await World(pipeline(), tmp_path, "Down").play(
        episode(0, frames=True, random_policy=True), episode(1, random_policy=True)
    )
    picture = Image.open(io.BytesIO(first.frames))
    assert picture.format == "GIF"
    assert 2 <= picture.n_frames <= first.turns + 1  # type: ignore[attr-defined]
    assert second.frames == b""


async def test_an_aborted_group_is_stopped_also_in_the_engine_and_its_tokens_counted(
    tmp_path: Path,
) -> None:
    world = World(pipeline(), tmp_path)
    world.engine.ignores = lambda request: request.request_id in ("train-0-1-2", "train-0-3-2")
    pool = await world.pool()
    playing = [asyncio.create_task(pool.run(each)) for each in members(4)]
    await asyncio.wait_for(asyncio.gather(playing[0], playing[2]), 60)
    pool.abort(0)
    results = await asyncio.wait_for(asyncio.gather(*playing), 60)
    assert [(r.key.member, r.stop_reason, r.response_tokens) for r in results] == [
        (0, "max_turns", 6),
        (1, "aborted", 2),
        (2, "max_turns", 6),
        (3, "aborted", 2),
    ]
    await pool.stop()
    await eventually_in_loop(lambda: len(world.engine.aborted) == 2, 60, "the engine hears of both")
    assert sorted(world.engine.aborted) == ["train-0-1-2", "train-0-3-2"]
    assert await world.store.size() == 2


async def until_asked(engine: FakeEngine, *request_ids: str) -> None:
    await eventually_in_loop(
        lambda: {request.request_id for request in engine.requests} >= set(request_ids),
        60,
        f"{request_ids} are asked for",
    )


async def until_aborts_have_come(pool: EnvPool) -> None:
    """Run another episode: the messages of a worker reach its engine in order."""
    await played(pool, episode(stream=Stream.VALIDATION))


async def test_training_episodes_with_tokens_that_are_too_old_are_stopped_and_run_again(
    tmp_path: Path,
) -> None:
    world = World(pipeline(), tmp_path)
    slow = ("train-0-1-2", "train-0-2-1", "validation-0-0-1")
    world.engine.ignores = lambda request: request.request_id in slow
    pool = await world.pool()
    training = [asyncio.create_task(pool.run(each)) for each in members(3)]
    validating = asyncio.create_task(pool.run(episode(stream=Stream.VALIDATION)))
    await until_asked(world.engine, *slow)
    await asyncio.wait_for(training[0], 60)
    pool.set_bounds(VersionBounds(oldest=1, newest=1))
    results = await asyncio.wait_for(asyncio.gather(*training), 60)
    assert [(r.key.member, r.stop_reason, r.response_tokens) for r in results] == [
        (0, "max_turns", 6),
        (1, "stale", 2),
        (2, "stale", 0),
    ]
    await eventually_in_loop(lambda: len(world.engine.aborted) == 2, 60, "the engine hears of both")
    assert sorted(world.engine.aborted) == sorted(slow[:2])
    assert not validating.done()
    again = asyncio.create_task(pool.run(episode(2, attempt=1)))
    await until_asked(world.engine, "train-0-2-try1-1")
    stopped = await asyncio.wait_for(again, 60)
    assert stopped.stop_reason == "stale", "the engine still samples with version 0"
    validating.cancel()
    await pool.stop()


async def test_an_answer_of_an_old_version_ends_its_episode(tmp_path: Path) -> None:
    world = World(pipeline(), tmp_path)
    pool = await world.pool()
    pool.set_bounds(VersionBounds(oldest=1, newest=1))
    results = await played(pool, *members())
    assert [(r.stop_reason, r.response_tokens) for r in results] == [("stale", 2)] * 2
    await pool.stop()


async def test_an_episode_that_begins_before_its_worker_hears_of_new_weights_is_not_too_old(
    tmp_path: Path,
) -> None:
    """Ray promises no order: a task may overtake the bounds that were sent before it."""
    world = World(pipeline(), tmp_path)
    world.engine.ignores = lambda request: request.request_id == "train-0-0-1"
    pool = await world.pool()
    training = asyncio.create_task(pool.run(episode(engine_version=1)))
    await until_asked(world.engine, "train-0-0-1")
    pool.set_bounds(VersionBounds(oldest=1, newest=1))
    await until_aborts_have_come(pool)
    assert world.engine.aborted == []
    training.cancel()
    await pool.stop()


async def test_a_response_that_will_start_again_with_new_weights_is_not_too_old(
    tmp_path: Path,
) -> None:
    staleness = {"max": 1, "partialRollout": False, "offPolicy": "Ignore"}
    world = World(pipeline(staleness=staleness), tmp_path)
    world.engine.ignores = lambda request: request.request_id == "train-0-0-1"
    pool = await world.pool()
    waiting, other = (asyncio.create_task(pool.run(each)) for each in members())
    await until_asked(world.engine, "train-0-0-1")
    await asyncio.wait_for(other, 60)
    pool.set_bounds(VersionBounds(oldest=1, newest=1))
    await until_aborts_have_come(pool)
    assert world.engine.aborted == []
    assert not waiting.done()
    waiting.cancel()
    await pool.stop()


async def test_the_judges_of_a_run_add_to_the_reward_of_its_policy_and_not_of_random_play(
    tmp_path: Path,
) -> None:
    world = World(
        pipeline(rewards=[{"name": "kind", "type": f"{__name__}:two", "weight": 0.5}]), tmp_path
    )
    judged = await world.play(*members())
    random = await world.play(*members(stream=Stream.VALIDATION, random_policy=True))
    assert [r.rewards_K.tolist() for r in judged] == [[0.0, 0.0, 1.0]] * 2
    assert all(r.score in (0.0, 1.0) and "reward/kind" not in r.metrics for r in random)


def two(episode: object) -> float:
    return 2.0


async def test_an_agent_that_raises_costs_its_episode_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(pipeline({"agent": {"type": f"{__name__}:BrokenAgent"}}), tmp_path)
    results = await world.play(*members(6))
    assert {(r.stop_reason, r.error) for r in results} == {("env_error", "RuntimeError: no idea")}
    assert len([record for record in caplog.records if "no idea" in record.getMessage()]) == 1


class BrokenAgent:
    def __init__(self, tokenizer: object, limits: object) -> None:
        pass

    async def collect_trajectory(self, *arguments: object) -> None:
        raise RuntimeError("no idea")


async def test_episodes_are_about_the_items_of_their_data_set(tmp_path: Path) -> None:
    data = tmp_path / "words.jsonl"
    data.write_text("".join(f'{{"word": "{digit}"}}\n' for digit in range(10)))
    env = {"type": f"{__name__}:Recall", "dataset": {"path": str(data)}, "maxTokensPerStep": 4}
    asked = pipeline(env, evalSteps=0)
    world = World(asked, tmp_path / "model", "3")
    tasks = [
        episode(member, group=group, transcript=not member)
        for group in range(9)
        for member in range(2)
    ]
    results = await world.play(*tasks)
    assert sorted(r.score for r in results) in ([0.0] * 16 + [1.0] * 2, [0.0] * 18)
    words = {r.transcript.split("<|user|>")[1][0] for r in results if r.transcript}
    assert len(words) == 9
    with pytest.raises(InvalidConfig, match=r"envs\[0\].dataset: frozen_lake takes no items"):
        describe_envs(pipeline({"dataset": {"path": str(data)}}))


def test_validation_samples_in_its_own_way_and_each_environment_may_have_one() -> None:
    infer = {
        "generating": {"temperature": 0.7},
        "validationGenerating": {"temperature": 0.2, "topK": 3},
    }
    asked = pipeline({"validationGenerating": {"temperature": 0.4, "topP": 0.5}}, actorInfer=infer)
    other = pipeline(actorInfer=infer)
    train = agent_limits(asked, asked.envs[0], Stream.TRAIN)
    own = agent_limits(asked, asked.envs[0], Stream.VALIDATION)
    common = agent_limits(other, other.envs[0], Stream.VALIDATION)
    assert (train.temperature, train.top_p, train.top_k, train.min_p, train.record_temperature) == (
        0.7,
        1.0,
        0,
        0.0,
        None,
    )
    assert (own.temperature, own.top_p, own.top_k) == (0.4, 0.5, 0)
    assert (common.temperature, common.top_p, common.top_k) == (0.2, 1.0, 3)


def test_truncated_sampling_of_training_is_recorded_at_temperature_one() -> None:
    generating = {
        "temperature": 0.7,
        "topP": 0.9,
        "topK": 5,
        "minP": 0.1,
        "allowTruncatedSampling": True,
    }
    asked = pipeline(actorInfer={"generating": generating})
    train = agent_limits(asked, asked.envs[0], Stream.TRAIN)
    assert (train.top_p, train.top_k, train.min_p, train.record_temperature) == (0.9, 5, 0.1, 1.0)


@pytest.mark.parametrize(
    ("deterministic", "asked", "timeout"), [(False, None, 60), (False, 5.0, 5), (True, None, None)]
)
def test_a_step_may_take_a_minute_unless_said_otherwise_and_any_time_in_deterministic_runs(
    deterministic: bool, asked: float | None, timeout: float | None
) -> None:
    env = {} if asked is None else {"stepTimeoutSeconds": asked}
    made = pipeline(env, deterministic=deterministic)
    assert agent_limits(made, made.envs[0], Stream.TRAIN).step_timeout == timeout


def test_the_vocabulary_holds_what_the_agent_s_templates_write() -> None:
    texts = describe_envs(pipeline({"agent": {"type": "step_wise"}})).texts
    assert any("Steps taken" in text for text in texts)
    assert {"0", "9"} <= set(texts)
    with pytest.raises(InvalidConfig, match=r"envs\[0\].agent.type"):
        describe_envs(pipeline({"agent": {"type": "nobody"}}))


class OddAgent:
    """Returns, or raises, what no agent should."""

    def __init__(self, tokenizer: object, limits: object, does: str) -> None:
        self.does = does

    async def collect_trajectory(self, episode: Episode, env: object, generate: object) -> Any:
        match self.does:
            case "exit":
                raise SystemExit(1)
            case "cancelled":
                inner = asyncio.create_task(asyncio.sleep(60))
                inner.cancel()
                await inner
            case "nothing":
                return None
            case "our metric":
                return Trajectory(
                    episode.key, episode.tag, (), StopReason.COMPLETED, {"turns": 7.0}
                )
            case "no arrays":
                return Trajectory(
                    episode.key,
                    episode.tag,
                    (Turn(None, None, None, None, "1"),),  # type: ignore[arg-type]
                    StopReason.COMPLETED,
                )
        raise AssertionError


@pytest.mark.parametrize("does", ["exit", "cancelled", "nothing", "no arrays", "our metric"])
async def test_an_agent_that_returns_no_trajectory_costs_its_episode(
    tmp_path: Path, does: str
) -> None:
    world = World(
        pipeline({"agent": {"type": f"{__name__}:OddAgent", "config": {"does": does}}}), tmp_path
    )
    assert {r.stop_reason for r in await world.play(*members(3))} == {StopReason.ENV_ERROR}


class SingleUse(Recall):
    reusable = False
    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.word = "word"


async def test_an_environment_that_is_not_reusable_is_made_for_each_episode(tmp_path: Path) -> None:
    world = World(pipeline({"type": f"{__name__}:SingleUse"}), tmp_path)
    await world.play(*members(5))
    assert SingleUse.made == 6  # one to read its texts


async def test_isolated_environments_play_and_are_filmed_like_others(tmp_path: Path) -> None:
    results = {}
    for isolated in (False, True):
        world = World(pipeline({"isolated": isolated}), tmp_path / str(isolated), "Down")
        results[isolated] = await world.play(
            episode(0, random_policy=True, transcript=True, frames=True),
            *(episode(member, random_policy=True) for member in (1, 2)),
        )
    assert [(r.stop_reason, r.transcript, r.frames) for r in results[True]] == [
        (r.stop_reason, r.transcript, r.frames) for r in results[False]
    ]
    assert results[True][0].frames


async def test_engines_are_asked_to_serve_earlier_batches_and_shorter_episodes_first(
    tmp_path: Path,
) -> None:
    world = World(pipeline(), tmp_path)  # two groups a batch, three turns an episode
    tasks = [episode(group=group) for group in (0, 1, 2)]
    await world.play(*tasks, episode(stream=Stream.VALIDATION))
    ranks: dict[str, list[int]] = {}
    for request in world.engine.requests:
        ranks.setdefault(request.session.rpartition("/")[2], []).append(request.priority)
    assert ranks["train-0-0"] == ranks["train-1-0"] == sorted(set(ranks["train-0-0"]))
    assert max(ranks["train-1-0"]) < min(ranks["train-2-0"])
    assert max(ranks["validation-0-0"]) < min(ranks["train-0-0"])


async def test_a_worker_looks_for_reference_cycles_seldom(tmp_path: Path) -> None:
    await World(pipeline(), tmp_path).spawn()
    assert gc.get_threshold() == GC_THRESHOLDS


async def test_others_run_between_the_constructors_of_two_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Constructors may be slow, and a worker that answers no poll for a minute is killed."""
    ticks, built_at = 0, []

    def build(*_: Any) -> FrozenLake:
        built_at.append(ticks)
        return FrozenLake()

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(episode_runner, "make_env", build)
    ticking = asyncio.create_task(tick())
    cache = episode_runner.EnvCache(pipeline())
    await asyncio.gather(*(cache.take("A") for _ in range(8)))
    ticking.cancel()
    assert len(set(built_at)) == 8


class Terse:
    """An environment without an instruction, which is optional."""

    def reset(self, seed: int, split: str) -> str:
        return "?"

    def step(self, action: str) -> StepResult:
        return StepResult("over", 0.0, terminated=True)


def test_an_environment_needs_no_instruction() -> None:
    run = tiny_run(
        envs=[{"tag": "Terse", "type": f"{__name__}:Terse", "maxSteps": 1}],
        trainEnvs={"groups": 4, "groupSize": 2, "tags": ["Terse"]},
        valEnvs=None,
        evalSteps=0,
    )
    assert "" in describe_envs(run.spec.pipeline).texts


async def test_a_worker_in_a_full_pod_runs_one_episode_at_a_time_and_says_how_long_others_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PodMemory, "limit", lambda _: 1000)
    monkeypatch.setattr(PodMemory, "used", lambda _: 1000)
    world = World(pipeline(), tmp_path)
    world.engine.ignores = lambda request: request.request_id == "train-0-0-3"
    pool = await world.pool()
    playing = [asyncio.create_task(pool.run(each)) for each in members(3)]
    await until_asked(world.engine, "train-0-0-3")
    asked = {request.session.rpartition("/")[2] for request in world.engine.requests}
    assert asked == {"train-0-0"}
    world.engine.answer("train-0-0-3")
    first, *others = await asyncio.wait_for(asyncio.gather(*playing), 60)
    await pool.stop()
    assert first.memory_wait == 0.0 < min(result.memory_wait for result in others)


async def test_a_full_pod_gets_the_memory_of_idle_environments_back(tmp_path: Path) -> None:
    world = World(pipeline(), tmp_path)
    worker = await world.spawn()
    envs = worker._runner.envs
    envs.release("A", await envs.take("A"))
    worker._make_room()
    assert not envs._idle
