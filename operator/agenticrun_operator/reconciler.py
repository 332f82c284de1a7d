"""One reconciliation: observe, plan, apply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from agenticrun_api import AgenticRun, InvalidRun, Phase
from agenticrun_api.load import parse_run
from agenticrun_api.names import KIND
from agenticrun_operator.applying import Applier
from agenticrun_operator.cluster import Conflict, Denied, Head, Kube, NotFound, Refused
from agenticrun_operator.observing import Observer, Surroundings
from agenticrun_operator.planning import (
    Observed,
    Plan,
    Submit,
    plan,
    plan_denied,
    plan_refused,
    plan_unreadable,
)
from agenticrun_operator.resources import Manifest, WorkerImages
from agenticrun_operator.workqueue import Item, Key

RETRY_SECONDS = 0.2
"""After a conflict: the run has changed under us, so look again."""


@dataclass(frozen=True)
class Memory:
    """The last look at a run. Only ever saves requests: whatever is decided on it is checked by the resourceVersion of the write."""

    document: Manifest
    around: Surroundings
    looked_at: datetime
    wrote_at: datetime | None = None
    job_trouble: str | None = None


def utc_now() -> datetime:
    return datetime.now(UTC)


class Reconciler:
    """Reconciles keys. Holds no truth: everything that matters is in the runs' status."""

    def __init__(
        self,
        kube: Kube,
        head: Head,
        images: WorkerImages,
        full_look_seconds: float,
        clock: Callable[[], datetime] = utc_now,
    ):
        self._kube = kube
        self._observer = Observer(kube, head)
        self._applier = Applier(kube, head)
        self._images = images
        self._full_look_seconds = full_look_seconds
        self._clock = clock
        self._memory: dict[Key, Memory] = {}

    def knows(self, key: Key, resource_version: str) -> bool:
        """Whether this version of the run was read or written here, so that its watch event is no news."""
        memory = self._memory.get(key)
        return (
            memory is not None
            and memory.document["metadata"]["resourceVersion"] == resource_version
        )

    async def reconcile(self, item: Item) -> float | None:
        """Take the run one step on. Returns after how many seconds to look again, if nothing happens before."""
        memory = self._memory.get(item.key)
        fully = memory is None or item.changed or self._is_stale(memory)
        if fully:
            memory = await self._look_fully(item.key)
        if memory is None:
            return None
        try:
            return await self._step(item.key, memory, fully)
        except Conflict:
            self._memory.pop(item.key, None)
            return RETRY_SECONDS
        except NotFound:
            self._forget(item.key)
            return None

    def _is_stale(self, memory: Memory) -> bool:
        running = memory.document.get("status", {}).get("phase") == Phase.RUNNING.value
        return (
            not running
            or (self._clock() - memory.looked_at).total_seconds() > self._full_look_seconds
        )

    async def _look_fully(self, key: Key) -> Memory | None:
        """Read everything anew; None when there is nothing to reconcile."""
        document = await self._kube.get(KIND, *key)
        before = self._memory.get(key)
        if document is None:
            self._forget(key)
            return None
        try:
            run = parse_run(document)
        except InvalidRun as error:
            await self._give_up(document, error)
            return None
        around = await self._observer.surroundings(run)
        now = self._clock()
        memory = (
            replace(before, document=document, around=around, looked_at=now)
            if before
            else Memory(document, around, now)
        )
        self._memory[key] = memory
        return memory

    async def _step(self, key: Key, memory: Memory, fully: bool) -> float | None:
        run = parse_run(memory.document)
        plan_ = await self._plan(run, memory)
        if plan_.status and plan_.status.phase is not run.status.phase and not fully:
            fresh = await self._look_fully(key)  # a decision of weight is made on a full look only
            if fresh is None:
                return None
            memory, run = fresh, parse_run(fresh.document)
            plan_ = await self._plan(run, memory)
        if isinstance(plan_.job, Submit) and not await self._may_submit(run, plan_.job):
            self._memory.pop(key, None)
            return RETRY_SECONDS
        try:
            await self._applier.make_children(run, plan_)
            await self._applier.apply_children(plan_, memory.around.children)
        except Refused as error:
            plan_ = plan_refused(run, str(error), self._clock())
        except Denied as error:
            plan_ = plan_denied(run, str(error), self._clock())
        document = await self._applier.write_status(memory.document, plan_)
        wrote_at = self._clock() if plan_.status else memory.wrote_at
        self._memory[key] = memory = replace(memory, document=document, wrote_at=wrote_at)
        head = await self._observer.head_address(run, memory.around) if plan_.job else None
        trouble = await self._applier.act(plan_, document, head)
        self._memory[key] = replace(memory, job_trouble=trouble)
        return plan_.requeue_after

    async def _may_submit(self, run: AgenticRun, submit: Submit) -> bool:
        """Whether an attempt has not been submitted before.

        Ray that does not know a stored attempt may be Ray that has just restarted. Only the head's incarnation, read after
        Ray's answer, tells.
        """
        job = run.status.job
        if job is None or job.submission_id != submit.submission_id:
            return True
        around = await self._observer.surroundings(run)
        head = Observed(pods=around.pods).head(run.metadata.uid)
        return head is not None and head.incarnation == job.incarnation

    async def _plan(self, run: AgenticRun, memory: Memory) -> Plan:
        observed = await self._observer.look(
            run, memory.around, memory.job_trouble, memory.wrote_at
        )
        return plan(run, observed, self._clock(), self._images)

    async def _give_up(self, document: Manifest, error: InvalidRun) -> None:
        metadata = document["metadata"]
        cluster = await self._kube.get("RayCluster", metadata["namespace"], metadata["name"])
        plan_ = plan_unreadable(document, error.errors, cluster, self._clock())
        stored = await self._applier.write_status(document, plan_)
        await self._applier.act(plan_, stored, None)

    def _forget(self, key: Key) -> None:
        memory = self._memory.pop(key, None)
        if memory:
            self._observer.forget(memory.document["metadata"]["uid"])
