"""Actors as threads of this process, for debuggers and for tests that are not about Ray.

As with Ray, an actor with async methods has an event loop of its own, and any other one runs one
call at a time. Unlike with Ray, arguments and results are not copied, and an actor that ends its
process ends all of them.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Generator
from concurrent.futures import Future
from contextvars import Context, copy_context
from dataclasses import replace
from itertools import count, islice
from queue import SimpleQueue
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

from typing_extensions import override

from agenticrun_api import Role
from agenticrun_workers.launch.handle import (
    ActorDied,
    ActorHandle,
    Invocation,
    OtherActorDied,
    Result,
)
from agenticrun_workers.launch.launcher import ActorOptions, Launcher
from agenticrun_workers.launch.node import Node, shared_node

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")

log = logging.getLogger(__name__)

NODE = Node("this-process", "127.0.0.1")
ASYNC_CALLS = 1000
"""Calls of an async actor that run at the same time by default, as in Ray."""

END_SECONDS = 30.0
"""Time for the threads of killed actors to end. A thread ends after its current call."""


@runtime_checkable
class Closable(Protocol):
    """An actor that must free something, since its end is not the end of its process."""

    def close(self) -> object: ...


class InProcessLauncher(Launcher):
    """Starts actors in this process. Close it to end them."""

    def __init__(self) -> None:
        self._actors: list[_Actor] = []

    @override
    def start(
        self, options: ActorOptions, cls: Callable[P, A], *args: P.args, **kwargs: P.kwargs
    ) -> ActorHandle[A]:
        def make() -> A:
            return cls(*args, **kwargs)

        name = getattr(cls, "__name__", "actor")
        # An actor that has ended gives its GPUs back, like a process.
        self._actors = [each for each in self._actors if not each.ended]
        taken = {gpu for each in self._actors for gpu in each.node.gpus}
        free = (gpu for gpu in map(str, count()) if gpu not in taken)
        node = replace(NODE, gpus=tuple(islice(free, options.gpus)))
        # As in Ray: one coroutine method makes an actor async, with another default concurrency.
        is_async = any(
            inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member)
            for _, member in inspect.getmembers(cls)
        )
        actor: _Actor = (
            _AsyncActor(make, name, node, options.max_concurrency or ASYNC_CALLS)
            if is_async
            else _SyncActor(make, name, node, options.max_concurrency or 1)
        )
        self._actors.append(actor)
        return InProcessHandle(actor)

    @override
    def put(self, value: T) -> Result[T]:
        result = InProcessResult[T]()
        result.set(value)
        return result

    @override
    def offers(self, node_id: str) -> Collection[str]:
        """This process has room for any number of actors of any role."""
        return [role.value for role in Role] if node_id == NODE.node_id else []

    def close(self) -> None:
        """Kill all actors, and wait until their threads have ended."""
        # All are killed before the first is waited for, so that they end at the same time.
        for actor in self._actors:
            actor.kill("its launcher was closed")
        for actor in self._actors:
            for thread in actor.threads:
                # Never started, if the actor died before its object was made.
                if thread.ident is not None:
                    thread.join(END_SECONDS)
        self._actors.clear()


class InProcessResult(Result[T_co]):
    """A result that another thread sets. The first one to set it wins."""

    def __init__(self) -> None:
        self._future: Future[Any] = Future()
        self._future.set_running_or_notify_cancel()  # a waiting task that is cancelled leaves it
        self._lock = threading.Lock()

    def __await__(self) -> Generator[Any, None, T_co]:
        value: T_co = yield from asyncio.wrap_future(self._future).__await__()
        return value

    @override
    def wait(self) -> T_co:
        value: T_co = self._future.result()
        return value

    def set(self, value: Any) -> None:
        with self._lock:
            # The actor may be killed while its method returns.
            if not self._future.done():
                self._future.set_result(value)

    def fail(self, error: BaseException) -> None:
        with self._lock:
            if not self._future.done():
                self._future.set_exception(error)

    def when_done(self, call: Callable[[Future[Any]], None]) -> None:
        self._future.add_done_callback(call)


class InProcessHandle(ActorHandle[A_co]):
    """A handle of an actor in this process."""

    may_freeze = False

    def __init__(self, actor: _Actor) -> None:
        self._actor = actor

    @override
    def kill(self) -> None:
        self._actor.kill("it was killed")

    def _call(self, call: Invocation) -> Result[Any]:
        result = InProcessResult[Any]()
        self._actor.submit(_Job(call, result))
        return result

    def _call_pair(self, call: Invocation) -> tuple[Result[Any], Result[Any]]:
        pair, first, second = (InProcessResult[Any]() for _ in range(3))

        def split(future: Future[Any]) -> None:
            error = future.exception()
            for number, half in enumerate((first, second)):
                if error is None:
                    half.set(future.result()[number])
                else:
                    half.fail(error)

        pair.when_done(split)
        self._actor.submit(_Job(call, pair))
        return first, second

    def _stream(self, call: Invocation) -> AsyncIterator[Any]:
        stream = _Stream()
        self._actor.submit(_Job(call, stream.end, stream.put))
        return stream.items()


class _Stream:
    """Items of a generator method, on their way to the event loop that reads them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[tuple[Any] | None] = asyncio.Queue()
        self.end = InProcessResult[None]()
        self.end.when_done(lambda _: self._send(None))

    def put(self, item: Any) -> None:
        self._send((item,))

    async def items(self) -> AsyncIterator[Any]:
        while (item := await self._items.get()) is not None:
            yield item[0]
        await self.end

    def _send(self, item: tuple[Any] | None) -> None:
        # The reader is gone with its event loop; the generator runs to its end.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)


class _Job:
    """A call of an actor.

    Args:
        put: takes the items of a generator method.
    """

    def __init__(
        self,
        call: Invocation,
        result: InProcessResult[Any],
        put: Callable[[Any], None] | None = None,
    ) -> None:
        self.call = call
        self.result = result
        self.put = put

    def fail(self, error: BaseException) -> None:
        """Fail the call with what its method raised."""
        # The caller must not take the death of another actor for that of this one.
        self.result.fail(OtherActorDied(str(error)) if isinstance(error, ActorDied) else error)

    @property
    def results(self) -> list[InProcessResult[Any]]:
        """Return the results of other calls among the arguments."""
        values = (*self.call.arguments, *self.call.options.values())
        return [value for value in values if isinstance(value, InProcessResult)]

    def run(self, target: Any) -> Any:
        """Call the method; all results among its arguments are there."""
        method = getattr(target, self.call.method)
        return method(
            *map(_value, self.call.arguments),
            **{name: _value(value) for name, value in self.call.options.items()},
        )


class _Actor:
    """An object of which all methods run in threads of its own.

    Args:
        make: makes the object, in such a thread.
        node: the actor's `current_node`.
    """

    def __init__(self, make: Callable[[], Any], name: str, node: Node) -> None:
        self._make = make
        self._name = name
        self.node = node
        self._death: ActorDied | None = None
        self.threads: list[threading.Thread] = []
        """The first one makes the object, and frees it at the end."""
        self._lock = threading.Lock()
        self._open: set[_Job] = set()
        self._context: Context = copy_context()
        self._context.run(shared_node.set, node)

    @property
    def ended(self) -> bool:
        """True if it was killed, and all its threads have ended."""
        return self._death is not None and not any(thread.is_alive() for thread in self.threads)

    def submit(self, job: _Job) -> None:
        with self._lock:
            if self._death is None:
                self._open.add(job)
        # Outside the lock, because failing a result runs callbacks of any kind.
        if self._death is not None:
            job.result.fail(self._death)
            return
        job.result.when_done(lambda _: self._open.discard(job))
        self._begin(job)

    def kill(self, reason: str) -> None:
        """End the actor. Calls in progress fail, and so do later ones."""
        with self._lock:
            if self._death is not None:
                return
            self._death = ActorDied(f"{self._name} died: {reason}")
            # A copy: each result that fails takes its job out of the set.
            jobs = list(self._open)
        for job in jobs:
            job.result.fail(self._death)
        self._end()

    @abstractmethod
    def _begin(self, job: _Job) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...

    def _made(self) -> Any:
        """Make the object. The actor dies, and None is returned, if that fails."""
        try:
            return self._make()
        # Like a process whose constructor raises: the actor is dead, and its caller retries.
        except BaseException as error:
            log.exception("%s could not be made", self._name)
            self.kill(f"it could not be made: {type(error).__name__}: {error}")
            return None

    def _failed(self, job: _Job, error: BaseException) -> None:
        # A bare CancelledError would look like a cancellation of the caller.
        if isinstance(error, asyncio.CancelledError):
            job.fail(RuntimeError(f"{job.call.method} of {self._name} was cancelled"))
        elif isinstance(error, Exception):
            job.fail(error)
        else:  # SystemExit would end an actor's process
            self.kill(f"{type(error).__name__} in {job.call.method}: {error}")


class _SyncActor(_Actor):
    """An actor without async methods.

    Args:
        threads: number of calls that may run at the same time.
    """

    def __init__(self, make: Callable[[], Any], name: str, node: Node, threads: int) -> None:
        super().__init__(make, name, node)
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._target: Any = None
        self.threads = [
            threading.Thread(
                target=self._context.copy().run,
                args=(self._work,),
                name=f"{name}-{number}",
                daemon=True,
            )
            for number in range(threads)
        ]
        self.threads[0].start()

    def _begin(self, job: _Job) -> None:
        self._jobs.put(job)

    def _end(self) -> None:
        for _ in self.threads:
            self._jobs.put(None)

    def _work(self) -> None:
        if threading.current_thread() is self.threads[0]:
            self._target = self._made()
            # Only now, because they must not find an actor without its object.
            for other in self.threads[1:]:
                other.start()
        while (job := self._jobs.get()) is not None:
            # Calls that were queued before the kill have failed already.
            if self._death is None:
                self._run(job)
        if threading.current_thread() is self.threads[0]:
            target, self._target = self._target, None
            if isinstance(target, Closable):
                try:
                    target.close()
                except Exception:
                    log.exception("%s could not be closed", self._name)

    def _run(self, job: _Job) -> None:
        try:
            for result in job.results:
                result.wait()
            answer = job.run(self._target)
            if job.put is not None:
                for item in answer:
                    job.put(item)
                answer = None
        except BaseException as error:
            self._failed(job, error)
        else:
            job.result.set(answer)


class _AsyncActor(_Actor):
    """An actor with async methods: its event loop runs in one thread.

    Args:
        calls: number of calls that may run at the same time.
    """

    def __init__(self, make: Callable[[], Any], name: str, node: Node, calls: int) -> None:
        super().__init__(make, name, node)
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._room = asyncio.Semaphore(calls)
        self._tasks: set[asyncio.Task[None]] = set()
        self._target: Any = None
        thread = threading.Thread(
            target=self._context.run, args=(self._work,), name=name, daemon=True
        )
        self.threads = [thread]
        thread.start()

    def _begin(self, job: _Job) -> None:
        self._schedule(lambda: self._start(job))

    def _end(self) -> None:
        self._schedule(self._ended.set)

    def _schedule(self, call: Callable[[], object]) -> None:
        try:
            # With the actor's context, not the caller's.
            self._loop.call_soon_threadsafe(call, context=self._context.copy())
        except RuntimeError:  # the loop is closed: the actor was killed
            assert self._death is not None

    def _start(self, job: _Job) -> None:
        task = self._loop.create_task(self._run(job), name=job.call.method)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._live())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _live(self) -> None:
        self._target = self._made()
        await self._ended.wait()
        await self._finish()

    async def _finish(self) -> None:
        """Cancel all calls and background tasks, and close the object."""
        await _cancel(self._tasks)
        target, self._target = self._target, None
        if isinstance(target, Closable):
            try:
                closing = target.close()
                if inspect.isawaitable(closing):
                    await asyncio.wait_for(closing, END_SECONDS)
            except Exception:
                log.exception("%s could not be closed", self._name)
        # After `close`, which may need its own background tasks.
        await _cancel(asyncio.all_tasks() - {asyncio.current_task()})

    async def _run(self, job: _Job) -> None:
        async with self._room:
            try:
                for result in job.results:
                    # Before the method starts, as Ray does: it must not block the loop on another
                    # actor.
                    await result
                answer = job.run(self._target)
                if inspect.isawaitable(answer):
                    answer = await answer
                elif inspect.isasyncgen(answer) and job.put is not None:
                    async for item in answer:
                        job.put(item)
                    answer = None
                elif job.put is not None:
                    for item in answer:
                        job.put(item)
                    answer = None
            except BaseException as error:
                self._failed(job, error)
            else:
                job.result.set(answer)


async def _cancel(tasks: Collection[asyncio.Task[Any] | None]) -> None:
    """Cancel tasks, and wait until they have ended."""
    ended = [task for task in tasks if task is not None]
    for task in ended:
        task.cancel()
    if ended:
        await asyncio.wait(ended, timeout=END_SECONDS)


def _value(argument: Any) -> Any:
    return argument.wait() if isinstance(argument, InProcessResult) else argument
