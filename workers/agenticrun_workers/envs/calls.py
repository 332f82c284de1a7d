"""Calls of environments, sync or async, in every shape that users write.

Async methods run on the event loop, in a task of their own. Sync methods run in a thread, so that
one that blocks or hangs costs only its own episode, unless the environment says `blocking = False`
(steps of microseconds). Every error of an environment becomes an `EnvFault`, and so does an answer
that is not text that a policy can read and finite numbers.

The threads are not those of concurrent.futures, which can never be abandoned: 64 calls that hang
would block every later call, and the interpreter waits for them when it exits.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import math
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast, get_args
from weakref import WeakKeyDictionary

import numpy as np

from agenticrun_api.base import clean_text
from agenticrun_workers.envs.env import Closes, Env, EnvFault, MetricMode, StepResult, TakesItem
from agenticrun_workers.tracing import span
from agenticrun_workers.types import StopReason, Stream

MAX_MESSAGE = 500
"""Characters of a message. It travels to the driver and into the run's status."""


def raised(error: BaseException, call: Callable[..., Any]) -> EnvFault:
    """Describe what `call` raised, and in which line of the environment's own file.

    An `EnvFault` is returned unchanged.
    """
    if isinstance(error, EnvFault):
        return error
    fault = EnvFault(StopReason.ENV_ERROR, f"{one_line(error)}{_place(error, call)}")
    fault.__cause__ = error
    return fault


def one_line(error: BaseException) -> str:
    """Return an error's type and text in one line, at most `MAX_MESSAGE` characters of text."""
    try:
        text = " ".join(clean_text(str(error)).split())
    except Exception:  # a user's __str__ may raise anything
        text = "(it has no text)"
    short = text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]} ..."
    return f"{type(error).__name__}: {short}"


def _place(error: BaseException, call: Callable[..., Any]) -> str:
    """Return the innermost line in the file of `call`, or else the innermost line of all."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first one is where it was caught
    code = getattr(inspect.unwrap(call), "__code__", None)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    where = (own or frames)[-1:]
    return "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in where)


class Abandoned(SystemExit):
    """Raised in a thread that was abandoned."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a call: a value, or the exception that it raised."""

    value: Any = None
    error: BaseException | None = None

    def drop(self) -> None:
        """Close a coroutine that the call returned and that nothing will await."""
        if inspect.iscoroutine(self.value):
            self.value.close()


def attempt(call: Callable[..., Any], *arguments: Any, **named: Any) -> Outcome:
    """Call it and catch everything.

    Also SystemExit, and StopIteration, which asyncio's futures reject.
    """
    try:
        return Outcome(call(*arguments, **named))
    except BaseException as error:  # a user's code may raise anything
        return Outcome(error=error)


async def in_thread(call: Callable[[], Outcome]) -> Outcome:
    """Run `call` in a thread. Cancelling this coroutine abandons the thread.

    An abandoned thread ends at its next line of Python, so an endless loop stops; one inside C code
    stays until that code returns.
    """
    try:
        thread = _idle.pop()
    except IndexError:
        thread = _CallThread()
    done = thread.run_call(call)
    try:
        # Threads are reused: starting one takes longer than most steps.
        outcome = await done
    except asyncio.CancelledError:
        thread.abandon()
        # The call may have ended in the moment of the cancellation.
        if not done.cancelled():
            done.result().drop()
        raise
    _idle.append(thread)
    return outcome


async def in_task(awaitable: Awaitable[Any], patience_seconds: float = 0.0) -> Outcome:
    """Await it in a task of its own, so that SystemExit does not end the loop.

    Cancelling this coroutine cancels the task. It is left behind if it does not end within
    `patience_seconds` of that.
    """
    task = asyncio.ensure_future(awaited(awaitable))
    try:
        # `wait` and not `await`: a SystemExit of the task must stay in the task.
        await asyncio.wait({task})
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=patience_seconds)
        if task.done():
            # A task that was cancelled before it began has not awaited it.
            Outcome(awaitable).drop()
    return task.result()


async def awaited(awaitable: Awaitable[Any]) -> Outcome:
    """Await it and catch everything."""
    try:
        return Outcome(await awaitable)
    except BaseException as error:  # a user's code may raise anything, cancellations included
        return Outcome(error=error)


def hanging() -> int:
    """Return the number of abandoned threads of this process that have not ended yet."""
    _abandoned[:] = [thread for thread in _abandoned if thread.is_alive()]
    return len(_abandoned)


class _CallThread(threading.Thread):
    """A thread that runs one call after another. A daemon: the interpreter does not wait for it."""

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

    def abandon(self) -> None:
        _abandoned.append(self)
        raise_in(self.ident or 0, Abandoned)
        # Should it survive the exception, it ends when its call does.
        self._calls.put(None)

    def run(self) -> None:
        with suppress(Abandoned):
            while (waiting := self._calls.get()) is not None:
                call, done = waiting
                _set_outcome(done, call())


def raise_in(thread: int, error: type[BaseException]) -> None:
    """Raise an error in another thread, at its next line of Python.

    Until the thread gets there, Python 3.12 and older keep one flag up for all threads. While it is
    up, a function that a debugger or coverage traces never gets past its first instruction in
    Python 3.11, and that thread no longer handles Ctrl-C. So this thread receives an exception too,
    which takes the flag down. The other thread raises the flag again when it leaves C code.
    """
    set_error, raised_there = ctypes.pythonapi.PyThreadState_SetAsyncExc, ctypes.py_object(error)
    there, here = ctypes.c_ulong(thread), ctypes.c_ulong(threading.get_ident())
    abandoned = ctypes.py_object(Abandoned)
    try:  # calls of C functions only: a Python function might be traced
        set_error(there, raised_there)
        if sys.version_info < (3, 13):
            set_error(here, abandoned)
            while True:
                pass
    except Abandoned:
        return


def _set_outcome(done: asyncio.Future[Outcome], outcome: Outcome) -> None:
    """Set the result of another thread's future. Drop it if the future is cancelled."""

    def set_result() -> None:
        if done.done():
            outcome.drop()
        else:
            done.set_result(outcome)

    loop = done.get_loop()
    # Asked here too: a loop that ends soon may not get to `set_result`.
    if loop.is_closed() or done.done():
        outcome.drop()
    else:
        loop.call_soon_threadsafe(set_result)


_numbers = count()
_idle: list[_CallThread] = []
_abandoned: list[_CallThread] = []


CLOSE_SECONDS = 10.0
"""Time for an environment to close."""

MAX_BLOCKING_CALLS = 64
"""Calls of sync environments that an event loop, such as an env worker's, runs at once.

Others wait, and their timeout starts only when they begin.
"""

MAX_HANGING = 1024
"""Abandoned threads of a process at which sync environments are refused: each keeps some memory."""


_rooms: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _room() -> asyncio.Semaphore:
    """Return the room for blocking calls of the running event loop.

    All `EnvCalls` share it: random play has one for each episode.
    """
    return _rooms.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_BLOCKING_CALLS))


class EnvCalls:
    """Calls environments of one run, many at once.

    Args:
        timeout: seconds that one `reset` or `step` may take (None: no limit).
    """

    def __init__(self, timeout: float | None = None) -> None:
        self._timeout = timeout

    async def reset(
        self, env: Env, seed: int, stream: Stream, item: Mapping[str, Any] | None = None
    ) -> Start:
        """Begin an episode, with `item` if there is one. Raises `EnvFault`."""
        with span("reset"):
            if item is not None:
                await self._call(env, cast(TakesItem, env).set_item, item)
            places, names = reset_arguments(env, seed, split_of(stream))
            answer = await self._call(env, env.reset, *places, **names)
        return checked_start(answer, getattr(env, "instruction", ""))

    async def step(self, env: Env, action: str) -> StepResult:
        """Play the text of an answer. Raises `EnvFault`."""
        with span("step"):
            return checked_step(await self._call(env, env.step, action))

    async def valid_actions(self, env: Env) -> list[str]:
        """Return the valid answers; empty if they cannot be listed. Raises `EnvFault`."""
        return checked_actions(await self._call(env, env.valid_actions))

    async def close(self, env: Env) -> None:
        """Close an environment that has something to give back. Raises `EnvFault`."""
        if isinstance(env, Closes):
            await self._call(env, env.close)

    async def _call(self, env: Env, call: Callable[..., Any], *places: Any, **names: Any) -> Any:
        calling = partial(attempt, call, *places, **names)
        # Code that says it never blocks saves the hand-over to a thread.
        if inspect.iscoroutinefunction(call) or not getattr(env, "blocking", True):
            return await self._in_time(call, calling, threaded=False)
        async with _room():
            if hanging() >= MAX_HANGING:
                raise EnvFault(
                    StopReason.TIMEOUT,
                    f"{MAX_HANGING} earlier calls hang forever: set isolated: true",
                )
            return await self._in_time(call, calling, threaded=True)

    async def _in_time(
        self, call: Callable[..., Any], calling: Callable[[], Outcome], *, threaded: bool
    ) -> Any:
        try:
            async with asyncio.timeout(self._timeout):
                outcome = await in_thread(calling) if threaded else calling()
                # A plain function may return a coroutine.
                if inspect.isawaitable(outcome.value):
                    outcome = await in_task(outcome.value)
        except TimeoutError:
            raise EnvFault(
                StopReason.TIMEOUT, f"{_name(call)} took more than {self._timeout} s"
            ) from None
        if outcome.error is not None:
            raise raised(outcome.error, call)
        return outcome.value


def _name(call: Callable[..., Any]) -> str:
    """Return class and name of an environment's method, also of an isolated one."""
    env = getattr(inspect.unwrap(call), "__self__", None)
    name: str = getattr(env, "isolated_class", "")
    return f"{name}.{call.__name__}" if name else call.__qualname__


def split_of(stream: Stream) -> Stream:
    """Return the split of an episode's level: the warm-up plays levels of training."""
    return Stream.VALIDATION if stream is Stream.VALIDATION else Stream.TRAIN


def reset_arguments(env: Env, seed: int, split: Stream) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments for `reset`.

    They are seed and split, or only the seed if the second parameter has a default and is not
    called `split`. As in gymnasium, the seed may be keyword-only.
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


MAX_TEXT = 1_048_576
"""Maximum number of characters in one observation.

That is more than a quarter of a million tokens, so more than any context holds; tokenising 10 MB
would block all episodes of an env worker for seconds.
"""

MODES = frozenset(get_args(MetricMode))

RESERVED_METRICS = ("score", "turns", "response_length", "random_success", "random_errors",
                    "warmup_success")  # fmt: skip
RESERVED_FAMILIES = ("stop/", "judge/", "reward/")
"""Names and beginnings of names in env/<tag>/... and val/<tag>/... that environments cannot use."""

LARGEST = float(np.finfo(np.float32).max)
"""Largest reward or metric: they are stored as float32."""
_TOO_LARGE = "which is too large (at most 3.4e38)"


@dataclass(frozen=True, slots=True)
class Start:
    """The beginning of an episode."""

    observation: str
    instruction: str
    """The task: the environment's instruction, or this episode's own."""
    info: Mapping[str, Any] = field(default_factory=dict)


def checked_start(answer: object, instruction: object) -> Start:
    """Check what `reset` returned; `instruction` is the environment's own. Raises `EnvFault`."""
    observation, info = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, {})
    if not isinstance(info, Mapping):
        raise _fault(f"reset returned an info of {type(info).__name__}, not a mapping")
    task = _text(info.get("env_instruction", instruction), "the instruction is")
    return Start(_text(observation, "reset returned"), task, info)


def checked_step(answer: object) -> StepResult:
    """Check what `step` returned: a `StepResult`, or gymnasium's tuple of five.

    The reward becomes a float. Raises `EnvFault`.
    """
    result = answer
    if isinstance(answer, tuple) and len(answer) == 5:
        observation, reward, terminated, truncated, info = answer
        if not isinstance(info, Mapping):
            raise _fault(f"step returned an info of {type(info).__name__}, not a mapping")
        metrics, modes = info.get("metrics", {}), info.get("metrics_agg_mode", {})
        result = StepResult(observation, reward, terminated, truncated, metrics, modes, info)
    if not isinstance(result, StepResult):
        raise _fault(
            f"step returned {type(answer).__name__}, neither a StepResult nor a tuple of five"
        )
    _text(result.observation, "step returned an observation of")
    if not isinstance(result.info, Mapping):
        raise _fault(f"step returned an info of {type(result.info).__name__}, not a mapping")
    for part, name in ((result.metrics, "metrics"), (result.modes, "modes of metrics")):
        if not isinstance(part, Mapping) or not all(isinstance(key, str) for key in part):
            raise _fault(f"step returned {name} that are not a mapping from names")
    assert isinstance(result.metrics, Mapping)
    assert isinstance(result.modes, Mapping)
    check_metric_names(result.metrics)
    for name, value in result.metrics.items():
        number(value, f"step returned the metric {name} =")
    for name, mode in result.modes.items():
        if mode not in MODES:
            raise _fault(
                f"step returned the mode {mode!r} of the metric {name}; known are "
                f"{', '.join(sorted(MODES))}"
            )
    return replace(
        result,
        reward=number(result.reward, "step returned the reward"),
        terminated=_flag(result.terminated, "terminated"),
        truncated=_flag(result.truncated, "truncated"),
    )


def checked_actions(answer: object) -> list[str]:
    """Check what `valid_actions` returned; empty if they cannot be listed. Raises `EnvFault`."""
    if (
        isinstance(answer, str)
        or not isinstance(answer, (list, tuple))
        or not all(isinstance(action, str) for action in answer)
    ):
        raise _fault("valid_actions did not return a list of strings")
    return list(answer)


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise _fault(f"{what} {type(value).__name__}, not text")
    if len(value) > MAX_TEXT:
        raise _fault(f"{what} {len(value):,} characters; {MAX_TEXT:,} are allowed")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise _fault(f"{what} text that is not valid unicode: {error.reason}") from None
    return value


def number(value: object, what: str) -> float:
    """Return a reward, score or metric of a user's code as a float.

    One rule for environments, agents and judges: text is no number, and float32 must hold it.

    Args:
        value: a number of Python, NumPy or torch.
        what: begin of the message, such as "step returned the reward".

    Raises:
        EnvFault: the value is not a number, not finite or too large.
    """
    # `float` would read numbers from text, which is a mistake in every case so far.
    has_text = isinstance(value, (str, bytes, bytearray, memoryview)) or (
        isinstance(value, np.ndarray) and value.dtype.kind not in "biuf"
    )
    try:
        found = float("x" if has_text else value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise _fault(f"{what} {_shortly(value)}, which is not a number") from None
    except OverflowError:
        raise _fault(f"{what} {_shortly(value)}, {_TOO_LARGE}") from None
    if not math.isfinite(found):
        raise _fault(f"{what} {found}")
    if abs(found) > LARGEST:
        raise _fault(f"{what} {found:g}, {_TOO_LARGE}")
    return found


def _shortly(value: object) -> str:
    return (
        repr(value[:40]) if isinstance(value, (str, bytes)) else f"of type {type(value).__name__}"
    )


def _flag(value: object, name: str) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise _fault(f"step returned {name} of {type(value).__name__}, not True or False")
    return bool(value)


def check_metric_names(metrics: Iterable[str]) -> None:
    """Refuse names of an environment's metrics that AgenticRun reports itself. Raises `EnvFault`.

    They would replace our own values in env/<tag>/... and val/<tag>/...
    """
    for name in metrics:
        if name in RESERVED_METRICS or name.startswith(RESERVED_FAMILIES):
            known = ", ".join([*RESERVED_METRICS, *(f"{family}*" for family in RESERVED_FAMILIES)])
            raise _fault(f"the metric {name!r} has a reserved name ({known}): rename it")


def _fault(message: str) -> EnvFault:
    return EnvFault(StopReason.ENV_ERROR, message)
