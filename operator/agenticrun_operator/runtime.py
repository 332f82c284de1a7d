"""Creates the operator's parts and connects them."""

from __future__ import annotations

import asyncio
import logging
import time

import aiohttp
from aiohttp import web

from agenticrun_operator.cluster import (
    ClusterError,
    DirectTransport,
    HeadTransport,
    KubeClient,
    ProxyTransport,
    RunHead,
    connect,
)
from agenticrun_operator.lease import Leadership
from agenticrun_operator.metrics import LAST_EVENT, serve_metrics
from agenticrun_operator.reconcile_workers import ReconcileWorkers, resync
from agenticrun_operator.reconciler import Reconciler
from agenticrun_operator.settings import HeadAccess, Settings
from agenticrun_operator.workqueue import Key, WorkQueue

log = logging.getLogger(__name__)


class MissingApi(Exception):
    """The Kubernetes cluster does not serve a resource that the operator needs."""


class OperatorRuntime:
    """The parts of a running operator: queue, reconcile workers, leadership and metrics."""

    def __init__(self, settings: Settings):
        self._settings = settings
        self.queue = WorkQueue()
        self._last_event = time.monotonic()

    async def start(self) -> None:
        """Connect to the apiserver and start all background tasks.

        Raises:
            MissingApi: a CRD that the operator needs is not installed.
        """
        settings = self._settings
        self._kube = KubeClient(await connect(), settings.namespaces)
        await self._check_apis()
        self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        direct = settings.head_access is HeadAccess.DIRECT
        transport: HeadTransport = (
            DirectTransport(self._session) if direct else ProxyTransport(self._kube)
        )
        self._reconciler = Reconciler(
            self._kube, RunHead(transport), settings.images, settings.full_look_seconds
        )
        self._leadership = Leadership(
            self._kube, settings.lease_namespace, settings.lease_name, settings.identity
        )
        self.reconcile_workers = ReconcileWorkers(
            self.queue, self._reconciler.reconcile, self._leadership.held, settings.workers
        )
        self.reconcile_workers.start()
        self._metrics: web.AppRunner = await serve_metrics(settings.metrics_port)
        self._background = [
            asyncio.create_task(self._leadership.run(), name="lease"),
            asyncio.create_task(
                resync(self.queue, self._kube.list_run_keys, settings.resync_seconds), name="resync"
            ),
        ]

    async def stop(self) -> None:
        """Stop all tasks, release the lease and close the connections."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.reconcile_workers.stop()
        try:
            await self._leadership.release()
        except ClusterError as error:
            log.warning("cannot release the lease: %s", error)
        await self._metrics.cleanup()
        await self._session.close()
        await self._kube.close()

    def run_changed(self, key: Key, resource_version: str) -> None:
        """Handle a watch event of a run. Events of our own writes are ignored."""
        self._note_event()
        if not self._reconciler.is_own_write(key, resource_version):
            self.queue.add(key)

    def child_changed(self, key: Key) -> None:
        """Handle a watch event of a RayCluster or pod of the run."""
        self._note_event()
        self.queue.add(key)

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
        if dead or self.reconcile_workers.alive < self._settings.workers:
            raise RuntimeError(
                f"{self.reconcile_workers.alive} of {self._settings.workers} reconcile workers "
                f"run; ended background tasks: {dead}"
            )

    def _note_event(self) -> None:
        self._last_event = time.monotonic()
        LAST_EVENT.set_to_current_time()

    async def _check_apis(self) -> None:
        for path, what in (
            ("/apis/ray.io/v1", "KubeRay's CRDs (ray.io/v1)"),
            ("/apis/agenticrun.dev/v1alpha1", "the AgenticRun CRD"),
        ):
            answer = await self._kube.raw("GET", path)
            if answer.status == 404:
                raise MissingApi(
                    f"the Kubernetes cluster does not serve {what}: install the CRDs, "
                    "then start the operator"
                )
