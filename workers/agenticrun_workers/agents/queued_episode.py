"""One episode of an agent with queues: its requests are answered in order, and whatever goes wrong is one lost trajectory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from agenticrun_workers.agents.agent import AgentLimits, Episode, Generate, answered
from agenticrun_workers.agents.chat import ChatFormat
from agenticrun_workers.agents.generation_config import GenerationConfig
from agenticrun_workers.agents.queued_types import (
    BundledGenerationOutputs,
    EpisodeEnded,
    Prompt,
    ScoredSequence,
)
from agenticrun_workers.agents.sampled_tree import SampledTree
from agenticrun_workers.agents.service_view import ServiceView
from agenticrun_workers.envs import EnvFault
from agenticrun_workers.envs.calls import raised
from agenticrun_workers.types import Generation, IntArray, StopReason, Trajectory

PATIENCE_SECONDS = 1.0
"""How long a task that is cancelled may take to end before it is left behind."""


class AnswerQueue(asyncio.Queue[Any]):
    """Bundles of outputs, and at the end `EpisodeEnded`, which is raised."""

    def get_nowait(self) -> Any:
        """`Queue.get` takes its item here as well."""
        item = super().get_nowait()
        if isinstance(item, EpisodeEnded):
            raise item
        return item


class QueuedEpisode:
    """See `play`.

    Args:
        collect: the user's `collect_trajectory`.
        vocabulary: how many tokens the policy knows.
    """

    def __init__(
        self,
        collect: Callable[..., Awaitable[Any]],
        chat: ChatFormat,
        vocabulary: int,
        limits: AgentLimits,
        episode: Episode,
        env: ServiceView,
        generate: Generate,
    ) -> None:
        self._collect = collect
        self._chat = chat
        self._vocabulary = vocabulary
        self._limits = limits
        self._episode = episode
        self._env = env
        self._generate = generate
        self._tree = SampledTree()
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._answers = AnswerQueue()
        self._ended: EpisodeEnded | None = None
        self._generating = 0
        self._active = time.monotonic()

    async def play(self) -> list[Trajectory]:
        """The trajectories that the agent returned; one without turns, with the reason, if there are none to be had."""
        try:
            instruction, text = await self._env.begin()
            returned = await self._run(self._prompt(instruction, text))
            if self._env.fault is not None:
                raise self._env.fault
            return self._trajectories(returned)
        except EnvFault as fault:
            return [self._lost(fault.reason, str(fault))]
        except EpisodeEnded as end:
            return [self._lost(end.reason, "")]

    def _lost(self, reason: StopReason, message: str) -> Trajectory:
        return Trajectory(
            self._episode.key, self._episode.tag, (), reason, self._env.metrics.totals(), message
        )

    def _prompt(self, instruction: str, text: str) -> Prompt:
        try:
            tokens_T = self._chat.first(instruction, text)
        except Exception as error:  # tokenizers raises plain Exception
            raise EnvFault(
                StopReason.ENV_ERROR, f"the prompt {text[:80]!r} cannot be tokenised: {error}"
            ) from error
        episode = self._episode
        return Prompt(
            str(episode.key),
            tokens_T.tolist(),
            text,
            instruction,
            dict(episode.item or {}),
            episode.key.stream,
            episode.env_seed,
        )

    async def _run(self, prompt: Prompt) -> Any:
        """What the agent returned. Raises `EnvFault` for whatever it does wrong, `EpisodeEnded` if it lets that pass."""
        agent = asyncio.create_task(self._call_agent(prompt))
        answering = asyncio.create_task(self._answer_requests())
        tasks = {agent, answering}
        try:
            while True:
                await asyncio.wait(
                    tasks, timeout=self._limits.step_timeout, return_when=asyncio.FIRST_COMPLETED
                )
                if answering.done():
                    answering.result()
                if agent.done():
                    return agent.result()
                self._check_patience()
        finally:
            for task in tasks:
                task.cancel()
            ended, _ = await asyncio.wait(tasks, timeout=PATIENCE_SECONDS)
            for task in ended:
                _ = task.cancelled() or task.exception()

    async def _call_agent(self, prompt: Prompt) -> Any:
        try:
            return await self._collect(prompt, self._env, self._requests, self._answers)
        except (EnvFault, EpisodeEnded, asyncio.CancelledError):
            raise
        except BaseException as error:  # a user's code may raise anything, SystemExit included
            raise raised(error, self._collect) from error

    def _check_patience(self) -> None:
        """An agent that neither asks nor returns must not hold its episode for ever."""
        limit = self._limits.step_timeout
        waited = time.monotonic() - max(self._active, self._env.active)
        if limit is not None and not self._generating and not self._env.calls and waited > limit:
            raise EnvFault(
                StopReason.TIMEOUT,
                f"the agent neither asked for a response nor returned within {limit} s",
            )

    async def _answer_requests(self) -> None:
        """Answer in the order of the requests, for as long as the agent asks."""
        try:
            async with asyncio.TaskGroup() as answers:
                before: asyncio.Task[None] | None = None
                for number in count(1):
                    before = answers.create_task(
                        self._answer(await self._requests.get(), number, before)
                    )
        except BaseExceptionGroup as failed:  # the first one cancels the others
            raise failed.exceptions[0] from None

    async def _answer(self, asked: Any, number: int, before: asyncio.Task[None] | None) -> None:
        self._generating += 1
        try:
            answer = await self._respond(asked, number)
            if before is not None:
                await before
            self._answers.put_nowait(answer)
        finally:
            self._generating -= 1
            self._active = time.monotonic()

    async def _respond(self, asked: Any, number: int) -> BundledGenerationOutputs | EpisodeEnded:
        qid, prompt_T, config = self._checked(asked)
        room = self._limits.sequence_length - len(prompt_T)
        if number > self._limits.max_turns or room < 1:
            self._ended = EpisodeEnded(
                StopReason.CONTEXT_OVERFLOW if room < 1 else StopReason.MAX_TURNS
            )
            return self._ended
        sampled = await asyncio.gather(
            *(self._sample(prompt_T, config, room, number, sample) for sample in range(config.n))
        )
        for generation in sampled:
            self._tree.add(prompt_T, generation)
        return BundledGenerationOutputs.of(qid, prompt_T.tolist(), sampled)

    def _checked(self, asked: Any) -> tuple[str, IntArray, GenerationConfig]:
        if (
            not isinstance(asked, tuple)
            or len(asked) != 3
            or not isinstance(asked[2], GenerationConfig)
        ):
            raise _mistake(f"obs_queue takes (qid, token_ids, gconfig), not {_shown(asked)}")
        qid, tokens, config = asked
        tokens_T = np.asarray(tokens)
        if tokens_T.ndim != 1 or not np.issubdtype(tokens_T.dtype, np.integer) or not len(tokens_T):
            raise _mistake(f"token_ids must be whole numbers, at least one, not {_shown(tokens)}")
        if tokens_T.min() < 0 or tokens_T.max() >= self._vocabulary:
            raise _mistake(
                f"token_ids has a number outside of the vocabulary of {self._vocabulary}"
            )
        try:
            return str(qid), tokens_T.astype(np.int32), config.within(self._limits)
        except ValueError as error:
            raise _mistake(str(error)) from error

    async def _sample(
        self, prompt_T: IntArray, config: GenerationConfig, room: int, number: int, sample: int
    ) -> Generation:
        assert config.max_new_tokens is not None
        sampling = self._limits.sampling(min(config.max_new_tokens, room), self._chat.stop_tokens)
        request = self._episode.request(f"{number}-{sample}", prompt_T, sampling, [number, sample])
        return answered(await self._generate(request))

    def _trajectories(self, returned: Any) -> list[Trajectory]:
        sequences = [returned] if isinstance(returned, ScoredSequence) else returned
        if (
            not isinstance(sequences, (list, tuple))
            or not sequences
            or not all(isinstance(s, ScoredSequence) for s in sequences)
        ):
            raise _mistake(
                f"collect_trajectory must return one ScoredSequence or several, not {_shown(returned)}"
            )
        try:
            return [self._trajectory(sequence) for sequence in sequences]
        except (TypeError, ValueError, OverflowError) as error:
            raise _mistake(
                f"a ScoredSequence has tokens, rewards or metrics that are no numbers: {error}"
            ) from error

    def _trajectory(self, sequence: ScoredSequence) -> Trajectory:
        sampled = self._tree.find(sequence.tokens)
        if sampled is None:
            raise _mistake(
                "a ScoredSequence has tokens that were not sampled: they must be one of the seqs of a bundle"
            )
        path = [replace(sampled, parent=None)] if sequence.trained == "last" else sampled.path()
        given = sequence.rewards
        rewards = [*given] if isinstance(given, Sequence) else [*[0.0] * (len(path) - 1), given]
        if len(rewards) != len(path):
            raise _mistake(
                f"a ScoredSequence has {len(rewards)} rewards, and its trained turns are {len(path)}"
            )
        turns = [
            one.turn(self._chat, float(reward)) for one, reward in zip(path, rewards, strict=True)
        ]
        turns[-1] = replace(turns[-1], valid=sequence.valid)
        told = self._ended.reason if self._ended else StopReason.COMPLETED
        metrics = self._env.metrics.totals() | {
            str(name): float(value) for name, value in sequence.metrics.items()
        }
        return Trajectory(
            self._episode.key,
            self._episode.tag,
            tuple(turns),
            sequence.stop_reason or told,
            metrics,
        )


def _mistake(message: str) -> EnvFault:
    return EnvFault(StopReason.ENV_ERROR, f"the agent: {message}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
