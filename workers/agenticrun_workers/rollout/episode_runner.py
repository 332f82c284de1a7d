"""EpisodeRunner: one episode from its task to a judged trajectory, inside an env worker."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from agenticrun_api import Pipeline
from agenticrun_api.environments import EnvSpec
from agenticrun_workers.agents import Agent, ChatFormat, Episode, Generate, random_valid_policy
from agenticrun_workers.envs import Env, EnvFault, Renders, make_env
from agenticrun_workers.envs.calls import one_line
from agenticrun_workers.envs.isolated import IsolatedEnv, Isolation
from agenticrun_workers.inference.client import GenerationClient
from agenticrun_workers.rollout.camera import Filmed, animated_gif
from agenticrun_workers.rollout.datasets import EpisodeItems
from agenticrun_workers.rollout.demonstrations import Demonstrations
from agenticrun_workers.rollout.groups import EpisodeResult, GroupTask, as_episode
from agenticrun_workers.rollout.log_once import LogOnce
from agenticrun_workers.rollout.rewards import JudgePanel, judged_episode
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
    """What a run's episodes are about, and who judges them."""

    items: EpisodeItems
    judges: JudgePanel
    demonstrations: Demonstrations | None

    @classmethod
    def of(cls, pipeline: Pipeline) -> Sources:
        """Reads data sets and builds judges. Blocks. Raises `InvalidConfig`."""
        return cls(EpisodeItems(pipeline), JudgePanel.of(pipeline), Demonstrations.of(pipeline))


@dataclass
class RunningEpisode:
    """An episode that is being played, or was."""

    task: GroupTask
    key: EpisodeKey
    answers: list[Generation] = field(default_factory=list)
    """What the engines sampled for it so far."""
    film: Filmed | None = None
    trajectories: list[Trajectory] = field(default_factory=list)
    """At least one when it is over; one, unless its agent makes several."""

    @property
    def told(self) -> bool:
        """Whether people want to read this episode: the first member's, where the task asks for it."""
        return self.key.member == self.task.members[0]

    def abandoned(self) -> Trajectory:
        """What is left of an episode that was stopped: its sampled tokens, for the books."""
        turns = tuple(
            Turn(a.tokens_T[:0], a.tokens_T, a.logprobs_T, a.versions_T, 0.0) for a in self.answers
        )
        return Trajectory(
            self.key,
            self.task.tag,
            turns,
            StopReason.ABORTED,
            error="enough other members had finished",
        )


class EpisodeRunner:
    """Plays the episodes of one env worker, many at once.

    Args:
        agents: by tag and stream.
        client: the way to the engines.
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
        self._envs = EnvCache(pipeline)
        self._report = LogOnce(log.exception)

    async def run(self, played: RunningEpisode) -> None:
        """Play it to its end; its environment goes back to the idle ones if nothing went wrong. Raises nothing."""
        task, key = played.task, played.key
        if task.demonstration:
            assert self._sources.demonstrations is not None
            played.trajectories = [
                self._sources.demonstrations.trajectory(key, task.tag, self._chat)
            ]
            return
        try:
            played.trajectories = await self._collected(played)
        except asyncio.CancelledError:
            raise
        except EnvFault as fault:
            played.trajectories = [_nothing(played, fault.reason, str(fault))]
        except (
            BaseException
        ) as error:  # an agent is a user's code and may raise anything: it costs this episode
            message = one_line(error)
            self._report(f"an agent failed in {task.tag}: {message}")
            played.trajectories = [_nothing(played, StopReason.ENV_ERROR, message)]
        finally:
            self._client.end_session(str(key))

    async def _collected(self, played: RunningEpisode) -> list[Trajectory]:
        task, key = played.task, played.key
        env, whole = await self._envs.take(task.tag), False
        try:
            timeout = step_timeout(self._pipeline, self._pipeline.env(task.tag))
            generate = (
                random_valid_policy(env, self._chat, timeout)
                if task.random_policy
                else self._client.generate
            )
            episode = Episode.seeded(
                self._pipeline.seed, key, task.tag, task.attempt, self._item(task)
            )
            agent = self._agents[task.tag, task.stream]
            made = await agent.collect_trajectory(
                episode, self._filmed(env, played), _counted(generate, played)
            )
            trajectories = _numbered(key, made)
            whole = all(trajectory.stop_reason.trainable for trajectory in trajectories)
            return trajectories
        finally:
            if whole:
                self._envs.give_back(task.tag, env)
            else:
                self._envs.give_up(env)

    async def judge(self, played: RunningEpisode) -> None:
        """Add what the judges say of each trajectory. Random play is not judged: nothing reads it."""
        task = played.task
        if (
            not task.random_policy
            and not task.demonstration
            and self._sources.judges.judges(task.tag)
        ):
            played.trajectories = list(
                await asyncio.gather(*(self._judged(task, each) for each in played.trajectories))
            )

    async def _judged(self, task: GroupTask, trajectory: Trajectory) -> Trajectory:
        if not trajectory.stop_reason.trainable:
            return trajectory
        return await self._sources.judges.apply(
            trajectory, judged_episode(trajectory, self._chat, self._item(task))
        )

    def result(self, played: RunningEpisode, store: int) -> EpisodeResult:
        """The scalars, with text and pictures if the task asks for them. Trajectories that have none end with env_error."""
        try:
            return self._result(played, store)
        except Exception as error:  # an agent is a user's code and may return anything
            self._report(
                f"an agent of {played.task.tag} returned no good trajectory: {one_line(error)}"
            )
            played.trajectories = [_nothing(played, StopReason.ENV_ERROR, one_line(error))]
            return self._result(played, store)

    def _result(self, played: RunningEpisode, store: int) -> EpisodeResult:
        task = played.task
        results = [
            EpisodeResult.of(
                trajectory,
                attempt=task.attempt,
                store=store,
                transcript=transcript(trajectory, self._chat)
                if task.transcript and played.told
                else "",
            )
            for trajectory in played.trajectories
        ]
        frames = animated_gif(played.film.frames) if played.film else b""
        return replace(as_episode(results), frames=frames)

    def _item(self, task: GroupTask) -> Mapping[str, Any] | None:
        return self._sources.items.of(task.tag, task.stream, task.group)

    def _filmed(self, env: Env, played: RunningEpisode) -> Env:
        wanted = played.task.frames and played.told
        if isinstance(env, IsolatedEnv):
            env.film = wanted
        if not (wanted and isinstance(env, Renders)):
            return env
        played.film = Filmed(env)
        return cast(Env, played.film)


def _numbered(key: EpisodeKey, made: Trajectory | Sequence[Trajectory]) -> list[Trajectory]:
    """What an agent returned, each trajectory with a key of its own."""
    trajectories = [made] if isinstance(made, Trajectory) else list(made)
    if not trajectories:
        raise ValueError("collect_trajectory returned no trajectory")
    return [
        replace(trajectory, key=replace(key, branch=branch))
        for branch, trajectory in enumerate(trajectories)
    ]


def _nothing(played: RunningEpisode, reason: StopReason, error: str) -> Trajectory:
    return Trajectory(played.key, played.task.tag, (), reason, error=error)


def _counted(generate: Generate, played: RunningEpisode) -> Generate:
    """Remembers what was sampled, so that a stopped episode's tokens are not lost from the books."""

    async def counting(request: GenerationRequest) -> Generation:
        generation = await generate(request)
        played.answers.append(generation)
        return generation

    return counting


STEP_TIMEOUT_SECONDS = 60.0
"""Default of `envs[].stepTimeoutSeconds`, in runs that are not deterministic."""

BUILD_TIMEOUT_SECONDS = 300.0
"""An isolated environment may read its data first."""


def step_timeout(pipeline: Pipeline, spec: EnvSpec) -> float | None:
    """Seconds that a reset or step of this environment may take; None: any."""
    return spec.step_timeout_seconds or (None if pipeline.deterministic else STEP_TIMEOUT_SECONDS)


class EnvCache:
    """Take an environment for an episode, and give it back."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._idle: dict[str, list[Env]] = defaultdict(list)
        timeout = None if pipeline.deterministic else BUILD_TIMEOUT_SECONDS
        self._isolations = {
            spec.tag: Isolation(spec.type, spec.config, timeout)
            for spec in pipeline.envs
            if spec.isolated
        }

    async def take(self, tag: str) -> Env:
        """One that plays no other episode. Raises what building it raises; `EnvFault` if it is isolated."""
        if self._idle[tag]:
            return self._idle[tag].pop()
        if tag in self._isolations:
            return await self._isolations[tag].start()
        spec = self._pipeline.env(tag)
        return make_env(spec.type, spec.config)

    def give_back(self, tag: str, env: Env) -> None:
        """After an episode in which nothing went wrong."""
        if getattr(env, "reusable", True) and not (isinstance(env, IsolatedEnv) and env.worn_out):
            self._idle[tag].append(env)
        else:
            self.give_up(env)

    def give_up(self, env: Env) -> None:
        """Nobody knows which state it is in."""
        if isinstance(env, IsolatedEnv):
            env.end()


MAX_CHARACTERS = 32_768
"""Of one transcript: what does not fit is left out as whole turns from the middle of the episode."""
MAX_PART = 4_096
"""Characters of one prompt or answer; what lies in the middle of a longer one is left out."""


def transcript(trajectory: Trajectory, chat: ChatFormat) -> str:
    """The whole episode, turn by turn, and how it ended."""
    blocks = [_turn(number, turn, chat) for number, turn in enumerate(trajectory.turns, start=1)]
    reason = (
        f"{trajectory.stop_reason}: {trajectory.error}"
        if trajectory.error
        else trajectory.stop_reason.value
    )
    return "".join(
        [*_within_bounds(blocks), f"--- end: {reason}, score {trajectory.score:.4g} ---\n"]
    )


def _turn(number: int, turn: Turn, chat: ChatFormat) -> str:
    action = "none" if turn.action is None else repr(turn.action)
    return (
        f"--- turn {number} ---\n{_shortened(chat.shown(turn.prompt_T))}\n"
        f"--- answer {number}: action {action}, {'valid' if turn.valid else 'not valid'}, reward {turn.reward:.4g} ---\n"
        f"{_shortened(chat.shown(turn.response_T))}\n"
    )


def _shortened(text: str) -> str:
    if len(text) <= MAX_PART:
        return text
    half = MAX_PART // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def _within_bounds(blocks: list[str]) -> list[str]:
    """The first and the last turns, as many as fit: the last one first, then from the beginning."""
    room = MAX_CHARACTERS - sum(map(len, blocks[-1:]))
    kept = 0
    while kept < len(blocks) - 1 and len(blocks[kept]) <= room:
        room -= len(blocks[kept])
        kept += 1
    left_out = len(blocks) - 1 - kept
    gap = [f"--- {left_out} turns left out ---\n"] if left_out > 0 else []
    return [*blocks[:kept], *gap, *blocks[-1:]]
