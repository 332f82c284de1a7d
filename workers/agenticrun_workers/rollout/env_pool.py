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
from typing import TYPE_CHECKING, Protocol, TypeAlias

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
from agenticrun_workers.tracing import GROUPS_RUNNING, count
from agenticrun_workers.types import EpisodeKey, StopReason, Stream, Trajectory

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

        Raises:
            RolloutFailed: the workers cannot run episodes any more.
        """
        ...


class TrainingBackend(RolloutBackend, Protocol):
    """Backend that also stops episodes that are no longer of use."""

    def set_bounds(self, bounds: VersionBounds) -> None:
        """Stop training episodes with a token older than `bounds.oldest`; they end as `STALE`."""
        ...

    def abort(self, group: int) -> None:
        """Stop all episodes of a training group; they end as `ABORTED`.

        Those that were lost with their worker have no result.
        """
        ...


_Group: TypeAlias = tuple[Stream, int]
_Run: TypeAlias = tuple[int, int]
"""A member of a group, and its attempt."""


@dataclass(slots=True, eq=False)
class _Open:
    """A task that runs on a worker or waits for one."""

    task: GroupTask
    done: asyncio.Future[list[EpisodeResult]]
    results: dict[int, EpisodeResult] = field(default_factory=dict)
    """Results by member."""
    aborting: bool = False
    deaths: int = 0
    """Number of workers that died while running the task."""

    @property
    def suspect(self) -> bool:
        return self.deaths >= SUSPECT_AFTER

    @property
    def group(self) -> _Group:
        return self.task.stream, self.task.group

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(member for member in self.task.members if member not in self.results)

    @property
    def runs(self) -> list[_Run]:
        """The runs that have not ended."""
        return [(member, self.task.attempt) for member in self.missing]

    def finish(self) -> None:
        if not self.done.done():
            self.done.set_result([self.results[member] for member in sorted(self.results)])

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
    open: dict[_Group, dict[_Run, _Open]] = field(default_factory=dict)
    """The tasks of running episodes."""
    outgoing: list[GroupTask] = field(default_factory=list)
    episodes: int = 0
    """Number of running episodes: the load."""

    @property
    def tasks(self) -> list[_Open]:
        """Each open task once."""
        return list(
            dict.fromkeys(opened for runs in self.open.values() for opened in runs.values())
        )

    def add(self, opened: _Open) -> None:
        """Begin a task."""
        self.open.setdefault(opened.group, {}).update(dict.fromkeys(opened.runs, opened))
        self.outgoing.append(replace(opened.task, members=opened.missing))
        self.episodes += len(opened.missing)

    def remove(self, opened: _Open) -> None:
        """Forget the runs of a task, if it has any here."""
        runs = self.open.get(opened.group, {})
        for run in [run for run, each in runs.items() if each is opened]:
            del runs[run]
        if not runs:
            self.open.pop(opened.group, None)

    def may_run(self, task: _Open) -> bool:
        """Return False if a death of this worker would have two possible causes.

        A suspect shares its worker only with groups that were not running in any dead worker. If
        the worker dies, the suspect is the cause.
        """
        return not task.deaths or not any(
            other.deaths and (other.suspect or task.suspect) and other.group != task.group
            for other in self.tasks
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
    def running(self) -> int:
        """Number of groups that are being run."""
        return self._running

    @property
    def workers(self) -> dict[int, ActorHandle[EnvWorker]]:
        """The workers that are alive, by number."""
        return {worker.number: worker.handle for worker in self._workers}

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
        count(GROUPS_RUNNING, self._running)
        self._assign(opened)
        try:
            return await opened.done
        finally:
            self._running -= 1
            count(GROUPS_RUNNING, self._running)
            self._idle_since = time.perf_counter()
            for worker in self._workers:
                worker.remove(opened)
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

    def abort(self, group: int) -> None:
        """See `TrainingBackend`."""
        for opened in self._waiting:
            if opened.group == (Stream.TRAIN, group):
                opened.finish()
        for worker in self._workers:
            runs = worker.open.get((Stream.TRAIN, group), {}).items()
            fresh = [(run, opened) for run, opened in runs if not opened.aborting]
            for _, opened in fresh:
                opened.aborting = True
            if fresh:
                self._send_abort(worker, [(opened.task.key(m), n) for (m, n), opened in fresh])

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

    def _send_abort(self, worker: _Worker, names: list[tuple[EpisodeKey, int]]) -> None:
        worker.handle.call(lambda actor: actor.abort(names))

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
        """Send a task to the worker of its group, else to the least loaded one, or let it wait."""
        able = [worker for worker in self._workers if worker.may_run(opened)]
        if not able:
            self._waiting.append(opened)
            return
        worker = next(
            (each for each in able if opened.group in each.open),
            min(able, key=lambda candidate: candidate.episodes),
        )
        worker.add(opened)
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
        tags = {opened.task.tag for opened in worker.tasks}
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
        for opened in worker.tasks:
            if opened.done.done():
                continue
            if opened.aborting:
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
        runs = worker.open.get((result.key.stream, result.key.group), {})
        opened = runs.get((result.key.member, result.attempt))
        if opened is None:
            return  # the caller no longer waits for it
        opened.results[result.key.member] = result
        if not opened.missing:
            opened.finish()

    def _fail(self, worker: _Worker, error: BaseException) -> None:
        self._failure = error
        for opened in (
            *worker.tasks,
            *self._waiting,
            *(o for w in self._workers for o in w.tasks),
        ):
            if not opened.done.done():
                opened.done.set_exception(error)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]


def _listed(tags: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(tags)))
