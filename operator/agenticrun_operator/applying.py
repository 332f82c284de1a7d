"""Carries out a plan, in the plan's order.

If the operator crashes at any point in between, the next reconciliation completes the work.
"""

from __future__ import annotations

import logging

from agenticrun_operator.cluster import (
    AlreadyExists,
    ClusterError,
    Conflict,
    Denied,
    Head,
    HeadAddress,
    HeadUnreachable,
    Kube,
    KubeUnavailable,
    NotFound,
)
from agenticrun_operator.metrics import CONFLICTS, REFUSED_SUBMISSIONS, STATUS_WRITES, SUBMISSIONS
from agenticrun_operator.planning import Configure, JobAction, Plan, RequestStop, Stop, Submit
from agenticrun_operator.resources import Manifest

log = logging.getLogger(__name__)


class Applier:
    """Carries out plans."""

    def __init__(self, kube: Kube, head: Head):
        self._kube = kube
        self._head = head

    async def make_tokens(self, plan: Plan) -> None:
        """Create the Secret with the run's tokens, if the plan has it.

        Raises:
            ClusterError: as `make_children`.
        """
        if plan.tokens is None:
            return
        try:
            await self._create(plan.tokens)
        except Denied as error:
            if any(manifest["kind"] == "RayCluster" for manifest in plan.create):
                raise
            log.warning("cannot create Secret %s: %s", plan.tokens["metadata"]["name"], error)

    async def make_children(self, plan: Plan) -> None:
        """Create the missing children. The next reconciliation handles those that exist by now.

        Raises:
            Refused: the apiserver rejects an object as invalid.
            Denied: a quota, an admission policy or missing rights prevent it.
            NotServed: KubeRay's CRD is not installed.
            NamespaceGone: the namespace is missing or being deleted.
        """
        for manifest in plan.create:
            await self._create(manifest)

    async def change_cluster(self, plan: Plan) -> None:
        """Store the RayCluster with other numbers of pods, if the plan has it.

        Raises:
            Conflict: it has changed since it was read.
            Refused: the apiserver rejects it as invalid.
            Denied: rights are missing, as in an older chart, or an admission policy prevents it.
        """
        if plan.cluster is None:
            return
        try:
            await self._kube.put(plan.cluster)
        except NotFound:
            return  # the next reconciliation creates it

    async def write_status(self, document: Manifest, plan: Plan) -> Manifest:
        """Write the plan's status. After an exception, the rest of the plan must not be applied.

        Returns:
            The run as it is stored now.

        Raises:
            Conflict: the run has changed since it was read.
            NotFound: the run no longer exists.
        """
        if plan.status is None:
            return document
        STATUS_WRITES.inc()
        return await self._kube.write_status(document, plan.status)

    async def delete_and_report(self, plan: Plan, document: Manifest) -> None:
        """Carry out the deletions and post the events of a plan whose status is stored."""
        for delete in plan.delete:
            namespace, child = document["metadata"]["namespace"], delete.child
            try:
                await self._kube.delete(
                    child.kind, namespace, child.name, delete.uid, force=delete.force
                )
            except Denied as error:  # an older chart does not let the operator delete pods
                log.warning("cannot delete %s %s: %s", child.kind, child.name, error)
        for event in plan.events:
            try:
                await self._kube.post_event(document, event)
            except ClusterError as error:  # the status says the same
                log.warning("cannot post the event %s: %s", event.reason, error)

    async def act_on_job(self, action: JobAction, head: HeadAddress) -> str | None:
        """Carry out the action on the job of a plan whose status is stored.

        Returns:
            The error, or None. A failed action is planned again.
        """
        try:
            match action:
                case Submit():
                    if action.config:
                        await self._head.configure(head, action.config)
                    await self._head.submit(
                        head, action.submission_id, action.attempt, action.replicas
                    )
                    SUBMISSIONS.inc()
                case Configure():
                    await self._head.configure(head, action.config)
                case RequestStop():
                    await self._head.request_stop(head)
                case Stop():
                    await self._head.stop(head, action.submission_id)
        except HeadUnreachable as error:
            if isinstance(action, Submit):
                REFUSED_SUBMISSIONS.inc()
            log.warning("pod %s: %s", head.pod.name, error)
            return str(error)
        return None

    async def _create(self, manifest: Manifest) -> None:
        try:
            await self._kube.create(manifest)
        except AlreadyExists:
            return
        except Conflict as error:  # another object has just used up the version of the quota
            CONFLICTS.inc()
            raise Denied(f"contention for a quota: {error}") from error
        except NotFound as error:  # it says nothing about the run
            raise KubeUnavailable(f"cannot create {manifest['kind']}: {error}") from error
