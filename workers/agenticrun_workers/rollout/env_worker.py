"""EnvWorker: a Ray actor that plays many episodes as coroutines, on an env pod. Imports no torch."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from agenticrun_api import Pipeline, Role
from agenticrun_workers.agents import Agent, AgentLimits, ChatFormat, make_agent, random_valid_policy
from agenticrun_workers.envs import Env, HasVocabulary, make_env
from agenticrun_workers.plugins import PluginConfigError, PluginError
from agenticrun_workers.rollout.errors import InvalidConfig
from agenticrun_workers.rollout.generation_client import GenerationClient
from agenticrun_workers.rollout.groups import EpisodeResult, GroupTask
from agenticrun_workers.rollout.outbox import Outbox
from agenticrun_workers.rollout.placement import Placement, here
from agenticrun_workers.rollout.seeds import derive, episode
from agenticrun_workers.rollout.tokenizer import TokenizerSource, load_tokenizer
from agenticrun_workers.rollout.wire import pack, unpack
from agenticrun_workers.types import StopReason, Stream, Trajectory

log = logging.getLogger(__name__)

MAX_TRANSCRIPT = 4000


@dataclass(frozen=True, slots=True)
class Texts:
    """What a tiny tokenizer must know: fixed pieces that the environments declare, and texts to cut into words."""

    vocabulary: tuple[str, ...]
    texts: tuple[str, ...]


class EnvWorker:
    """Call `describe`, then `setup`, then `set_peers`; then `play` and `collect` in any order.

    Args:
        name: unique among the env workers of a run, also those that were replaced.
        pipeline: what to play.
    """

    def __init__(self, name: str, pipeline: Pipeline) -> None:
        self._name = name
        self._pipeline = pipeline
        self._limit = asyncio.Semaphore(pipeline.train_envs.max_envs_per_worker)
        self._idle_envs: dict[str, list[Env]] = defaultdict(list)
        self._agents: dict[tuple[str, Stream], Agent] = {}
        self._client = GenerationClient(name, derive(pipeline.seed, "engine-choice", name))
        self._stores: list[Any] = []
        self._unstored: list[tuple[Trajectory, EpisodeResult]] = []
        self._unstored_event = asyncio.Event()
        self._outbox: Outbox[EpisodeResult] = Outbox()
        self._tasks: set[asyncio.Task[None]] = set()

    async def placement(self) -> Placement:
        return here(self._name, Role.ENV)

    async def until_death(self) -> None:
        """Never returns: the caller's future fails when this process dies."""
        await asyncio.Event().wait()

    async def describe(self) -> Texts:
        """Import and build every environment once. Raises `InvalidConfig` with the plug-in's own words."""
        return describe_envs(self._pipeline)

    async def setup(self, source: TokenizerSource) -> None:
        """Load the tokenizer and build the agents. Raises `InvalidConfig`."""
        tokenizer = load_tokenizer(source)
        self._tokenizer = tokenizer
        self._chat = ChatFormat(tokenizer)
        self._agents = build_agents(self._pipeline, tokenizer)
        self._keep(asyncio.create_task(self._store_finished(), name="store-finished"))

    async def set_peers(self, engines: Mapping[str, Any], stores: list[Any]) -> None:
        """The engines to ask and the stores to fill, from now on."""
        self._stores = stores
        self._client.set_engines(engines)

    async def play(self, tasks: bytes) -> None:
        """Begin these `list[GroupTask]`. Every member ends as one result of `collect`."""
        for task in unpack(tasks):
            for member in task.members:
                self._keep(asyncio.create_task(self._play_one(task, member)))

    async def collect(self) -> bytes:
        """Finished episodes, a packed `list[EpisodeResult]`; empty if none finishes for some seconds."""
        return pack(await self._outbox.take())

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _play_one(self, task: GroupTask, member: int) -> None:
        async with self._limit:
            trajectory = await self._trajectory(task, member)
        result = self._result(task, trajectory, transcript=task.transcript and member == task.members[0])
        if task.stream is Stream.VALIDATION or not result.trainable:
            self._outbox.put(result)
        else:
            self._unstored.append((trajectory, result))
            self._unstored_event.set()

    async def _trajectory(self, task: GroupTask, member: int) -> Trajectory:
        key = task.key(member)
        spec = self._pipeline.env(task.tag)
        try:
            env = self._idle_envs[task.tag].pop() if self._idle_envs[task.tag] else make_env(spec.type, spec.config)
            generate = random_valid_policy(env, self._chat) if task.random_policy else self._client.generate
            agent = self._agents[task.tag, task.stream]
            trajectory = await agent.collect_trajectory(episode(self._pipeline.seed, key, task.tag, task.attempt), env, generate)
        except Exception as error:  # an agent is a user's code and may raise anything: it costs this episode
            log.exception("episode %s", key)
            return Trajectory(key, task.tag, (), StopReason.ENV_ERROR, error=f"{type(error).__name__}: {error}")
        finally:
            self._client.end_session(str(key))
        if trajectory.stop_reason.trainable:
            self._idle_envs[task.tag].append(env)
        return trajectory

    def _result(self, task: GroupTask, trajectory: Trajectory, transcript: bool) -> EpisodeResult:
        return EpisodeResult.of(
            trajectory,
            attempt=task.attempt,
            store=-1 if task.stream is Stream.VALIDATION else trajectory.key.group % len(self._stores),
            transcript=self._tokenizer.decode(trajectory.tokens_T.tolist())[:MAX_TRANSCRIPT] if transcript else "",
        )

    async def _store_finished(self) -> None:
        """Carry finished trajectories to their stores; a result is told only when the bytes are there."""
        while True:
            await self._unstored_event.wait()
            await asyncio.sleep(0.002)
            self._unstored_event.clear()
            finished, self._unstored = self._unstored, []
            by_store: dict[int, list[Trajectory]] = defaultdict(list)
            for trajectory, result in finished:
                by_store[result.store].append(trajectory)
            await asyncio.gather(*(self._stores[store].put.remote(pack(kept)) for store, kept in by_store.items()))
            for _, result in finished:
                self._outbox.put(result)


def describe_envs(pipeline: Pipeline) -> Texts:
    """Build every environment of a run and read its texts. Raises `InvalidConfig`."""
    vocabulary: list[str] = []
    texts: list[str] = []
    for index, spec in enumerate(pipeline.envs):
        path = f"spec.pipeline.envs[{index}]"
        try:
            env = make_env(spec.type, spec.config)
        except PluginError as error:
            raise InvalidConfig(f"{path}.{_field_of(error)}", str(error)) from error
        if isinstance(env, HasVocabulary):
            vocabulary += env.vocabulary()
        texts += [env.instruction, *(value for value in spec.agent.config.values() if isinstance(value, str))]
    return Texts(tuple(vocabulary), tuple(texts))


def build_agents(pipeline: Pipeline, tokenizer: PreTrainedTokenizerBase) -> dict[tuple[str, Stream], Agent]:
    """One agent per tag and stream: validation samples in its own way. Raises `InvalidConfig`."""
    agents: dict[tuple[str, Stream], Agent] = {}
    for index, spec in enumerate(pipeline.envs):
        for stream in Stream:
            sampling = pipeline.actor_infer.validation_generating if stream is Stream.VALIDATION else None
            limits = AgentLimits(
                max_turns=spec.max_steps,
                max_tokens_per_step=spec.max_tokens_per_step,
                sequence_length=pipeline.sequence_length,
                temperature=sampling.temperature if sampling else pipeline.actor_infer.generating.temperature,
                top_p=sampling.top_p if sampling else 1.0,
                top_k=sampling.top_k if sampling else 0,
                step_timeout=spec.step_timeout_seconds,
            )
            try:
                agents[spec.tag, stream] = make_agent(spec.agent.type, spec.agent.config, tokenizer=tokenizer, limits=limits)
            except PluginError as error:
                raise InvalidConfig(f"spec.pipeline.envs[{index}].agent.{_field_of(error)}", str(error)) from error
    return agents


def _field_of(error: PluginError) -> str:
    return "config" if isinstance(error, PluginConfigError) else "type"
