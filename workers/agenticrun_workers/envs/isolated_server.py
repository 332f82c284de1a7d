"""The server that forks isolated environments, and the code of a forked process.

python -m agenticrun_workers.envs.isolated_server FD

It has imported the environment's module, so a new process takes milliseconds and shares its memory.
FD is a file with the pickled module path of the env worker, type and config of the environment. An
environment's file is the socket to its worker. `fork_server` has the rest: the worker can kill an
environment that hangs, and all of them end with the worker, however it ends.

Each process answers its worker's calls on its main thread, one after the other.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import resource
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any

from agenticrun_workers.envs.calls import Outcome, attempt, raised, reset_arguments
from agenticrun_workers.envs.env import Renders, find_env, make_env
from agenticrun_workers.envs.isolated import encoded, receive
from agenticrun_workers.fork_server import serve

MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


def answer_calls(end: socket.socket, type: str, config: dict[str, Any]) -> None:
    """Build the environment and answer calls until the worker closes its end.

    The first frame, and the answer to every call, is (True, value) or (False, error message).
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
    """The environment and the event loop for its async methods."""

    def __init__(self, env: Any, runner: asyncio.Runner) -> None:
        self._env = env
        self._runner = runner

    def facts(self) -> dict[str, Any]:
        return {
            "class": type(self._env).__qualname__,
            "instruction": getattr(self._env, "instruction", ""),
            "draws": isinstance(self._env, Renders),
            "reusable": getattr(self._env, "reusable", True),
            "bytes": _peak_bytes(),
        }

    def answer(self, name: str, arguments: tuple[Any, ...], film: bool) -> bytes:
        """Return one frame: the method's result, and a picture if `film` is set.

        Only `reset` and `step` are filmed.
        """
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
                    f"{name} returned something that cannot leave the environment's process: "
                    f"{error}",
                )
            )


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_UNIT


def main() -> None:
    with os.fdopen(int(sys.argv[1]), "rb") as setup:
        path, type, config = pickle.load(setup)
    sys.path[:] = path
    control, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # or the environment could read from the worker's socket
    os.close(nothing)
    with suppress(Exception):  # the first environment says it in its own words
        find_env(type)
    (connection,) = serve(control)
    # From here on this is a child.
    status = 1
    try:
        answer_calls(socket.socket(fileno=connection), type, config)
        status = 0
    except ConnectionError:  # the worker has closed its end
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
