"""A fake cluster for the operator's tests: an apiserver, KubeRay, Ray and a driver.

They are behind the protocols that the operator uses.

The cluster keeps the rules that the operator's safety depends on: resourceVersions, uids, Ray's
memory of submission ids per incarnation of the head, a reporter that outlives the driver. The
operator can be made to crash before and after each request.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import pickle
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar, cast

from agenticrun_api import (
    AgenticRunStatus,
    Condition,
    ConditionType,
    FinalReport,
    LiveConfig,
    Outcome,
    Phase,
    Progress,
    Reason,
    Role,
    parse_run,
)
from agenticrun_api.load import parse_served
from agenticrun_api.names import KIND, LABEL_ROLE, LABEL_RUN
from agenticrun_api.progress import QUIET_SECONDS
from agenticrun_operator.cluster import Head, HeadAddress
from agenticrun_operator.cluster.kube import Propagation
from agenticrun_operator.errors import (
    AlreadyExists,
    ClusterError,
    Conflict,
    Denied,
    HeadUnreachable,
    NotFound,
    NotServed,
    Refused,
)
from agenticrun_operator.observed import Job, NoJob, NoReport, Unreachable
from agenticrun_operator.planning.times import format_time, parse_time
from agenticrun_operator.pod_reader import role_of
from agenticrun_operator.reconciler import Reconciler
from agenticrun_operator.resources import (
    CLAIM_KIND,
    POLICY_KIND,
    Event,
    Manifest,
    OperatorKey,
    WorkerImages,
    secret_of,
    tokens_name,
    workloads,
)
from agenticrun_operator.shard import ALL_RUNS
from agenticrun_operator.slow_writes import SlowWrites
from agenticrun_operator.watch_cache import WatchedObjects
from agenticrun_operator.workqueue import Item, Key
from fake_kueue import FakeKueue
from fake_ray import FakeJob, missing_roles, pod_of, ready_condition, surplus_pods
from kube_schema import status_schema, violations
from runs import run_with

IMAGE = "worker:1"
IMAGES = WorkerImages(IMAGE, {"sglang": "worker-sglang:1", "vllm": ""})
"""An installation without an image for vLLM."""
KEY = OperatorKey("the operator's key, of 32 characters")
NAMESPACE = "team"
NAME = "lake"
START = datetime(2026, 1, 1, tzinfo=UTC)


T = TypeVar("T")


def copied(manifests: T) -> T:
    """Return a deep copy. Through pickle it takes a fifth of the time of `copy.deepcopy`."""
    return cast(T, pickle.loads(pickle.dumps(manifests, pickle.HIGHEST_PROTOCOL)))


class Crash(BaseException):
    """The operator's process has died here."""


@dataclass
class Gpus:
    """The GPUs that the pods of several worlds share, placed one by one as a scheduler does."""

    total: int
    worlds: list[World] = field(default_factory=list)

    def place(self, pod: Manifest) -> bool:
        """Return True if the pod fits now."""
        held = sum(
            gpus_of(item)
            for world in self.worlds
            for item in world.pods()
            if "nodeName" in item["spec"]
        )
        return held + gpus_of(pod) <= self.total


def gpus_of(pod: Manifest) -> int:
    limits = pod["spec"]["containers"][0].get("resources", {}).get("limits", {})
    return int(limits.get("nvidia.com/gpu", 0))


@dataclass
class World:
    """Everything outside the operator."""

    now: datetime = START
    objects: dict[tuple[str, str], Manifest] = field(default_factory=dict)
    """By kind and name, all in one namespace."""
    jobs: list[FakeJob] = field(default_factory=list)
    """Of all incarnations, in the order of their submission."""
    reports: dict[str, Progress] = field(default_factory=dict)
    """What the reporter of a head pod (by uid) was told last."""
    configs: dict[str, LiveConfig] = field(default_factory=dict)
    """The settings that the reporter of a head pod (by uid) was sent last."""
    events: list[Event] = field(default_factory=list)
    pod_warnings: dict[str, list[Manifest]] = field(default_factory=dict)
    """Events of type Warning by the uid of their pod."""
    events_denied: bool = False
    """The operator may not list events, with the chart of an earlier release."""
    requests: list[str] = field(default_factory=list)
    status_writes: int = 0
    invalid_statuses: list[list[str]] = field(default_factory=list)
    """Violations of the CRD in statuses that were refused."""
    crd_lacks: tuple[str, ...] = ()
    """Fields of the status, as paths, that the CRD does not have, so that they are not stored."""
    create_errors: dict[str, ClusterError] = field(default_factory=dict)
    """The apiserver's answer to the creation of a kind."""
    create_seconds: dict[str, float] = field(default_factory=dict)
    """Time that webhooks take for the creation of a kind, by the clock of the event loop."""
    refuse_status: Callable[[dict[str, Any]], bool] = lambda _: False
    """Returns True for a status that the CRD does not allow."""
    kuberay_missing: bool = False
    """The apiserver does not serve RayClusters."""
    kueue: FakeKueue | None = None
    """None: the apiserver serves no Workloads."""
    kueue_denied: ClusterError | None = None
    """The apiserver's answer to everything about Workloads."""
    quota_faults: list[str] = field(default_factory=list)
    """Quota that was given back while the run held pods, and pods without quota."""
    storage_down: bool = False
    """There is no default StorageClass."""
    pods_denied: str = ""
    rejoin_seconds: float = 0.0
    """Time in which the workers of a lost head notice it and start again."""
    """The words with which a quota refuses KubeRay's pods."""
    gpus: Gpus | None = None
    """None: there are enough."""
    lost: dict[str, bool] = field(default_factory=dict)
    """Uids of the pods on nodes that no longer answer. True: their processes still run."""
    lost_at: datetime = START
    delete_errors: dict[str, ClusterError] = field(default_factory=dict)
    """The apiserver's answer to the deletion of a kind."""
    delete_seconds: dict[str, float] = field(default_factory=dict)
    """Time that webhooks take for the deletion of a kind, by the clock of the event loop."""
    put_seconds: float = 0.0
    """Time that webhooks take for the status of a Workload, by the clock of the event loop."""
    policy_error: ClusterError | None = None
    """The apiserver's answer to a list of NetworkPolicies."""
    put_error: ClusterError | None = None
    """The apiserver's answer to the change of a RayCluster, or of the status of a Workload."""
    stop_requests: int = 0
    reporter_down: bool = False
    hold_seconds: float = 0.0
    """Time for which reporters hold the question of one who knows their snapshot, by the clock of
    the event loop. 0: they hold none, like those of an earlier version."""
    ray_down: bool = False
    submit_down: bool = False
    watches_hang: bool = False
    """The watches show what was there before, without an error."""
    watched: WatchedObjects = field(
        default_factory=lambda: WatchedObjects(lambda _: None, lambda _: None)
    )
    interruption: tuple[int | str, Callable[[], None]] | None = None
    """The function to call at this many points from now, or at the named one.

    Every request has a point before it, a change one after it.
    """
    _tokens: dict[str, dict[str, str]] = field(default_factory=dict)
    """What the containers of a pod started with, by incarnation."""
    _texts: dict[str, tuple[str, str]] = field(default_factory=dict)
    """resourceVersion and content of each object when the watches last saw it, by uid."""
    _parsed: tuple[bytes, AgenticRunStatus] | None = None
    """The run whose status was read last, and that status: most reads are of an unchanged run."""
    _ids: Any = field(default_factory=lambda: itertools.count(1))

    # -- the user ----------------------------------------------------------------------------------

    def apply_run(self, *changes: tuple[str, Any]) -> None:
        """Create the run."""
        document = json.loads(json.dumps(parse_run(run_with(*changes, name=NAME)).to_dict()))
        document.pop("status")
        document["metadata"] |= {"namespace": NAMESPACE, "generation": 1}
        self._store(document)

    def change_run(self, *changes: tuple[str, Any]) -> None:
        """Change fields of the spec."""
        for path, value in changes:
            *parents, last = path.split(".")
            node = self.run["spec"]
            for part in parents:
                node = node[part]
            node[last] = value
        self.run["metadata"]["generation"] += 1
        self.run["metadata"]["resourceVersion"] = str(next(self._ids))

    def delete_run(self) -> None:
        """Delete the run; its children linger until `collect_garbage`. A finalizer holds it."""
        if self.run["metadata"].get("finalizers"):
            self._mark_deleted(self.run, grace_seconds=0)
        else:
            del self.objects[KIND, NAME]

    def add_claim(self, name: str, mode: str = "ReadWriteOnce") -> None:
        """Create a volume claim of the user."""
        metadata = {"name": name, "namespace": NAMESPACE}
        self._store({"kind": CLAIM_KIND, "metadata": metadata, "spec": {"accessModes": [mode]}})

    def delete_claim(self, name: str = f"{NAME}-checkpoints") -> None:
        """Delete a volume claim; Kubernetes keeps it until no pod uses it."""
        claim = self.objects.get((CLAIM_KIND, name))
        if claim is not None:
            self._mark_deleted(claim, grace_seconds=0)
            self._release_claim()

    def _release_claim(self) -> None:
        for key, item in list(self.objects.items()):
            if key[0] != CLAIM_KIND or "deletionTimestamp" not in item["metadata"]:
                continue
            if not self.pods():
                del self.objects[key]

    def collect_garbage(self) -> None:
        """Delete what has no owner any more; a pod in its grace period stays."""
        self._collect()
        self._release_claim()

    def _collect(self) -> None:
        uids = {item["metadata"]["uid"] for item in self.objects.values()}
        for key, item in list(self.objects.items()):
            owners = item["metadata"].get("ownerReferences", [])
            if "deletionTimestamp" in item["metadata"]:
                continue
            if not owners or any(owner["uid"] in uids for owner in owners):
                continue
            if item["metadata"]["uid"] in self.lost:
                self._mark_deleted(item)
            else:
                del self.objects[key]

    def let_watches_catch_up(self) -> None:
        """Deliver all events to the watches, unless they hang."""
        if self.watches_hang:
            return
        for item in self.objects.values():
            self._version_what_a_test_changed(item)
        items = copied(list(self.objects.values()))
        of_runs = [item for item in items if LABEL_RUN in item["metadata"].get("labels", {})]
        for kind, cache, found in (
            (KIND, self.watched.runs, items),
            ("RayCluster", self.watched.clusters, of_runs),
            ("Pod", self.watched.pods, of_runs),
            (CLAIM_KIND, self.watched.claims, of_runs),
            (POLICY_KIND, self.watched.policies, of_runs),
            (workloads.WORKLOAD_KIND, self.watched.workloads, of_runs),
        ):
            cache.listed(None, [item for item in found if item["kind"] == kind])
        if self.kuberay_missing:
            self.watched.clusters.lost(None)
        if self.kueue is None or self.kueue_denied:
            self.watched.workloads.lost(None)

    def _version_what_a_test_changed(self, item: Manifest) -> None:
        """Give an object that was changed in place another resourceVersion."""
        metadata = item["metadata"]
        before = self._texts.get(metadata["uid"])
        content = _content(item)
        if before == (metadata["resourceVersion"], content):
            return
        if before and before[0] == metadata["resourceVersion"]:
            metadata["resourceVersion"] = str(next(self._ids))
        self._texts[metadata["uid"]] = (metadata["resourceVersion"], content)

    def _mark_deleted(self, item: Manifest, grace_seconds: int = 30) -> None:
        if "deletionTimestamp" not in item["metadata"]:
            end = self.now + timedelta(seconds=grace_seconds)
            item["metadata"]["deletionTimestamp"] = format_time(end)
            item["metadata"]["resourceVersion"] = str(next(self._ids))

    @property
    def run(self) -> Manifest:
        return self.objects[KIND, NAME]

    @property
    def status(self) -> AgenticRunStatus:
        run = pickle.dumps(self.run, pickle.HIGHEST_PROTOCOL)
        if self._parsed is None or self._parsed[0] != run:
            self._parsed = run, parse_served(self.run).status
        return self._parsed[1]

    @property
    def secret(self) -> tuple[str, str]:
        """Kind and name of the Secret that the run's pods need."""
        cluster = self.objects.get(("RayCluster", NAME))
        name = tokens_name(parse_served(self.run), KEY.id)
        return "Secret", secret_of(cluster) if cluster else name

    def delete_secret(self) -> None:
        """Delete the Secret with the tokens. Containers that run keep them."""
        self.objects.pop(self.secret, None)

    def crash(self) -> None:
        """The operator's process dies, wherever it is."""
        raise Crash

    def add_stray_pod(self, labels: dict[str, str]) -> None:
        """Create a pod that carries the run's name as a label and belongs to no RayCluster."""
        metadata = {
            "name": f"stray-{next(self._ids)}",
            "namespace": NAMESPACE,
            "labels": {LABEL_RUN: NAME, **labels},
        }
        self._store({"kind": "Pod", "metadata": metadata, "spec": {"containers": []}, "status": {}})

    def bind_claims(self) -> None:
        """Give each claim a volume, of the default StorageClass if it names none."""
        for (kind, _), item in self.objects.items():
            if kind != CLAIM_KIND:
                continue
            if not self.storage_down:
                item["spec"].setdefault("storageClassName", "standard")
            bound = item.get("status", {}).get("phase") == "Bound" or not self.storage_down
            item["status"] = {"phase": "Bound" if bound else "Pending"}

    # -- KubeRay and the kubelet -------------------------------------------------------------------

    def make_pods(self, ready: bool = True) -> None:
        """KubeRay: create the pods that the RayCluster lacks, and let all of them become ready.

        Kueue works, too.
        """
        if self.kueue:
            self.kueue.work(self.workload, self.now)
        cluster = self.objects.get(("RayCluster", NAME))
        if cluster is None:
            return
        failure = {"type": "ReplicaFailure", "status": "True", "message": self.pods_denied}
        status = cluster.get("status", {})
        cluster["status"] = status | {"conditions": [failure] if self.pods_denied else []}
        if self.pods_denied or cluster["spec"].get("suspend"):
            return
        # KubeRay selects by labels, and counts pods that are being deleted.
        counted = [
            pod
            for pod in self.pods()
            if self._belongs_to(pod, cluster) or "deletionTimestamp" in pod["metadata"]
        ]
        for pod in surplus_pods(cluster, counted):
            del self.objects["Pod", pod["metadata"]["name"]]
            counted.remove(pod)
        for role in missing_roles(cluster, counted):
            self._store(pod_of(cluster, role, f"{NAME}-{role}-{next(self._ids)}"))
        placed = 0
        own = [pod for pod in self.pods() if self._belongs_to(pod, cluster)]
        heads = [pod for pod in own if pod["metadata"]["labels"][LABEL_ROLE] == Role.DRIVER.value]
        claims = [item for (kind, _), item in self.objects.items() if "Claim" in kind]
        ready = ready and all(claim["status"]["phase"] == "Bound" for claim in claims)
        for pod in sorted(own, key=lambda pod: pod not in heads):
            if pod["metadata"]["uid"] in self.lost:
                continue
            if "nodeName" not in pod["spec"]:
                waits = self._cannot_be_placed(pod, placed)
                if waits:
                    pod["status"]["conditions"] = [
                        {"type": "PodScheduled", "status": "False", "message": waits}
                    ]
                    continue
                placed += gpus_of(pod)
                self._start(pod)
            self._start_container(pod)
            if pod not in heads and heads:
                self._rejoin(pod, heads[0])
            known = self._tokens_of(pod)
            joined = known and any(known == self._tokens_of(head) for head in heads[:1])
            self._set_ready(pod, bool(ready and joined))
        self.name_the_head()

    def name_the_head(self) -> None:
        """KubeRay: write the head pod into the status of the RayCluster."""
        cluster = self.objects["RayCluster", NAME]
        heads = [pod for pod in self.pods(Role.DRIVER) if self._belongs_to(pod, cluster)]
        named = {
            "podName": heads[0]["metadata"]["name"] if heads else "",
            "podIP": heads[0]["status"].get("podIP", "") if heads else "",
        }
        ready = sum(
            pod["status"].get("containerStatuses", [{}])[0].get("ready", False)
            for pod in self.pods()
            if pod not in heads and self._belongs_to(pod, cluster)
        )
        status = cluster.get("status", {})
        cluster["status"] = status | {"head": named, "readyWorkerReplicas": ready}

    def _start_container(self, pod: Manifest) -> None:
        """The kubelet: start Ray with the tokens in the Secret, if it has not started."""
        (container,) = pod["status"]["containerStatuses"]
        if self._tokens_of(pod):
            return
        name = self.secret[1]
        names = [name, f"{NAME}-reporter"] if name == f"{NAME}-ray-token" else [name]
        secrets = [self.objects.get(("Secret", name)) for name in names]
        data = {key: value for secret in secrets if secret for key, value in secret["data"].items()}
        if None in secrets:
            message = f'secret "{names[secrets.index(None)]}" not found'
            waiting = {"reason": "CreateContainerConfigError", "message": message}
            container |= {"containerID": "", "state": {"waiting": waiting}}
            return
        running = {"startedAt": format_time(self.now)}
        container |= {"containerID": "c", "state": {"running": running}}
        self._tokens[self._incarnation(pod)] = {
            key: b64decode(value).decode() for key, value in data.items()
        }

    def _rejoin(self, pod: Manifest, head: Manifest) -> None:
        """The kubelet: start Ray again after it has noticed that its head is lost."""
        started, heads_start = _started(pod), _started(head)
        if not started or not heads_start or started >= heads_start:
            return
        if (self.now - heads_start).total_seconds() >= self.rejoin_seconds:
            pod["status"]["containerStatuses"][0]["restartCount"] += 1
            self._start_container(pod)

    def _tokens_of(self, pod: Manifest) -> dict[str, str]:
        return self._tokens.get(self._incarnation(pod), {})

    @staticmethod
    def _incarnation(pod: Manifest) -> str:
        (container,) = pod["status"].get("containerStatuses") or [{"restartCount": 0}]
        restarts = container["restartCount"]
        return f"{pod['metadata']['uid']}/{restarts}"

    def _cannot_be_placed(self, pod: Manifest, placed: int) -> str | None:
        for volume in pod["spec"]["volumes"]:
            if (mounted := volume.get("persistentVolumeClaim")) is None:
                continue
            claim = self.objects.get((CLAIM_KIND, mounted["claimName"]))
            if claim is None:
                return f'persistentvolumeclaim "{mounted["claimName"]}" not found'
            if "deletionTimestamp" in claim["metadata"]:
                return f'persistentvolumeclaim "{mounted["claimName"]}" is being deleted'
        if self.gpus is None or gpus_of(pod) == 0:
            return None
        if placed or not self.gpus.place(pod):  # the scheduler takes turns
            return "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
        return None

    def _start(self, pod: Manifest) -> None:
        pod["spec"]["nodeName"] = f"node-of-{pod['metadata']['name']}"
        pod["status"] = {
            "podIP": f"10.0.0.{next(self._ids)}",
            "containerStatuses": [{"name": "ray", "restartCount": 0, "state": {}}],
        }

    def _set_ready(self, pod: Manifest, ready: bool) -> None:
        status = "True" if ready else "False"
        before: Manifest = next(
            (item for item in pod["status"].get("conditions", ()) if item["type"] == "Ready"), {}
        )
        pod["status"]["containerStatuses"][0]["ready"] = ready
        if before.get("status") != status:
            pod["status"]["conditions"] = [ready_condition(ready, self.now)]

    def lose_node(self, role: Role, partition: bool = False) -> None:
        """The node of one of the role's pods stops answering; the node controller has seen it.

        Args:
            role: the role.
            partition: its processes go on behind the broken network.
        """
        found = [pod for pod in self.pods(role) if pod["metadata"]["uid"] not in self.lost]
        for pod in [item for item in found if "nodeName" in item["spec"]][:1]:
            uid = pod["metadata"]["uid"]
            self.lost[uid] = partition
            self.lost_at = self.now
            self._set_ready(pod, False)
            pod["status"]["containerStatuses"][0]["ready"] = True
            for job in self.jobs:
                if job.live and job.incarnation.startswith(uid) and not partition:
                    job.status = "FAILED"

    def nodes_return(self) -> None:
        """Lost nodes answer again: kubelets end deleted pods, and restart what the loss killed."""
        for pod in self.pods():
            partition = self.lost.get(pod["metadata"]["uid"])
            if partition is None:
                continue
            if "deletionTimestamp" in pod["metadata"]:
                del self.objects["Pod", pod["metadata"]["name"]]
            elif not partition:
                pod["status"]["containerStatuses"][0]["restartCount"] += 1
                self._start_container(pod)
        self.lost.clear()
        self._release_claim()

    def evict_lost_pods(self) -> None:
        """The node controller deletes the pods of lost nodes; they stay in the API."""
        for pod in self.pods():
            if pod["metadata"]["uid"] in self.lost:
                self._mark_deleted(pod)

    @staticmethod
    def _belongs_to(pod: Manifest, cluster: Manifest) -> bool:
        owners = pod["metadata"]["ownerReferences"]
        return any(owner["uid"] == cluster["metadata"]["uid"] for owner in owners)

    def pods(self, role: Role | None = None) -> list[Manifest]:
        """The pods of RayClusters, also of deleted ones; the newest first."""
        found = [item for (kind, _), item in self.objects.items() if kind == "Pod"]
        return [
            pod
            for pod in reversed(found)
            if "ownerReferences" in pod["metadata"]
            if role is None or role_of(pod) is role
        ]

    def delete_pod(self, role: Role) -> None:
        for pod in self.pods(role)[:1]:
            if pod["metadata"]["uid"] in self.lost:
                self._mark_deleted(pod)
            else:
                del self.objects["Pod", pod["metadata"]["name"]]
        self._release_claim()

    def restart_head_container(self) -> None:
        """Restart Ray's head in the same pod: Ray forgets its jobs, the reporter survives."""
        for pod in self.pods(Role.DRIVER):
            if "nodeName" in pod["spec"] and pod["metadata"]["uid"] not in self.lost:
                pod["status"]["containerStatuses"][0]["restartCount"] += 1
                self._start_container(pod)

    def delete_cluster(self) -> None:
        """Delete the RayCluster; its pods go on as orphans until `collect_garbage`."""
        self.objects.pop(("RayCluster", NAME), None)

    def incarnation(self) -> str | None:
        """Return the incarnation of the newest head."""
        return next(iter(self._incarnations().values()), None)

    def _incarnations(self) -> dict[str, str]:
        """Incarnation of each head pod, by the pod's IP."""
        return {
            pod["status"]["podIP"]: self._incarnation(pod)
            for pod in self.pods(Role.DRIVER)
            if "nodeName" in pod["spec"]
        }

    # -- the driver --------------------------------------------------------------------------------

    def live_jobs(self) -> list[FakeJob]:
        """Jobs whose driver runs now, on any head."""
        heads = self._incarnations().values()
        return [job for job in self.jobs if job.live and job.incarnation in heads]

    def drive(self, step: int, **fields: Any) -> None:
        """The running driver reports a step."""
        for job in self.live_jobs():
            job.status = "RUNNING"
            head = job.incarnation.split("/")[0]
            if config := self.configs.get(head):
                fields = {
                    "max_steps": config.max_steps,
                    "observed_generation": config.generation,
                    **fields,
                }
            self.reports[head] = self.progress_of(job, step, **fields)

    def end_driver(
        self, outcome: Outcome | None, retryable: bool = True, exit_code: int = 1
    ) -> None:
        """The running driver ends: with a final report, or, without an outcome, killed."""
        for job in self.live_jobs():
            if outcome:
                final = FinalReport(
                    outcome=outcome,
                    reason="Told",
                    message="the driver's words",
                    retryable=retryable,
                    time=format_time(self.now),
                )
                before = self.reports.get(job.incarnation.split("/")[0])
                step, steps = (before.step, before.max_steps) if before else (0, 2)
                kept = {
                    "observed_generation": before.observed_generation if before else None,
                    "checkpoint": before.checkpoint if before else None,
                }
                self.reports[job.incarnation.split("/")[0]] = self.progress_of(
                    job, step, final=final, max_steps=steps, **kept
                )
            job.status = "SUCCEEDED" if outcome is Outcome.SUCCEEDED else "FAILED"
            job.exit_code = 0 if outcome is Outcome.SUCCEEDED else exit_code
            job.message = "Job entrypoint command failed"

    def progress_of(self, job: FakeJob, step: int, **fields: Any) -> Progress:
        return job.progress(self.run["metadata"]["uid"], self.now, step, **fields)

    # -- protocols.Kube ----------------------------------------------------------------------------

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        self._point(f"get {kind}")
        self._check_served(kind)
        if kind == "Secret":
            raise Denied("secrets is forbidden")
        if kind in (workloads.FLAVOR_KIND, workloads.PRIORITY_KIND):
            assert namespace == ""
            assert self.kueue
            return copied(self.kueue.objects.get((kind, name)))
        assert namespace == NAMESPACE
        return copied(self.objects.get((kind, name)))

    async def list_run_keys(self) -> list[tuple[str, str]]:
        return [(NAMESPACE, name) for kind, name in self.objects if kind == KIND]

    async def list_pods(
        self, namespace: str, run_name: str, label: str = LABEL_RUN
    ) -> list[Manifest]:
        self._point("list pods")
        return copied(
            [
                item
                for (kind, _), item in self.objects.items()
                if kind == "Pod" and item["metadata"]["labels"].get(label) == run_name
            ]
        )

    async def list_policies(self, namespace: str, run_name: str) -> list[Manifest]:
        self._point("list policies")
        if self.policy_error is not None:
            raise self.policy_error
        return copied(
            [
                item
                for (kind, _), item in self.objects.items()
                if kind == POLICY_KIND
                and item["metadata"].get("labels", {}).get(LABEL_RUN) == run_name
            ]
        )

    async def list_pod_warnings(self, namespace: str, pod_uid: str) -> list[Manifest]:
        self._point("list events")
        if self.events_denied:
            raise Denied("events is forbidden")
        return copied(self.pod_warnings.get(pod_uid, []))

    async def queue_positions(self, namespace: str, queue: str) -> dict[str, int]:
        self._point("get positions")
        assert (namespace, queue) == (NAMESPACE, self.run["spec"]["queue"]["name"])
        if self.kueue is None or self.kueue.positions is None:
            raise NotServed("404 page not found")
        return dict(self.kueue.positions)

    async def create(self, manifest: Manifest) -> None:
        self._point(f"create {manifest['kind']}")
        self._check_served(manifest["kind"])
        if seconds := self.create_seconds.get(manifest["kind"]):
            await asyncio.sleep(seconds)
        if manifest["kind"] in self.create_errors:
            raise self.create_errors[manifest["kind"]]
        if (manifest["kind"], manifest["metadata"]["name"]) in self.objects:
            raise AlreadyExists(manifest["metadata"]["name"])
        if manifest["kind"] == "RayCluster" and self._lacks_quota():
            self.quota_faults.append("a RayCluster was created without quota")
        elif manifest["kind"] == "RayCluster":
            self._note_growth(None, manifest)
        self._store(copied(manifest))
        self._point("created")

    async def put(self, manifest: Manifest) -> Manifest:
        self._point(f"put {manifest['kind']}")
        if self.put_error is not None:
            raise self.put_error
        metadata = manifest["metadata"]
        stored = self.objects.get((manifest["kind"], metadata["name"]))
        if stored is None:
            raise NotFound(metadata["name"])
        self._version_what_a_test_changed(stored)
        if stored["metadata"]["resourceVersion"] != metadata["resourceVersion"]:
            raise Conflict(metadata["name"])
        if manifest["kind"] == "RayCluster":
            self._note_growth(stored, manifest)
        changed = copied(manifest)
        changed["metadata"]["resourceVersion"] = str(next(self._ids))
        self.objects[manifest["kind"], metadata["name"]] = changed
        self._point("put")
        return copied(changed)

    async def put_status(self, manifest: Manifest) -> Manifest:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        self._point(f"put status of {kind}")
        self._check_served(kind)
        await asyncio.sleep(self.put_seconds)
        if self.put_error is not None:
            raise self.put_error
        stored = self.objects.get((kind, name))
        if stored is None:
            raise NotFound(name)
        self._version_what_a_test_changed(stored)
        if stored["metadata"]["resourceVersion"] != manifest["metadata"]["resourceVersion"]:
            raise Conflict(name)
        before, asked = workloads.holds_quota(stored), workloads.pod_counts(stored)
        stored["status"] = copied(manifest["status"])
        stored["metadata"]["resourceVersion"] = str(next(self._ids))
        assert before or not workloads.holds_quota(stored), "only Kueue may reserve quota"
        if before and not workloads.holds_quota(stored):
            self._note_release()
        for role, number in workloads.pod_counts(stored).items() if before else ():
            assert number <= asked[role], "Kueue's webhook refuses it"
            if number < asked[role] and len(self.pods(Role(role))) > number:
                self.quota_faults.append(f"quota of {role} pods was given back before they went")
        self._point("put status")
        return copied(stored)

    async def delete(
        self,
        kind: str,
        namespace: str,
        name: str,
        uid: str,
        force: bool = False,
        propagation: Propagation = "Background",
    ) -> None:
        self._point(f"delete {kind}")
        if seconds := self.delete_seconds.get(kind):
            await asyncio.sleep(seconds)
        if kind in self.delete_errors:
            raise self.delete_errors[kind]
        found = self.objects.get((kind, name))
        if found and found["metadata"]["uid"] == uid:
            if kind == workloads.WORKLOAD_KIND and workloads.holds_quota(found):
                self._note_release()
            if uid in self.lost and not force:
                self._mark_deleted(found)
            else:
                del self.objects[kind, name]
            self.collect_garbage()
        self._point("deleted")

    async def write_status(self, run: Manifest, status: AgenticRunStatus) -> Manifest:
        self._point("write status")
        stored = self.objects.get((KIND, NAME))
        if stored is None:
            raise NotFound(NAME)
        if any(
            stored["metadata"][key] != run["metadata"][key] for key in ("uid", "resourceVersion")
        ):
            raise Conflict(NAME)
        if self.refuse_status(status.to_dict()):
            raise Refused("status: Invalid value")
        if invalid := violations(status_schema(), status.to_dict()):
            self.invalid_statuses.append(invalid)
            raise Refused(f'AgenticRun.agenticrun.dev "{NAME}" is invalid: {"; ".join(invalid)}')
        stored["status"] = status.to_dict()
        for path in self.crd_lacks:
            *parents, last = path.split(".")
            node = stored["status"]
            for name in parents:
                node = node.get(name) or {}
            node.pop(last, None)
        stored["metadata"]["resourceVersion"] = str(next(self._ids))
        self.status_writes += 1
        answer = copied(stored)
        self._point("wrote status")
        return answer

    async def post_event(self, run: Manifest, event: Event) -> None:
        self._point("post event")
        self.events.append(event)

    # -- protocols.Head ----------------------------------------------------------------------------

    async def job(self, head: HeadAddress, submission_id: str) -> Job | NoJob | Unreachable:
        self._point("get job")
        if self.ray_down:
            return Unreachable("no answer")
        if trouble := self._trouble(head, head.ray_token, "auth_token"):
            return trouble
        job = self._known(head, submission_id)
        tail = "the last line" if job and job.status in ("FAILED", "STOPPED") else ""
        if job is None:
            return NoJob()
        return Job(job.status, job.message, job.exit_code, tail, job.start_time)

    async def submit(
        self, head: HeadAddress, submission_id: str, attempt: int, replicas: Mapping[str, int]
    ) -> None:
        self._point("submit")
        incarnation = self._incarnations().get(head.pod.ip)
        if self.submit_down:
            raise HeadUnreachable("Ray did not take the job")
        if self.ray_down or self._trouble(head, head.ray_token, "auth_token"):
            raise HeadUnreachable("no answer")
        assert incarnation is not None
        if self._known(head, submission_id) is None:
            self.jobs.append(
                FakeJob(
                    submission_id,
                    attempt,
                    incarnation,
                    replicas=dict(replicas),
                    start_time=self.now.timestamp(),
                )
            )
        self._point("submitted")

    async def stop(self, head: HeadAddress, submission_id: str) -> None:
        self._point("stop")
        if self.ray_down or self._trouble(head, head.ray_token, "auth_token"):
            raise HeadUnreachable("no answer")
        job = self._known(head, submission_id)
        if job and job.live:
            job.status = "STOPPED"

    async def configure(self, head: HeadAddress, config: LiveConfig) -> None:
        self._point("configure")
        if self.reporter_down or self._trouble(head, head.reporter_token, "token"):
            raise HeadUnreachable("no answer")
        self.configs[self._incarnations()[head.pod.ip].split("/")[0]] = config
        self._point("configured")

    async def request_stop(self, head: HeadAddress) -> None:
        self._point("request stop")
        if self.reporter_down or self._trouble(head, head.reporter_token, "token"):
            raise HeadUnreachable("no answer")
        self.stop_requests += 1

    async def progress(
        self, head: HeadAddress, after: Progress | None = None
    ) -> Progress | NoReport | Unreachable:
        self._point("get progress")
        for _ in range(round(10 * self.hold_seconds) if after else 0):
            found = self._report(head)
            quiet = isinstance(found, Progress) and (found.silent_seconds or 0) >= QUIET_SECONDS
            if found != after or quiet:
                break
            await asyncio.sleep(0.1)
        return self._report(head)

    def _report(self, head: HeadAddress) -> Progress | NoReport | Unreachable:
        if self.reporter_down:
            return Unreachable("no answer")
        if trouble := self._trouble(head, head.reporter_token, "token"):
            return trouble
        return self.reports.get(self._incarnations()[head.pod.ip].split("/")[0], NoReport())

    def _check_served(self, kind: str) -> None:
        if kind == "RayCluster" and self.kuberay_missing:
            raise NotServed("404 page not found")
        if kind in workloads.KINDS and self.kueue is None:
            raise NotServed("404 page not found")
        if kind in workloads.KINDS and self.kueue_denied:
            raise self.kueue_denied

    # -- the quota ---------------------------------------------------------------------------------

    @property
    def workload(self) -> Manifest | None:
        """The Workload of the run, as the apiserver has it."""
        found = (item for (kind, _), item in self.objects.items() if kind == "Workload")
        return next(found, None)

    def _lacks_quota(self) -> bool:
        queued = self.run["spec"].get("queue")
        return bool(queued and not (self.workload and workloads.is_admitted(self.workload)))

    def _note_growth(self, before: Manifest | None, cluster: Manifest) -> None:
        """Note a RayCluster that gets more pods than Kueue has admitted."""
        if not (self.run["spec"].get("queue") and self.workload):
            return
        admitted = workloads.admitted_pods(self.workload)
        old = {
            group["groupName"]: group["replicas"]
            for group in (before or {"spec": {}})["spec"].get("workerGroupSpecs", ())
        }
        for group in cluster["spec"]["workerGroupSpecs"]:
            role, number = group["groupName"], group["replicas"]
            if admitted.get(role, 0) < number > old.get(role, 0):
                self.quota_faults.append(f"{number} {role} pods, and {admitted} are admitted")

    def _note_release(self) -> None:
        if self.pods() or ("RayCluster", NAME) in self.objects:
            self.quota_faults.append("quota was given back while the run held pods")

    # -- inside ------------------------------------------------------------------------------------

    def _known(self, head: HeadAddress, submission_id: str) -> FakeJob | None:
        wanted = (submission_id, self._incarnations().get(head.pod.ip))
        return next(
            (job for job in self.jobs if (job.submission_id, job.incarnation) == wanted), None
        )

    def _trouble(self, head: HeadAddress, given: str, key: str) -> Unreachable | None:
        """Return the reason why the head does not answer a request with this token."""
        heads = [pod for pod in self.pods(Role.DRIVER) if pod["metadata"]["uid"] not in self.lost]
        pod = next((pod for pod in heads if pod["status"].get("podIP") == head.pod.ip), None)
        if pod is None or not self._tokens_of(pod):
            return Unreachable("no answer")
        if self._tokens_of(pod)[key] != given:
            return Unreachable("the head refuses the token", Reason.TOKENS_REFUSED)
        return None

    def _store(self, manifest: Manifest) -> None:
        number = next(self._ids)
        manifest["metadata"] |= {
            "uid": f"{number:08d}-uid",
            "resourceVersion": str(number),
            "creationTimestamp": format_time(self.now),
        }
        self.objects[manifest["kind"], manifest["metadata"]["name"]] = manifest
        self.bind_claims()

    def _point(self, what: str) -> None:
        self.requests.append(what)
        if self.interruption is not None:
            when, happen = self.interruption
            if when in (0, what):
                self.interruption = None
                happen()
            elif isinstance(when, int):
                self.interruption = (when - 1, happen)


def _content(item: Manifest) -> str:
    metadata = {key: item["metadata"].get(key) for key in ("labels", "ownerReferences")}
    return json.dumps({key: item.get(key) for key in ("spec", "status")} | metadata)


def _started(pod: Manifest) -> datetime | None:
    (container,) = pod["status"].get("containerStatuses") or [{"state": {}}]
    started = container["state"].get("running", {}).get("startedAt")
    return parse_time(started) if started else None


class Operator:
    """A reconciler on a world. Its memory is lost when it crashes."""

    def __init__(
        self,
        world: World,
        slots: asyncio.Semaphore | None = None,
        slow_writes: SlowWrites | None = None,
    ):
        self.world = world
        self.slots = slots or asyncio.Semaphore(4)
        self.slow_writes = slow_writes or SlowWrites(lambda _: None)
        self.crashes = 0
        self.images = IMAGES
        self.head: Head = world
        self.key = KEY
        self.default_ttl: int | None = None
        self.look_again: Callable[[Key], None] | None = None
        self.shard = ALL_RUNS
        self._start()

    def _start(self) -> None:
        self.reconciler = Reconciler(
            self.world,
            self.head,
            self.world.watched,
            self.images,
            self.key,
            full_look_seconds=20.0,
            slots=self.slots,
            slow_writes=self.slow_writes,
            clock=lambda: self.world.now,
            default_ttl=self.default_ttl,
            look_again=self.look_again,
            shard=self.shard,
        )

    def use_head(self, head: Head) -> None:
        """Ask this client for jobs and progress, from a new process on."""
        self.head = head
        self._start()

    def watch_progress(self, look_again: Callable[[Key], None]) -> None:
        """Watch the progress of runs, from a new process on."""
        self.look_again = look_again
        self._start()

    def upgrade(self, images: WorkerImages) -> None:
        """Replace the operator by one of another version, with other worker images."""
        self.images = images
        self._start()

    async def reconcile(self, changed: bool = True) -> float | None:
        """Reconcile once.

        A crash ends the process and another one starts. Trouble with the cluster is left for the
        next reconciliation.
        """
        self.world.let_watches_catch_up()
        try:
            return await self.reconciler.reconcile(Item((NAMESPACE, NAME), changed))
        except Crash:
            self.crashes += 1
            self._start()
        except HeadUnreachable:
            pass
        return None

    async def settle(self, times: int = 6) -> None:
        """Reconcile a few times, a moment apart, with KubeRay at work."""
        for _ in range(times):
            self.world.make_pods()
            await self.reconcile()
            self.world.now += timedelta(seconds=1)


def happened(world: World) -> list[str]:
    """Return the reasons of all events so far."""
    return [str(event.reason) for event in world.events]


def condition(world: World, kind: ConditionType) -> Condition:
    """Return a condition of the run."""
    return next(item for item in world.status.conditions if item.type == kind.value)


async def training(operator: Operator, step: int = 1, **fields: Any) -> None:
    """Bring the run to a driver that has reported `step`."""
    await operator.settle()
    operator.world.drive(step, **fields)
    await operator.settle(2)
    assert operator.world.status.phase is Phase.RUNNING
