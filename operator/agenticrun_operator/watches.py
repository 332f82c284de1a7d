"""Watches of runs, RayClusters and pods, each of which survives whatever happens to its resource.

What they see goes into a `WatchCache`, which reports the run that it belongs to.

A watch whose namespace or CRD is missing, or that may not list, retries until it can, and delays no
other watch; see docs/decisions/0002 for what kopf's watches do. A connection that broke or fell
silent is replaced, and the watch continues from the version that it has reached, without a list.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from agenticrun_api import names
from agenticrun_operator import errors, metrics
from agenticrun_operator.planning import times
from agenticrun_operator.resources import CLAIM_KIND, POLICY_KIND, Manifest
from agenticrun_operator.resources.workloads import WORKLOAD_KIND
from agenticrun_operator.watch_cache import WatchCache, WatchedObjects

FIRST_RETRY_SECONDS = 0.5
MAX_RETRY_SECONDS = 4.0
"""Longest delay until an apiserver, namespace or CRD that is there again is noticed."""
ABSENT_SECONDS = 30.0
"""Time after which an optional kind that is not installed is looked for again."""
_ABSENT = (errors.NotServed, errors.RightMissing)
JITTER = 0.2
ALL_NAMESPACES = "*"
"""Label of a watch of all namespaces. Prometheus puts that of the operator in place of nothing."""

log = logging.getLogger(__name__)


class WatchClient(Protocol):
    """The methods of the kube client that a watch needs."""

    async def list_objects(
        self, kind: str, namespace: str | None, label: str | None
    ) -> tuple[list[Manifest], str]: ...

    def watch_objects(
        self, kind: str, namespace: str | None, label: str | None, since: str
    ) -> AbstractAsyncContextManager[AsyncIterator[tuple[str, Manifest]]]: ...


def watch_all(
    client: WatchClient, watched: WatchedObjects, namespaces: Sequence[str], *, policies: bool
) -> list[Watch]:
    """Return the watches of runs and of their objects.

    Args:
        client: the kube client.
        watched: the caches that the watches fill.
        namespaces: the namespaces to watch; empty: the whole Kubernetes cluster.
        policies: True to watch NetworkPolicies, too.
    """
    children: dict[str, WatchCache[Any]] = {
        "RayCluster": watched.clusters,
        "Pod": watched.pods,
        CLAIM_KIND: watched.claims,
        WORKLOAD_KIND: watched.workloads,
    }
    if policies:
        children[POLICY_KIND] = watched.policies
    watches = []
    # With watchNamespaces the operator has rights in these only, so each has watches of its own.
    for where in namespaces or (None,):
        watches.append(Watch(client, names.KIND, where, None, watched.runs))
        for kind, cache in children.items():
            # Kueue need not be installed.
            optional = kind == WORKLOAD_KIND
            watches.append(Watch(client, kind, where, names.LABEL_RUN, cache, optional=optional))
    return watches


class Watch:
    """Lists and watches the objects of one kind, in one namespace or in all."""

    def __init__(
        self,
        client: WatchClient,
        kind: str,
        namespace: str | None,
        label: str | None,
        cache: WatchCache[Any],
        *,
        optional: bool = False,
    ):
        """Create a watch.

        Args:
            client: the kube client.
            kind: the kind of the objects.
            namespace: their namespace; None: all namespaces.
            label: the label that the objects must have; None: any object.
            cache: receives the objects of each list and each event.
            optional: True if it is no trouble that the kind is not installed here, or that the
                operator may not read it.
        """
        self._client = client
        self._kind = kind
        self._namespace = namespace
        self._label = label
        self._cache = cache
        self._optional = optional
        self._failures = 0
        self._trouble = ""
        self._version: str | None = None
        """The newest resourceVersion that was seen; None: the objects must be listed."""

    @property
    def name(self) -> str:
        """The kind and namespace, for messages."""
        return f"{self._kind}@{self._namespace or 'all namespaces'}"

    async def run(self) -> None:
        """List and watch until cancelled."""
        while True:
            try:
                if self._version is None:
                    where = (self._kind, self._namespace, self._label)
                    objects, version = await self._client.list_objects(*where)
                    # The version is set last: if the cache raises, the next try lists again.
                    self._cache.listed(self._namespace, objects)
                    self._version = version
                await self._follow()
                self._failures = 0  # it ended at its time
                await asyncio.sleep(FIRST_RETRY_SECONDS)  # not in a tight loop
                continue
            except Exception as error:  # whatever it is, it must not end the watch
                # Until the watch is back, decisions are made on reads from the apiserver.
                self._cache.lost(self._namespace)
                # A broken watch continues from its last version; after any other error the gap is
                # unknown.
                if not isinstance(error, errors.WatchBroken):
                    self._version = None
                # An optional kind, such as Kueue's, may be installed later.
                if self._optional and isinstance(error, _ABSENT):
                    # No alert about objects that this cluster need not have.
                    self._trouble, self._failures = "", 0
                    metrics.WATCHES_DOWN.labels(**self._labels).set(0)
                    metrics.WATCH_CONTACT.remove_by_labels(self._labels)
                    await asyncio.sleep(ABSENT_SECONDS)
                    continue
                # A version that is too old is normal after a long gap: the objects are listed
                # again.
                if not isinstance(error, errors.WatchExpired):
                    self._note_down(error)
            delay = times.backoff_seconds(self._failures, FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS)
            self._failures += 1
            # Jittered: all watches of all namespaces lose the apiserver together.
            await asyncio.sleep(delay * random.uniform(1 - JITTER, 1 + JITTER))

    async def _follow(self) -> None:
        """Watch from the newest version that was seen, until the watch ends."""
        assert self._version is not None
        where = (self._kind, self._namespace, self._label)
        async with self._client.watch_objects(*where, self._version) as events:
            if self._trouble:
                log.info("watch %s works again", self.name)
            self._trouble = ""
            self._note_contact()
            metrics.WATCHES_DOWN.labels(**self._labels).set(0)
            self._cache.resumed(self._namespace)
            async for kind, item in events:
                # Only an event shows that the watch works: an apiserver may accept and end it at
                # once.
                self._failures = 0
                self._note_contact()
                if kind == "DELETED":
                    self._cache.deleted(item)
                elif kind != "BOOKMARK":
                    self._cache.put(item)
                # Bookmarks bring newer versions too, so a quiet watch does not expire.
                self._version = item["metadata"]["resourceVersion"]

    def _note_contact(self) -> None:
        metrics.WATCH_CONTACT.labels(**self._labels).set_to_current_time()

    @property
    def _labels(self) -> dict[str, str]:
        return {"kind": self._kind, "namespace": self._namespace or ALL_NAMESPACES}

    def _note_down(self, error: Exception) -> None:
        """Log the trouble, once."""
        metrics.WATCHES_DOWN.labels(**self._labels).set(1)
        if str(error) == self._trouble:
            return
        self._trouble = str(error)
        bug = None if isinstance(error, errors.ClusterError) else error
        log.warning("watch %s retries: %s%s", self.name, error, self._advice(error), exc_info=bug)

    def _advice(self, error: Exception) -> str:
        match error:
            case errors.NotServed():
                what = "KubeRay and its CRDs" if self._kind == "RayCluster" else "the chart's CRDs"
                return f"; install {what}"
            case errors.Denied() | errors.NamespaceGone() if self._namespace:
                return (
                    f"; if namespace {self._namespace} is missing, create it and run helm upgrade, "
                    "or remove it from watchNamespaces"
                )
            case errors.Denied():
                return "; check the operator's ClusterRole"
        return ""
