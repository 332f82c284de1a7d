"""Typed handles of actors: what a caller sees of an actor, in whatever process it runs.

    scores = engine.call(lambda engine: engine.score(plan))    # Result[Scores], sent at once
    await scores

The lambda runs once, immediately, on an object that records the method and its arguments. So a
caller needs the class of an actor only for type checking: the driver imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, cast, overload

from agenticrun_workers.launch import liveness

A_co = TypeVar("A_co", covariant=True)
T = TypeVar("T")
U = TypeVar("U")
T_co = TypeVar("T_co", covariant=True)


class ActorDied(Exception):
    """The actor has died. It answers neither this call nor any later one."""


class ActorUnavailable(ActorDied):
    """The actor does not answer at the moment. It may be alive."""


class OtherActorDied(ActorDied):
    """The actor is alive: its method failed because another actor died that it needs."""


class Result(ABC, Generic[T_co]):
    """The result of a call that is on its way. Await it, also several times, or never.

    Raises:
        ActorDied: the actor, or its connection, is gone.
        Exception: what the method raised, with the actor's traceback as its cause.
    """

    @abstractmethod
    def __await__(self) -> Generator[Any, None, T_co]: ...

    @abstractmethod
    def wait(self) -> T_co:
        """Block this thread until the result is there. For actors without an event loop."""

    def as_argument(self) -> T_co:
        """Stand for the value among the arguments of another call.

        The value goes to that actor without passing through this process. This works for arguments
        themselves, not for items inside of them.
        """
        return cast(T_co, self)


@dataclass(frozen=True, slots=True)
class Invocation:
    """One call of a method, recorded."""

    method: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class ActorHandle(ABC, Generic[A_co]):
    """Calls the methods of an actor of class `A`. Can be passed to other actors.

    An actor runs the calls of one caller in their order, unless it has async methods: then they
    may start in any order, and the caller awaits what must be in order.
    """

    may_freeze: ClassVar[bool] = True
    """False where a debugger may stop the actor."""

    @overload
    def call(self, method: Callable[[A_co], Coroutine[Any, Any, T]]) -> Result[T]: ...
    @overload
    def call(self, method: Callable[[A_co], T]) -> Result[T]: ...
    def call(self, method: Callable[[A_co], Any]) -> Result[Any]:
        """Send one call, given as `lambda actor: actor.method(arguments)`, and return its result.

        A call need not be awaited. Its failure is then lost.
        """
        return self._call(_record(method))

    @overload
    async def poll(self, method: Callable[[A_co], Coroutine[Any, Any, T]]) -> T: ...
    @overload
    async def poll(self, method: Callable[[A_co], T]) -> T: ...
    async def poll(self, method: Callable[[A_co], Any]) -> Any:
        """Call a method that returns within `POLL_SECONDS`; kill the actor if it does not answer.

        See `liveness`.

        Raises:
            ActorUnavailable: it did not answer, and was killed.
        """
        result = self.call(method)
        try:
            return await (liveness.answered(result) if self.may_freeze else result)
        except liveness.NoAnswer:
            self.kill()
            seconds = liveness.FROZEN_POLLS * liveness.POLL_SECONDS
            raise ActorUnavailable(
                f"the actor has not answered for {seconds:.0f} s: it is frozen or out of reach"
            ) from None
        # Ray also raises this for a broken connection, with an actor that still runs: the pool
        # replaces it, so it must end.
        except ActorUnavailable:
            self.kill()
            raise

    def call_pair(self, method: Callable[[A_co], tuple[T, U]]) -> tuple[Result[T], Result[U]]:
        """Call a method that returns a pair, and return its two items as separate results."""
        return self._call_pair(_record(method))

    @overload
    def stream(self, method: Callable[[A_co], AsyncIterator[T]]) -> AsyncIterator[T]: ...
    @overload
    def stream(self, method: Callable[[A_co], Iterator[T]]) -> AsyncIterator[T]: ...
    def stream(self, method: Callable[[A_co], Any]) -> AsyncIterator[Any]:
        """Call a generator method. It does not wait until its items are read."""
        return self._stream(_record(method))

    @abstractmethod
    def kill(self) -> None:
        """End the actor now. Calls in progress, and all later ones, raise `ActorDied`."""

    @abstractmethod
    def _call(self, call: Invocation) -> Result[Any]: ...

    @abstractmethod
    def _call_pair(self, call: Invocation) -> tuple[Result[Any], Result[Any]]: ...

    @abstractmethod
    def _stream(self, call: Invocation) -> AsyncIterator[Any]: ...


@contextmanager
def killed_on_error(actor: ActorHandle[Any]) -> Iterator[None]:
    """Kill an actor that has just been started, if the `with` block fails or is cancelled.

    It may live, and would keep its place on the pod and its GPUs, though no one holds it.
    """
    try:
        yield
    except BaseException:
        actor.kill()
        raise


class _Recorder:
    def __getattr__(self, method: str) -> Callable[..., Invocation]:
        return lambda *arguments, **options: Invocation(method, arguments, options)


_RECORDER: Any = _Recorder()


def _record(method: Callable[[Any], Any]) -> Invocation:
    # The lambda runs on a stand-in, so that mypy checks the call and Ray gets a plain record.
    call = method(_RECORDER)
    if not isinstance(call, Invocation):
        raise TypeError(f"the lambda of a call must call one method of the actor, not make {call}")
    return call
