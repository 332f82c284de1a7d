"""Reads the objects of a run from the apiserver, and the state of its newest attempt from the head.

Keeps requests to the apiserver few: RayCluster and pods come from the watches, and a look at a
training run makes no request. A head that does not answer is asked less and less often.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TypeVar

from agenticrun_api import AgenticRun, Phase, Progress, Reason, names
from agenticrun_operator import errors, metrics, pod_reader, resources
from agenticrun_operator.cluster import Head, HeadAddress, Kube
from agenticrun_operator.cluster.transports import PodAddress
from agenticrun_operator.observed import (
    Observed,
    Pod,
    Problem,
    QueueObjects,
    Unreachable,
)
from agenticrun_operator.planning import times
from agenticrun_operator.pod_reader import LabelledPod
from agenticrun_operator.progress_watches import ProgressWatches
from agenticrun_operator.queue_positions import QueuePositions
from agenticrun_operator.resources import Child, Manifest, OperatorKey, workloads
from agenticrun_operator.watch_cache import WatchedObjects

log = logging.getLogger(__name__)

PATIENCE = 3
"""Times in a row that a head may fail to answer before it is asked less often."""
FIRST_SILENCE_SECONDS = 4.0
MAX_SILENCE_SECONDS = 30.0
PREPARING_SECONDS = 15.0
"""Time that a node has for the volumes and the network of a pod before its events are read."""
DENIED_SECONDS = 30.0
"""Time after which events that were denied are asked for again."""
SUSPICIOUS_QUESTIONS = 256
"""Questions at the same time to heads that have not answered the last one. Those of a thousand such
heads fit; the others wait for their next look, so that their connections are limited."""
JITTER = 0.3
"""Share of the silence that is random, so that the heads of a lost node are not asked together."""
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class ObservedObjects:
    """The children and pods of a run as the apiserver returned them."""

    children: dict[Child, Manifest | None]
    pods: tuple[Pod, ...]
    missing_code: str | None
    kuberay_missing: bool = False
    queue: QueueObjects = field(default_factory=QueueObjects)
    fresh: bool = True
    """True if everything was read from the apiserver, nothing taken from the watches or before."""
    policies: Mapping[Child, Manifest | None] = field(default_factory=dict)
    """The run's NetworkPolicies; None: it is missing. Empty while they do not matter, or while
    nothing is known of them."""
    policy_error: errors.ClusterError | None = None
    """Why the NetworkPolicies cannot be read."""


@dataclass(frozen=True)
class _Silence:
    """A part of a head that did not answer."""

    failures: int
    answer: Unreachable
    until: datetime
    """It is not asked before this time."""


class Observer:
    """Reads runs."""

    def __init__(
        self,
        kube: Kube,
        head: Head,
        watched: WatchedObjects,
        key: OperatorKey,
        clock: Callable[[], datetime],
        operator_namespace: str = "",
        watches: ProgressWatches | None = None,
    ):
        """Create an observer.

        Args:
            kube: the apiserver.
            head: the head pods.
            watched: what the watches saw last.
            key: the key of this installation.
            clock: returns the current time.
            operator_namespace: as in `WorkerImages`.
            watches: follows the progress of runs that train; None: each look asks their heads.
        """
        self._kube = kube
        self._head = head
        self._watched = watched
        self._key = key
        self._clock = clock
        self._operator_namespace = operator_namespace
        self._events_denied: dict[str, datetime] = {}
        """When the events of a namespace were denied last."""
        self._silent: dict[tuple[str, str], _Silence] = {}
        """By the run's uid and the part of its head."""
        self._suspicious = asyncio.Semaphore(SUSPICIOUS_QUESTIONS)
        self._pods: dict[str, pod_reader.ResolvedPods] = {}
        """By the run's uid."""
        self._positions = QueuePositions(kube, clock)
        self._watches = watches

    async def stop(self) -> None:
        """End what runs in the background."""
        await self._positions.stop()
        if self._watches:
            await self._watches.stop()

    def forget(self, run_uid: str) -> None:
        """Forget a run that is gone or has ended."""
        if self._watches:
            self._watches.forget(run_uid)
        self._pods.pop(run_uid, None)
        self._forget_silence(run_uid)

    def _forget_silence(self, run_uid: str) -> None:
        for part in ("job", "progress"):
            self._note_answer((run_uid, part), None)

    def ask_again(self, run_uid: str) -> None:
        """Ask the head at the next look, also one that did not answer: something has changed."""
        if self._watches:
            self._watches.doubt(run_uid)
        for part in ((run_uid, "job"), (run_uid, "progress")):
            if silence := self._silent.get(part):
                # One failure is kept, so that a head that stays silent is soon asked less often
                # again.
                self._silent[part] = replace(silence, failures=1, until=self._clock())

    async def read_objects(
        self, run: AgenticRun, known: ObservedObjects | None = None, *, fresh: bool
    ) -> ObservedObjects:
        """Read the RayCluster and the pods, and the other children if they may have to be created.

        They may not while the run trains or is suspended. Of a run with a queue, its Workload is
        read always.

        Args:
            run: the run.
            known: an earlier observation; its other children are used instead of reading them.
            fresh: True to read everything from the apiserver, False to ask the watches first.
        """
        namespace, name = run.key
        asked = fresh
        watched_pods = None if fresh else self._watched.pods.of_run(run.key)
        clusters = None if fresh else self._watched.clusters.of_run(run.key)
        # One that the watch does not know may exist: someone else's has no label of ours.
        seen = next((one for one in clusters or () if one["metadata"]["name"] == name), None)
        fresh = watched_pods is None and seen is None
        found: Manifest | errors.NotServed | None
        pods, found = await asyncio.gather(
            self._list_pods(run, watched_pods), self._read_cluster(run, seen)
        )
        kuberay_missing = isinstance(found, errors.NotServed)
        cluster = None if isinstance(found, errors.NotServed) else found
        # Anyone who may edit pods can remove our label. These pods are found by KubeRay's label,
        # which KubeRay itself needs.
        if cluster is not None and pod_reader.seems_incomplete(pods, cluster):
            pods = await self._with_unlabelled(run, pods)
        children: dict[Child, Manifest | None] = {}
        missing_code = None
        settled = (
            run.status.phase is Phase.RUNNING
            and run.status.observed_generation == run.metadata.generation
        )
        needed = not run.status.phase.finished and not run.spec.suspend
        if needed and (cluster is None or not settled):
            # What no watch reports is read again only after a time: each read is one more request
            # per look.
            if known:
                children, fresh = dict(known.children), False
                missing_code = known.missing_code
            else:
                wanted = [*resources.mounted_names(run)]
                wanted += filter(None, [resources.users_claim_of(run)])
                existing = await self._get_all(namespace, wanted)
                children = dict(zip(wanted, existing, strict=True))
                code = resources.code_config_map(run)
                if code and await self._kube.get(code.kind, namespace, code.name) is None:
                    missing_code = code.name
        budget = resources.budget_of(run)
        if (
            budget
            and budget not in children
            and ((settled and needed) or run.status.phase.finished)
        ):
            # No watch sees it: removed while the run trains, it has to come back.
            if known and budget in known.children:
                children[budget], fresh = known.children[budget], False
            elif cluster is not None:
                children[budget] = await self._kube.get(budget.kind, namespace, budget.name)
        # A finished run without a RayCluster has no more use for its claim.
        in_use = not run.status.phase.finished or cluster is not None
        if in_use and Child(resources.CLAIM_KIND, resources.claim_name(run)) not in children:
            children |= await self._lost_claim(run, fresh=asked)
        children[Child("RayCluster", name)] = cluster
        queue = QueueObjects()
        if run.spec.queue:
            workload, watched = await self._read_workload(run, fresh=asked)
            if isinstance(workload, errors.ClusterError):
                queue = QueueObjects(error=workload)
            else:
                children[Child(workloads.WORKLOAD_KIND, workloads.name_of(run))] = workload
                queue = await self._read_queue(run, workload, needs_flavors=cluster is None)
            fresh = fresh and not watched
        own = self._own_pods(run, pods, cluster, cluster_known=not kuberay_missing)
        observed = ObservedObjects(
            children, own, missing_code, kuberay_missing, queue=queue, fresh=fresh
        )
        if not (needed and self._operator_namespace):
            return observed
        # With policies from a watch, the whole observation may be behind.
        observed = replace(observed, fresh=fresh and asked)
        try:
            return replace(observed, policies=await self._policies(run, fresh=asked))
        except (errors.Denied, errors.NotServed) as error:
            return replace(observed, policy_error=error)

    async def _policies(self, run: AgenticRun, *, fresh: bool) -> dict[Child, Manifest | None]:
        """Return the NetworkPolicies that the run must have, and the ones that it has.

        Nothing while their watch is down: before anything is done, they are read.

        Raises:
            NotServed: the Kubernetes cluster has no NetworkPolicies.
            Denied: the right to read them is missing.
        """
        namespace, name = run.key
        policies = resources.network_policies(run, self._operator_namespace)
        wanted = [Child.of(policy) for policy in policies]
        found = None if fresh else self._watched.policies.of_run(run.key)
        if found is None and not fresh:
            return {}
        listed = await self._kube.list_policies(namespace, name) if found is None else found
        known: dict[Child, Manifest | None] = {
            Child.of(item): item
            for item in listed
            if Child.of(item) in wanted or resources.is_policy_of(run, item)
        }
        if fresh:  # one of this name may have no label of ours
            unseen = [child for child in wanted if child not in known]
            known |= dict(zip(unseen, await self._get_all(namespace, unseen), strict=True))
        return dict.fromkeys(wanted) | known

    async def _read_workload(
        self, run: AgenticRun, *, fresh: bool
    ) -> tuple[Manifest | errors.ClusterError | None, bool]:
        """Return the run's Workload, or why it cannot be read; and True if a watch had it."""
        name = workloads.name_of(run)
        watched = None if fresh else self._watched.workloads.of_run(run.key)
        seen = next((one for one in watched or () if one["metadata"]["name"] == name), None)
        if seen:
            return seen, True
        try:
            kind = workloads.WORKLOAD_KIND
            # It may exist without our label, which Kueue's users can remove.
            return await self._kube.get(kind, run.metadata.namespace, name), False
        except (errors.NotServed, errors.Denied, errors.WebhookUnavailable) as error:
            return error, False

    async def _read_queue(
        self, run: AgenticRun, workload: Manifest | None, *, needs_flavors: bool
    ) -> QueueObjects:
        """Return what the creation of the Workload, or of the RayCluster, needs of Kueue."""
        assert run.spec.queue is not None
        name = run.spec.queue.priority_class
        try:
            if workload is None and name:
                found = await self._kube.get(workloads.PRIORITY_KIND, "", name)
                return QueueObjects(priority=found)
            if workload is not None and workloads.waits_for_quota(workload):
                queue, namespace = run.spec.queue.name, run.metadata.namespace
                position = self._positions.of(namespace, queue, workloads.name_of(run))
                return QueueObjects(position=position)
            # Flavors choose nodes, so they are read when the RayCluster is about to be made.
            if workload is None or not needs_flavors or not workloads.is_admitted(workload):
                return QueueObjects()
            names = sorted(workloads.flavors_of(workload))
            flavors = await asyncio.gather(
                *(self._kube.get(workloads.FLAVOR_KIND, "", name) for name in names)
            )
        except (errors.NotServed, errors.Denied, errors.WebhookUnavailable) as error:
            return QueueObjects(error=error)
        return QueueObjects(
            flavors={name: item for name, item in zip(names, flavors, strict=True) if item}
        )

    async def _lost_claim(self, run: AgenticRun, *, fresh: bool) -> dict[Child, Manifest | None]:
        """Return the claim of the run's checkpoints if it was deleted or is being deleted.

        No watch reports the user's own claim, which has no label of ours.
        """
        claim, is_users = (
            Child(resources.CLAIM_KIND, resources.claim_name(run)),
            resources.users_claim_of(run) is not None,
        )
        if run.status.volume_claim != claim.name or not (is_users or resources.created_claim(run)):
            return {}
        if fresh or is_users:
            found = await self._kube.get(resources.CLAIM_KIND, run.metadata.namespace, claim.name)
            return {claim: found} if found is None or resources.is_deleting(found) else {}
        watched = self._watched.claims.of_run(run.key)
        if watched is None:
            return {}
        deleting = dict(watched).get(claim.name)
        if deleting is None:
            return {claim: None}
        # Only that it goes matters: what acts on it reads the whole claim.
        metadata = {"name": claim.name, "uid": "unknown", "deletionTimestamp": "unknown"}
        return (
            {claim: {"kind": resources.CLAIM_KIND, "metadata": metadata, "spec": {}}}
            if deleting
            else {}
        )

    async def _list_pods(
        self, run: AgenticRun, known: tuple[LabelledPod, ...] | None
    ) -> tuple[LabelledPod, ...]:
        if known is not None:
            return known
        read = map(pod_reader.read_labelled_pod, await self._kube.list_pods(*run.key))
        return tuple(pod for pod in read if pod is not None)

    async def _with_unlabelled(
        self, run: AgenticRun, pods: tuple[LabelledPod, ...]
    ) -> tuple[LabelledPod, ...]:
        """Add the pods without the run's label: KubeRay knows its pods by a label of its own."""
        known = {item.pod.uid for item in pods}
        found = await self._kube.list_pods(*run.key, label=resources.LABEL_CLUSTER)
        read = map(pod_reader.read_labelled_pod, found)
        more = tuple(item for item in read if item is not None and item.pod.uid not in known)
        return (*pods, *more) if more else pods

    def _own_pods(
        self,
        run: AgenticRun,
        labelled: tuple[LabelledPod, ...],
        cluster: Manifest | None,
        cluster_known: bool,
    ) -> tuple[Pod, ...]:
        """Return the pods of RayClusters of the run's name, with the head marked."""
        uid = run.metadata.uid
        before = self._pods.get(uid)
        found = pod_reader.resolve_pods(labelled, run, cluster, cluster_known, before)
        self._pods[uid] = found
        return found.pods

    async def _read_cluster(
        self, run: AgenticRun, known: Manifest | None
    ) -> Manifest | errors.NotServed | None:
        try:
            return known or await self._kube.get("RayCluster", *run.key)
        except errors.NotServed as error:
            return error

    async def _get_all(self, namespace: str, wanted: list[Child]) -> list[Manifest | None]:
        return await asyncio.gather(
            *(self._kube.get(child.kind, namespace, child.name) for child in wanted)
        )

    async def look(
        self,
        run: AgenticRun,
        objects: ObservedObjects,
    ) -> Observed:
        """Return the observed objects together with the head's answers about the newest attempt.

        Args:
            run: the run.
            objects: its children and pods, from `read_objects`.
        """
        head = await self.head_address(run, objects)
        observed = await self._ask_head(run, objects, head)
        if self._watches:
            watched = self._watches.watch(run, head, observed)
            observed = replace(observed, progress_watched=watched)
        return replace(observed, pods=await self._with_reasons(run, observed.pods))

    async def _ask_head(
        self, run: AgenticRun, objects: ObservedObjects, head: HeadAddress | Unreachable | None
    ) -> Observed:
        observed = Observed(
            children={**objects.children, **objects.policies},
            policy_error=objects.policy_error,
            pods=objects.pods,
            missing_code=objects.missing_code,
            kuberay_missing=objects.kuberay_missing,
            queue=objects.queue,
        )
        job = run.status.job
        cluster = observed.child("RayCluster", run.metadata.name)
        if head is None or (cluster is None and not objects.kuberay_missing):
            # Its head is gone for good; a later one starts with a clean record.
            if run.status.phase in (Phase.SUSPENDED, Phase.QUEUED):
                self._forget_silence(run.metadata.uid)
            return observed
        if isinstance(head, Unreachable):
            return replace(observed, job=head, progress=head)
        uid, asked = run.metadata.uid, self._watches or self._head
        if job is None:
            pod = observed.head(uid)
            if pod is None or not pod.ready:
                return observed
            # No attempt is submitted to a head that the operator cannot reach.
            first = names.submission_id(run.metadata.name, uid, 1)
            seen = await self._ask((uid, "job"), lambda: self._head.job(head, first))
            return replace(self._with_news(observed, run, objects), job=seen)
        # Together, because the slower of the two decides how long the look takes.
        seen, progress = await asyncio.gather(
            self._ask((uid, "job"), lambda: asked.job(head, job.submission_id)),
            self._ask((uid, "progress"), lambda: asked.progress(head)),
        )
        if isinstance(progress, Progress):
            # Before anything is stored or logged: reports of user code may quote secrets.
            progress = progress.masked()
        return replace(self._with_news(observed, run, objects), job=seen, progress=progress)

    def _with_news(self, observed: Observed, run: AgenticRun, objects: ObservedObjects) -> Observed:
        """Take RayCluster and pods from the watches again: a head may take seconds to answer.

        Not if they were read from the apiserver, because the watches may be behind.
        """
        pods, clusters = self._watched.pods.of_run(run.key), self._watched.clusters.of_run(run.key)
        if objects.fresh or pods is None or clusters is None:
            return observed
        if any(pod.lacks for pod in objects.pods):  # the watches do not see it
            return observed
        name = run.metadata.name
        cluster = next((one for one in clusters if one["metadata"]["name"] == name), None)
        if cluster is None:
            return observed
        return replace(
            observed,
            children={**observed.children, Child("RayCluster", name): cluster},
            pods=self._own_pods(run, pods, cluster, cluster_known=True),
        )

    async def _with_reasons(self, run: AgenticRun, pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
        """Add problems that count only after a time, and what no field of a pod says.

        The events are read of the first pod of each role that its node cannot prepare: a Secret
        that does not exist, for example, is in no field of the pod that waits for it.
        """
        now = self._clock()
        if any(pod.passing for pod in pods):
            # Only here, with a clock, does it show that a problem which usually passes has not.
            pods = tuple(
                replace(pod, problem=pod.problem or pod.passing.problem)
                if pod.passing and now >= times.parse_time(pod.passing.counts_from)
                else pod
                for pod in pods
            )
        long_ago = now - timedelta(seconds=PREPARING_SECONDS)
        stuck = {
            pod.role: pod
            for pod in reversed(pods)
            if pod.preparing_since is not None
            and times.parse_time(pod.preparing_since) <= long_ago
            and pod.problem is None
            and not pod.deleting
        }
        if not stuck:
            return pods
        problems = await asyncio.gather(
            *(self._read_problem(run.metadata.namespace, pod) for pod in stuck.values())
        )
        found = {pod.uid: problem for pod, problem in zip(stuck.values(), problems, strict=True)}
        return tuple(
            replace(pod, problem=found[pod.uid]) if pod.uid in found else pod for pod in pods
        )

    async def _read_problem(self, namespace: str, pod: Pod) -> Problem | None:
        denied = self._events_denied.pop(namespace, None)
        # Each look would otherwise ask again, and log the same refusal.
        if denied and (self._clock() - denied).total_seconds() < DENIED_SECONDS:
            self._events_denied[namespace] = denied
            return None
        try:
            return pod_reader.problem_of_warnings(
                await self._kube.list_pod_warnings(namespace, pod.uid)
            )
        except errors.Denied as error:  # a chart of an earlier release gives no right to do this
            self._events_denied[namespace] = self._clock()
            log.warning("cannot read the events of pods in %s: %s", namespace, error)
        except errors.ClusterError as error:
            log.warning("cannot read the events of pod %s: %s", pod.name, error)
        return None

    async def _ask(
        self, part: tuple[str, str], ask: Callable[[], Awaitable[Answer]]
    ) -> Answer | Unreachable:
        """Ask a part of a head, unless it has not answered several times and it is not yet time."""
        before = self._silent.get(part)
        if before is None:
            answer = await ask()
        elif self._clock() < before.until or self._suspicious.locked():
            return before.answer
        else:
            # Many silent heads, as after the loss of a node, must not use up the connections.
            async with self._suspicious:
                answer = await ask()
        if isinstance(answer, Unreachable):
            failures = before.failures + 1 if before else 1
            wait = times.backoff_seconds(
                failures - PATIENCE, FIRST_SILENCE_SECONDS, MAX_SILENCE_SECONDS
            )
            wait *= random.uniform(1 - JITTER, 1) if failures >= PATIENCE else 0.0
            until = self._clock() + timedelta(seconds=wait)
            self._note_answer(part, _Silence(failures, answer, until))
        else:
            self._note_answer(part, None)
        return answer

    def _note_answer(self, part: tuple[str, str], silence: _Silence | None) -> None:
        """Remember that a part of a head did not answer; None: it did."""
        known = part in self._silent
        if silence:
            self._silent[part] = silence
        else:
            self._silent.pop(part, None)
        if known != (silence is not None):
            metrics.HEADS_UNREACHABLE.set(len({uid for uid, _ in self._silent}))

    async def head_address(
        self, run: AgenticRun, objects: ObservedObjects
    ) -> HeadAddress | Unreachable | None:
        """Return the address of the run's head; None while it has no IP.

        Unreachable if the operator does not know the tokens of the run.
        """
        pod = Observed(pods=objects.pods).head(run.metadata.uid)
        if pod is None or pod.ip is None:
            return None
        cluster = objects.children[Child("RayCluster", run.metadata.name)]
        tokens = self._tokens(run, cluster)
        if isinstance(tokens, Unreachable):
            return tokens
        ray_token, reporter_token = tokens
        return HeadAddress(
            PodAddress(run.metadata.namespace, pod.name, pod.ip),
            run.metadata.uid,
            ray_token,
            reporter_token,
            pod_uid=pod.uid,
            incarnation=str(pod.incarnation),
            proves_itself=cluster is None or resources.answers_challenges(cluster),
        )

    def _tokens(self, run: AgenticRun, cluster: Manifest | None) -> tuple[str, str] | Unreachable:
        """Return Ray's and the reporter's token of the RayCluster's pods, or why not."""
        uid = run.metadata.uid
        key_id = resources.key_id_of(run, cluster) if cluster else self._key.id
        if cluster and key_id is None:
            return Unreachable(
                f"the pods have the tokens of Secret {resources.secret_of(cluster) or '(none)'}, "
                "which the operator has not made: set spec.authOptions.secretName back",
                Reason.TOKENS_UNKNOWN,
            )
        # With a wrong token the head would only say 401, which looks like an attack or a bug.
        if key_id != self._key.id:
            return Unreachable(
                f"the run's tokens were made with operator key {key_id}, and this operator has key "
                f"{self._key.id}: give it that key again",
                Reason.TOKENS_UNKNOWN,
            )
        return self._key.ray_token(uid), self._key.reporter_token(uid)
