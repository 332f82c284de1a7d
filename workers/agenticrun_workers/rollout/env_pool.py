"""EnvPool: distributes groups over env workers and reruns the groups of a dead worker.

An environment that ends its process (`os._exit`, a crash in C) kills the env worker and all groups
that run there. A group that was running in two workers that died becomes a suspect. A worker runs
at most one suspect, together with groups that were not running in any dead worker. At the third
death the suspect is given up. So a crashing episode costs three workers and no other episode. With
`envs[].isolated` it costs only itself.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from agenticrun_workers.errors import RolloutFailed
from agenticrun_workers.inference.client import RequestServer
from agenticrun_workers.launch import (
    ActorDied,
    ActorHandle,
    OtherActorDied,
    Result,
)
from agenticrun_workers.rollout.groups import (
    Endpoints,
    EpisodeResult,
    GroupTask,
    Stores,
    VersionBounds,
)
from agenticrun_workers.serialization import pack, unpack
from agenticrun_workers.types import StopReason, Stream, Trajectory

if TYPE_CHECKING:
    from agenticrun_workers.rollout.env_worker import EnvWorker

log = logging.getLogger(__name__)

MAX_DEATHS = 10
"""Worker deaths in a row, without a finished episode, that end the attempt."""

SUSPECT_AFTER = 2
"""Worker deaths after which a group that was running there becomes a suspect."""


class RolloutBackend(Protocol):
    """Backend that runs groups of episodes."""

    async def run(self, task: GroupTask) -> list[EpisodeResult]:
        """Return one result per member, in the order of the task.

        With `task.stop_after` they come in the order of finishing.

        Raises:
            RolloutFailed: the workers cannot run episodes any more.
        """
        ...


class TrainingBackend(RolloutBackend, Protocol):
    """Backend that also stops episodes that have grown too old to be trained on."""

    def set_bounds(self, bounds: VersionBounds) -> None:
        """Stop training episodes with a token older than `bounds.oldest`; they end as `STALE`."""
        ...


@dataclass(slots=True)
class _Open:
    """A task that runs on a worker or waits for one."""

    task: GroupTask
    done: asyncio.Future[list[EpisodeResult]]
    results: dict[int, EpisodeResult] = field(default_factory=dict)
    """Results by member, in the order of finishing."""
    aborting: bool = False
    deaths: int = 0
    """Number of workers that died while running the task."""

    @property
    def suspect(self) -> bool:
        return self.deaths >= SUSPECT_AFTER

    @property
    def has_enough(self) -> bool:
        """True if the missing members are not needed."""
        return (
            self.task.stop_after is not None
            and sum(result.trainable for result in self.results.values()) >= self.task.stop_after
        )

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(member for member in self.task.members if member not in self.results)

    def finish(self) -> None:
        if not self.done.done():
            in_order = sorted(self.results) if self.task.stop_after is None else self.results
            self.done.set_result([self.results[member] for member in in_order])

    def fail_missing(self, error: BaseException) -> None:
        """End the missing members with env_error."""
        message = (
            f"{self.deaths + 1} env workers died while they played it: the environment "
            f"{self.task.tag!r} may end its process; set isolated: true in its entry of "
            f"spec.pipeline.envs ({_first_line(error)})"
        )
        for member in self.missing:
            trajectory = Trajectory(
                self.task.key(member), self.task.tag, (), StopReason.ENV_ERROR, error=message
            )
            self.results[member] = EpisodeResult.of(trajectory, attempt=self.task.attempt)
        self.finish()


@dataclass(slots=True, eq=False)
class _Worker:
    handle: ActorHandle[EnvWorker]
    number: int
    """From 1, and never used again."""
    open: dict[tuple[str, int, int], _Open] = field(default_factory=dict)
    outgoing: list[GroupTask] = field(default_factory=list)
    episodes: int = 0
    """Number of running episodes: the load."""

    def may_run(self, task: _Open) -> bool:
        """Return False if a death of this worker would have two possible causes.

        A suspect shares its worker only with groups that were not running in any dead worker. If
        the worker dies, the suspect is the cause.
        """
        return not any(
            other.deaths and task.deaths and (other.suspect or task.suspect)
            for other in self.open.values()
        )


class EnvPool:
    """A fixed number of env workers.

    Args:
        spawn: starts an env worker and sets it up; called again for each that dies.
        count: number of workers.
    """

    def __init__(self, spawn: Callable[[], Awaitable[ActorHandle[EnvWorker]]], count: int) -> None:
        self._spawn = spawn
        self._count = count
        self._workers: list[_Worker] = []
        self._numbers = itertools.count(1)
        self._waiting: list[_Open] = []
        self._flush_planned = False
        self._endpoints = Endpoints()
        self._bounds = VersionBounds()
        self._deaths = 0
        self._dead_with: Counter[str] = Counter()
        """Deaths in a row, by the tag of the environments that were running."""
        self._given_up: set[tuple[Stream, int]] = set()
        """Groups that were given up. A re-roll of one is a suspect from the start."""
        self._watchers: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._running = 0
        self._idle_since, self._idle_seconds = time.perf_counter(), 0.0

    @property
    def idle_seconds(self) -> float:
        """Time so far without a group to run."""
        now = time.perf_counter()
        return self._idle_seconds + (0.0 if self._running else now - self._idle_since)

    async def start(self) -> None:
        """Start all workers. Raises what `spawn` raises."""
        for handle in await asyncio.gather(*(self._spawn() for _ in range(self._count))):
            self._add(handle)

    async def run(self, task: GroupTask) -> list[EpisodeResult]:
        """See `RolloutBackend`."""
        if self._failure is not None:
            raise self._failure
        given_up = (task.stream, task.group) in self._given_up
        opened = _Open(
            task,
            asyncio.get_running_loop().create_future(),
            deaths=SUSPECT_AFTER if given_up else 0,
        )
        self._idle_seconds, self._running = self.idle_seconds, self._running + 1
        self._assign(opened)
        try:
            return await opened.done
        finally:
            self._running -= 1
            self._idle_since = time.perf_counter()
            for worker in self._workers:
                if worker.open.get(_name(task)) is opened:
                    del worker.open[_name(task)]
            self._assign_waiting()

    async def set_endpoints(
        self,
        engines: Mapping[str, ActorHandle[RequestServer]],
        stores: Stores,
    ) -> None:
        """Set the engines and stores of current and later workers. No group runs before this."""
        self._endpoints = Endpoints(self._endpoints.number + 1, engines, stores)
        calls = map(self._send_endpoints, self._workers)
        # `_watch` handles dead workers.
        await asyncio.gather(*calls, return_exceptions=True)

    def set_bounds(self, bounds: VersionBounds) -> None:
        """See `TrainingBackend`."""
        self._bounds = bounds
        for worker in self._workers:
            self._send_bounds(worker)

    async def stop(self) -> None:
        """Stop watching. The actors end with the Ray session."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)

    def _send_endpoints(self, worker: _Worker) -> Result[None]:
        endpoints = replace(self._endpoints, worker=worker.number)
        return worker.handle.call(lambda actor: actor.set_endpoints(endpoints))

    def _send_bounds(self, worker: _Worker) -> None:
        worker.handle.call(lambda actor: actor.set_bounds(self._bounds))

    def _add(self, handle: ActorHandle[EnvWorker]) -> None:
        worker = _Worker(handle, next(self._numbers))
        self._workers.append(worker)
        if self._endpoints.number:
            self._send_endpoints(worker)
        if self._bounds != VersionBounds():
            self._send_bounds(worker)
        watcher = asyncio.create_task(self._watch(worker), name="env-worker")
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        self._assign_waiting()

    def _assign_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for opened in waiting:
            if not opened.done.done():
                self._assign(opened)

    def _assign(self, opened: _Open) -> None:
        """Send a task to the least loaded worker that may run it, or let it wait."""
        able = [worker for worker in self._workers if worker.may_run(opened)]
        if not able:
            self._waiting.append(opened)
            return
        worker = min(able, key=lambda candidate: candidate.episodes)
        worker.open[_name(opened.task)] = opened
        worker.outgoing.append(replace(opened.task, members=opened.missing))
        worker.episodes += len(opened.missing)
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        for worker in self._workers:
            if worker.outgoing:
                tasks, worker.outgoing = worker.outgoing, []
                worker.handle.call(lambda actor: actor.submit(pack(tasks)))

    async def _watch(self, worker: _Worker) -> None:
        """Replace a worker when it dies.

        An error of a live worker or a failed replacement ends the attempt.
        """
        try:
            death = await self._collect_until_death(worker)
            self._remove_dead(worker, death)
            await asyncio.gather(
                *(
                    store.call(lambda keeper: keeper.refuse(worker.number))
                    for store in self._endpoints.stores
                )
            )
            self._reassign(worker, death)
            self._add(await self._replacement())
        except Exception as error:
            self._fail(worker, error)

    async def _replacement(self) -> ActorHandle[EnvWorker]:
        """Start another worker, also if the first ones die before they are ready.

        Raises:
            RolloutFailed: too many workers died in a row.
        """
        while True:
            try:
                return await self._spawn()
            except OtherActorDied:
                raise
            except ActorDied as death:
                log.warning("a new env worker is gone before it is ready: %s", _first_line(death))
                self._count_death(death)

    async def _collect_until_death(self, worker: _Worker) -> ActorDied:
        """Collect results until the worker dies, and return the error of its death.

        Raises:
            Exception: the worker is alive and its `collect` fails.
        """
        while True:
            try:
                collected = await worker.handle.poll(lambda actor: actor.collect())
            except OtherActorDied:
                raise  # the worker is alive
            except ActorDied as death:
                return death
            for result in unpack(collected):
                self._deliver(worker, result)

    def _remove_dead(self, worker: _Worker, death: ActorDied) -> None:
        """Remove a dead worker.

        Raises:
            RolloutFailed: too many workers died in a row.
        """
        self._workers.remove(worker)
        tags = {opened.task.tag for opened in worker.open.values()}
        log.warning(
            "an env worker is gone (%s): its %d groups of %s are played again",
            _first_line(death),
            len(worker.open),
            _listed(tags) or "no environment",
        )
        self._count_death(death, tags)

    def _count_death(self, death: ActorDied, tags: Iterable[str] = ()) -> None:
        self._deaths += 1
        self._dead_with.update(tags)
        if self._deaths >= MAX_DEATHS:
            raise RolloutFailed(
                f"{self._deaths} env workers died in a row without finishing an episode"
                f"{self._advice()}: {death}"
            )

    def _advice(self) -> str:
        """Name the environments that were running in most of the dead workers."""
        most = max(self._dead_with.values(), default=0)
        tags = {tag for tag, deaths in self._dead_with.items() if deaths == most}
        if not tags:
            return ""
        return (
            f", {most} of them while they ran {_listed(tags)}. If this environment ends its "
            "process (os._exit, a crash in C code), set isolated: true in its entry of "
            "spec.pipeline.envs: then it costs only the episode. The last death"
        )

    def _reassign(self, worker: _Worker, error: BaseException) -> None:
        """Assign the tasks of a dead worker to others. A suspect is given up."""
        for opened in worker.open.values():
            if opened.done.done():
                continue
            if opened.has_enough:
                opened.finish()
            elif opened.suspect:
                self._given_up.add((opened.task.stream, opened.task.group))
                opened.fail_missing(error)
            else:
                opened.deaths += 1
                self._assign(opened)

    def _deliver(self, worker: _Worker, result: EpisodeResult) -> None:
        self._deaths = 0
        self._dead_with.clear()
        worker.episodes -= 1
        opened = worker.open.get((result.key.stream, result.key.group, result.attempt))
        if opened is None or result.key.member not in opened.task.members:
            return  # the caller no longer waits for it
        opened.results[result.key.member] = result
        if not opened.missing:
            opened.finish()
        elif opened.has_enough and not opened.aborting:
            opened.aborting = True
            missing = [(opened.task.key(member), opened.task.attempt) for member in opened.missing]
            worker.handle.call(lambda actor: actor.abort(missing))

    def _fail(self, worker: _Worker, error: BaseException) -> None:
        self._failure = error
        for opened in (
            *worker.open.values(),
            *self._waiting,
            *(o for w in self._workers for o in w.open.values()),
        ):
            if not opened.done.done():
                opened.done.set_exception(error)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]


def _listed(tags: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(tags)))


def _name(task: GroupTask) -> tuple[str, int, int]:
    return task.stream, task.group, task.attempt
