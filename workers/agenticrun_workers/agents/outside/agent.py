"""The `outside` agent: a program of any framework that calls the policy at a base_url."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from agenticrun_workers.agents.agent import AgentLimits, Episode, EpisodeMetrics, Generate
from agenticrun_workers.agents.chat import ChatFormat
from agenticrun_workers.agents.outside.endpoint import serving
from agenticrun_workers.agents.outside.messages import HERMES
from agenticrun_workers.agents.outside.program import (
    Task,
    called,
    command_program,
    function_at,
    function_program,
)
from agenticrun_workers.agents.outside.session import Answer, Policy, Session
from agenticrun_workers.agents.registry import register_agent
from agenticrun_workers.envs import Env, EnvCalls, EnvFault
from agenticrun_workers.plugins import compile_pattern
from agenticrun_workers.types import StopReason, Trajectory, Turn

POSTED, ENVIRONMENT = "posted", "environment"


@register_agent("outside")
class OutsideAgent:
    """Agent that starts a program for each episode and records its requests as trajectories.

    Args:
        tokenizer: tokenizer of the policy, with a chat template.
        limits: limits of turns and tokens, and sampling settings.
        run: `module:function`, called with a base_url and a `Task`; a sync function runs in a
            thread. It may return the reward.
        command: program and its arguments, instead of `run`.
        reward: source of the reward. `posted`: returned by `run` or sent to `/reward`.
            `environment`: the last answer is the only action of the environment. `module:function`:
            a function of a trajectory's messages and the task.
        model: model name that the program requests.
        tool_call_pattern: regular expression of a tool call in an answer. Its last group is JSON
            with name and arguments.
        timeout_seconds: limit of an episode, from the start of the program.
    """

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase,
        limits: AgentLimits,
        run: str | None = None,
        command: Sequence[str] | None = None,
        reward: str = POSTED,
        model: str = "policy",
        tool_call_pattern: str = HERMES,
        timeout_seconds: float = 600.0,
    ) -> None:
        if (run is None) == (command is None):
            raise ValueError("one of run and command must be given")
        if command is not None and (
            isinstance(command, str)
            or not command
            or not all(isinstance(word, str) for word in command)
        ):
            raise ValueError(f"command must be a list of words, not {command!r}")
        if not isinstance(timeout_seconds, (int, float)) or not timeout_seconds > 0:
            raise ValueError(f"timeoutSeconds must be more than 0, not {timeout_seconds!r}")
        self._program = (
            function_program(function_at("run", run))
            if run is not None
            else command_program(command or ())
        )
        self._reward = reward
        self._reward_function = (
            None if reward in (POSTED, ENVIRONMENT) else function_at("reward", reward)
        )
        self._timeout = timeout_seconds
        self._envs = EnvCalls(limits.step_timeout)
        self._policy = Policy(
            tokenizer,
            ChatFormat(tokenizer),
            limits,
            model,
            compile_pattern("toolCallPattern", tool_call_pattern),
        )

    async def collect_trajectory(
        self, episode: Episode, env: Env, generate: Generate
    ) -> list[Trajectory]:
        """See `Agent`."""
        metrics = EpisodeMetrics()
        session = Session(self._policy, episode, generate)
        try:
            start = await self._envs.reset(env, episode.env_seed, episode.key.stream, episode.item)
            async with serving(session) as url:
                split, model = episode.key.stream.value, self._policy.model
                task = Task(
                    start.instruction,
                    start.observation,
                    dict(episode.item or {}),
                    split,
                    episode.env_seed,
                    model,
                    f"{url}/reward",
                )
                returned = await self._play(session, f"{url}/v1", task)
            branches = self._branches(session)
            rewards = await self._rewards(session, branches, returned, env, task, metrics)
        except EnvFault as fault:
            return [
                Trajectory(episode.key, episode.tag, (), fault.reason, metrics.totals(), str(fault))
            ]
        reason = session.ended or StopReason.COMPLETED
        return [
            Trajectory(
                episode.key,
                episode.tag,
                self._turns(session, branch, reward),
                reason,
                metrics.totals(),
            )
            for branch, reward in zip(branches, rewards, strict=True)
        ]

    async def _play(self, session: Session, base_url: str, task: Task) -> Any:
        """Run the program and return its result.

        Raises:
            EnvFault: the program fails or exceeds its time limit.
            Exception: the error of the engines, if they fail.
        """
        program = asyncio.ensure_future(self._program(base_url, task))
        try:
            await asyncio.wait(
                {program, session.failed},
                timeout=self._timeout,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if session.failed.done():
                session.failed.result()
            if not program.done():
                raise EnvFault(
                    StopReason.TIMEOUT, f"the agent took more than timeoutSeconds: {self._timeout}"
                )
            return _returned(program, session)
        finally:
            program.cancel()
            await asyncio.wait({program})
            _ = program.cancelled() or program.exception()

    def _branches(self, session: Session) -> list[list[Answer]]:
        branches = session.recorded.branches()
        if not branches and session.ended:
            raise EnvFault(session.ended, "")
        if not branches:
            raise EnvFault(StopReason.ENV_ERROR, "the agent ended without an answer of the policy")
        return branches

    async def _rewards(
        self,
        session: Session,
        branches: list[list[Answer]],
        returned: Any,
        env: Env,
        task: Task,
        metrics: EpisodeMetrics,
    ) -> list[float]:
        """Return the reward of the last answer of each branch.

        Raises:
            EnvFault: a reward is missing, unexpected or not a finite number.
        """
        if self._reward != POSTED and (returned is not None or session.reward is not None):
            raise EnvFault(
                StopReason.ENV_ERROR,
                f"the agent gave a reward, and its config says reward: {self._reward}",
            )
        if self._reward_function is not None:
            function = self._reward_function
            return [
                _number(
                    await self._in_time(
                        called(function, [m.body for m in branch[-1].conversation], task)
                    ),
                    "the reward function",
                )
                for branch in branches
            ]
        reward = session.reward if returned is None else _number(returned, "the agent")
        if self._reward == ENVIRONMENT:
            result = await self._envs.step(
                env, session.recorded.answers[-1].conversation[-1].content
            )
            reward = float(result.reward)
            metrics.add_step(result)
        if reward is None and session.ended:
            reward = 0.0
        return [_posted(session.rewards.get(branch[-1], reward)) for branch in branches]

    async def _in_time(self, call: Any) -> Any:
        try:
            return await asyncio.wait_for(call, self._policy.limits.step_timeout)
        except TimeoutError:
            raise EnvFault(
                StopReason.TIMEOUT,
                f"the reward function took more than {self._policy.limits.step_timeout} s",
            ) from None

    def _turns(self, session: Session, branch: list[Answer], reward: float) -> tuple[Turn, ...]:
        """Return the turns of a branch. The first prompt includes what other branches train."""
        first, *others = (answer.sampled for answer in branch)
        rewards = [*(session.rewards.get(answer, 0.0) for answer in branch[:-1]), reward]
        return tuple(
            sampled.turn(self._policy.chat, given, valid=answer.valid)
            for sampled, given, answer in zip(
                [replace(first, parent=None), *others], rewards, branch, strict=True
            )
        )


def _returned(program: asyncio.Future[Any], session: Session) -> Any:
    """Return the result of the program.

    If it fails after a refused request, it was only cut short, and the result is None.
    """
    try:
        return program.result()
    except EnvFault:
        if session.ended is None:
            raise
        return None


def _number(value: Any, who: str) -> float:
    if not isinstance(value, (int, float, np.number)) or not math.isfinite(value):
        raise EnvFault(
            StopReason.ENV_ERROR,
            f"{who} returned {str(value)[:80]!r} where a reward is expected, a finite number",
        )
    return float(value)


def _posted(reward: float | None) -> float:
    if reward is None:
        raise EnvFault(
            StopReason.ENV_ERROR,
            "the agent ended without a reward: return one from run, "
            "or post it (docs/outside-agents.md)",
        )
    return reward
