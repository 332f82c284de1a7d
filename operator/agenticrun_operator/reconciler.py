"""One reconciliation of a run: observe, plan, apply."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from agenticrun_api import AgenticRun, ConditionType, InvalidRun, Metadata, Phase, names
from agenticrun_api.load import parse_served, repair_status
from agenticrun_operator import errors, metrics, planning, resources
from agenticrun_operator.applying import Applier
from agenticrun_operator.cluster import Head, HeadAddress, Kube
from agenticrun_operator.logs import note_attempt
from agenticrun_operator.observed import DeletionTrouble, JobTrouble, Observed
from agenticrun_operator.observing import ObservedObjects, Observer
from agenticrun_operator.planning import times
from agenticrun_operator.progress_watches import ProgressWatches
from agenticrun_operator.resources import Manifest, OperatorKey, WorkerImages
from agenticrun_operator.run_metrics import EndedRun, RunState, Totals
from agenticrun_operator.shard import ALL_RUNS, Shard
from agenticrun_operator.slow_writes import SlowWrites
from agenticrun_operator.watch_cache import WatchedObjects
from agenticrun_operator.workqueue import Item, Key

RETRY_SECONDS = 0.2
"""Delay after a first conflict: the run has changed since it was read, so it is read again."""
MAX_RETRY_SECONDS = 5.0
"""Longest delay after many conflicts in a row: the status is to be true 10 s after the last one."""
FIRST_ACTION_SECONDS = 2.0
MAX_ACTION_SECONDS = 60.0
"""Longest delay until an action on an attempt that its head does not accept is repeated."""
JITTER = 0.3
"""Share of that delay that is random."""

_REPORTED = (
    errors.Refused,
    errors.TooLarge,
    errors.Denied,
    errors.WebhookUnavailable,
    errors.KubeUnavailable,
)
"""Errors of a change of the RayCluster that the status shows."""

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class RunCache:
    """The last observation of a run, kept to save requests.

    A stale cache does no harm: a status write that is based on it fails, because it carries the old
    resourceVersion.
    """

    metadata: Manifest
    """Names, uid and resourceVersion of the run that was read or written last."""
    status_hash: int
    """Hash of its status as it was stored, which an older CRD may have cut."""
    run: AgenticRun
    """The run, parsed once."""
    objects: ObservedObjects
    looked_at: datetime
    children_read_at: datetime
    """Time at which the children beside the RayCluster were read."""
    totals: Totals
    """Its time, GPUs and steps so far, for metrics only."""
    wrote_at: datetime | None = None
    job_trouble: JobTrouble | None = None
    tokens_sent_at: datetime | None = None
    """Time at which this operator last created the Secret with the tokens, or found it there."""
    last_action: tuple[object, datetime] | None = None
    """The last action on the job that was carried out, and when."""
    deletions: Mapping[str, datetime] = field(default_factory=dict)
    """When an object was last asked to be deleted, by uid."""
    deletion_troubles: Mapping[str, DeletionTrouble] = field(default_factory=dict)
    """The deletions that failed, by the uid of the object."""
    cluster_changed_at: datetime | None = None
    """When this operator last changed the RayCluster."""
    policies_changed_at: datetime | None = None
    """When this operator last changed NetworkPolicies."""
    scaling_refusal: tuple[int, errors.ClusterError, datetime] | None = None
    """Generation of the run, and why and when the apiserver refused to change its RayCluster."""
    workload_trouble: tuple[errors.ClusterError, datetime] | None = None
    """Why and when the last change of the Workload failed."""
    ended: tuple[str, str] | None = None
    """Submission id and end time of the newest attempt that this operator saw end."""

    def still_there(self, deletions: Mapping[str, T]) -> dict[str, T]:
        """Return what is known of the deletions of objects that still exist, by their uids."""
        # The usual case, which needs no search through the objects.
        if not deletions:
            return {}
        children = (*self.objects.children.values(), *self.objects.policies.values())
        uids = {manifest["metadata"]["uid"] for manifest in children if manifest}
        uids |= {pod.uid for pod in self.objects.pods} | {self.metadata["uid"]}
        return {uid: found for uid, found in deletions.items() if uid in uids}


@dataclass(frozen=True, slots=True)
class _Ended:
    """The remains in memory of a run that has ended, until it changes."""

    version: str
    """Its resourceVersion."""
    metrics: EndedRun
    next_look: datetime | None
    """Time of the next look; None: only a change is a reason for one."""


class Reconciler:
    """Reconciles runs. Everything that must survive a restart is in the runs' status, not here."""

    def __init__(
        self,
        kube: Kube,
        head: Head,
        watched: WatchedObjects,
        images: WorkerImages,
        key: OperatorKey,
        full_look_seconds: float,
        slots: asyncio.Semaphore,
        slow_writes: SlowWrites,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        default_ttl: int | None = None,
        look_again: Callable[[Key], None] | None = None,
        shard: Shard = ALL_RUNS,
    ):
        """Create a reconciler.

        Args:
            kube: the apiserver.
            head: the head pods.
            watched: what the watches saw last.
            images: the worker images of this installation.
            key: the operator's key, from which the tokens of runs are derived.
            full_look_seconds: the age at which remembered objects are looked at again.
            slots: limits the runs that are read at the same time. Requests to head pods and writes
                are made outside the slots, so that an unanswered request delays no other run.
            slow_writes: carries out creations and changes of objects in the background.
            clock: returns the current time.
            default_ttl: spec.ttlSecondsAfterFinished of runs that do not set it, in seconds.
            look_again: called with a run that trains and has news; None: the progress of runs is
                not watched, and each look asks for it.
            shard: the part of all runs that is reconciled.
        """
        self._kube = kube
        self._watched = watched
        watches = ProgressWatches(head, look_again) if look_again else None
        self._observer = Observer(
            kube, head, watched, key, clock, images.operator_namespace, watches
        )
        self._slots = slots
        self._conflicts: dict[Key, int] = {}
        """Conflicts in a row."""
        self._applier = Applier(kube, head, slow_writes)
        self._images = images
        self._key = key
        self._full_look_seconds = full_look_seconds
        self._clock = clock
        self._default_ttl = default_ttl
        self._shard = shard
        self._cache: dict[Key, RunCache] = {}
        self._ended: dict[Key, _Ended] = {}
        """Runs that have ended and have no RayCluster and no pods."""
        self._unreadable: dict[Key, RunState | EndedRun] = {}
        """Runs that cannot be read."""

    async def stop(self) -> None:
        """End what runs in the background."""
        await self._observer.stop()

    def is_current(self, key: Key) -> bool:
        """Return True if the newest version of the run that the watch saw was read or written here.

        Then the watch event is no change.
        """
        version = self._watched.version(key)
        if ended := self._ended.get(key):
            return ended.version == version
        cached = self._cache.get(key)
        return cached is not None and cached.metadata["resourceVersion"] == version

    def known_keys(self) -> list[Key]:
        """Return the runs that are remembered here."""
        return [*self._cache, *self._ended, *self._unreadable]

    def run_states(self) -> list[RunState | EndedRun]:
        """Return what is known of each run, for metrics.

        A run that cannot be read and has not ended is only counted: its status is old.
        """
        return [
            *(RunState.of(item.run, item.totals) for item in self._cache.values()),
            *(item.metrics for item in self._ended.values()),
            *(state for state in self._unreadable.values() if state.ended),
        ]

    async def reconcile(self, item: Item) -> float | None:
        """Observe the run, plan and apply.

        Returns:
            Seconds until the next look if no watch event comes earlier, or None for no next look.
        """
        key = item.key
        if ended := self._ended.get(key):
            left = None
            if ended.next_look:
                left = (ended.next_look - self._clock()).total_seconds()
            due = left is not None and left <= 0
            if self.is_current(key) and not self._watched.children_may_exist(key) and not due:
                return left
        conflicts = self._conflicts.get(key, 0)
        cached = self._cache.get(key)
        # After a change, a silent head may answer again, so it is asked at once.
        if cached and item.changed:
            self._observer.ask_again(cached.run.metadata.uid)
        try:
            delay = await self._look_and_act(key, again=item.changed, fresh=conflicts > 0)
        except errors.Conflict as error:
            self._conflicts[key] = conflicts + 1
            metrics.CONFLICTS.inc()
            # A first conflict is normal: the run was edited while this looked.
            if conflicts:
                log.info("%s: conflict %d: %s", "/".join(key), conflicts + 1, error)
            return times.backoff_seconds(conflicts, RETRY_SECONDS, MAX_RETRY_SECONDS)
        except errors.NotFound:
            self._forget(key)
            return None
        self._conflicts.pop(key, None)
        self._release(key, delay)
        return delay

    def _release(self, key: Key, delay: float | None) -> None:
        """Keep only the metrics of a run that has ended and has no RayCluster and no pods.

        A look reads it again, if it changes or its time is over.
        """
        cached = self._cache.get(key)
        if cached is None or not cached.run.status.phase.finished:
            return
        # A finished run with pods is still being cleaned up.
        if self._watched.children_may_exist(key) or cached.deletion_troubles:
            return
        if cached.workload_trouble:  # to forget the run would end the write that gives quota back
            return
        state = RunState(key, cached.run.status)
        next_look = None if delay is None else self._clock() + timedelta(seconds=delay)
        # Read before `_forget`, which drops the cache.
        version = cached.metadata["resourceVersion"]
        self._forget(key)
        self._ended[key] = _Ended(version, EndedRun.of(state), next_look)

    async def _look_and_act(self, key: Key, again: bool, fresh: bool) -> float | None:
        """Look at the run and carry out a plan.

        The watches may be behind, so a plan that acts is made again from objects that were read
        after it was made, and only then carried out. Any other plan only writes what was seen.

        Args:
            key: the run.
            again: True if what is remembered of its objects may be old.
            fresh: True to read everything from the apiserver at once.
        """
        while True:
            # Only reading takes a slot: heads and webhooks that are slow must not block other runs.
            with metrics.SLOTS_USED.track_inprogress():
                async with self._slots:
                    cached, fresh = await self._look(key, again, fresh)
            if cached is None:
                return None
            if job := cached.run.status.job:
                note_attempt(job.attempt)
            observed = await self._observe(cached)  # other runs are reconciled while this waits
            plan = planning.plan(cached.run, observed, self._clock(), self._images, self._key)
            # A plan from a watch that is behind may change conditions and numbers, but not pods or
            # attempts.
            if fresh or not plan.acts(cached.run.status.phase):
                applied = await self._apply(key, cached, observed, plan)
                break
            fresh = True
        if applied is None:
            return RETRY_SECONDS
        before = cached.run.status
        plan, cached = applied
        seen = observed.own_progress(cached.run)
        cached.totals.count(before, cached.run, cached.objects.pods, seen, self._clock())
        await self._act_on_job(key, cached, plan)  # other runs are reconciled while this waits
        return plan.requeue_after

    def _read(
        self, document: Manifest, before: RunCache | None, metadata: Manifest, status_hash: int
    ) -> AgenticRun:
        """Return the run with the installation's defaults.

        It has the status that was written last as long as no one has changed it.

        Raises:
            InvalidRun: the run cannot be read.
        """
        # The run has not changed since it was parsed: its resourceVersion is the same.
        if before and before.metadata == metadata:
            return before.run
        run = parse_served(document)
        if self._default_ttl is not None and run.spec.ttl_seconds_after_finished is None:
            ttl = {"ttl_seconds_after_finished": self._default_ttl}
            run = run.model_copy(update={"spec": run.spec.model_copy(update=ttl)})
        # Someone else has written the status: the stored one counts.
        if before is None or before.status_hash != status_hash:
            return run
        return run.model_copy(update={"status": before.run.status})

    async def _look(self, key: Key, again: bool, fresh: bool) -> tuple[RunCache | None, bool]:
        """Return the run with its objects, and True if all was read from the apiserver just now.

        None if there is nothing to reconcile.
        """
        before = self._cache.get(key)
        trains = before and before.run.status.phase is Phase.RUNNING
        if before and trains and not (again or fresh) and self._age(before.looked_at) <= 0:
            return before, False
        current = before is not None and not fresh and self.is_current(key)
        if before and current:
            metadata, status_hash, run = before.metadata, before.status_hash, before.run
        else:
            document = await self._kube.get(names.KIND, *key)
            # An object without our label may have led to a run of another operator.
            if document is None or not self._shard.has(document["metadata"]["uid"]):
                self._forget(key)
                return None, True
            metadata, status_hash = _version_of(document)
            # Another run of the same name: what is remembered belongs to the deleted one.
            if before and before.metadata["uid"] != metadata["uid"]:
                self._forget(key)
                before = None
            try:
                run = self._read(document, before, metadata, status_hash)
            except InvalidRun as error:
                # Before `_forget`, which forgets that as well.
                reported = key in self._unreadable
                self._forget(key)
                await self._handle_unreadable(key, document, error, reported)
                return None, True
            self._forget_ended(key)
        known = before if before and not fresh and self._knows_children(before, run) else None
        # Saves the requests of a run that cannot start here.
        if run.status.phase is Phase.PENDING and self._images.missing_engine(run):
            objects = ObservedObjects({}, (), None)  # nothing can be done for it
        else:
            objects = await self._observer.read_objects(
                run, known.objects if known else None, fresh=fresh
            )
        now = self._clock()
        cached = replace(
            before or RunCache(metadata, status_hash, run, objects, now, now, Totals(now)),
            metadata=metadata,
            status_hash=status_hash,
            run=run,
            objects=objects,
            looked_at=now,
            children_read_at=known.children_read_at if known else now,
        )
        self._cache[key] = cached
        return cached, objects.fresh and not current

    def _knows_children(self, cached: RunCache, run: AgenticRun) -> bool:
        """Return True if the children beside the RayCluster were there a moment ago, and in order.

        No watch reports them.
        """
        in_order = cached.run.metadata.generation == run.metadata.generation and any(
            item.type == ConditionType.CLUSTER_PROVISIONED.value and item.status == "True"
            for item in run.status.conditions
        )
        children = cached.objects.children
        read = any(child.kind == "ConfigMap" for child in children)
        found = read and cached.objects.missing_code is None
        settled = all(
            manifest
            and (
                child.kind != resources.CLAIM_KIND
                or manifest.get("status", {}).get("phase") == "Bound"
            )
            for child, manifest in children.items()
        )
        return in_order and found and settled and self._age(cached.children_read_at) <= 0

    def _age(self, moment: datetime) -> float:
        """Return the seconds by which something is too old to be used."""
        return (self._clock() - moment).total_seconds() - self._full_look_seconds

    async def _apply(
        self, key: Key, cached: RunCache, observed: Observed, plan: planning.Plan
    ) -> tuple[planning.Plan, RunCache] | None:
        """Carry out a plan, except its action on the job.

        Returns:
            The plan, or the one that was made because the apiserver refused it, and what is
            remembered of the run now. None if the run must be looked at again first.
        """
        run = cached.run
        # An attempt that Ray forgot in a restart must not run twice on one head.
        if isinstance(plan.job, planning.Submit) and not await self._may_submit(run, plan.job):
            self._cache.pop(key, None)
            return None
        try:
            await self._applier.make_objects(run, plan)
            if plan.tokens:
                cached = replace(cached, tokens_sent_at=self._clock())
            if plan.update:
                cached = replace(cached, policies_changed_at=self._clock())
        # Planned again with the error, so that the status says what is missing and why.
        except errors.ClusterError as error:
            log.warning("%s: %s", "/".join(key), error)
            plan = planning.plan(run, observed, self._clock(), self._images, self._key, error)
        try:
            await self._applier.change_cluster(run, plan)
            if plan.cluster:
                cached = replace(cached, cluster_changed_at=self._clock())
        except _REPORTED as error:
            log.warning("%s: the RayCluster cannot be changed: %s", "/".join(key), error)
            if not isinstance(error, errors.Unanswered):  # else the change is under way
                refusal = run.metadata.generation, error, self._clock()
                cached = replace(cached, scaling_refusal=refusal)
            plan = planning.plan(
                run, observed, self._clock(), self._images, self._key, scaling_error=error
            )
        job = plan.status.job if plan.status else None
        if job and job.end_time:
            cached = replace(cached, ended=(job.submission_id, job.end_time))
        if plan.status:
            stored = {"metadata": cached.metadata}
            document = await self._applier.write_status(stored, plan)
            # Not the stored status: it lacks the fields that an older CRD does not have.
            written = {"metadata": Metadata.model_validate(document["metadata"])}
            metadata, status_hash = _version_of(document)
            cached = replace(
                cached,
                metadata=metadata,
                status_hash=status_hash,
                run=run.model_copy(update=written | {"status": plan.status}),
                wrote_at=self._clock(),
            )
        asked = {delete.uid: self._clock() for delete in plan.delete}
        cached = replace(
            cached,
            # Uids of objects that are gone would pile up.
            deletions=cached.still_there(cached.deletions) | asked,
        )
        self._cache[key] = cached  # known even if a request below ends this process
        failed = await self._applier.delete_and_report(plan, {"metadata": cached.metadata})
        troubles = self._deletion_troubles(cached, plan, failed)
        # A new kind of error belongs in the status, which was written before the deletion.
        if any(
            uid not in cached.deletion_troubles
            or type(cached.deletion_troubles[uid].error) is not type(error)
            for uid, error in failed.items()
        ):
            plan = replace(plan, requeue_after=RETRY_SECONDS)  # the status is to say it
        # Refused deletions are asked for again; unanswered ones may be under way.
        refused = {uid for uid in failed if not isinstance(failed[uid], errors.KubeUnavailable)}
        cached = self._cache[key] = replace(
            cached,
            deletion_troubles=troubles,
            deletions={uid: at for uid, at in cached.deletions.items() if uid not in refused},
        )
        if plan.workload:
            failure = await self._applier.change_workload(run, plan.workload)
            trouble = (failure, self._clock()) if failure else None
            cached = self._cache[key] = replace(cached, workload_trouble=trouble)
        return plan, cached

    def _deletion_troubles(
        self, cached: RunCache, plan: planning.Plan, failed: Mapping[str, errors.ClusterError]
    ) -> dict[str, DeletionTrouble]:
        """Return the deletions that have failed, after those of a plan."""
        now, before = self._clock(), cached.still_there(cached.deletion_troubles)
        asked = {delete.uid for delete in plan.delete}
        stay = {uid: trouble for uid, trouble in before.items() if uid not in asked}
        return stay | {
            uid: DeletionTrouble(error, before[uid].since if uid in before else now, now)
            for uid, error in failed.items()
        }

    async def _act_on_job(self, key: Key, cached: RunCache, plan: planning.Plan) -> None:
        if plan.job is None:
            return
        head = await self._observer.head_address(cached.run, cached.objects)
        followed = cached.run.status.job
        if isinstance(head, HeadAddress):
            refusal = await self._applier.act_on_job(plan.job, head)
        else:
            refusal = head.why if head else "the head pod has no address"
        if followed:
            trouble = self._trouble(cached.job_trouble, followed.submission_id, plan.job, refusal)
            done = None if trouble else (plan.job, self._clock())
            self._cache[key] = replace(cached, job_trouble=trouble, last_action=done)

    def _trouble(
        self,
        before: JobTrouble | None,
        submission_id: str,
        action: planning.JobAction,
        error: str | None,
    ) -> JobTrouble | None:
        """Return the trouble with an attempt after an action on it; None if it succeeded."""
        if error is None:
            return None
        now = self._clock()
        # Another attempt or another action starts its own count.
        if before and (before.submission_id, before.action) != (submission_id, action):
            before = None
        failures = before.count if before else 0
        wait = times.backoff_seconds(failures, FIRST_ACTION_SECONDS, MAX_ACTION_SECONDS)
        return JobTrouble(
            submission_id=submission_id,
            action=action,
            message=error,
            count=failures + 1,
            since=before.since if before else now,
            # Jittered, because one lost node silences the heads of many runs at once.
            retry_at=now + timedelta(seconds=wait * random.uniform(1 - JITTER, 1)),
        )

    async def _may_submit(self, run: AgenticRun, submit: planning.Submit) -> bool:
        """Return True if the attempt cannot have been submitted before.

        If Ray does not know an attempt that is in the status, Ray may have just restarted. Only the
        head's incarnation, read after Ray's answer, shows this.
        """
        job = run.status.job
        if job is None or job.submission_id != submit.submission_id:
            return True
        # This reads from the apiserver as well, so it takes a slot.
        async with self._slots:
            objects = await self._observer.read_objects(run, fresh=True)
        head = Observed(pods=objects.pods).head(run.metadata.uid)
        return head is not None and str(head.incarnation) == job.incarnation

    async def _observe(self, cached: RunCache) -> Observed:
        run, ended = cached.run, cached.ended
        job = run.status.job
        end_time = ended[1] if job and ended and ended[0] == job.submission_id else None
        refusal = cached.scaling_refusal
        # The user has changed the run since: the new numbers may be accepted.
        if refusal and refusal[0] != run.metadata.generation:
            refusal = None
        trouble = cached.job_trouble
        # Trouble with an earlier attempt says nothing about this one.
        if trouble and (job is None or job.submission_id != trouble.submission_id):
            trouble = None
        return replace(
            await self._observer.look(run, cached.objects),
            job_trouble=trouble,
            last_status_write=cached.wrote_at,
            tokens_sent_at=cached.tokens_sent_at,
            last_action=cached.last_action,
            deletions=cached.deletions,
            deletion_troubles=cached.deletion_troubles,
            cluster_changed_at=cached.cluster_changed_at,
            policies_changed_at=cached.policies_changed_at,
            scaling_refusal=refusal and refusal[1:],
            workload_trouble=cached.workload_trouble,
            end_time=end_time,
        )

    async def _handle_unreadable(
        self, key: Key, document: Manifest, error: InvalidRun, reported: bool
    ) -> None:
        self._note_unreadable(key, document)  # even if the write is refused
        plan = planning.plan_unreadable(document, error.errors, self._clock())
        if reported and plan.status is None:
            plan = planning.Plan()  # a damaged status cannot remember that an event was posted
        stored = await self._applier.write_status(document, plan)
        self._note_unreadable(key, stored)
        await self._applier.delete_and_report(plan, stored)

    def _note_unreadable(self, key: Key, document: Manifest | None) -> None:
        """Remember for metrics that a run cannot be read; None: it can, or it is gone.

        One that has ended, or is being deleted, does not wait for an operator that can read it.
        """
        self._unreadable.pop(key, None)
        if document:
            state = RunState(key, repair_status(document.get("status")))
            if state.ended:
                self._unreadable[key] = EndedRun.of(state)
            elif "deletionTimestamp" not in document["metadata"]:
                self._unreadable[key] = state
        metrics.UNREADABLE_RUNS.set(sum(not state.ended for state in self._unreadable.values()))

    def _forget_ended(self, key: Key) -> None:
        """Forget that a run could not be read, or had ended."""
        self._note_unreadable(key, None)
        self._ended.pop(key, None)

    def _forget(self, key: Key) -> None:
        self._forget_ended(key)
        self._conflicts.pop(key, None)
        cached = self._cache.pop(key, None)
        if cached:
            self._observer.forget(cached.run.metadata.uid)
            self._applier.forget(cached.run)


def _version_of(document: Manifest) -> tuple[Manifest, int]:
    """Return the metadata that a write needs, and the hash of the status as it is stored."""
    keep = ("name", "namespace", "uid", "resourceVersion")
    identity = {key: document["metadata"][key] for key in keep}
    return identity, hash(json.dumps(document.get("status"), sort_keys=True))
