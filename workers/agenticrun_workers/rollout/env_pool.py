"""EnvPool: distributes groups over env workers and reruns the groups of a dead worker.

Workers may join and leave while groups run: `resize`.

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
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from typing_extensions import override

from agenticrun_workers.errors import RolloutFailed
from agenticrun_workers.inference.client import RequestServer
from agenticrun_workers.launch import (
    ActorDied,
    ActorHandle,
    ActorUnavailable,
    OtherActorDied,
    Result,
)
from agenticrun_workers.launch.liveness import enough_of
from agenticrun_workers.placement import in_leaving_order
from agenticrun_workers.rollout.groups import (
    Endpoints,
    EpisodeResult,
    EpisodeTask,
    TrainingBackend,
    VersionBounds,
)
from agenticrun_workers.rollout.trajectory_store import Stores
from agenticrun_workers.tracing import EPISODES_RUNNING, count
from agenticrun_workers.types import StopReason, Stream, Trajectory

if TYPE_CHECKING:
    from agenticrun_workers.rollout.env_worker import EnvWorker

log = logging.getLogger(__name__)

MAX_DEATHS = 10
"""Worker deaths in a row, without a finished episode, that end the attempt."""

DRAIN_SECONDS = 120.0
"""Time for a worker that leaves to end its episodes."""

SUSPECT_AFTER = 2
"""Worker deaths after which a group that was running there becomes a suspect."""


_Group: TypeAlias = tuple[Stream, int]
_Run: TypeAlias = tuple[int, int]
"""A member of a group, and its attempt."""


@dataclass(slots=True, eq=False)
class _Open:
    """A task that runs on a worker or waits for one."""

    task: EpisodeTask
    done: asyncio.Future[EpisodeResult]
    submitted: Result[None] | None = None
    """The call that takes it to its worker; None while it waits to be sent."""
    aborting: bool = False
    deaths: int = 0
    """Number of workers that died while running the task."""

    @property
    def suspect(self) -> bool:
        return self.deaths >= SUSPECT_AFTER

    @property
    def group(self) -> _Group:
        return self.task.key.stream, self.task.key.group

    @property
    def run(self) -> _Run:
        return self.task.key.member, self.task.attempt

    def finish(self, result: EpisodeResult) -> None:
        if not self.done.done():
            self.done.set_result(result)

    def abort(self) -> None:
        """End it without a token."""
        self._end(StopReason.ABORTED, "enough other members had finished")

    def give_up(self, death: BaseException) -> None:
        """End it with env_error."""
        self._end(
            StopReason.ENV_ERROR,
            f"{self.deaths + 1} env workers died while they played it: "
            f"{_likely_cause(death, repr(self.task.tag))} ({_first_line(death)})",
        )

    def _end(self, reason: StopReason, error: str) -> None:
        nothing = Trajectory(self.task.key, self.task.tag, (), reason, error=error)
        self.finish(EpisodeResult.of(nothing, attempt=self.task.attempt))


@dataclass(slots=True, eq=False)
class _Worker:
    handle: ActorHandle[EnvWorker]
    number: int
    """From 1, and never used again."""
    open: dict[_Group, dict[_Run, _Open]] = field(default_factory=dict)
    """The tasks of running episodes."""
    outgoing: list[_Open] = field(default_factory=list)
    episodes: int = 0
    """Number of running episodes: the load."""
    leaving: bool = False
    """True if it gets no more groups, and ends when its groups are done."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has no open task."""
    watcher: asyncio.Task[None] = field(init=False)
    """Collects its results."""
    bounds: VersionBounds = field(default_factory=VersionBounds)
    """The newest that it has."""
    sending_bounds: asyncio.Task[None] | None = None
    """Sends it newer bounds."""

    @property
    def tasks(self) -> list[_Open]:
        return [opened for runs in self.open.values() for opened in runs.values()]

    def add(self, opened: _Open) -> None:
        """Begin a task."""
        self.done.clear()
        opened.submitted = None
        self.open.setdefault(opened.group, {})[opened.run] = opened
        self.outgoing.append(opened)
        self.episodes += 1

    def remove(self, opened: _Open) -> None:
        """Forget a task, if it runs here."""
        runs = self.open.get(opened.group, {})
        if runs.get(opened.run) is opened:
            del runs[opened.run]
        if not runs:
            self.open.pop(opened.group, None)
        if not self.open:
            self.done.set()

    def may_run(self, task: _Open) -> bool:
        """Return False if a death of this worker would have two possible causes.

        A suspect shares its worker only with groups that were not running in any dead worker. If
        the worker dies, the suspect is the cause.
        """
        return not task.deaths or not any(
            other.deaths and (other.suspect or task.suspect) and other.group != task.group
            for other in self.tasks
        )


class EnvPool(TrainingBackend):
    """Env workers that share the groups of a run.

    Args:
        spawn: starts an env worker and sets it up; called again for each that dies.
        count: number of workers.
        node_of: returns the node of a worker, so that `resize` empties whole nodes.
        on_change: called when workers join, die or leave.
    """

    def __init__(
        self,
        spawn: Callable[[], Awaitable[ActorHandle[EnvWorker]]],
        count: int,
        node_of: Callable[[ActorHandle[EnvWorker]], str] = lambda _: "",
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._spawn = spawn
        self._count = count
        self._node_of = node_of
        self._on_change = on_change
        self._workers: list[_Worker] = []
        self._gone: list[_Worker] = []
        """Workers that are gone, with tasks that others do not have yet."""
        self._joining: set[asyncio.Task[None]] = set()
        # Numbers are never reused: the stores refuse a worker that is gone by its number.
        self._numbers = itertools.count(1)
        self._waiting: list[_Open] = []
        self._flush_planned = False
        self._endpoints = Endpoints()
        self._bounds = VersionBounds()
        self._deaths = 0
        self._dead_with: Counter[str] = Counter()
        """Deaths in a row, by the tag of the environments that were running."""
        self._given_up: set[_Group] = set()
        """Groups that were given up. A re-roll of one is a suspect from the start."""
        self._watchers: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._running = 0
        self.lost_episodes = 0
        """Number of episodes so far that began and were lost with their worker."""
        self._idle_since, self._idle_seconds = time.perf_counter(), 0.0

    @property
    def running(self) -> int:
        """Number of episodes that are being run."""
        return self._running

    @property
    def workers(self) -> dict[int, ActorHandle[EnvWorker]]:
        """The workers that are alive, by number."""
        return {worker.number: worker.handle for worker in self._workers}

    @property
    def count(self) -> int:
        """Number of workers that are wanted."""
        return self._count

    @property
    def joining(self) -> int:
        """Number of workers that start."""
        return len(self._joining)

    @property
    def leaving(self) -> int:
        """Number of workers that get no more groups, and have not ended yet."""
        return sum(worker.leaving for worker in self._workers)

    @property
    def idle_seconds(self) -> float:
        """Time so far without an episode to run."""
        now = time.perf_counter()
        return self._idle_seconds + (0.0 if self._running else now - self._idle_since)

    async def start(self, needed: int | None = None) -> None:
        """Start the workers. Raises what `spawn` raises.

        Args:
            needed: number of workers without which no episode can begin; the others join later.
                Default: all.
        """
        # All at once: pods come up in any order, and the first `needed` of them suffice.
        starts = [asyncio.ensure_future(self._spawn()) for _ in range(self._count)]
        late = await enough_of(starts, self._count if needed is None else needed)
        for start in starts:
            if start in late:
                self._begin_to_join(start)
            else:
                self._add(start.result())

    def resize(self, count: int) -> None:
        """Follow another number of workers, in the background.

        More workers get groups as soon as each has a pod. Leaving workers get no more groups, and
        end when their episodes have, or after `DRAIN_SECONDS`: other workers run these groups then.
        Whole nodes become empty first.
        """
        self._count = count
        self._settle()

    @override
    async def run(self, task: EpisodeTask) -> EpisodeResult:
        # A failure ends the attempt: a task that came later could wait for a worker forever.
        if self._failure is not None:
            raise self._failure
        # A re-roll of a group that killed workers runs alone from its start, so that it can take no
        # other group with it again.
        given_up = (task.key.stream, task.key.group) in self._given_up
        opened = _Open(
            task,
            asyncio.get_running_loop().create_future(),
            deaths=SUSPECT_AFTER if given_up else 0,
        )
        # Read before the count rises, because idle time passes only while the count is 0.
        self._idle_seconds, self._running = self.idle_seconds, self._running + 1
        count(EPISODES_RUNNING, self._running)
        self._assign(opened)
        try:
            return await opened.done
        finally:
            self._running -= 1
            count(EPISODES_RUNNING, self._running)
            self._idle_since = time.perf_counter()
            # The task may have moved to another worker, or its caller may have been cancelled.
            for worker in (*self._workers, *self._gone):
                worker.remove(opened)
            # A worker that runs one group less may be allowed to run a suspect now.
            self._assign_waiting()

    async def set_endpoints(
        self,
        engines: Mapping[str, ActorHandle[RequestServer]],
        stores: Stores,
        retired: Iterable[str] = (),
    ) -> None:
        """Set the engines and stores of current and later workers. No group runs before this.

        Args:
            engines: the engines by id.
            stores: the trajectory stores.
            retired: engines that have left alive.
        """
        # Numbered, because calls of an actor may overtake each other: workers ignore an older
        # number.
        number = self._endpoints.number + 1
        self._endpoints = Endpoints(number, engines, stores, retired=frozenset(retired))
        calls = map(self._send_endpoints, self._workers)
        # `_watch` handles dead workers.
        await asyncio.gather(*calls, return_exceptions=True)

    @override
    def set_bounds(self, bounds: VersionBounds) -> None:
        self._bounds = bounds
        for worker in self._workers:
            self._send_bounds(worker)

    @override
    def abort(self, group: int) -> None:
        for opened in self._waiting:
            # No worker has it yet, so the answer is ours to give.
            if opened.group == (Stream.TRAIN, group):
                opened.abort()
        for worker in self._gone:
            for opened in worker.open.get((Stream.TRAIN, group), {}).values():
                opened.aborting = True  # `_reassign` ends it
        for worker in self._workers:
            runs = worker.open.get((Stream.TRAIN, group), {})
            fresh = [opened for opened in runs.values() if not opened.aborting]
            for opened in fresh:
                opened.aborting = True
                # Still in our own queue: the worker has never seen it.
                if opened.submitted is None:
                    worker.outgoing.remove(opened)
                    worker.episodes -= 1
                    opened.abort()
            if sent := [opened for opened in fresh if opened.submitted is not None]:
                self._watch_over(_abort(worker.handle, sent))

    async def stop(self) -> None:
        """Stop watching. The actors end with the Ray session."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)

    def _send_endpoints(self, worker: _Worker) -> Result[None]:
        endpoints = replace(self._endpoints, worker=worker.number)
        return worker.handle.call(lambda actor: actor.set_endpoints(endpoints))

    def _send_bounds(self, worker: _Worker) -> None:
        """Send a worker the bounds, one call at a time: calls would pile up at a stopped one."""
        if worker.sending_bounds is None or worker.sending_bounds.done():
            worker.sending_bounds = self._watch_over(self._send_newer_bounds(worker))

    async def _send_newer_bounds(self, worker: _Worker) -> None:
        with suppress(ActorDied):  # `_watch` handles dead workers
            while worker.bounds != self._bounds:
                bounds = self._bounds
                await worker.handle.call(lambda actor: actor.set_bounds(bounds))
                worker.bounds = bounds

    def _add(self, handle: ActorHandle[EnvWorker]) -> None:
        worker = _Worker(handle, next(self._numbers))
        self._workers.append(worker)
        # Before the first endpoints there is nothing to send; `set_endpoints` reaches all workers.
        if self._endpoints.number:
            self._send_endpoints(worker)
        self._send_bounds(worker)
        worker.watcher = self._watch_over(self._watch(worker))
        self._assign_waiting()
        self._on_change()

    def _watch_over(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in the background. An error of it ends the attempt."""
        watcher = asyncio.create_task(work, name="env-worker")
        self._watchers.add(watcher)
        watcher.add_done_callback(self._ended)
        return watcher

    def _ended(self, watcher: asyncio.Task[None]) -> None:
        self._watchers.discard(watcher)
        if not watcher.cancelled() and (error := watcher.exception()) is not None:
            self._fail(error)

    def _assign_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for opened in waiting:
            if not opened.done.done():
                self._assign(opened)

    def _assign(self, opened: _Open) -> None:
        """Send a task to the worker of its group, else to the least loaded one, or let it wait."""
        able = [each for each in self._workers if not each.leaving and each.may_run(opened)]
        if not able:
            self._waiting.append(opened)
            return
        worker = next(
            (each for each in able if opened.group in each.open),
            min(able, key=lambda candidate: candidate.episodes),
        )
        worker.add(opened)
        # One call for all tasks of this turn of the event loop: calls of actors cost more than
        # tasks.
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        for worker in self._workers:
            if worker.outgoing:
                outgoing, worker.outgoing = worker.outgoing, []
                tasks = [opened.task for opened in outgoing]
                submitted = worker.handle.call(lambda actor: actor.submit(tasks))
                for opened in outgoing:
                    opened.submitted = submitted

    async def _watch(self, worker: _Worker) -> None:
        """Replace a worker when it dies.

        Raises:
            Exception: the worker is alive and its `collect` fails.
            RolloutFailed: too many workers died in a row.
        """
        death = await self._collect_until_death(worker)
        # First of all, so that no task is assigned to it while the stores answer.
        self._remove(worker)
        tags = {opened.task.tag for opened in worker.tasks}
        log.warning(
            "an env worker is gone (%s): its %d groups of %s are played again",
            _first_line(death),
            len(worker.open),
            _listed(tags) or "no environment",
        )
        self._count_death(death, tags)
        await self._hand_over(worker, death)
        self._settle()
        self._on_change()

    async def _retire(self, worker: _Worker) -> None:
        """End a worker once its episodes have ended, or after `DRAIN_SECONDS`.

        The stores refuse what it sends after that, as if it had died.
        """
        # After the time limit the worker leaves with its episodes, which run again elsewhere.
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                if worker.open:
                    await worker.done.wait()
        if worker not in self._workers:
            return  # it has died while it drained
        log.info("an env worker leaves, %d stay", self._count)
        if worker.open:
            log.warning(
                "an env worker leaves before its episodes ended: %d groups are played again",
                len(worker.open),
            )
        self._remove(worker)
        # Before the kill, so that this death is neither counted nor followed by a replacement.
        worker.watcher.cancel()
        worker.handle.kill()
        await self._hand_over(worker)
        self._on_change()

    def _remove(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._gone.append(worker)

    async def _hand_over(self, worker: _Worker, death: BaseException | None = None) -> None:
        """Give the tasks of a worker that is gone to others. `death`: see `_reassign`."""
        # Before any other worker runs these episodes: a late trajectory of this one must not
        # replace theirs.
        await self._refuse(worker)
        self._gone.remove(worker)
        self._reassign(worker, death)

    async def _refuse(self, worker: _Worker) -> None:
        """Make the stores refuse what a worker that is gone may still send.

        They delete what came from its open tasks, before another worker plays these again.
        """
        # Only episodes without a result: the tokens of the others are complete and stay.
        lost = {opened.task.key for opened in worker.tasks if not opened.done.done()}
        calls = (
            store.call(lambda actor: actor.refuse(worker.number, lost))
            for store in self._endpoints.stores
        )
        await asyncio.gather(*calls)

    def _settle(self) -> None:
        """Let workers join or leave until as many stay as are wanted."""
        staying = [worker for worker in self._workers if not worker.leaving]
        surplus = len(staying) + len(self._joining) - self._count
        for _ in range(-surplus):
            self._begin_to_join()
        # Workers that still start leave first: they have no episodes to drain.
        for joining in list(self._joining)[: max(surplus, 0)]:
            self._joining.remove(joining)
            joining.cancel()
            surplus -= 1
        # Whole nodes become empty first, because only then can a cluster give them back.
        nodes = {worker: self._node_of(worker.handle) for worker in staying}
        for worker in in_leaving_order(nodes)[: max(surplus, 0)]:
            worker.leaving = True
            self._watch_over(self._retire(worker))

    def _begin_to_join(self, start: Awaitable[ActorHandle[EnvWorker]] | None = None) -> None:
        joining = self._watch_over(self._join(start))
        self._joining.add(joining)
        joining.add_done_callback(self._joining.discard)

    async def _join(self, start: Awaitable[ActorHandle[EnvWorker]] | None) -> None:
        """Add another worker: the one that `start` starts, or a new one.

        Raises:
            RolloutFailed: too many workers died in a row before they were ready.
        """
        handle: ActorHandle[EnvWorker] | None = None
        while handle is None:
            try:
                handle = await (start or self._spawn())
            # The new worker is alive, but an actor that it needs is dead: another start would fail,
            # too.
            except OtherActorDied:
                raise
            except ActorDied as death:
                log.warning("a new env worker is gone before it is ready: %s", _first_line(death))
                self._count_death(death)
                start = None
        # From here on it is a worker: `_settle` must neither count it twice nor cancel this task.
        current = asyncio.current_task()
        assert current is not None
        self._joining.discard(current)
        self._add(handle)

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
            for result in collected:
                self._deliver(worker, result)

    def _count_death(self, death: ActorDied, tags: Iterable[str] = ()) -> None:
        self._deaths += 1
        self._dead_with.update(tags)
        if self._deaths >= MAX_DEATHS:
            raise RolloutFailed(
                f"{self._deaths} env workers died in a row without finishing an episode"
                f"{self._advice(death)}: {death}"
            )

    def _advice(self, death: ActorDied) -> str:
        """Name the environments that were running in most of the dead workers."""
        most = max(self._dead_with.values(), default=0)
        tags = {tag for tag, deaths in self._dead_with.items() if deaths == most}
        if not tags:
            return ""
        return (
            f", {most} of them while they ran {_listed(tags)}: "
            f"{_likely_cause(death, _listed(tags))}. The last death"
        )

    def _reassign(self, worker: _Worker, death: BaseException | None = None) -> None:
        """Assign the tasks of a worker that is gone to others. If it has died, give up a suspect.

        Args:
            worker: the worker.
            death: the error of its death; None if it has left.
        """
        for opened in worker.tasks:
            if opened.done.done():
                continue
            # A task that was still in our queue had not begun, so nothing of it is lost.
            self.lost_episodes += opened.submitted is not None
            if opened.aborting:
                opened.abort()
            elif death is not None and opened.suspect:
                self._given_up.add(opened.group)
                opened.give_up(death)
            else:
                opened.deaths += death is not None
                self._assign(opened)

    def _deliver(self, worker: _Worker, result: EpisodeResult) -> None:
        # Workers that finish episodes are not broken: only deaths in a row end the attempt.
        self._deaths = 0
        self._dead_with.clear()
        worker.episodes -= 1
        runs = worker.open.get((result.key.stream, result.key.group), {})
        opened = runs.get((result.key.member, result.attempt))
        if opened is not None:  # else the caller no longer waits for it
            opened.finish(result)

    def _fail(self, error: BaseException) -> None:
        """End all tasks, also those of workers that are gone."""
        self._failure = error
        for opened in (
            *self._waiting,
            *(o for w in (*self._workers, *self._gone) for o in w.tasks),
        ):
            if not opened.done.done():
                opened.done.set_exception(error)


async def _abort(worker: ActorHandle[EnvWorker], episodes: list[_Open]) -> None:
    """Stop episodes on their worker, which must know them first: calls may overtake each other."""
    calls = {opened.submitted for opened in episodes if opened.submitted is not None}
    await asyncio.gather(*calls, return_exceptions=True)  # the pool notices a worker that is dead
    names = [(opened.task.key, opened.task.attempt) for opened in episodes]
    # Not awaited: the results say how the episodes ended, and `_watch` notices a dead worker.
    worker.call(lambda actor: actor.abort(names))


def _likely_cause(death: BaseException, tags: str) -> str:
    """Return what in these environments ends env workers, and what to do."""
    if isinstance(death, ActorUnavailable):
        return (
            f"an async judge, agent or environment of {tags} may block their event loop, or one "
            "with blocking = False: write it as a plain def, which runs in a thread; the logs of "
            "the env workers (actors/) name file and line"
        )
    return (
        f"the environment {tags} may end its process; set isolated: true in its entry of "
        "spec.pipeline.envs, then a crash costs only the episode"
    )


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]


def _listed(tags: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(tags)))
