"""Actors as Ray actors, each in a process of its own. The only module that calls them by Ray.

Exceptions of Ray become those of `handle`, so that no other module knows how a call fails in Ray.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import AsyncIterator, Callable, Collection, Generator, Iterator
from contextlib import aclosing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import ray
from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from typing_extensions import override

from agenticrun_api.base import clean_text
from agenticrun_workers.launch.handle import (
    ActorDied,
    ActorHandle,
    ActorUnavailable,
    Invocation,
    OtherActorDied,
    Result,
)
from agenticrun_workers.launch.launcher import ActorOptions, Launcher
from agenticrun_workers.launch.packing import Block, is_packed

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")


class RayLauncher(Launcher):
    """Starts actors on the Ray that this process is connected to."""

    @override
    def start(
        self, options: ActorOptions, cls: Callable[P, A], *args: P.args, **kwargs: P.kwargs
    ) -> ActorHandle[A]:
        remote = _remote_class(cls)
        actor = remote.options(**ray_options(options)).remote(*args, **kwargs)
        methods = inspect.getmembers(cls, is_packed)
        return RayHandle(actor, frozenset(name for name, _ in methods))

    @override
    def put(self, value: T) -> Result[T]:
        return RayResult(ray.put(Block(value)))

    @override
    def offers(self, node_id: str) -> Collection[str]:
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        resources = {node["NodeID"]: node.get("Resources", {}) for node in nodes}
        return [name for name, amount in resources.get(node_id, {}).items() if amount]


@cache
def _remote_class(cls: Any) -> Any:
    """Return the actor class of Ray for a class: its methods return and raise what Ray can carry.

    One for all actors of the class: every process that holds a handle keeps the class of its actor
    forever, so one for each actor would be a leak.
    """
    # Static, because `getattr` would show a static method as a plain function, and `_sending` would
    # wrap it as a method.
    methods = {name: inspect.getattr_static(cls, name) for name in dir(cls)}
    own = {
        name: _sending(method)
        for name, method in methods.items()
        if inspect.isfunction(method) and (not name.startswith("_") or name == "__init__")
    }
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    remote: Any = ray.remote(type(cls.__name__, (cls,), names | own))
    return remote


def _sending(method: Any) -> Any:
    """Wrap a method: its errors are clean, and its result is a `Block` if it is `packed`.

    Ray sends the text of an error and its traceback as UTF-8. An error of user code that names a
    file in other bytes would end the process of the actor: its caller would see a lost actor.
    """

    def answer(result: Any) -> Any:
        if not is_packed(method):
            return result
        # `call_pair` splits the tuple into two results, so each half is a block of its own.
        return tuple(map(Block, result)) if isinstance(result, tuple) else Block(result)

    wrapper: Any
    if inspect.isasyncgenfunction(method):

        async def wrapper(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            with _clean_errors():
                # A caller that leaves early must end the generator of the actor, too.
                async with aclosing(method(*args, **kwargs)) as items:
                    async for item in items:
                        yield item

    elif inspect.iscoroutinefunction(method):

        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            with _clean_errors():
                return answer(await method(*args, **kwargs))

    elif inspect.isgeneratorfunction(method):

        def wrapper(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with _clean_errors():
                yield from method(*args, **kwargs)

    else:

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with _clean_errors():
                return answer(method(*args, **kwargs))

    return functools.wraps(method)(wrapper)


@contextmanager
def _clean_errors() -> Iterator[None]:
    """Clean the texts of an error, and of its causes, in place."""
    try:
        yield
    except Exception as error:
        if _is_utf8(error):
            raise
        part: BaseException | None = error
        # Causes can form a circle.
        seen: set[int] = set()
        while part is not None and id(part) not in seen:
            seen.add(id(part))
            part.args = tuple(clean_text(arg) if isinstance(arg, str) else arg for arg in part.args)
            texts = {name: value for name, value in vars(part).items() if isinstance(value, str)}
            vars(part).update({name: clean_text(text) for name, text in texts.items()})
            part = part.__cause__ or part.__context__
        if _is_utf8(error):
            raise
        # Its text is made of something else, such as a path.
        raise RuntimeError(clean_text(f"{type(error).__name__}: {error}")) from None


def _is_utf8(error: Exception) -> bool:
    try:
        "".join(traceback.format_exception(error)).encode()
    except UnicodeEncodeError:
        return False
    return True


def ray_options(options: ActorOptions) -> dict[str, Any]:
    """Return the options in Ray's terms.

    An actor takes none of Ray's CPUs, because Kubernetes sizes the pods. The pods of a role offer
    the resource of its name.
    """
    # No restarts by Ray: a new actor needs settings and weights that only the driver has.
    chosen: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0}
    if options.role is not None:
        chosen |= {"num_gpus": options.gpus, "resources": {options.role.value: 1.0}}
    if options.node_id is not None:
        # Hard: an actor elsewhere would not reach the shared memory or the GPUs that it is for.
        chosen["scheduling_strategy"] = NodeAffinitySchedulingStrategy(options.node_id, soft=False)
    if options.max_concurrency is not None:
        chosen["max_concurrency"] = options.max_concurrency
    return chosen


class RayHandle(ActorHandle[A_co]):
    """A handle that wraps Ray's own.

    Args:
        packed: names of the methods that are `packed`.
    """

    def __init__(self, actor: Any, packed: frozenset[str] = frozenset()) -> None:
        self._actor = actor
        self._packed = packed
        self._killed = False

    @override
    def kill(self) -> None:
        """Ray ends the process some time later, and until then it could still take calls."""
        # First: calls from now on must not reach a process that is still ending.
        self._killed = True
        ray.kill(self._actor)

    def _call(self, call: Invocation) -> Result[Any]:
        return KilledResult() if self._killed else RayResult(self._send(call))

    def _call_pair(self, call: Invocation) -> tuple[Result[Any], Result[Any]]:
        if self._killed:
            return KilledResult(), KilledResult()
        first, second = self._send(call, num_returns=2)
        return RayResult(first), RayResult(second)

    def _stream(self, call: Invocation) -> AsyncIterator[Any]:
        return _nothing() if self._killed else _items(self._send(call, num_returns="streaming"))

    def _send(self, call: Invocation, num_returns: int | str | None = None) -> Any:
        def sendable(argument: Any) -> Any:
            if isinstance(argument, KilledResult):
                # Raises ActorDied here, as the call would have.
                argument.wait()
            if isinstance(argument, RayResult):
                return argument._ref
            return Block(argument) if call.method in self._packed else argument

        method = getattr(self._actor, call.method)
        if num_returns is not None:
            method = method.options(num_returns=num_returns)
        options = {name: sendable(value) for name, value in call.options.items()}
        return method.remote(*map(sendable, call.arguments), **options)


class RayResult(Result[T_co]):
    """A result that wraps Ray's reference."""

    def __init__(self, ref: Any) -> None:
        self._ref = ref

    def __await__(self) -> Generator[Any, None, T_co]:
        try:
            value: T_co = yield from self._ref.__await__()
        except RayError as error:
            _raise_ours(error)
        return value

    @override
    def wait(self) -> T_co:
        try:
            value: T_co = ray.get(self._ref)
        except RayError as error:
            _raise_ours(error)
        return value


class KilledResult(Result[Any]):
    """The result of a call to an actor that this process has killed."""

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return self.wait()

    @override
    def wait(self) -> NoReturn:
        raise ActorDied("the actor was killed before the call")


async def _nothing() -> AsyncIterator[Any]:
    yield await KilledResult()


def session_logs() -> Path:
    """Return the folder of logs that Ray's dashboard shows.

    It is that of this session: `session_latest` would be that of the session that started last on
    this machine.
    """
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir(), context.get_session_name(), "logs")


async def _items(references: Any) -> AsyncIterator[Any]:
    try:
        async for reference in references:
            yield await reference
    except RayError as error:
        _raise_ours(error)


def _raise_ours(error: RayError) -> NoReturn:
    """Raise what `Result` promises in place of an exception of Ray.

    A method that failed raises `RayTaskError`; it is a subclass of its cause's class too. One that
    got a failed result as an argument raises one around another.
    """
    if isinstance(error, RayTaskError):
        # One layer for each actor that the error has come through.
        cause: BaseException = error
        while isinstance(cause, RayTaskError):
            cause = cause.cause
        if isinstance(cause, RayActorError | ActorDied):
            raise OtherActorDied(str(cause)) from error
        raise cause from error
    if isinstance(error, ActorUnavailableError):
        raise ActorUnavailable(str(error)) from error
    if isinstance(error, RayActorError | ActorUnschedulableError):  # or its node is lost
        raise ActorDied(str(error)) from error
    raise error
