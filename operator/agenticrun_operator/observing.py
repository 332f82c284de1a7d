"""Reads the objects of a run from the apiserver, and the state of its newest attempt from the head.

Keeps requests to the apiserver few: three for a full look at a training run, none for a light one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from datetime import datetime

from agenticrun_api import AgenticRun, Phase, Reason
from agenticrun_operator.cluster import Head, HeadAddress, Kube, NotServed
from agenticrun_operator.cluster.transports import PodAddress
from agenticrun_operator.observed import Observed, Pod, Unreachable, read_pods
from agenticrun_operator.release_0_1 import RandomTokens
from agenticrun_operator.resources import (
    Child,
    Manifest,
    OperatorKey,
    code_config_map,
    key_id_of,
    mounted_names,
)


@dataclass(frozen=True)
class ObservedObjects:
    """The children and pods of a run as the apiserver returned them."""

    children: dict[Child, Manifest | None]
    pods: tuple[Pod, ...]
    missing_code: str | None
    kuberay_missing: bool = False


class Observer:
    """Reads runs."""

    def __init__(self, kube: Kube, head: Head, key: OperatorKey):
        self._kube = kube
        self._head = head
        self._key = key
        self._random_tokens = RandomTokens(kube)

    async def read_objects(self, run: AgenticRun) -> ObservedObjects:
        """Read the RayCluster and the pods, and the other children unless the run is training."""
        namespace, name = run.key
        pods, found = await asyncio.gather(
            self._kube.list_pods(namespace, name), self._read_cluster(run)
        )
        kuberay_missing = isinstance(found, NotServed)
        cluster = None if isinstance(found, NotServed) else found
        children: dict[Child, Manifest | None] = {Child("RayCluster", name): cluster}
        missing_code = None
        settled = (
            run.status.phase is Phase.RUNNING
            and run.status.observed_generation == run.metadata.generation
        )
        if not run.status.phase.finished and (cluster is None or not settled):
            children |= await self._all_children(run)
            code = code_config_map(run)
            if code and await self._kube.get(code.kind, namespace, code.name) is None:
                missing_code = code.name
        own = tuple(read_pods(pods, run, cluster, cluster_known=not kuberay_missing))
        return ObservedObjects(children, own, missing_code, kuberay_missing)

    async def _read_cluster(self, run: AgenticRun) -> Manifest | NotServed | None:
        try:
            return await self._kube.get("RayCluster", *run.key)
        except NotServed as error:
            return error

    async def _all_children(self, run: AgenticRun) -> dict[Child, Manifest | None]:
        wanted = mounted_names(run)
        found = await asyncio.gather(
            *(self._kube.get(child.kind, run.metadata.namespace, child.name) for child in wanted)
        )
        return dict(zip(wanted, found, strict=True))

    async def look(
        self,
        run: AgenticRun,
        objects: ObservedObjects,
        job_trouble: str | None,
        last_status_write: datetime | None,
        tokens_sent_at: datetime | None,
        end_time: str | None,
    ) -> Observed:
        """Return the observed objects together with the head's answers about the newest attempt.

        Args:
            run: the run.
            objects: its children and pods, from `read_objects`.
            job_trouble: the error of the last submission or stop, if it failed.
            last_status_write: the time of this operator's last write of the run's status.
            tokens_sent_at: the time of its last creation of the Secret with the run's tokens.
            end_time: the end of the newest attempt, as this operator saw it.
        """
        observed = Observed(
            children=objects.children,
            pods=objects.pods,
            missing_code=objects.missing_code,
            kuberay_missing=objects.kuberay_missing,
            job_trouble=job_trouble,
            last_status_write=last_status_write,
            tokens_sent_at=tokens_sent_at,
            end_time=end_time,
        )
        job, head = run.status.job, await self.head_address(run, objects)
        cluster = observed.child("RayCluster", run.metadata.name)
        if head is None or (cluster is None and not objects.kuberay_missing):
            return observed
        if isinstance(head, Unreachable):
            return replace(observed, job=head, progress=head)
        if job is None:
            return observed
        seen, progress = await asyncio.gather(
            self._head.job(head, job.submission_id), self._head.progress(head)
        )
        return replace(observed, job=seen, progress=progress)

    async def head_address(
        self, run: AgenticRun, objects: ObservedObjects
    ) -> HeadAddress | Unreachable | None:
        """Return the address of the run's head; None while it has no IP.

        Unreachable if the operator does not know the tokens of the run.
        """
        pod = Observed(pods=objects.pods).head(run.metadata.uid)
        if pod is None or pod.ip is None:
            return None
        tokens = await self._tokens(run, objects.children[Child("RayCluster", run.metadata.name)])
        if isinstance(tokens, Unreachable):
            return tokens
        ray_token, reporter_token = tokens
        return HeadAddress(
            PodAddress(run.metadata.namespace, pod.name, pod.ip),
            run.metadata.uid,
            ray_token,
            reporter_token,
        )

    async def _tokens(
        self, run: AgenticRun, cluster: Manifest | None
    ) -> tuple[str, str] | Unreachable:
        """Return Ray's and the reporter's token of the RayCluster's pods, or why not."""
        uid = run.metadata.uid
        key_id = key_id_of(run, cluster) if cluster else self._key.id
        if key_id is None:
            return await self._random_tokens.read(run)
        if key_id != self._key.id:
            return Unreachable(
                f"the run's tokens were made with operator key {key_id}, and this operator has key "
                f"{self._key.id}: give it that key again",
                Reason.TOKENS_UNKNOWN,
            )
        return self._key.ray_token(uid), self._key.reporter_token(uid)
