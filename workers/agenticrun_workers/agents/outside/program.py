"""The agent's own program: a function, or a command in a process of its own."""

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
"""How long a coroutine that is cancelled may take to end before it is left behind."""

API_KEY = "none"
"""Any key does: the secret is in the URL."""


@dataclass(frozen=True, slots=True)
class Task:
    """What an episode is about, for the program."""

    instruction: str
    observation: str
    item: Mapping[str, Any]
    """The item of `envs[].dataset`; empty without a data set."""
    split: str
    seed: int
    """Equal for all members of a group."""
    model: str
    """The name to ask for."""
    reward_url: str
    """Takes `{"reward": 1.0}`."""

    @property
    def messages(self) -> list[dict[str, str]]:
        """Instruction and observation as the first messages of a chat."""
        system = [{"role": "system", "content": self.instruction}] if self.instruction else []
        return [*system, {"role": "user", "content": self.observation}]

    @property
    def body(self) -> dict[str, Any]:
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
"""Plays an episode at a base_url, and returns the reward if it knows it. Raises `EnvFault`. Cancelled, it leaves nothing running."""


def function_program(function: Callable[..., Any]) -> Program:
    """`function(base_url, task)`, in a thread unless it is async."""

    async def run(base_url: str, task: Task) -> Any:
        return await called(function, base_url, task)

    return run


def command_program(command: Sequence[str]) -> Program:
    """A command that finds OPENAI_BASE_URL, OPENAI_API_KEY and AGENTICRUN_TASK (JSON) in its environment."""

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
    """Run it to its end, with all processes of its session. Output goes to a file: a pipe would wait for processes left behind."""
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
        # Not awaited itself: asyncio answers a cancellation by killing the command alone, which may have begun others.
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
    """`module:function`. Raises `ValueError`, which names the config's `key`."""
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
    """What a user's function returns, sync or async. Raises `EnvFault` for whatever it raises."""
    call = partial(attempt, function, *arguments)
    outcome = call() if inspect.iscoroutinefunction(function) else await in_thread(call)
    if inspect.isawaitable(outcome.value):
        outcome = await in_task(outcome.value, PATIENCE_SECONDS)
    if outcome.error is not None:
        raise raised(outcome.error, function) from outcome.error
    return outcome.value
