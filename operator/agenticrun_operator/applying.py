"""Carries out a plan, in the plan's order.

If the operator crashes at any point in between, the next reconciliation completes the work.
"""

from __future__ import annotations

import asyncio
import functools
import logging

from agenticrun_api import AgenticRun, Reason, names
from agenticrun_api.load import repair_status
from agenticrun_operator import metrics
from agenticrun_operator.cluster import Head, HeadAddress, Kube
from agenticrun_operator.errors import (
    AlreadyExists,
    ClusterError,
    Conflict,
    Denied,
    HeadUnreachable,
    KubeUnavailable,
    NotFound,
    Refused,
    TooLarge,
)
from agenticrun_operator.planning import (
    Configure,
    Delete,
    JobAction,
    Plan,
    RequestStop,
    Stop,
    Submit,
)
from agenticrun_operator.resources import Child, Event, Manifest
from agenticrun_operator.slow_writes import SlowWrites
from agenticrun_operator.workqueue import Key

log = logging.getLogger(__name__)


class Applier:
    """Carries out plans."""

    def __init__(self, kube: Kube, head: Head, slow_writes: SlowWrites):
        self._kube = kube
        self._head = head
        self._slow_writes = slow_writes
        self._refused: set[str] = set()
        """Uids of the runs of which the apiserver has refused the whole status."""

    async def make_objects(self, run: AgenticRun, plan: Plan) -> None:
        """Correct NetworkPolicies, then create the Secret with the run's tokens and the children.

        The next reconciliation handles the objects that exist by then.

        Raises:
            Refused: the apiserver rejects an object as invalid.
            TooLarge: an object is too large.
            Denied: a quota, an admission policy or missing rights prevent it.
            WebhookUnavailable: an admission webhook fails.
            NotServed: KubeRay's CRD is not installed.
            NamespaceGone: the namespace is missing or being deleted.
            KubeUnavailable: the apiserver does not answer, or not yet.
        """
        objects = ((plan.tokens,) if plan.tokens else ()) + plan.create
        wanted = {f"creation of {Child.of(manifest)}": manifest for manifest in objects}
        changes = {f"change of {Child.of(manifest)}": manifest for manifest in plan.update}
        later = [manifest for manifest in (plan.cluster, plan.workload) if manifest]
        kept = {*wanted, *changes, *(f"change of {Child.of(manifest)}" for manifest in later)}
        kept |= {f"deletion of {delete.child}" for delete in plan.delete}
        # Writes of an earlier plan that are not wanted now must not come through later.
        self._slow_writes.keep_only(run.key, kept)
        version = run.metadata.uid, run.metadata.generation
        deadline = self._slow_writes.deadline()
        for name, manifest in changes.items():
            # If the run or the object has changed since, a new write replaces the old one.
            replaces = run.metadata.generation, manifest["metadata"]["resourceVersion"]
            replace = functools.partial(self._replace, manifest)
            await self._slow_writes.finish(run.key, name, replaces, deadline, replace)
        # One after the other: the Secret must exist before pods mount it.
        for name, manifest in wanted.items():
            create = functools.partial(self._create, manifest)
            try:
                await self._slow_writes.finish(run.key, name, version, deadline, create)
            except Denied as error:
                # A quota on Secrets denies what exists already, too.
                new = any(item["kind"] == "RayCluster" for item in plan.create)
                if manifest is not plan.tokens or new:
                    raise
                log.warning("cannot create Secret %s: %s", manifest["metadata"]["name"], error)

    async def change_cluster(self, run: AgenticRun, plan: Plan) -> None:
        """Store the RayCluster with other numbers of pods, if the plan has it.

        Raises:
            Conflict: it has changed since it was read.
            Refused: the apiserver rejects it as invalid.
            TooLarge: it is too large.
            Denied: rights are missing, as in an older chart, or an admission policy prevents it.
            WebhookUnavailable: an admission webhook fails.
            KubeUnavailable: the apiserver does not answer, or not yet.
        """
        if plan.cluster is None:
            return
        version = run.metadata.generation, plan.cluster["metadata"]["resourceVersion"]
        deadline = self._slow_writes.deadline()
        change = functools.partial(self._kube.put, plan.cluster)
        try:
            name = f"change of {Child.of(plan.cluster)}"
            await self._slow_writes.finish(run.key, name, version, deadline, change)
        except NotFound:
            return  # the next reconciliation creates it

    async def change_workload(self, run: AgenticRun, workload: Manifest) -> ClusterError | None:
        """Store the conditions of a Workload after the status of its run.

        Returns:
            The error, or None. The change is planned again.

        Raises:
            Conflict: it has changed since it was read.
        """
        version = workload["metadata"]["resourceVersion"]
        deadline = self._slow_writes.deadline()
        change = functools.partial(self._kube.put_status, workload)
        name = f"change of {Child.of(workload)}"
        try:
            await self._slow_writes.finish(run.key, name, version, deadline, change)
        except Conflict:
            raise
        except NotFound:
            return None  # the next reconciliation sees it
        except ClusterError as error:
            log.warning("the Workload of %s cannot be changed: %s", "/".join(run.key), error)
            return error
        return None

    async def write_status(self, document: Manifest, plan: Plan) -> Manifest:
        """Write the plan's status. After an exception, the rest of the plan must not be applied.

        If the apiserver refuses it, it is written once more without what comes from the run's own
        pods, so that nothing that they report can stop suspension, deadlines or deletion. If this
        is refused as well, nothing can be recorded, and so nothing may be done.

        Args:
            document: the metadata of the run that the plan was made for.
            plan: the plan.

        Returns:
            The run as it is stored now.

        Raises:
            Conflict: the run has changed since it was read.
            NotFound: the run no longer exists.
            Refused: the apiserver refuses both.
            TooLarge: both are too large.
            Denied: an admission policy or missing rights prevent it.
        """
        if plan.status is None:
            return document
        metrics.STATUS_WRITES.inc()
        try:
            return await self._store_all_or_without_reports(document, plan)
        except (Refused, TooLarge, Denied):
            metrics.REFUSED_STATUS_WRITES.inc()
            raise

    async def _store_all_or_without_reports(self, document: Manifest, plan: Plan) -> Manifest:
        assert plan.status is not None
        uid = document["metadata"]["uid"]
        try:
            stored = await self._kube.write_status(document, plan.status)
            self._refused.discard(uid)
            return stored
        except (Refused, TooLarge) as error:
            refusal = f"the apiserver refuses the status of the run: {error}"
        name = document["metadata"]["name"]
        log.warning("%s: %s; writing it without what its pods report", name, refusal)
        if uid not in self._refused:  # one event, not one for each look
            self._refused.add(uid)
            what = "it is written without what the pods of the run report"
            await self._report(
                document, Event(Reason.STATUS_REFUSED, f"{what}: {refusal}", "Warning")
            )
        metadata = document["metadata"]
        current = await self._kube.get(names.KIND, metadata["namespace"], metadata["name"])
        if current is None:
            raise NotFound(metadata["name"])
        # From the stored status, because the values in memory may be the ones that are refused.
        reduced = plan.without_reports(repair_status(current.get("status")))
        return await self._kube.write_status(document, reduced)

    def forget(self, run: AgenticRun) -> None:
        """Forget a run that no longer exists, and end its writes."""
        self._refused.discard(run.metadata.uid)
        self._slow_writes.keep_only(run.key)

    async def delete_and_report(self, plan: Plan, document: Manifest) -> dict[str, ClusterError]:
        """Carry out the deletions and post the events of a plan whose status is stored.

        Returns:
            The errors of deletions, by the uid of the object.
        """
        metadata, deadline = document["metadata"], self._slow_writes.deadline()
        key = metadata["namespace"], metadata["name"]
        # After the status is stored: an operator that crashes here repeats what it says.
        errors = await asyncio.gather(*(self._delete(key, item, deadline) for item in plan.delete))
        for event in plan.events:
            await self._report(document, event)
        found = zip(plan.delete, errors, strict=True)
        return {delete.uid: error for delete, error in found if error}

    async def _delete(self, key: Key, delete: Delete, deadline: float) -> ClusterError | None:
        child = delete.child
        write = functools.partial(
            self._kube.delete,
            child.kind,
            key[0],
            child.name,
            delete.uid,
            force=delete.force,
            propagation="Foreground" if delete.foreground else "Background",
        )
        try:
            await self._slow_writes.finish(key, f"deletion of {child}", delete, deadline, write)
        except ClusterError as error:
            log.warning("cannot delete %s: %s", child, error)
            return error
        return None

    async def act_on_job(self, action: JobAction, head: HeadAddress) -> str | None:
        """Carry out the action on the job of a plan whose status is stored.

        Returns:
            The error, or None. A failed action is planned again.
        """
        try:
            match action:
                case Submit():
                    # Before the submission: the driver asks for its settings when it starts.
                    if action.config:
                        await self._head.configure(head, action.config)
                    await self._head.submit(
                        head, action.submission_id, action.attempt, action.replicas
                    )
                    metrics.SUBMISSIONS.inc()
                case Configure():
                    await self._head.configure(head, action.config)
                case RequestStop():
                    await self._head.request_stop(head)
                case Stop():
                    await self._head.stop(head, action.submission_id)
        except HeadUnreachable as error:
            if isinstance(action, Submit):
                metrics.REFUSED_SUBMISSIONS.inc()
            log.warning("pod %s: %s", head.pod.name, error)
            return str(error)
        return None

    async def _report(self, document: Manifest, event: Event) -> None:
        try:
            await self._kube.post_event(document, event)
        except ClusterError as error:  # the status says the same
            log.warning("cannot post the event %s: %s", event.reason, error)

    async def _replace(self, manifest: Manifest) -> None:
        try:
            await self._kube.put(manifest)
        except (Conflict, NotFound) as error:  # the next reconciliation reads it again
            log.info("change of %s: %s", Child.of(manifest), error)

    async def _create(self, manifest: Manifest) -> None:
        try:
            await self._kube.create(manifest)
        except AlreadyExists:
            return
        except Conflict as error:  # another object has just used up the version of the quota
            metrics.CONFLICTS.inc()
            raise Denied(f"contention for a quota: {error}") from error
        except NotFound as error:  # it says nothing about the run
            raise KubeUnavailable(f"cannot create {manifest['kind']}: {error}") from error
