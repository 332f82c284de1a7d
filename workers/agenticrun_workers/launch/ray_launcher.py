"""Actors as Ray actors, each in a process of its own. The only module that calls them by Ray.

Exceptions of Ray become those of `handle`, so that no other module knows how a call fails in Ray.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Generator
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

from agenticrun_workers.launch.handle import (
    ActorDied,
    ActorHandle,
    ActorUnavailable,
    Invocation,
    OtherActorDied,
    Result,
)
from agenticrun_workers.launch.launcher import ActorOptions, Node

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")


class RayLauncher:
    """Starts actors on the Ray that this process is connected to."""

    def start(
        self, options: ActorOptions, cls: Callable[P, A], *args: P.args, **kwargs: P.kwargs
    ) -> ActorHandle[A]:
        """See `Launcher`."""
        remote = _remote_class(cls)
        return RayHandle(remote.options(**ray_options(options)).remote(*args, **kwargs))

    def put(self, value: T) -> Result[T]:
        """See `Launcher`."""
        return RayResult(ray.put(value))

    def offers(self, node_id: str) -> Collection[str]:
        """See `Launcher`."""
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        resources = {node["NodeID"]: node.get("Resources", {}) for node in nodes}
        return [name for name, amount in resources.get(node_id, {}).items() if amount]


@cache
def _remote_class(cls: Callable[..., Any]) -> Any:
    """Return the actor class of Ray for a class.

    One for all actors of the class: every process that holds a handle keeps the class of its actor
    forever, so one for each actor would be a leak.
    """
    remote: Any = ray.remote(cls)
    return remote


def ray_options(options: ActorOptions) -> dict[str, Any]:
    """Return the options in Ray's terms.

    An actor takes none of Ray's CPUs, because Kubernetes sizes the pods. The pods of a role offer
    the resource of its name.
    """
    chosen: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0}
    if options.role is not None:
        chosen |= {"num_gpus": options.gpus, "resources": {options.role.value: 1.0}}
    if options.node_id is not None:
        chosen["scheduling_strategy"] = NodeAffinitySchedulingStrategy(options.node_id, soft=False)
    if options.max_concurrency is not None:
        chosen["max_concurrency"] = options.max_concurrency
    return chosen


class RayHandle(ActorHandle[A_co]):
    """A handle that wraps Ray's own."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._killed = False

    def kill(self) -> None:
        """See `ActorHandle`.

        Ray ends the process some time later, and until then it could still take calls.
        """
        self._killed = True
        ray.kill(self._actor)

    def _call(self, call: Invocation) -> Result[Any]:
        if self._killed:
            return KilledResult()
        return RayResult(_send(getattr(self._actor, call.method), call))

    def _call_pair(self, call: Invocation) -> tuple[Result[Any], Result[Any]]:
        if self._killed:
            return KilledResult(), KilledResult()
        first, second = _send(getattr(self._actor, call.method).options(num_returns=2), call)
        return RayResult(first), RayResult(second)

    def _stream(self, call: Invocation) -> AsyncIterator[Any]:
        if self._killed:
            return _nothing()
        method = getattr(self._actor, call.method).options(num_returns="streaming")
        return _items(_send(method, call))


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

    def wait(self) -> T_co:
        """See `Result`."""
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

    def wait(self) -> NoReturn:
        """See `Result`."""
        raise ActorDied("the actor was killed before the call")


async def _nothing() -> AsyncIterator[Any]:
    yield await KilledResult()


def ray_node() -> Node:
    """Return the node of this process; see `current_node`."""
    address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    if not ray.is_initialized():
        return Node("", address)
    context = ray.get_runtime_context()
    gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
    return Node(context.get_node_id(), address, gpus)


def session_logs() -> Path:
    """Return the folder of logs that Ray's dashboard shows.

    It is that of this session: `session_latest` would be that of the session that started last on
    this machine.
    """
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir(), context.get_session_name(), "logs")


def _send(method: Any, call: Invocation) -> Any:
    arguments = [_sendable(argument) for argument in call.arguments]
    return method.remote(
        *arguments, **{name: _sendable(value) for name, value in call.options.items()}
    )


def _sendable(argument: Any) -> Any:
    if isinstance(argument, KilledResult):
        argument.wait()
    return argument._ref if isinstance(argument, RayResult) else argument


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
