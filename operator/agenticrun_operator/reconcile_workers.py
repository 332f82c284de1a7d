"""Reconcile workers, one for each run that is reconciled, and the periodic resync of all runs.

Their number is not limited, because most wait for the answer of a head pod: heads that do not
answer, however many, must delay no healthy run. `Reconciler` limits how many read and write at the
same time, and a run stays in the queue until one more may.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable

from agenticrun_operator import errors, metrics
from agenticrun_operator.logs import about_run
from agenticrun_operator.planning import times
from agenticrun_operator.workqueue import Item, Key, WorkQueue

MAX_BACKOFF_SECONDS = 60.0
"""Longest delay after an error that is a bug."""
MAX_UNAVAILABLE_SECONDS = 4.0
"""Longest delay after trouble with the apiserver, so that the status is true soon after it. Retries
are no more load than a run that trains, which is written every 2 s."""
JITTER = 0.1
"""Relative random spread of requested delays, so that many runs are not reconciled at once."""

log = logging.getLogger(__name__)


class ReconcileWorkers:
    """Takes runs off the queue while this process is the leader, each into a task of its own."""

    def __init__(
        self,
        queue: WorkQueue,
        reconcile: Callable[[Item], Awaitable[float | None]],
        leading: asyncio.Event,
        slots: asyncio.Semaphore,
    ):
        """Create it.

        Args:
            queue: the queue.
            reconcile: reconciles a run; returns the seconds until the next look.
            leading: set while this process is the leader.
            slots: those of the reconciler. While none is free, runs stay in the queue, so that
                its length shows how far behind the operator is.
        """
        self._queue = queue
        self._reconcile = reconcile
        self._leading = leading
        self._slots = slots
        self._failures: dict[Key, int] = {}
        self._began: dict[Key, float] = {}
        """When each present reconciliation began, the earliest first."""
        self._tasks: set[asyncio.Task[None]] = set()
        """The dispatcher, the running workers, and the workers that have died."""

    def start(self) -> None:
        """Start to take runs off the queue."""
        self._tasks = {asyncio.create_task(self._dispatch(), name="dispatcher")}

    async def stop(self) -> None:
        """Cancel all tasks and wait for them to end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def retry_failed(self) -> None:
        """Reconcile the runs that wait after a failure now: its cause may be over."""
        for key in self._failures:
            self._queue.add(key)

    async def resync(
        self,
        list_keys: Callable[[], Awaitable[list[Key]]],
        known_keys: Callable[[], list[Key]],
        seconds: float,
    ) -> None:
        """Enqueue all runs every `seconds`, in case a watch misses an event. Runs until cancelled.

        Args:
            list_keys: lists the runs that exist.
            known_keys: returns the runs that the operator remembers; it forgets deleted runs.
            seconds: the interval.
        """
        while True:
            await asyncio.sleep(seconds)
            try:
                keys = await list_keys()
            except errors.ClusterError as error:
                log.warning("resync: cannot list the runs: %s", error)
                continue
            # Deleted runs, too: their memory is freed by one more look.
            for key in {*keys, *known_keys()}:
                self._queue.add(key)

    @property
    def alive(self) -> bool:
        """True unless a task has ended with an error, which is a bug: the liveness probe fails."""
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    @property
    def busy(self) -> int:
        """Number of runs that are reconciled now."""
        return len(self._began)

    @property
    def longest_seconds(self) -> float:
        """Time that the longest of the present reconciliations has taken; 0 if there is none."""
        began = next(iter(self._began.values()), None)
        return 0.0 if began is None else time.perf_counter() - began

    async def _dispatch(self) -> None:
        while True:
            # Waits for a free slot without holding it: until then the run waits in the queue.
            async with self._slots:
                pass
            item = await self._queue.get()
            # After the queue: a standby takes one run and holds it, all others stay queued.
            await self._leading.wait()
            self._began[item.key] = time.perf_counter()
            name = f"reconcile {'/'.join(item.key)}"
            worker = asyncio.create_task(self._work(item), name=name)
            self._tasks.add(worker)
            worker.add_done_callback(self._ended)

    def _ended(self, worker: asyncio.Task[None]) -> None:
        # A worker that died stays in the set, where `alive` finds it.
        if not worker.cancelled() and worker.exception() is None:
            self._tasks.discard(worker)

    async def _work(self, item: Item) -> None:
        try:
            with about_run(*item.key):
                try:
                    delay = await self._reconcile(item)
                    self._failures.pop(item.key, None)
                    metrics.RECONCILES.labels(result="ok").inc()
                except Exception as error:  # an error in one run must not end the operator
                    delay = self._back_off(item.key, error)
        finally:
            metrics.RECONCILE_SECONDS.observe(time.perf_counter() - self._began.pop(item.key))
            # Before the delay is added: `done` queues again what changed during the look.
            self._queue.done(item.key)
        if delay is not None:
            self._queue.add_after(item.key, delay * random.uniform(1 - JITTER, 1 + JITTER))

    def _back_off(self, key: Key, error: Exception) -> float:
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        # Errors of the apiserver pass on their own; others are bugs, and are retried less often.
        unavailable = isinstance(error, errors.ClusterError)
        longest = MAX_UNAVAILABLE_SECONDS if unavailable else MAX_BACKOFF_SECONDS
        delay = times.backoff_seconds(failures, 0.5, longest)
        name = "/".join(key)
        if unavailable:
            metrics.RECONCILES.labels(result="unavailable").inc()
            log.warning("%s: %s; retrying in %.0f s", name, error, delay)
        else:
            metrics.RECONCILES.labels(result="error").inc()
            log.exception(
                "%s: reconciliation failed; retrying in %.0f s", name, delay, exc_info=error
            )
        return delay
