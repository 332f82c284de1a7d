"""Agents with queues: they put prompts into one queue and read responses from another.

The interface is AReaL's:

    async def collect_trajectory(self, prompt, env, obs_queue, act_queue):
        await obs_queue.put((prompt.qid, prompt.token_ids, self.gconfig))
        act = await act_queue.get()
        _, rewards, *_ = await env.step((prompt.qid, texts))
        return [ScoredSequence(seq, reward) for seq, reward in zip(act.seqs, rewards)]

`QueuedAgent` adapts such an agent to the `Agent` protocol. An agent may put several requests before
it reads an answer; answers arrive in the order of the requests.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np

from agenticrun_workers.agents.agent import AgentLimits, Episode, EpisodeMetrics, Generate, answered
from agenticrun_workers.agents.chat import ChatFormat
from agenticrun_workers.agents.queued_types import (
    BundledGenerationOutputs,
    EpisodeEnded,
    GenerationConfig,
    Prompt,
    ScoredSequence,
)
from agenticrun_workers.agents.sampled_tree import SampledTree
from agenticrun_workers.envs import Env, EnvFault
from agenticrun_workers.envs.calls import number, raised, split_of
from agenticrun_workers.envs.service import EnvironmentService, ServiceCalls, ServiceStep
from agenticrun_workers.types import Generation, IntArray, StopReason, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Request = tuple[str, list[int], GenerationConfig]
"""One request: (qid, token_ids, gconfig)."""


class CollectsThroughQueues(Protocol):
    """Interface of a user's agent with queues.

    One instance runs many episodes at the same time, so it must not keep state of an episode.
    """

    async def collect_trajectory(
        self,
        prompt: Prompt,
        env: EnvironmentService,
        obs_queue: asyncio.Queue[Request],
        act_queue: asyncio.Queue[BundledGenerationOutputs],
    ) -> ScoredSequence | Sequence[ScoredSequence]:
        """Run one episode and return its trajectories, at least one.

        An exception fails only this episode. Do not block: all episodes of an env worker share its
        event loop.

        Args:
            prompt: the task, as text and as tokens.
            env: environment of the episode.
            obs_queue: takes requests, each a tuple (qid, token_ids, gconfig).
            act_queue: returns one bundle of sampled responses per request.
        """
        ...


class QueuedAgent:
    """Adapter that runs a user's agent with queues as an `Agent`."""

    def __init__(
        self,
        user: CollectsThroughQueues,
        *,
        tokenizer: PreTrainedTokenizerBase,
        limits: AgentLimits,
    ) -> None:
        self.user = user
        self._chat = ChatFormat(tokenizer)
        self._vocabulary = len(tokenizer)
        self._limits = limits
        self._calls = ServiceCalls(limits.step_timeout)

    async def collect_trajectory(
        self, episode: Episode, env: Env | EnvironmentService, generate: Generate
    ) -> list[Trajectory]:
        view = view_of(env, episode, self._calls)
        return await QueuedEpisode(
            self.user.collect_trajectory,
            self._chat,
            self._vocabulary,
            self._limits,
            episode,
            view,
            generate,
        ).play()


PATIENCE_SECONDS = 1.0
"""Seconds that a cancelled task may take to end before it is abandoned."""


class AnswerQueue(asyncio.Queue[Any]):
    """Queue of response bundles. An `EpisodeEnded` item is raised, not returned."""

    def get_nowait(self) -> Any:
        """Return the next bundle or raise `EpisodeEnded`. `Queue.get` calls this method, too."""
        item = super().get_nowait()
        if isinstance(item, EpisodeEnded):
            raise item
        return item


class QueuedEpisode:
    """One episode of an agent with queues.

    Args:
        collect: the user's `collect_trajectory`.
        vocabulary: number of tokens that the policy knows.
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
        """Run the episode and return the agent's trajectories.

        If the episode fails, or the agent does not catch `EpisodeEnded`, the only trajectory has no
        turns and carries the reason.
        """
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
            message = self._chat.not_tokenised("prompt", (instruction, text), self._env, error)
            raise EnvFault(StopReason.ENV_ERROR, message) from error
        episode = self._episode
        return Prompt(
            str(episode.key),
            tokens_T.tolist(),
            text,
            instruction,
            episode.item or {},
            split_of(episode.key.stream),
            episode.env_seed,
        )

    async def _run(self, prompt: Prompt) -> Any:
        """Run the agent and return its result.

        Raises:
            EnvFault: the agent fails or makes a mistake.
            EpisodeEnded: the agent does not catch it.
        """
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
        """Raise `EnvFault` if the agent is idle for longer than the step timeout.

        An agent that neither asks nor returns would block its episode forever.
        """
        limit = self._limits.step_timeout
        waited = time.monotonic() - max(self._active, self._env.active)
        if limit is not None and not self._generating and not self._env.calls and waited > limit:
            raise EnvFault(
                StopReason.TIMEOUT,
                f"the agent neither asked for a response nor returned within {limit} s",
            )

    async def _answer_requests(self) -> None:
        """Answer the agent's requests in order, until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as answers:
                before: asyncio.Task[None] | None = None
                for number in count(1):
                    before = answers.create_task(
                        self._answer(await self._requests.get(), number, before)
                    )
        except BaseExceptionGroup as failed:  # the first failure cancels the others
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
                "collect_trajectory must return one ScoredSequence or several, "
                f"not {_shown(returned)}"
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
                "a ScoredSequence has tokens that were not sampled: "
                "they must be one of the seqs of a bundle"
            )
        path = [replace(sampled, parent=None)] if sequence.trained == "last" else sampled.path()
        given = sequence.rewards
        rewards = [*given] if isinstance(given, Sequence) else [*[0.0] * (len(path) - 1), given]
        if len(rewards) != len(path):
            raise _mistake(
                f"a ScoredSequence has {len(rewards)} rewards, "
                f"and its trained turns are {len(path)}"
            )
        turns = [
            one.turn(self._chat, number(reward, "one of the rewards of a ScoredSequence is"))
            for one, reward in zip(path, rewards, strict=True)
        ]
        turns[-1] = replace(turns[-1], valid=sequence.valid)
        reason = self._ended.reason if self._ended else StopReason.COMPLETED
        metrics = self._env.metrics.totals() | {
            str(name): number(value, f"a ScoredSequence has the metric {name} =")
            for name, value in sequence.metrics.items()
        }
        return Trajectory(
            self._episode.key,
            self._episode.tag,
            tuple(turns),
            sequence.stop_reason or reason,
            metrics,
        )


def _mistake(message: str) -> EnvFault:
    return EnvFault(StopReason.ENV_ERROR, f"the agent: {message}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


T = TypeVar("T")


class ServiceView(EnvironmentService):
    """Environment of one episode, as its agent sees it.

    It is reset before the agent starts. The agent's first `reset` only returns the first message.
    """

    def __init__(self, episode: Episode, calls: ServiceCalls) -> None:
        self.metrics = EpisodeMetrics()
        self.fault: EnvFault | None = None
        """Last fault of the environment, even if the agent caught it."""
        self.calls = 0
        """Number of calls in progress."""
        self.active = time.monotonic()
        """End of the last call, in seconds of the monotonic clock."""
        self._episode = episode
        self._env_calls = calls
        self._first: str | None = None

    async def begin(self) -> tuple[str, str]:
        """Reset the environment and return the instruction and the first user message.

        Raises:
            EnvFault: the environment fails.
        """
        instruction, first = await self._counted(self._begin())
        self._first = first
        return instruction, first

    async def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> str:
        """Return the first user message. The environment is reset again unless it has just begun.

        Raises:
            EnvFault: the environment fails, or the agent passes options or another seed. The run
                chooses the level.
        """
        if seed not in (None, self._episode.env_seed) or options:
            raise EnvFault(
                StopReason.ENV_ERROR,
                "the agent: seed and options are the run's, so call env.reset() without them",
            )
        if self._first is None:
            _, first = await self._counted(self._begin())
            return first
        first, self._first = self._first, None
        return first

    async def step(self, action: Any) -> ServiceStep:
        """Take one step in the environment. Raises `EnvFault`."""
        self._first = None
        return await self._counted(self._step(action))

    async def _counted(self, call: Awaitable[T]) -> T:
        self.calls += 1
        try:
            return await call
        except EnvFault as fault:
            self.fault = fault
            raise
        finally:
            self.calls -= 1
            self.active = time.monotonic()

    @abstractmethod
    async def _begin(self) -> tuple[str, str]: ...

    @abstractmethod
    async def _step(self, action: Any) -> ServiceStep: ...


class _OfService(ServiceView):
    """View of an `EnvironmentService`."""

    def __init__(self, service: EnvironmentService, episode: Episode, calls: ServiceCalls) -> None:
        super().__init__(episode, calls)
        self._service = service

    async def _begin(self) -> tuple[str, str]:
        episode = self._episode
        text = await self._env_calls.begin(
            self._service, episode.env_seed, episode.key.stream, episode.item, str(episode.key)
        )
        return self._service.instruction, text

    async def _step(self, action: Any) -> ServiceStep:
        return await self._env_calls.act(self._service, action)


class _OfEnv(ServiceView):
    """View of a text environment: an action is a text."""

    def __init__(self, env: Env, episode: Episode, calls: ServiceCalls) -> None:
        super().__init__(episode, calls)
        self._env = env

    async def _begin(self) -> tuple[str, str]:
        episode = self._episode
        start = await self._env_calls.reset(
            self._env, episode.env_seed, episode.key.stream, episode.item
        )
        return start.instruction, start.observation

    async def _step(self, action: Any) -> ServiceStep:
        result = await self._env_calls.step(self._env, action)
        self.metrics.add_step(result)
        return (
            result.observation,
            result.reward,
            result.terminated,
            result.truncated,
            {"metrics": result.metrics, **result.info},
        )


def view_of(env: Env | EnvironmentService, episode: Episode, calls: ServiceCalls) -> ServiceView:
    """Return the agent's view of an episode's environment."""
    if getattr(env, "is_service", False):
        return _OfService(cast(EnvironmentService, env), episode, calls)
    return _OfEnv(cast(Env, env), episode, calls)
