"""Writes that admission webhooks may hold up: they run in the background.

A webhook may take 30 s, and the webhooks of one namespace may hang while all others are healthy. So
a look at a run waits for a moment only; then it reports that the apiserver has not answered, and
suspension, deadlines and deletion of the run take effect as usual. The write continues, and its end
causes the next look.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from agenticrun_operator import errors, metrics
from agenticrun_operator.workqueue import Key

PATIENCE_SECONDS = 5.0
"""Time for which a look waits for all of its writes together."""
WRITES = 64
"""Writes at the same time. The apiserver serves a few hundred requests at once, for all clients."""
WRITES_PER_NAMESPACE = 16
"""Writes at the same time in one namespace, so that it leaves the others their share."""


class Budget:
    """Limits what is done at the same time: in total, and in each namespace."""

    def __init__(self, total: int, per_namespace: int):
        self._total = asyncio.Semaphore(total)
        self._per_namespace = per_namespace
        self._namespaces: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()
        """Writes that hold or wait for a place, by namespace."""

    @asynccontextmanager
    async def place(self, namespace: str) -> AsyncIterator[None]:
        """Wait for a place and hold it.

        The namespace comes first: what waits for its turn there takes no place from others.
        """
        own = self._namespaces.setdefault(namespace, asyncio.Semaphore(self._per_namespace))
        self._users[namespace] += 1
        try:
            async with own, self._total:
                yield
        finally:
            self._users[namespace] -= 1
            # Namespaces come and go; their semaphores must not stay.
            if not self._users[namespace]:
                del self._users[namespace], self._namespaces[namespace]


@dataclass
class _Write:
    version: Hashable
    task: asyncio.Task[None]
    sent: asyncio.Event = field(default_factory=asyncio.Event)


class SlowWrites:
    """The writes that are under way."""

    def __init__(self, ended: Callable[[Key], None], budget: Budget | None = None):
        """Create the collection.

        Args:
            ended: called when a write ends that a look has reported as not answered.
            budget: limits the writes at the same time.
        """
        self._ended = ended
        self._budget = budget or Budget(WRITES, WRITES_PER_NAMESPACE)
        self._writes: dict[Key, dict[str, _Write]] = {}

    def deadline(self) -> float:
        """Return the time of the event loop until which a look that begins now waits."""
        return asyncio.get_running_loop().time() + PATIENCE_SECONDS

    async def finish(
        self,
        key: Key,
        name: str,
        version: Hashable,
        deadline: float,
        write: Callable[[], Awaitable[object]],
    ) -> None:
        """Begin the write unless it is under way, and wait for its end.

        Args:
            key: the run.
            name: the write, as a noun: `creation of RayCluster lake`.
            version: what the write is based on. One that is based on another version is replaced.
            deadline: the time of the event loop until which to wait.
            write: carries it out.

        Raises:
            Unanswered: it has not ended by the deadline.
            ClusterError: as `write`.
        """
        writes = self._writes.setdefault(key, {})
        # What it would write is out of date, and it may never end.
        if name in writes and writes[name].version != version:
            _cancel(writes.pop(name))
        known = writes.get(name)
        if known is None:
            # Distinguishes a write that waits for its turn from one that the apiserver has not
            # answered.
            sent = asyncio.Event()
            task = asyncio.create_task(self._carry_out(key[0], sent, write))
            known = writes[name] = _Write(version, task, sent)
            left = deadline - asyncio.get_running_loop().time()
            await asyncio.wait({task}, timeout=max(0.0, left))
            # Only then is a later look needed; a write that is done is reported right here.
            if not task.done():
                task.add_done_callback(lambda task: task.cancelled() or self._ended(key))
        if not known.task.done():
            if known.sent.is_set():
                raise errors.Unanswered(
                    f"the apiserver has not answered the {name} for {PATIENCE_SECONDS:.0f} s: "
                    "an admission webhook may be slow"
                )
            raise errors.Unanswered(
                f"the {name} waits for its turn: the apiserver has not answered "
                f"{WRITES_PER_NAMESPACE} others in namespace {key[0]}, or {WRITES} in all"
            )
        # Before `result`, which may raise: a failed write is begun again by the next look.
        writes.pop(name, None)
        known.task.result()

    def keep_only(self, key: Key, names: Collection[str] = ()) -> None:
        """Cancel the writes of a run that have other names: they are no longer wanted."""
        writes = self._writes.get(key, {})
        for name in [name for name in writes if name not in names]:
            _cancel(writes.pop(name))
        if not writes:
            self._writes.pop(key, None)

    async def stop(self) -> None:
        """Cancel all writes and wait for them to end."""
        tasks = [write.task for writes in self._writes.values() for write in writes.values()]
        for key in list(self._writes):
            self.keep_only(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry_out(
        self, namespace: str, sent: asyncio.Event, write: Callable[[], Awaitable[object]]
    ) -> None:
        async with self._budget.place(namespace):
            sent.set()
            try:
                await write()
            except errors.ClusterError as error:
                if not isinstance(error, (errors.Conflict, errors.NotFound)):  # seen before
                    metrics.WRITE_FAILURES.labels(error=type(error).__name__).inc()
                raise


def _cancel(write: _Write) -> None:
    if write.task.done():
        if not write.task.cancelled():
            write.task.exception()  # or asyncio reports that no one has read it
    else:
        write.task.cancel()
