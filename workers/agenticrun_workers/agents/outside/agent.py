"""The `outside` agent: a program of any framework that calls the policy at a base_url.

The program is a function, or a command in its own process.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from agenticrun_workers.agents.agent import AgentLimits, Episode, EpisodeMetrics, Generate
from agenticrun_workers.agents.chat import ChatFormat
from agenticrun_workers.agents.outside.endpoint import ANY_KEY, serving
from agenticrun_workers.agents.outside.session import Answer, Policy, Session
from agenticrun_workers.agents.registry import register_agent
from agenticrun_workers.envs import Env, EnvCalls, EnvFault
from agenticrun_workers.envs.calls import (
    MAX_MESSAGE,
    attempt,
    in_task,
    in_thread,
    number,
    raised,
    split_of,
)
from agenticrun_workers.launch import current_node
from agenticrun_workers.plugins import PluginImportError, imported
from agenticrun_workers.processes import direct
from agenticrun_workers.types import StopReason, Trajectory, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

POSTED, ENVIRONMENT = "posted", "environment"
MACHINE, NETWORK = "machine", "network"


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
        tool_call_pattern: removed; an error says what takes its place.
        timeout_seconds: limit of an episode, from the start of the program.
        reachable_from: `machine` or `network`: who can reach the endpoint.
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
        tool_call_pattern: str | None = None,
        timeout_seconds: float = 600.0,
        reachable_from: str = MACHINE,
    ) -> None:
        if (run is None) == (command is None):
            raise ValueError("one of run and command must be given")
        if tool_call_pattern is not None:
            raise ValueError(
                "toolCallPattern was removed: tool calls are read in the format of the model's "
                "chat template. Leave it out; for a template of an unknown family, set "
                "spec.model.chatFormat"
            )
        if command is not None and (
            isinstance(command, str)
            or not command
            or not all(isinstance(word, str) for word in command)
        ):
            raise ValueError(f"command must be a list of words, not {command!r}")
        if not isinstance(timeout_seconds, (int, float)) or not timeout_seconds > 0:
            raise ValueError(f"timeoutSeconds must be more than 0, not {timeout_seconds!r}")
        if reachable_from not in (MACHINE, NETWORK):
            raise ValueError(f"reachableFrom must be machine or network, not {reachable_from!r}")
        self._network = reachable_from == NETWORK
        os.environ.update(direct(os.environ))  # before the agent's module makes its HTTP client
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
        self._policy = Policy(tokenizer, ChatFormat(tokenizer), limits, model)

    async def collect_trajectory(
        self, episode: Episode, env: Env, generate: Generate
    ) -> list[Trajectory]:
        metrics = EpisodeMetrics()
        session = Session(self._policy, episode, generate)
        try:
            start = await self._envs.reset(env, episode.env_seed, episode.key.stream, episode.item)
            host = current_node().address if self._network else None
            if host is not None:
                os.environ.update(direct(os.environ, [host]))
            async with serving(session, host) as address:
                split, model = split_of(episode.key.stream).value, self._policy.model
                task = Task(
                    start.instruction,
                    start.observation,
                    episode.item or {},
                    split,
                    episode.env_seed,
                    model,
                    f"{address.url}/reward",
                    address.api_key,
                )
                returned = await self._play(session, f"{address.url}/v1", task)
            branches = session.recorded.branches()
            if not branches and session.ended:
                raise EnvFault(session.ended, "")
            if not branches:
                message = "the agent ended without an answer of the policy"
                raise EnvFault(StopReason.ENV_ERROR, message)
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
            scores: dict[Answer, float] = {}
            for answer in map(_ending, branches):
                if answer not in scores:
                    conversation = [message.body for message in answer.conversation]
                    score = await self._in_time(called(function, conversation, task))
                    scores[answer] = number(score, "the reward function returned the reward")
            return [scores[_ending(branch)] for branch in branches]
        reward = (
            session.reward
            if returned is None
            else number(returned, "the agent returned the reward")
        )
        if self._reward == ENVIRONMENT:
            result = await self._envs.step(
                env, session.recorded.answers[-1].conversation[-1].content
            )
            reward = float(result.reward)
            metrics.add_step(result)
        if reward is None and session.ended:
            reward = 0.0
        rewards = []
        for branch in branches:
            posted = session.rewards.get(_ending(branch), reward)
            if posted is None:
                raise EnvFault(
                    StopReason.ENV_ERROR,
                    "the agent ended without a reward: return one from run, "
                    "or post it (docs/outside-agents.md)",
                )
            rewards.append(posted)
        return rewards

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


def _ending(branch: Sequence[Answer]) -> Answer:
    """Return the answer whose reward the branch gets: a draft has that of its answer."""
    return branch[-1].draft_of or branch[-1]


PATIENCE_SECONDS = 1.0
"""Seconds that a cancelled coroutine may take to end before it is abandoned."""


@dataclass(frozen=True, slots=True)
class Task:
    """Task of one episode, for the program."""

    instruction: str
    observation: str
    item: Mapping[str, Any]
    """Item of `envs[].dataset`; empty without a data set."""
    split: str
    seed: int
    """Equal for all episodes of a group."""
    model: str
    """Model name that the program requests."""
    reward_url: str
    """URL that accepts `{"reward": 1.0}`."""
    api_key: str = field(default=ANY_KEY, repr=False)
    """API key for both URLs. Without `reachableFrom: network` any other works, too."""

    @property
    def messages(self) -> list[dict[str, str]]:
        """Instruction and observation as the first messages of a chat."""
        system = [{"role": "system", "content": self.instruction}] if self.instruction else []
        return [*system, {"role": "user", "content": self.observation}]

    @property
    def body(self) -> dict[str, Any]:
        """Task as JSON, for commands."""
        names = (
            "instruction",
            "observation",
            "item",
            "split",
            "seed",
            "model",
            "reward_url",
            "api_key",
            "messages",
        )
        return {name: getattr(self, name) for name in names}


Program = Callable[[str, Task], Awaitable[Any]]
"""Async function that runs an episode at a base_url and returns the reward, if known.

It raises `EnvFault`. After a cancellation it leaves no process running.
"""


def function_program(function: Callable[..., Any]) -> Program:
    """Return a program that calls `function(base_url, task)`, in a thread unless it is async."""

    async def run(base_url: str, task: Task) -> Any:
        return await called(function, base_url, task)

    return run


def command_program(command: Sequence[str]) -> Program:
    """Return a program that runs a command in the current folder.

    Relative paths of files in the run's code folder become absolute. The command gets these
    environment variables: OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY,
    AGENTICRUN_REWARD_URL and AGENTICRUN_TASK (JSON).
    """
    program, *arguments = command
    is_installed = "/" not in program and shutil.which(program) is not None
    command = [program if is_installed else _in_code(program), *map(_in_code, arguments)]

    async def run(base_url: str, task: Task) -> None:
        own = {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": task.api_key,
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": task.api_key,
            "AGENTICRUN_REWARD_URL": task.reward_url,
            "AGENTICRUN_TASK": json.dumps(task.body),
        }
        with tempfile.TemporaryFile() as output:
            await _run_command(command, os.environ | own, output)

    return run


def _in_code(word: str) -> str:
    """Return a word of a command with the whole path of the file that it names in the code folder.

    Modules are found there, too: beside the run file, or in `spec.code` on a cluster. A word that
    names no file there stays as it is. The folder itself may be read-only, so the command does not
    run in it.
    """
    option, equals, path = word.partition("=") if word.startswith("-") else ("", "", word)
    if os.path.isabs(path) or not ("/" in path or "." in path):
        return word
    folders = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    found = (os.path.abspath(os.path.join(folder, path)) for folder in folders)
    return next((f"{option}{equals}{file}" for file in found if os.path.isfile(file)), word)


async def _run_command(
    command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]
) -> None:
    """Run a command to its end, and kill all processes of its session.

    Output goes to a file, because a pipe would wait for child processes that still hold it open.

    Raises:
        EnvFault: the command cannot be started or fails.
    """
    starting = asyncio.create_task(
        asyncio.create_subprocess_exec(
            *command,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    )
    try:
        # Do not await the task itself: on cancellation, asyncio kills only the command and not
        # the processes that it has started.
        await asyncio.wait({starting})
        status = await _started(starting).wait()
    finally:
        await asyncio.wait({starting})
        if starting.exception() is None:
            leader = starting.result()
            with suppress(ProcessLookupError):
                os.killpg(leader.pid, signal.SIGKILL)
            await leader.wait()
    if status:
        raise EnvFault(
            StopReason.ENV_ERROR,
            f"the agent's command ended with status {status}: {_last_line(output)}",
        )


def _started(starting: asyncio.Task[asyncio.subprocess.Process]) -> asyncio.subprocess.Process:
    try:
        return starting.result()
    except OSError as error:
        raise EnvFault(
            StopReason.ENV_ERROR, f"the agent's command cannot be started: {error}"
        ) from error


def _last_line(output: IO[bytes]) -> str:
    output.seek(-min(output.seek(0, os.SEEK_END), 4 * MAX_MESSAGE), os.SEEK_END)
    lines = output.read().decode(errors="replace").strip().splitlines()
    return lines[-1][-MAX_MESSAGE:] if lines else "it wrote nothing"


def function_at(key: str, place: str) -> Callable[..., Any]:
    """Return the function at `module:function`.

    Raises:
        ValueError: names `key`, the config key of the function.
    """
    module_name, _, name = place.partition(":")
    try:
        found = imported(module_name, name)
    except PluginImportError as error:
        raise ValueError(
            f"{key}: {place!r} cannot be imported as module:function: {error}"
        ) from error
    if not callable(found):
        raise ValueError(f"{key}: {place!r} is no function")
    function: Callable[..., Any] = found
    return function


async def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a sync or async function of a user and return its result.

    Raises:
        EnvFault: the function raises any exception.
    """
    call = partial(attempt, function, *arguments)
    outcome = call() if inspect.iscoroutinefunction(function) else await in_thread(call)
    if inspect.isawaitable(outcome.value):
        outcome = await in_task(outcome.value, PATIENCE_SECONDS)
    if outcome.error is not None:
        raise raised(outcome.error, function) from outcome.error
    return outcome.value
