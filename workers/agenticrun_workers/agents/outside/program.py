"""Program of an outside agent: a function, or a command in its own process."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from agenticrun_workers.envs import EnvFault
from agenticrun_workers.envs.calls import MAX_MESSAGE, attempt, in_task, in_thread, raised
from agenticrun_workers.plugins import PluginImportError, imported
from agenticrun_workers.types import StopReason

PATIENCE_SECONDS = 1.0
"""Seconds that a cancelled coroutine may take to end before it is abandoned."""

API_KEY = "none"
"""Any key works, since the secret is in the URL."""


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
    """Return a program that runs a command.

    The command gets these environment variables: OPENAI_BASE_URL, OPENAI_API_KEY,
    AGENTICRUN_REWARD_URL and AGENTICRUN_TASK (JSON).
    """

    async def run(base_url: str, task: Task) -> None:
        own = {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": API_KEY,
            "AGENTICRUN_REWARD_URL": task.reward_url,
            "AGENTICRUN_TASK": json.dumps(task.body),
        }
        with tempfile.TemporaryFile() as output:
            await _run_command(command, os.environ | own, output)

    return run


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
            await _kill_session(starting.result())
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


async def _kill_session(leader: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    await leader.wait()


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
