"""One reconciliation of a run: observe, plan, apply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from agenticrun_api import AgenticRun, InvalidRun, Phase
from agenticrun_api.load import parse_served
from agenticrun_api.names import KIND
from agenticrun_operator.applying import Applier
from agenticrun_operator.cluster import (
    Conflict,
    Denied,
    Head,
    HeadAddress,
    Kube,
    NamespaceGone,
    NotFound,
    NotServed,
    Refused,
)
from agenticrun_operator.observed import Observed
from agenticrun_operator.observing import ObservedObjects, Observer
from agenticrun_operator.planning import (
    Submit,
    plan,
    plan_unreadable,
)
from agenticrun_operator.resources import Manifest, OperatorKey, WorkerImages
from agenticrun_operator.workqueue import Item, Key

RETRY_SECONDS = 0.2
"""Delay after a conflict: the run has changed since it was read, so it is read again."""


@dataclass(frozen=True)
class RunCache:
    """The last observation of a run, kept to save requests.

    A stale cache does no harm: a status write that is based on it fails, because it carries the old
    resourceVersion.
    """

    document: Manifest
    run: AgenticRun
    """The document, parsed once."""
    objects: ObservedObjects
    looked_at: datetime
    wrote_at: datetime | None = None
    job_trouble: str | None = None
    tokens_sent_at: datetime | None = None
    """Time at which this operator last created the Secret with the tokens, or found it there."""
    ended: tuple[str, str] | None = None
    """Submission id and end time of the newest attempt that this operator saw end."""


def utc_now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)


class Reconciler:
    """Reconciles runs. Everything that must survive a restart is in the runs' status, not here."""

    def __init__(
        self,
        kube: Kube,
        head: Head,
        images: WorkerImages,
        key: OperatorKey,
        full_look_seconds: float,
        clock: Callable[[], datetime] = utc_now,
    ):
        self._kube = kube
        self._observer = Observer(kube, head, key)
        self._applier = Applier(kube, head)
        self._images = images
        self._key = key
        self._full_look_seconds = full_look_seconds
        self._clock = clock
        self._cache: dict[Key, RunCache] = {}

    def is_own_write(self, key: Key, resource_version: str) -> bool:
        """Return True if this version was read or written here, so that its event is no change."""
        cached = self._cache.get(key)
        return (
            cached is not None
            and cached.document["metadata"]["resourceVersion"] == resource_version
        )

    async def reconcile(self, item: Item) -> float | None:
        """Observe the run, plan and apply.

        Returns:
            Seconds until the next look if no watch event comes earlier, or None for no next look.
        """
        cached = self._cache.get(item.key)
        fully = cached is None or item.changed or self._is_stale(cached)
        if fully:
            cached = await self._look_fully(item.key)
        if cached is None:
            return None
        try:
            return await self._step(item.key, cached, fully)
        except Conflict:
            self._cache.pop(item.key, None)
            return RETRY_SECONDS
        except NotFound:
            self._cache.pop(item.key, None)
            return None

    def _is_stale(self, cached: RunCache) -> bool:
        running = cached.document.get("status", {}).get("phase") == Phase.RUNNING.value
        return (
            not running
            or (self._clock() - cached.looked_at).total_seconds() > self._full_look_seconds
        )

    async def _look_fully(self, key: Key) -> RunCache | None:
        """Read the run and its objects. Return None if there is nothing to reconcile."""
        document = await self._kube.get(KIND, *key)
        before = self._cache.get(key)
        if (
            before
            and document
            and before.document["metadata"]["uid"] != document["metadata"]["uid"]
        ):
            before = None
        if document is None:
            self._cache.pop(key, None)
            return None
        try:
            run = parse_served(document)
        except InvalidRun as error:
            self._cache.pop(key, None)
            await self._handle_unreadable(document, error)
            return None
        objects = await self._observer.read_objects(run)
        now = self._clock()
        cached = (
            replace(before, document=document, run=run, objects=objects, looked_at=now)
            if before
            else RunCache(document, run, objects, now)
        )
        self._cache[key] = cached
        return cached

    async def _step(self, key: Key, cached: RunCache, fully: bool) -> float | None:
        run, observed = cached.run, await self._observe(cached)
        plan_ = plan(run, observed, self._clock(), self._images, self._key)
        if plan_.status and plan_.status.phase is not run.status.phase and not fully:
            # A phase change is decided only on freshly read objects.
            fresh = await self._look_fully(key)
            if fresh is None:
                return None
            cached, run = fresh, fresh.run
            observed = await self._observe(cached)
            plan_ = plan(run, observed, self._clock(), self._images, self._key)
        if isinstance(plan_.job, Submit) and not await self._may_submit(run, plan_.job):
            self._cache.pop(key, None)
            return RETRY_SECONDS
        try:
            await self._applier.make_tokens(plan_)
            if plan_.tokens:
                cached = replace(cached, tokens_sent_at=self._clock())
            await self._applier.make_children(plan_)
        except (Refused, Denied, NotServed, NamespaceGone) as error:
            plan_ = plan(run, observed, self._clock(), self._images, self._key, error)
        job = plan_.status.job if plan_.status else None
        if job and job.end_time:
            cached = replace(cached, ended=(job.submission_id, job.end_time))
        document = await self._applier.write_status(cached.document, plan_)
        wrote_at = self._clock() if plan_.status else cached.wrote_at
        if document is not cached.document:
            cached = replace(cached, document=document, run=parse_served(document))
        self._cache[key] = cached = replace(cached, wrote_at=wrote_at)
        head = await self._observer.head_address(run, cached.objects) if plan_.job else None
        address = head if isinstance(head, HeadAddress) else None
        trouble = await self._applier.act(plan_, document, address)
        self._cache[key] = replace(cached, job_trouble=trouble)
        return plan_.requeue_after

    async def _may_submit(self, run: AgenticRun, submit: Submit) -> bool:
        """Return True if the attempt cannot have been submitted before.

        If Ray does not know an attempt that is in the status, Ray may have just restarted. Only the
        head's incarnation, read after Ray's answer, shows this.
        """
        job = run.status.job
        if job is None or job.submission_id != submit.submission_id:
            return True
        objects = await self._observer.read_objects(run)
        head = Observed(pods=objects.pods).head(run.metadata.uid)
        return head is not None and head.incarnation == job.incarnation

    async def _observe(self, cached: RunCache) -> Observed:
        run, ended = cached.run, cached.ended
        job = run.status.job
        end_time = ended[1] if job and ended and ended[0] == job.submission_id else None
        return await self._observer.look(
            run,
            cached.objects,
            cached.job_trouble,
            cached.wrote_at,
            cached.tokens_sent_at,
            end_time,
        )

    async def _handle_unreadable(self, document: Manifest, error: InvalidRun) -> None:
        plan_ = plan_unreadable(document, error.errors, self._clock())
        stored = await self._applier.write_status(document, plan_)
        await self._applier.act(plan_, stored, None)
