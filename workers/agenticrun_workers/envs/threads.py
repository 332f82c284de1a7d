"""Calls of a user's code that may never end, each where it can be given up: in a thread, or in a task.

Not concurrent.futures: its threads are never given up, so 64 calls that hang would take every later call with them, and an
interpreter waits for them when it ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from queue import SimpleQueue
from typing import Any


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
