"""Creates the operator's parts and connects them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from agenticrun_operator import errors, metrics
from agenticrun_operator.cluster import Head, KubeClient, open_clients
from agenticrun_operator.lease import Leadership
from agenticrun_operator.operator_key import wait_for_key
from agenticrun_operator.reconcile_workers import ReconcileWorkers
from agenticrun_operator.reconciler import Reconciler
from agenticrun_operator.resources import OperatorKey
from agenticrun_operator.run_metrics import run_registry
from agenticrun_operator.settings import Settings
from agenticrun_operator.slow_writes import SlowWrites
from agenticrun_operator.watch_cache import WatchedObjects
from agenticrun_operator.watches import watch_all
from agenticrun_operator.workqueue import Key, WorkQueue

CHILD_EVENTS_SECONDS = 0.5
"""Shortest time between two looks at a run because of its RayCluster or pods."""

log = logging.getLogger(__name__)


@asynccontextmanager
async def running_operator(settings: Settings) -> AsyncIterator[OperatorRuntime]:
    """Connect to the apiserver, and follow the runs until the `with` block ends."""
    clients = open_clients(
        settings.namespaces, heads_by_proxy=settings.heads_by_proxy, shard=settings.part
    )
    async with clients as (kube, head):
        # Waits for a Secret that another replica, or the chart, may still be making.
        key = settings.key or await wait_for_key(kube, *settings.operator_key_secret.split("/"))
        runtime = OperatorRuntime(settings, kube, head, key)
        try:
            await runtime.start()
            yield runtime
        finally:
            await runtime.stop()


class OperatorRuntime:
    """The parts of a running operator: queue, reconcile workers, leadership and metrics.

    Args:
        settings: the settings.
        kube: the apiserver.
        head: the heads of runs.
        key: the operator's key, from which the tokens of runs are derived.
    """

    def __init__(self, settings: Settings, kube: KubeClient, head: Head, key: OperatorKey):
        self._settings = settings
        self._kube = kube
        self._queue = WorkQueue()
        self._watched = WatchedObjects(self._run_changed, self._child_changed)
        self._slow_writes = SlowWrites(self._queue.add)
        self._last_event = time.monotonic()
        # One semaphore for both: a run leaves the queue only when there is a slot to read it.
        slots = asyncio.Semaphore(settings.workers)
        self._reconciler = Reconciler(
            kube,
            head,
            self._watched,
            settings.images,
            key,
            settings.full_look_seconds,
            slots,
            self._slow_writes,
            default_ttl=settings.ttl_seconds_after_finished,
            # A question that waits would hold a connection of the apiserver.
            look_again=None
            if settings.heads_by_proxy
            else lambda run: self._queue.add_after(run, 0.0),
            shard=settings.part,
        )
        self._leadership = Leadership(
            kube,
            settings.lease_namespace,
            settings.lease_name,
            settings.identity,
            recovered=self._apiserver_recovered,
        )
        self._reconcile_workers = ReconcileWorkers(
            self._queue, self._reconciler.reconcile, self._leadership.held, slots
        )
        self._background: list[asyncio.Task[None]] = []
        self._pages: list[web.AppRunner] = []

    async def start(self) -> None:
        """Start all background tasks and serve the pages."""
        settings = self._settings
        # Before the watches, which enqueue from their first list on.
        self._reconcile_workers.start()
        metrics.SLOTS.set(settings.workers)
        metrics.SHARDS.set(settings.part.count)
        metrics.MEMORY_LIMIT.set(metrics.memory_limit())
        metrics.FOLLOWED_RUNS.set_function(lambda: len(self._reconciler.known_keys()))
        metrics.QUEUE_LENGTH.set_function(lambda: len(self._queue))
        metrics.QUEUE_OLDEST.set_function(lambda: self._queue.oldest_seconds)
        metrics.RECONCILE_LONGEST.set_function(lambda: self._reconcile_workers.longest_seconds)
        self._background += [
            asyncio.create_task(self._leadership.run(), name="lease"),
            asyncio.create_task(
                self._reconcile_workers.resync(
                    self._kube.list_run_keys, self._reconciler.known_keys, settings.resync_seconds
                ),
                name="resync",
            ),
            *(
                asyncio.create_task(watch.run(), name=f"watch {watch.name}")
                for watch in watch_all(
                    self._kube,
                    self._watched,
                    settings.namespaces,
                    policies=bool(settings.network_policy_namespace),
                )
            ),
        ]
        for port, path, page in (
            (settings.metrics_port, "/metrics", self._metrics),
            (settings.probe_port, "/healthz", self.health),
        ):
            self._pages.append(await metrics.serve_page(port, path, page))

    async def stop(self) -> None:
        """Stop all tasks and pages, and release the lease."""
        for task in self._background:
            task.cancel()
        # Watches and lease first: nothing enqueues or acquires while the workers end.
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._reconcile_workers.stop()
        await self._slow_writes.stop()
        await self._reconciler.stop()
        try:
            # Last: until here this operator may still be writing.
            await self._leadership.release()
        except errors.ClusterError as error:
            log.warning("cannot release the lease: %s", error)
        for page in self._pages:
            await page.cleanup()

    async def _metrics(self) -> web.Response:
        # A standby knows runs from its watches, but not their numbers, which would go stale.
        leads = self._leadership.held.is_set()
        return await metrics.metrics_page(
            lambda: run_registry(self._reconciler.run_states() if leads else [])
        )

    async def health(self) -> web.Response:
        """Answer the kubelet's probes: status 500 makes it restart the operator."""
        try:
            self.check_alive()
        except RuntimeError as error:
            return web.Response(status=500, text=f"{error}\n")
        busy, seconds = self._reconcile_workers.busy, round(self.seconds_since_event, 1)
        return web.json_response({"reconciling": busy, "secondsSinceEvent": seconds})

    def _apiserver_recovered(self) -> None:
        self._reconcile_workers.retry_failed()

    def _run_changed(self, run: Key) -> None:
        """Handle a watch event of a run. Events of our own writes are ignored."""
        self._note_event()
        if not self._reconciler.is_current(run):
            self._queue.add(run)

    def _child_changed(self, run: Key) -> None:
        """Handle a watch event of a RayCluster or pod of a run.

        A thousand pods that start make thousands of events.
        """
        self._note_event()
        self._queue.add_throttled(run, CHILD_EVENTS_SECONDS)

    @property
    def seconds_since_event(self) -> float:
        """Seconds since the newest watch event, or since the start if there was none."""
        return time.monotonic() - self._last_event

    def check_alive(self) -> None:
        """Check that all tasks are running.

        Raises:
            RuntimeError: a reconcile worker or background task has ended. This is a bug; the failed
                liveness probe makes the kubelet restart the operator.
        """
        dead = [task.get_name() for task in self._background if task.done()]
        if dead:
            raise RuntimeError(f"ended background tasks: {dead}")
        if not self._reconcile_workers.alive:
            raise RuntimeError("a reconcile worker has died")

    def _note_event(self) -> None:
        self._last_event = time.monotonic()
        metrics.LAST_EVENT.set_to_current_time()
