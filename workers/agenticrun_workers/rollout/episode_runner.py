"""EpisodeRunner: runs one episode from its task to judged trajectories, in an env worker."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, cast

from agenticrun_api import Pipeline
from agenticrun_api.environments import EnvSpec
from agenticrun_workers.agents import Agent, ChatFormat, Episode, random_valid_policy
from agenticrun_workers.envs import Closes, Env, EnvCalls, EnvFault, Renders, make_env
from agenticrun_workers.envs.calls import CLOSE_SECONDS, check_metric_names, one_line
from agenticrun_workers.envs.isolated import IsolatedEnv, Isolation
from agenticrun_workers.inference.client import GenerationClient
from agenticrun_workers.log_once import LogOnce
from agenticrun_workers.rollout import rendering
from agenticrun_workers.rollout.datasets import Demonstrations, EpisodeItems
from agenticrun_workers.rollout.groups import EpisodeResult, EpisodeTask, VersionBounds, as_episode
from agenticrun_workers.rollout.rewards import JudgePanel, judged_episode
from agenticrun_workers.tracing import span
from agenticrun_workers.types import (
    EpisodeKey,
    Generation,
    GenerationRequest,
    StopReason,
    Stream,
    Trajectory,
    Turn,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sources:
    """Data sets, judges and demonstrations of a run."""

    items: EpisodeItems
    judges: JudgePanel
    demonstrations: Demonstrations | None

    @classmethod
    def of(cls, pipeline: Pipeline) -> Sources:
        """Read the data sets and build the judges. Blocks. Raises `InvalidConfig`."""
        return cls(EpisodeItems(pipeline), JudgePanel.of(pipeline), Demonstrations.of(pipeline))


@dataclass
class RunningEpisode:
    """State of one episode while it runs."""

    task: EpisodeTask
    answers: list[Generation] = field(default_factory=list)
    """Generations sampled so far."""
    asked_version: int | None = None
    """Policy version of the engines when the first response was requested."""
    stale: bool = False
    """True if it was stopped because its tokens are too old to be trained on."""
    coroutine: asyncio.Task[None] | None = None
    begun: bool = False
    """True when `coroutine` has taken its first step."""
    cancelled: bool = False
    """True if it was stopped before that."""
    recorder: rendering.FrameRecorder | None = None
    memory_wait: float = 0.0
    """Seconds that it waited for memory of its pod before it began."""

    @property
    def oldest_version(self) -> int | None:
        """Lower bound of the policy versions of its tokens; None before the first request."""
        versions = [int(a.versions_T.min()) for a in self.answers if len(a.versions_T)]
        return min(versions, default=self.asked_version)

    def stop_if_older(self, version: int) -> None:
        """Stop a training episode that has a token older than this version."""
        oldest = self.oldest_version
        if (
            # Validation and warm-up do not care about the age of a token.
            self.task.key.stream is Stream.TRAIN
            and not self.stale
            and oldest is not None
            and oldest < version
        ):
            self.stale = True
            self.cancel()

    def cancel(self) -> None:
        """Stop the episode.

        A task that is cancelled before its first step never runs, and would leave no result.
        """
        if not self.begun:
            self.cancelled = True
        elif self.coroutine is not None:
            self.coroutine.cancel()

    def abandoned(self) -> Trajectory:
        """Return the trajectory of a stopped episode. Its sampled tokens still count in metrics."""
        turns = tuple(
            Turn(a.tokens_T[:0], a.tokens_T, a.logprobs_T, a.versions_T, 0.0) for a in self.answers
        )
        return Trajectory(
            self.task.key,
            self.task.tag,
            turns,
            StopReason.STALE if self.stale else StopReason.ABORTED,
            error="its tokens are older than staleness.max allows"
            if self.stale
            else "enough other members had finished",
        )


class EpisodeRunner:
    """Runner of the concurrent episodes of one env worker.

    Args:
        pipeline: `spec.pipeline`.
        chat: the policy's chat template.
        agents: agents by tag and stream.
        sources: data sets, judges and demonstrations.
        client: sends generation requests to the engines.

    Attributes:
        bounds: the latest policy versions that are known here.
        envs: the environments that are built.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        chat: ChatFormat,
        agents: Mapping[tuple[str, Stream], Agent],
        sources: Sources,
        client: GenerationClient,
    ) -> None:
        self._pipeline = pipeline
        self._chat = chat
        self._agents = agents
        self._sources = sources
        self._client = client
        self.envs = EnvCache(pipeline)
        self.bounds = VersionBounds()
        self._report = LogOnce(log.exception)

    def raise_bounds(self, bounds: VersionBounds) -> None:
        """Take these policy versions, unless later ones are known."""
        self.bounds = self.bounds.later(bounds)

    async def run(self, running: RunningEpisode) -> list[Trajectory]:
        """Run an episode to its end, and return its trajectories: at least one.

        Its errors become stop reasons.
        """
        task = running.task
        if task.demonstration:
            assert self._sources.demonstrations is not None
            return [self._sources.demonstrations.trajectory(task.key, task.tag, self._chat)]
        try:
            return await self._collected(running)
        except EnvFault as fault:
            return [_nothing(task, fault.reason, str(fault))]
        except BaseException as error:  # a user's agent may raise anything, cancellations included
            current = asyncio.current_task()
            assert current is not None
            # `abort`, `set_bounds` or the end of the worker cancelled us. Else the agent raised it.
            if current.cancelling():
                raise
            message = one_line(error)
            self._report(f"an agent failed in {task.tag}: {message}")
            return [_nothing(task, StopReason.ENV_ERROR, message)]

    async def _collected(self, running: RunningEpisode) -> list[Trajectory]:
        task, key = running.task, running.task.key
        episode = Episode.seeded(self._pipeline.seed, key, task.tag, task.attempt, self._item(task))
        with span("build"):
            env, whole = await self.envs.take(task.tag), False
        try:
            timeout = step_timeout(self._pipeline, self._pipeline.env(task.tag))
            generate = (
                random_valid_policy(env, self._chat, timeout)
                if task.random_policy
                else self._client.generate
            )
            agent = self._agents[task.tag, key.stream]
            groups = self._pipeline.groups_per_batch
            partial = self._pipeline.staleness.partial_rollout

            async def ranked(request: GenerationRequest) -> Generation:
                # A response that starts again with new weights (`partialRollout: false`) has no
                # tokens of the version that it was requested with.
                if partial and running.asked_version is None:
                    running.asked_version = self.bounds.newest
                priority = request_priority(running.task, groups, len(running.answers))
                with span("generate"):
                    generation = await generate(replace(request, priority=priority))
                # Before the episode may be stopped as stale: its tokens count, too.
                running.answers.append(generation)
                # An answer may bring news of a newer version before the driver's call does.
                if len(generation.versions_T):
                    self.raise_bounds(VersionBounds(newest=int(generation.versions_T.max())))
                running.stop_if_older(self.bounds.oldest)
                return generation

            made = await agent.collect_trajectory(episode, self._recorded(env, running), ranked)
            trajectories = _numbered(key, made)
            whole = all(trajectory.stop_reason.trainable for trajectory in trajectories)
            return trajectories
        finally:
            # Else the table of sessions would grow with every episode of the run.
            self._client.end_session(episode.session)
            # An environment that was left in the middle of an episode may be in any state.
            if whole:
                self.envs.release(task.tag, env)
            else:
                self.envs.discard(task.tag, env)

    async def judge(self, task: EpisodeTask, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Return the trajectories with the judges' scores. Random episodes are not judged."""
        if task.random_policy or task.demonstration or not self._sources.judges.judges(task.tag):
            return trajectories
        with span("judge"):
            return await asyncio.gather(*(self._judged(task, each) for each in trajectories))

    async def _judged(self, task: EpisodeTask, trajectory: Trajectory) -> Trajectory:
        if not trajectory.stop_reason.trainable:
            return trajectory
        return await self._sources.judges.apply(
            trajectory, judged_episode(trajectory, self._chat, self._item(task))
        )

    def result(
        self, running: RunningEpisode, trajectories: list[Trajectory], store: int
    ) -> EpisodeResult:
        """Return the scalars, with transcript and frames if requested.

        Malformed trajectories of an agent become env_error.
        """
        try:
            return self._result(running, trajectories, store)
        except Exception as error:  # an agent is a user's code and may return anything
            self._report(
                f"an agent of {running.task.tag} returned no good trajectory: {one_line(error)}"
            )
            nothing = _nothing(running.task, StopReason.ENV_ERROR, one_line(error))
            return self._result(running, [nothing], store)

    def _result(
        self, running: RunningEpisode, trajectories: list[Trajectory], store: int
    ) -> EpisodeResult:
        task = running.task
        results = [
            EpisodeResult.of(
                trajectory,
                attempt=task.attempt,
                store=store,
                transcript=rendering.transcript(trajectory, self._chat) if task.transcript else "",
            )
            for trajectory in trajectories
        ]
        frames = rendering.animated_gif(running.recorder.frames) if running.recorder else b""
        episode = as_episode(results)
        return replace(episode, frames=frames, memory_wait=running.memory_wait)

    def _item(self, task: EpisodeTask) -> Mapping[str, Any] | None:
        return self._sources.items.of(task.tag, task.key.stream, task.key.group)

    def _recorded(self, env: Env, running: RunningEpisode) -> Env:
        wanted = running.task.frames
        if isinstance(env, IsolatedEnv):
            env.film = wanted
        if not (wanted and isinstance(env, Renders)):
            return env
        running.recorder = rendering.FrameRecorder(env)
        return cast(Env, running.recorder)


def _numbered(key: EpisodeKey, made: Trajectory | Sequence[Trajectory]) -> list[Trajectory]:
    """Return an agent's trajectories, each with its own key.

    Raises:
        ValueError, EnvFault: there are none, or a metric has a reserved name.
    """
    trajectories = [made] if isinstance(made, Trajectory) else list(made)
    if not trajectories:
        raise ValueError("collect_trajectory returned no trajectory")
    for trajectory in trajectories:
        check_metric_names(trajectory.metrics)
    return [
        replace(trajectory, key=replace(key, branch=branch))
        for branch, trajectory in enumerate(trajectories)
    ]


def _nothing(task: EpisodeTask, reason: StopReason, error: str) -> Trajectory:
    return Trajectory(task.key, task.tag, (), reason, error=error)


MAX_TURNS_RANKED = 1024


def request_priority(task: EpisodeTask, groups_per_batch: int, turn: int) -> int:
    """Return the priority of a request: earlier batches first, then episodes with fewer turns.

    The training step waits for the last episode of its batch. Validation and warm-up go before all
    training episodes, because training waits for them.
    """
    if task.key.stream is not Stream.TRAIN:
        return 0
    batch = 1 + task.key.group // groups_per_batch
    return batch * MAX_TURNS_RANKED + min(turn, MAX_TURNS_RANKED - 1)


STEP_TIMEOUT_SECONDS = 60.0
"""Default of `envs[].stepTimeoutSeconds` in runs that are not deterministic."""

BUILD_TIMEOUT_SECONDS = 300.0
"""Seconds to build an isolated environment, which may read its data first."""


def step_timeout(pipeline: Pipeline, spec: EnvSpec) -> float | None:
    """Return the seconds that a reset or step may take; None = no limit."""
    return spec.step_timeout_seconds or (None if pipeline.deterministic else STEP_TIMEOUT_SECONDS)


class EnvCache:
    """The environments of one env worker, built on demand and reused.

    An entry with `maxConcurrent` has at most that many in use; `take` waits for a place.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._idle: dict[str, list[Env]] = defaultdict(list)
        self._building = asyncio.Lock()
        timeout = None if pipeline.deterministic else BUILD_TIMEOUT_SECONDS
        self._isolations = {
            spec.tag: Isolation(spec.type, spec.config, timeout)
            for spec in pipeline.envs
            if spec.isolated
        }
        self._places = {
            spec.tag: asyncio.Semaphore(spec.max_concurrent)
            for spec in pipeline.envs
            if spec.max_concurrent is not None
        }
        self._calls = EnvCalls(CLOSE_SECONDS)
        self._closing: set[asyncio.Task[None]] = set()
        self._report = LogOnce(log.warning)

    async def take(self, tag: str) -> Env:
        """Return an idle environment or a new one.

        Raises:
            EnvFault: an isolated environment cannot be started.
        """
        if tag in self._places:
            await self._places[tag].acquire()
        try:
            if self._idle[tag]:
                return self._idle[tag].pop()
            if tag in self._isolations:
                return await self._isolations[tag].start()
            spec = self._pipeline.env(tag)
            async with self._building:
                await asyncio.sleep(0)  # constructors may be slow: others run between two of them
                return make_env(spec.type, spec.config)
        # A cancellation, too, must not leave the place taken.
        except BaseException:
            self._free_place(tag)
            raise

    def release(self, tag: str, env: Env) -> None:
        """Return an environment after an episode without faults."""
        if getattr(env, "reusable", True) and not (isinstance(env, IsolatedEnv) and env.worn_out):
            self._idle[tag].append(env)
            self._free_place(tag)
        else:
            self.discard(tag, env)

    def discard(self, tag: str, env: Env) -> None:
        """Drop an environment that was in use and may be in any state.

        Its place is free once it is closed: a server with few places must have seen that.
        """
        closing = self._drop(env)
        if closing is None:
            self._free_place(tag)
        else:
            closing.add_done_callback(lambda _: self._free_place(tag))

    def discard_idle(self) -> None:
        """Drop all environments that no episode uses."""
        idle, self._idle = self._idle, defaultdict(list)
        for env in chain.from_iterable(idle.values()):
            self._drop(env)

    def _drop(self, env: Env) -> asyncio.Task[None] | None:
        """End or close an environment. Return the task that closes it, if it has to be closed."""
        if isinstance(env, IsolatedEnv):
            env.end()
        elif isinstance(env, Closes):
            closing = asyncio.create_task(self._close(env), name="close-env")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            return closing
        return None

    async def _close(self, env: Env) -> None:
        try:
            await self._calls.close(env)
        except EnvFault as fault:
            self._report(f"{type(env).__name__} cannot be closed: {fault}")

    def _free_place(self, tag: str) -> None:
        if tag in self._places:
            self._places[tag].release()
