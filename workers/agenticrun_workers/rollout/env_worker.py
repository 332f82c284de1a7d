"""EnvWorker: a Ray actor on an env pod that runs episodes as coroutines. Imports no torch."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

from agenticrun_api import Pipeline, Role
from agenticrun_api.environments import EnvSpec
from agenticrun_workers.agents import Agent, AgentLimits, ChatFormat, agent_texts, make_agent
from agenticrun_workers.agents.chat_checks import require_chat
from agenticrun_workers.envs import HasVocabulary, TakesItem, make_env
from agenticrun_workers.envs.loop_watch import LoopWatch
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.inference.client import GenerationClient
from agenticrun_workers.launch import current_node, packed
from agenticrun_workers.launch.liveness import POLL_SECONDS
from agenticrun_workers.log_once import LogOnce
from agenticrun_workers.models.devices import gpus_of_children
from agenticrun_workers.models.source import TokenizerCorpus, TokenizerSource
from agenticrun_workers.placement import Placement, current_placement
from agenticrun_workers.plugins import PluginConfigError, PluginError
from agenticrun_workers.pod_memory import PodMemory
from agenticrun_workers.rollout.episode_runner import (
    EpisodeRunner,
    RunningEpisode,
    Sources,
    step_timeout,
)
from agenticrun_workers.rollout.groups import Endpoints, EpisodeResult, EpisodeTask, VersionBounds
from agenticrun_workers.seeds import derive
from agenticrun_workers.tracing import (
    ENV_WORKER,
    EPISODES_IN_FLIGHT,
    Recorder,
    Traced,
    span,
)
from agenticrun_workers.types import EpisodeKey, Stream, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


log = logging.getLogger(__name__)


class EnvWorker(Traced):
    """Actor that runs episodes.

    Call `describe`, then `setup`; then `set_endpoints`, `set_bounds`, `submit`, `abort` and
    `collect` in any order.

    Args:
        name: unique among the env workers of a run, including replaced ones.
        pipeline: `spec.pipeline`.
    """

    def __init__(self, name: str, pipeline: Pipeline) -> None:
        # Not by this module, which the driver imports; not in `setup`, for which the run waits.
        from agenticrun_workers.models.tokenizer import load_tokenizer

        self._load_tokenizer = load_tokenizer
        self.recorder = Recorder(
            name, ENV_WORKER, lambda: {EPISODES_IN_FLIGHT: float(len(self._running))}
        )
        self._name = name
        self._pipeline = pipeline
        self._places = EpisodePlaces(pipeline.train_envs.max_envs_per_worker, self._make_room)
        self._endpoints = Endpoints()
        self._has_endpoints = asyncio.Event()
        self._unstored: list[tuple[list[Trajectory], EpisodeResult]] = []
        self._unstored_event = asyncio.Event()
        self._outbox: ResultMailbox[EpisodeResult] = ResultMailbox()
        self._client = GenerationClient(
            name, derive(pipeline.seed, "engine-choice", name), self._keep
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = AsyncExitStack()
        """Resources to free at the end."""
        self._garbage_collected_at = float("-inf")
        self._running: dict[tuple[EpisodeKey, int], RunningEpisode] = {}
        """Running episodes by key and attempt."""
        self._sources: Sources | None = None
        """None until `describe`."""
        self._made_runner: EpisodeRunner | None = None
        """None until `setup`."""

    async def placement(self) -> Placement:
        return current_placement(self._name, Role.ENV)

    async def describe(self) -> TokenizerCorpus:
        """Build each environment, data set and judge once.

        Raises:
            InvalidConfig: one of them fails.
            MissingGpus: this env worker has GPUs, and does not see them.
        """
        owner = f"env worker {self._name}"
        await asyncio.to_thread(gpus_of_children, owner, current_node().gpus)
        texts = describe_envs(self._pipeline)
        sources = self._sources = await asyncio.to_thread(Sources.of, self._pipeline)
        self._open.push_async_callback(sources.judges.close)
        return texts

    async def setup(self, source: TokenizerSource) -> None:
        """Load the tokenizer and build the agents. Raises `InvalidConfig`."""
        tokenizer = self._load_tokenizer(source)
        chat = ChatFormat(tokenizer)
        require_chat(chat)
        agents = build_agents(self._pipeline, tokenizer)
        assert self._sources is not None, "`describe` comes first"
        self._made_runner = EpisodeRunner(self._pipeline, chat, agents, self._sources, self._client)
        self._keep(asyncio.create_task(self._store_finished(), name="store-finished"))
        self._open.enter_context(LoopWatch())
        collect_garbage_rarely()

    async def close(self) -> None:
        """Free what a process would free by ending."""
        await self._open.aclose()

    async def set_endpoints(self, endpoints: Endpoints) -> None:
        """Use these engines and stores from now on; ignore the call if a newer one came first."""
        if endpoints.number > self._endpoints.number:
            self._endpoints = endpoints
            self._client.set_engines(endpoints.engines, endpoints.retired)
            self._has_endpoints.set()

    @packed
    async def submit(self, tasks: list[EpisodeTask]) -> None:
        """Start episodes. `collect` returns one result for each."""
        # Ray promises no order of calls: tasks may come before the endpoints.
        await self._has_endpoints.wait()
        for task in tasks:
            # For the same reason a task may come before the bounds that the driver sent first.
            self._runner.raise_bounds(VersionBounds(newest=task.engine_version))
            episode = RunningEpisode(task)
            episode.coroutine = asyncio.create_task(self._run_episode(episode))
            self._running[task.key, task.attempt] = episode
            self._keep(episode.coroutine)

    async def abort(self, episodes: list[tuple[EpisodeKey, int]]) -> None:
        """Stop these (episode, attempt) pairs; they end as aborted. Unknown ones are ignored."""
        for name in episodes:
            if name in self._running:
                self._running[name].cancel()

    async def set_bounds(self, bounds: VersionBounds) -> None:
        """Stop training episodes with a token older than `bounds.oldest`; they end as stale."""
        self._runner.raise_bounds(bounds)
        for episode in list(self._running.values()):
            episode.stop_if_older(self._runner.bounds.oldest)

    @packed
    async def collect(self) -> list[EpisodeResult]:
        """Return finished episodes; none after idle seconds.

        Raises the error of a background task, since its episode may be lost and the caller must not
        wait for it.
        """
        return await self._outbox.take()

    @property
    def _runner(self) -> EpisodeRunner:
        assert self._made_runner is not None, "`setup` comes first"
        return self._made_runner

    def _keep(self, task: asyncio.Task[None]) -> None:
        """Keep a reference to a task until it ends. `collect` raises its error if it fails."""
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._outbox.fail(error)

    async def _run_episode(self, episode: RunningEpisode) -> None:
        episode.begun = True
        task = episode.task
        key = task.key
        name = f"{key.group}.{key.member} {task.tag}"
        with self.recorder.track(name, stream=key.stream.value, attempt=task.attempt) as track:
            self._count_episodes()
            try:
                if episode.cancelled:
                    raise asyncio.CancelledError
                async with AsyncExitStack() as stack:
                    with span("wait for a place"):
                        episode.memory_wait = await stack.enter_async_context(self._places.place())
                    trajectories = await self._runner.run(episode)
                # After the place is free: judges may take long.
                trajectories = await self._runner.judge(task, trajectories)
            except asyncio.CancelledError:  # only `abort` and `set_bounds` cancel it
                trajectories = [episode.abandoned()]
            finally:
                del self._running[key, task.attempt]
                self._count_episodes()
            ending = trajectories[-1]
            track.note(stop=ending.stop_reason.value, turns=len(ending.turns))
        # Validation uses only scalars, so its tokens are not stored.
        keeps = key.stream is not Stream.VALIDATION
        result = self._runner.result(
            episode,
            trajectories,
            store=key.group % len(self._endpoints.stores) if keeps else -1,
        )
        if keeps and result.trainable:
            kept = {each.key for each in result.trajectories if each.trainable}
            self._unstored.append(
                ([trajectory for trajectory in trajectories if trajectory.key in kept], result)
            )
            self._unstored_event.set()
        else:
            self._outbox.put(result)

    def _make_room(self) -> None:
        """Free idle environments and, unless that was done just now, objects in reference cycles.

        To look for cycles blocks the event loop, up to a second with many episodes, and room is
        made after each episode that ends while memory is full.
        """
        self._runner.envs.discard_idle()
        clock = asyncio.get_running_loop().time
        if clock() - self._garbage_collected_at >= COLLECT_GARBAGE_SECONDS:
            gc.collect()
            self._garbage_collected_at = clock()

    def _count_episodes(self) -> None:
        if self.recorder.on:
            self.recorder.count(EPISODES_IN_FLIGHT, len(self._running))

    async def _store_finished(self) -> None:
        """Send trajectories to their stores. A result is published once its tokens are stored."""
        while True:
            await self._unstored_event.wait()
            # Episodes often end together: one call stores all that end within 2 ms.
            await asyncio.sleep(0.002)
            self._unstored_event.clear()
            finished, self._unstored = self._unstored, []
            by_store: dict[int, list[Trajectory]] = defaultdict(list)
            for trajectories, result in finished:
                by_store[result.store] += trajectories
            number, stores = self._endpoints.worker, self._endpoints.stores
            await asyncio.gather(
                *(
                    stores[store].call(lambda actor: actor.put(kept, number))
                    for store, kept in by_store.items()
                )
            )
            for _, result in finished:
                self._outbox.put(result)


FULL_SHARE = 0.9
"""Share of its limit above which a pod's memory counts as nearly full.

Ray kills processes from 0.95 on (`RAY_memory_usage_threshold`), the kernel at 1.
"""
LOOK_SECONDS = 0.1
LOOK_EPISODES = 16
"""The memory is read again after so many seconds, or when so many episodes have begun."""
WAIT_SECONDS = 1.0
"""Time between two readings while episodes wait."""


class EpisodePlaces:
    """Places for the running episodes of one env worker: says when the next one may begin.

    While the pod's memory is nearly full, running episodes continue, and none begins beside them: a
    worker that waits is slow, one that the kernel kills loses its episodes. One episode may always
    run, so nothing waits forever.

    Args:
        limit: largest number of episodes at once.
        make_room: called when the memory is nearly full: frees what can be made again.
        memory: of the pod. Without a limit, episodes do not wait for it.
    """

    def __init__(
        self, limit: int, make_room: Callable[[], None], memory: PodMemory | None = None
    ) -> None:
        self._memory = memory or PodMemory()
        self._bytes = self._memory.limit()
        self._make_room = make_room
        self._places = asyncio.Semaphore(limit)
        self._turn = asyncio.Lock()
        """Held by the episode that begins next, so that a single one waits for memory."""
        self._running = 0
        self._ended = asyncio.Event()
        self._full = self._roomy = False
        """Memory was nearly full; no episode has ended since room was made."""
        self._looked_at = float("-inf")
        self._begun = 0
        """Episodes that have begun since the memory was read."""
        self._warn = LogOnce(log.warning)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[float]:
        """Wait for a place, and keep it inside the `with` block.

        Yields:
            Seconds that the episode waited for memory while there was a place.
        """
        async with self._places:
            waited = 0.0
            if self._bytes is not None:
                async with self._turn:
                    waited = await self._wait_for_memory(self._bytes)
            self._running += 1
            try:
                yield waited
            finally:
                self._running -= 1
                # Its environment is idle now and can be freed, so making room is worth another try.
                self._roomy = False
                self._ended.set()

    async def _wait_for_memory(self, limit: int) -> float:
        clock, waited = asyncio.get_running_loop().time, 0.0
        # One episode may always run, so nothing waits forever.
        while self._running and self._nearly_full(limit):
            began = clock()
            self._ended.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(WAIT_SECONDS):
                    await self._ended.wait()
            waited += clock() - began
        self._begun += 1
        return waited

    def _nearly_full(self, limit: int) -> bool:
        """Return True if the pod's memory was nearly full a moment ago."""
        now = asyncio.get_running_loop().time()
        # Thousands of episodes begin: reading the kernel's files for each of them would be slow.
        if now - self._looked_at < LOOK_SECONDS and self._begun < LOOK_EPISODES:
            return self._full
        self._full = self._used() > FULL_SHARE * limit
        if self._full and not self._roomy:
            self._make_room()
            self._roomy = True
            self._full = self._used() > FULL_SHARE * limit
        self._looked_at, self._begun = now, 0
        if self._full:
            self._warn(
                f"{FULL_SHARE:.0%} of the pod's memory is in use: episodes wait until it is less "
                "(metric rollout/memory_wait_seconds). Raise spec.roles.env.memory, or lower "
                "trainEnvs.maxEnvsPerWorker"
            )
        return self._full

    def _used(self) -> int:
        """Return the memory in use; 0 if the kernel does not tell, so that episodes begin."""
        try:
            return self._memory.used()
        except OSError as error:
            self._warn(
                f"the memory of the pod cannot be read: {error}. Episodes begin as if it were free"
            )
            return 0


GC_THRESHOLDS = (50_000, 10, 5)
COLLECT_GARBAGE_SECONDS = 10.0
"""Shortest time between two searches for reference cycles because memory is full."""


def collect_garbage_rarely() -> None:
    """Let Python look for reference cycles seldom.

    By default it looks at all objects of all running episodes after every few thousand turns. With
    10,000 episodes that blocks the process for 0.1 s each time. Now at most 2,500,000 objects can
    pile up in cycles.
    """
    # Reference counts free nearly everything at once; only cycles wait.
    gc.set_threshold(*GC_THRESHOLDS)


def describe_envs(pipeline: Pipeline) -> TokenizerCorpus:
    """Build each environment of a run and return its texts. Raises `InvalidConfig`."""
    vocabulary: list[str] = []
    texts: list[str] = []
    for index, spec in enumerate(pipeline.envs):
        path = f"spec.pipeline.envs[{index}]"
        try:
            # Built once here to fail early, in `describe`, and not in the first episode of each
            # worker.
            env = make_env(spec.type, spec.config)
        except PluginError as error:
            raise InvalidConfig(f"{path}.{_field_of(error)}", str(error)) from error
        if spec.dataset is not None and not isinstance(env, TakesItem):
            raise InvalidConfig(
                f"{path}.dataset", f"{spec.type} takes no items: give it set_item(item)"
            )
        if isinstance(env, HasVocabulary):
            vocabulary += env.vocabulary()
        try:
            instruction = getattr(env, "instruction", "")
            texts += [instruction, *agent_texts(spec.agent.type, spec.agent.config)]
        except PluginError as error:
            raise InvalidConfig(f"{path}.agent.type", str(error)) from error
    return TokenizerCorpus(tuple(vocabulary), tuple(texts))


def build_agents(
    pipeline: Pipeline, tokenizer: PreTrainedTokenizerBase
) -> dict[tuple[str, Stream], Agent]:
    """Build one agent per tag and stream, since their sampling differs. Raises `InvalidConfig`."""
    agents: dict[tuple[str, Stream], Agent] = {}
    for index, spec in enumerate(pipeline.envs):
        for stream in Stream:
            limits = agent_limits(pipeline, spec, stream)
            try:
                agents[spec.tag, stream] = make_agent(
                    spec.agent.type, spec.agent.config, tokenizer=tokenizer, limits=limits
                )
            except PluginError as error:
                raise InvalidConfig(
                    f"spec.pipeline.envs[{index}].agent.{_field_of(error)}", str(error)
                ) from error
    learns_observations = pipeline.warmup is not None and pipeline.warmup.observation_weight > 0
    if learns_observations and all(getattr(agent, "stepwise", False) for agent in agents.values()):
        # The operator cannot check it: for multi_turn, the chat template decides.
        raise InvalidConfig(
            "spec.pipeline.warmup.observationWeight",
            "each turn of these agents is a sample without the observation after it: leave it out, "
            "or set spec.model.earlierReasoning: Keep for multi_turn",
        )
    return agents


def agent_limits(pipeline: Pipeline, spec: EnvSpec, stream: Stream) -> AgentLimits:
    """Return the limits and sampling settings of an environment's episodes."""
    limits = AgentLimits(
        max_turns=spec.max_steps,
        max_tokens_per_step=spec.max_tokens_per_step,
        sequence_length=pipeline.sequence_length,
        step_timeout=step_timeout(pipeline, spec),
    )
    if stream is Stream.VALIDATION:
        # Validation measures the policy as it would be used, so its sampling is set apart from
        # training's.
        asked = spec.validation_generating or pipeline.actor_infer.validation_generating
        return replace(limits, temperature=asked.temperature, top_p=asked.top_p, top_k=asked.top_k)
    train = pipeline.actor_infer.generating
    return replace(
        limits,
        temperature=train.temperature,
        top_p=train.top_p,
        top_k=train.top_k,
        min_p=train.min_p,
        # If truncated sampling is allowed, log-probs are recorded at temperature 1, otherwise at
        # the sampling temperature: in both cases over the whole vocabulary.
        record_temperature=1.0 if train.allow_truncated_sampling else None,
    )


def _field_of(error: PluginError) -> str:
    return "config" if isinstance(error, PluginConfigError) else "type"


T = TypeVar("T")


class ResultMailbox(Generic[T]):
    """Results for one consumer that polls with `take`.

    A remote call costs about a millisecond of CPU, independent of its size. So the producer puts
    single results, and the consumer keeps one `take` running that returns all of them.
    """

    def __init__(self, gather_seconds: float = 0.002) -> None:
        self._items: list[T] = []
        self._failure: BaseException | None = None
        self._filled = asyncio.Event()
        self._gather_seconds = gather_seconds

    def put(self, item: T) -> None:
        self._items.append(item)
        self._filled.set()

    def fail(self, error: BaseException) -> None:
        """Make all later calls of `take` raise this error: some results may never come."""
        # The first error is the cause; later ones follow from it.
        self._failure = self._failure or error
        self._filled.set()

    async def take(self, patience: float = POLL_SECONDS) -> list[T]:
        """Return all results, waiting at most `patience` seconds for the first one.

        Raises the error passed to `fail`.
        """
        try:
            async with asyncio.timeout(patience):  # wait_for can swallow a cancellation
                await self._filled.wait()
        except TimeoutError:
            return []
        # Others often end at the same moment: one answer takes all of them.
        await asyncio.sleep(self._gather_seconds)
        # Before the results: the caller must not wait for an episode that is lost.
        if self._failure is not None:
            raise self._failure
        items, self._items = self._items, []
        self._filled.clear()
        return items
