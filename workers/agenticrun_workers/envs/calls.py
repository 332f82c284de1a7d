"""How environments are called: sync or async, in any of the shapes that users write, and whatever they do wrong is one `EnvFault`.

Async methods run on the event loop, in a task of their own. Sync ones run in a thread, so that one that blocks or hangs costs its own
episode only, unless the environment says `blocking = False` (steps of microseconds).
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

from agenticrun_workers.envs.answers import Start, checked_actions, checked_start, checked_step
from agenticrun_workers.envs.env import Env, EnvFault, StepResult, TakesItem
from agenticrun_workers.types import StopReason, Stream

MAX_MESSAGE = 500
"""Characters. The message travels to the driver and into the run's status."""


def raised(error: BaseException, call: Callable[..., Any]) -> EnvFault:
    """What `call` raised, and in which line of the environment's own file. An `EnvFault` stays as it is."""
    if isinstance(error, EnvFault):
        return error
    fault = EnvFault(StopReason.ENV_ERROR, f"{one_line(error)}{_place(error, call)}")
    fault.__cause__ = error
    return fault


def one_line(error: BaseException) -> str:
    """Its type and text, at most `MAX_MESSAGE` characters of it."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # a user's __str__ may raise anything
        text = "(it has no text)"
    return f"{type(error).__name__}: {text if len(text) <= MAX_MESSAGE else f'{text[:MAX_MESSAGE]} ...'}"


def _place(error: BaseException, call: Callable[..., Any]) -> str:
    """The innermost line in the file of `call`, else the innermost one of all."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first one is where it was caught
    code = getattr(inspect.unwrap(call), "__code__", None)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    where = (own or frames)[-1:]
    return "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in where)


class GivenUp(SystemExit):
    """Thrown into a thread that nobody waits for any more."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call: a value, or whatever it raised."""

    value: Any = None
    error: BaseException | None = None


def attempt(call: Callable[..., Any], *arguments: Any, **named: Any) -> Outcome:
    """Call it. Nothing gets through: not SystemExit, and not StopIteration, which asyncio's futures refuse."""
    try:
        return Outcome(call(*arguments, **named))
    except BaseException as error:  # a user's code may raise anything
        return Outcome(error=error)


async def in_thread(call: Callable[[], Outcome]) -> Outcome:
    """Run `call` in a thread. Who is cancelled meanwhile gives the thread up.

    A thread that was given up ends at its next line of Python, so an endless loop stops; one inside C code stays until that returns.
    """
    thread = _idle_thread()
    try:
        outcome = await thread.run_call(call)
    except asyncio.CancelledError:
        thread.give_up()
        raise
    _idle.append(thread)
    return outcome


async def apart(awaitable: Awaitable[Any], patience_seconds: float = 0.0) -> Outcome:
    """Await it in a task of its own, so that SystemExit does not end the loop. Who is cancelled meanwhile cancels the task.

    A task that does not end within `patience_seconds` of that is left behind.
    """
    task = asyncio.ensure_future(_awaited(awaitable))
    try:
        await asyncio.wait({task})
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=patience_seconds)
    return task.result()


async def _awaited(awaitable: Awaitable[Any]) -> Outcome:
    try:
        return Outcome(await awaitable)
    except BaseException as error:  # a user's code may raise anything, cancellations included
        return Outcome(error=error)


def hanging() -> int:
    """Threads of this process that were given up and have not ended yet."""
    _given_up[:] = [thread for thread in _given_up if thread.is_alive()]
    return len(_given_up)


class _CallThread(threading.Thread):
    """Runs one call after another. A daemon: the interpreter does not wait for it."""

    def __init__(self) -> None:
        super().__init__(name=f"env_{next(_numbers)}", daemon=True)
        self._calls: SimpleQueue[tuple[Callable[[], Outcome], asyncio.Future[Outcome]] | None] = (
            SimpleQueue()
        )
        self.start()

    def run_call(self, call: Callable[[], Outcome]) -> asyncio.Future[Outcome]:
        done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._calls.put((call, done))
        return done

    def give_up(self) -> None:
        _given_up.append(self)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self.ident or 0), ctypes.py_object(GivenUp)
        )
        self._calls.put(None)

    def run(self) -> None:
        with suppress(GivenUp):
            while (waiting := self._calls.get()) is not None:
                call, done = waiting
                _tell(done, call())


def _tell(done: asyncio.Future[Outcome], outcome: Outcome) -> None:
    """Set the result of another thread's future, if that still wants it."""

    def tell() -> None:
        if not done.done():
            done.set_result(outcome)

    loop = done.get_loop()
    if not loop.is_closed():
        loop.call_soon_threadsafe(tell)


_numbers = count()
_idle: list[_CallThread] = []
_given_up: list[_CallThread] = []


def _idle_thread() -> _CallThread:
    try:
        return _idle.pop()
    except IndexError:
        return _CallThread()


MAX_BLOCKING_CALLS = 64
"""Sync environments of one `EnvCalls` that can be inside `reset` or `step` at once. Others wait, and their timeout does not run."""

MAX_HANGING = 1024
"""Threads of a process that may hang for ever before sync environments are refused: each keeps some memory."""


class EnvCalls:
    """Calls environments of one run, many at once.

    Args:
        timeout: seconds that one `reset` or `step` may take (None: any).
    """

    def __init__(self, timeout: float | None = None) -> None:
        self._timeout = timeout
        self._room = asyncio.Semaphore(MAX_BLOCKING_CALLS)

    async def reset(
        self, env: Env, seed: int, split: Stream, item: Mapping[str, Any] | None = None
    ) -> Start:
        """Begin an episode, about `item` if there is one. Raises `EnvFault`."""
        if item is not None:
            await self._call(env, cast(TakesItem, env).set_item, item)
        places, names = reset_arguments(env, seed, split)
        answer = await self._call(env, env.reset, *places, **names)
        return checked_start(answer, getattr(env, "instruction", ""))

    async def step(self, env: Env, action: str) -> StepResult:
        """Play an answer's text. Raises `EnvFault`."""
        return checked_step(await self._call(env, env.step, action))

    async def valid_actions(self, env: Env) -> list[str]:
        """The answers that are valid now; none: they cannot be listed. Raises `EnvFault`."""
        return checked_actions(await self._call(env, env.valid_actions))

    async def _call(self, env: Env, call: Callable[..., Any], *places: Any, **names: Any) -> Any:
        calling = partial(attempt, call, *places, **names)
        if inspect.iscoroutinefunction(call) or not getattr(env, "blocking", True):
            return await self._in_time(call, calling, threaded=False)
        async with self._room:
            if hanging() >= MAX_HANGING:
                raise EnvFault(
                    StopReason.TIMEOUT,
                    f"{MAX_HANGING} earlier calls hang for ever: set isolated: true",
                )
            return await self._in_time(call, calling, threaded=True)

    async def _in_time(
        self, call: Callable[..., Any], calling: Callable[[], Outcome], *, threaded: bool
    ) -> Any:
        try:
            async with asyncio.timeout(self._timeout):
                outcome = await in_thread(calling) if threaded else calling()
                if inspect.isawaitable(outcome.value):
                    outcome = await apart(outcome.value)
        except TimeoutError:
            raise EnvFault(
                StopReason.TIMEOUT, f"{call.__qualname__} took more than {self._timeout} s"
            ) from None
        if outcome.error is not None:
            raise raised(outcome.error, call)
        return outcome.value


def reset_arguments(env: Env, seed: int, split: Stream) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `reset` is called with, by place and by name.

    Seed and split, or only the seed where no second argument must be given or is called `split`. As in gymnasium, the seed may be
    an argument by name only.
    """
    try:
        parameters = list(inspect.signature(env.reset).parameters.values())
    except (TypeError, ValueError):  # compiled code need not have one
        return (seed, split), {}
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return (seed, split), {}
    if not places:
        named = {"seed": seed, "split": split}
        return (), {p.name: named[p.name] for p in parameters if p.name in named}
    takes_split = any(p.name == "split" or p.default is p.empty for p in places[1:2])
    return ((seed, split) if takes_split else (seed,)), {}
