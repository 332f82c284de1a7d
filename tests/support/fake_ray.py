"""Fakes of what KubeRay, Ray's job API and a driver make: pods, jobs and progress snapshots.

`operator_world.py` keeps them in memory, `simulated_cluster.py` on a real apiserver and behind
HTTP.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from agenticrun_api import Activity, Progress, Role
from agenticrun_api.names import LABEL_ROLE, LABEL_RUN, LABEL_RUN_UID
from agenticrun_operator.planning.times import format_time
from agenticrun_operator.resources import Manifest


@dataclass
class FakeJob:
    """A job in the memory of one incarnation of Ray's head."""

    submission_id: str
    attempt: int
    incarnation: str
    status: str = "PENDING"
    message: str = ""
    exit_code: int | None = None
    replicas: dict[str, int] = field(default_factory=dict)
    """Those that the driver was started with, if they may have changed."""
    start_time: float = 1767225600.0

    @property
    def live(self) -> bool:
        return self.status in ("PENDING", "RUNNING")

    def details(self) -> dict[str, Any]:
        """The answer of Ray's job API."""
        return {
            "type": "SUBMISSION",
            "submission_id": self.submission_id,
            "status": self.status,
            "entrypoint": "agenticrun driver",
            "message": self.message or "Job is currently running.",
            "driver_exit_code": self.exit_code,
            "start_time": int(self.start_time * 1000),
            "metadata": {"agenticrun.dev/run-uid": "u"},
            "runtime_env": {"env_vars": {"A": "b"}},
            "driver_agent_http_address": "http://10.0.0.1:52365",
            "driver_node_id": "f" * 56,
        }

    def progress(self, run_uid: str, now: datetime, step: int, **fields: Any) -> Progress:
        """A snapshot of its driver after a step."""
        return Progress(
            run_uid=run_uid,
            submission_id=self.submission_id,
            attempt=self.attempt,
            step=step,
            policy_version=step,
            time=format_time(now),
            last_step_time=format_time(now),
            **{
                "sequence": step,
                "activity": Activity.TRAINING,
                "max_steps": 2,
                "seconds_per_step": 3.0,
                "reward": 0.5,
                **fields,
            },
        )


def missing_roles(cluster: Manifest, pods: Iterable[Manifest]) -> list[str]:
    """Return the role of each pod that the RayCluster lacks."""
    groups = cluster["spec"]["workerGroupSpecs"]
    wanted = {Role.DRIVER.value: 1} | {group["groupName"]: group["replicas"] for group in groups}
    have = Counter(pod["metadata"]["labels"][LABEL_ROLE] for pod in pods)
    return [role for role, count in wanted.items() for _ in range(count - have[role])]


def surplus_pods(cluster: Manifest, pods: Iterable[Manifest]) -> list[Manifest]:
    """Return the pods that KubeRay deletes: those that it is told to, then any."""
    chosen = []
    for group in cluster["spec"]["workerGroupSpecs"]:
        named = group.get("scaleStrategy", {}).get("workersToDelete", ())
        own = [pod for pod in pods if pod["metadata"]["labels"][LABEL_ROLE] == group["groupName"]]
        chosen += [pod for pod in own if pod["metadata"]["name"] in named]
        others = [pod for pod in own if pod["metadata"]["name"] not in named]
        chosen += others[: max(0, len(others) - group["replicas"])]
    return chosen


def pod_of(cluster: Manifest, role: str, name: str) -> Manifest:
    """Return a new pod of a RayCluster, as KubeRay makes it."""
    owner, spec = cluster["metadata"], cluster["spec"]
    groups = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    template = groups.get(role, spec["headGroupSpec"])["template"]
    reference = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "controller": True}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": owner["namespace"],
            "annotations": dict(template["metadata"].get("annotations", {})),
            "labels": template["metadata"]["labels"]
            | {
                LABEL_RUN: owner["name"],
                LABEL_RUN_UID: owner["labels"][LABEL_RUN_UID],
                LABEL_ROLE: role,
                "ray.io/cluster": owner["name"],
                "ray.io/node-type": "worker" if role in groups else "head",
                "ray.io/group": role if role in groups else "headgroup",
            },
            "ownerReferences": [reference | {"name": owner["name"], "uid": owner["uid"]}],
        },
        "spec": copy.deepcopy(template["spec"]),
        "status": {},
    }


def ready_condition(ready: bool, now: datetime) -> Manifest:
    """Return the Ready condition of a pod."""
    status = "True" if ready else "False"
    return {"type": "Ready", "status": status, "lastTransitionTime": format_time(now)}
