"""The process with one isolated environment in it: answers its env worker's calls, one after the other, on its main thread."""

from __future__ import annotations

import asyncio
import inspect
import resource
import socket
import sys
from typing import Any

from agenticrun_workers.envs.calls import reset_arguments
from agenticrun_workers.envs.env import Renders
from agenticrun_workers.envs.faults import raised
from agenticrun_workers.envs.isolated_wire import encoded, receive
from agenticrun_workers.envs.registry import make_env
from agenticrun_workers.envs.threads import Outcome, attempt

MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


def serve(end: socket.socket, type: str, config: dict[str, Any]) -> None:
    """Build the environment and answer until the worker closes its end.

    The first frame, and the answer to every call, is (True, value) or (False, what went wrong).
    """
    made = attempt(make_env, type, config)
    if made.error is not None:
        end.sendall(encoded((False, f"it could not be built: {raised(made.error, make_env)}")))
        return
    with asyncio.Runner() as runner:
        child = _Child(made.value, runner)
        end.sendall(encoded((True, child.facts())))
        while True:
            try:
                name, arguments, film = receive(end)
            except EOFError:
                return
            end.sendall(child.answer(name, arguments, film))


class _Child:
    """The environment and the loop that its async methods run on."""

    def __init__(self, env: Any, runner: asyncio.Runner) -> None:
        self._env = env
        self._runner = runner

    def facts(self) -> dict[str, Any]:
        return {
            "instruction": getattr(self._env, "instruction", ""),
            "draws": isinstance(self._env, Renders),
            "reusable": getattr(self._env, "reusable", True),
            "bytes": _peak_bytes(),
        }

    def answer(self, name: str, arguments: tuple[Any, ...], film: bool) -> bytes:
        """One frame: what the method returned, and after `reset` and `step` a picture if the worker wants one."""
        call = getattr(self._env, name)
        places, names = (
            reset_arguments(self._env, *arguments) if name == "reset" else (arguments, {})
        )
        outcome = attempt(call, *places, **names)
        if inspect.isawaitable(outcome.value):
            outcome = attempt(self._runner.run, _awaited(outcome.value))
        if outcome.error is not None:
            return encoded((False, str(raised(outcome.error, call))))
        picture = (
            attempt(self._env.render) if film and isinstance(self._env, Renders) else Outcome()
        )
        said = {
            "value": outcome.value,
            "instruction": getattr(self._env, "instruction", ""),
            "picture": picture.value,
            "picture_error": ""
            if picture.error is None
            else str(raised(picture.error, self._env.render)),
            "bytes": _peak_bytes(),
        }
        try:
            return encoded((True, said))
        except Exception as error:  # pickle raises what the objects raise
            return encoded(
                (
                    False,
                    f"{name} returned something that cannot leave the environment's process: {error}",
                )
            )


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_UNIT
