"""The positions of runs that wait in queues of Kueue, which are read in the background.

Kueue's visibility API may be slow or missing, and no run needs it. So a look takes the newest
answer and never waits. Each queue that a run waits in has one task: it asks every 20 s, and ends
when no run has waited in the queue for two minutes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from agenticrun_operator import errors
from agenticrun_operator.cluster import Kube
from agenticrun_operator.resources import workloads

log = logging.getLogger(__name__)

REFRESH_SECONDS = 20.0
"""Time between two questions about a queue. An answer serves all runs that wait in it."""
SHOWN_SECONDS = 2 * REFRESH_SECONDS
"""Age at which an answer is too old to be shown."""
FOLLOWED_SECONDS = 120.0
"""Time from the last look until a queue is forgotten. A run that waits is looked at every 30 s."""
PAUSE_SECONDS = 30.0
"""Time without questions after the API has failed."""
QUESTIONS = 8
"""Questions at the same time."""
_NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass
class _Queue:
    """A queue that a run waits in."""

    looked_at: datetime
    """The last time that a look needed its positions."""
    asked_at: datetime = _NEVER
    answered_at: datetime = _NEVER
    """When the question was asked that `positions` answers."""
    positions: Mapping[str, int] = field(default_factory=dict)
    """By the name of the Workload; only those of runs."""
    due: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to ask at once."""


class QueuePositions:
    """The newest positions in each queue that runs wait in."""

    def __init__(self, kube: Kube, clock: Callable[[], datetime]):
        """Create the collection.

        Args:
            kube: the apiserver.
            clock: returns the current time.
        """
        self._kube = kube
        self._clock = clock
        self._queues: dict[tuple[str, str], _Queue] = {}
        """By namespace and name."""
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(QUESTIONS)
        self._again_at = _NEVER
        """Time from which the API is asked again, after it has failed."""

    def of(self, namespace: str, queue: str, workload: str) -> int | None:
        """Return the position of a Workload that waits in a queue; None if it is not known.

        The first look at a queue only begins to ask.
        """
        key = (namespace, queue)
        known = self._queues.get(key)
        if known is None:
            known = self._queues[key] = _Queue(self._clock())
            task = asyncio.create_task(self._follow(key, known), name=f"positions {queue}")
            task.add_done_callback(lambda task: self._forget(key, task))
            self._tasks[key] = task
        known.looked_at = self._clock()
        if self._age(known.asked_at) >= REFRESH_SECONDS:
            known.due.set()
        shown = self._age(known.answered_at) < SHOWN_SECONDS
        return known.positions.get(workload) if shown else None

    async def stop(self) -> None:
        """Cancel all tasks and wait for them to end."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, key: tuple[str, str], queue: _Queue) -> None:
        """Ask for the positions in a queue again and again while runs wait in it."""
        while self._age(queue.looked_at) < FOLLOWED_SECONDS:
            async with self._turns:
                # Checked here, because the API may have failed before this turn came.
                if self._clock() >= self._again_at:
                    await self._ask(key, queue)
            queue.due.clear()
            # Not `wait_for`, which loses a cancellation if the event is set at the same time.
            with suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_SECONDS):
                    await queue.due.wait()

    async def _ask(self, key: tuple[str, str], queue: _Queue) -> None:
        queue.asked_at = asked_at = self._clock()
        found: Mapping[str, int] = {}
        try:
            found = await self._kube.queue_positions(*key)
        except errors.ClusterError as error:
            log.debug("no positions in queue %s: %s", "/".join(key), error)
            # An administrator may have left out this part of Kueue, or it is down. These two are
            # about this queue only.
            if not isinstance(error, errors.NotFound | errors.Denied):
                self._again_at = self._clock() + timedelta(seconds=PAUSE_SECONDS)
                return
        queue.answered_at = asked_at
        queue.positions = {
            name: number for name, number in found.items() if workloads.is_of_a_run(name)
        }

    def _forget(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        del self._queues[key], self._tasks[key]
        if not task.cancelled() and (error := task.exception()):
            log.error("the positions in queue %s cannot be read", "/".join(key), exc_info=error)

    def _age(self, moment: datetime) -> float:
        return (self._clock() - moment).total_seconds()
