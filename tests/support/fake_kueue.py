"""Kueue for one Workload: it admits while there is quota, evicts, and takes no quota back itself.

As in Kueue, only the controller of a job gives quota back: QuotaReserved stays True until then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from agenticrun_operator.planning.times import format_time
from agenticrun_operator.resources import Manifest, workloads

CLUSTER_QUEUE = "gpus"
PREEMPTED = "Preempted to accommodate a workload (UID: 7) due to prioritization in the ClusterQueue"
NO_QUOTA = "couldn't assign flavors to pod set trainer: insufficient unused quota for cpu"


@dataclass
class FakeKueue:
    """The scheduler and the objects of an administrator."""

    free: bool = True
    """There is quota for the run."""
    elastic_pods: int = 1024
    """There is quota for so many pods of the pod set that may have fewer."""
    admits_parts: bool = True
    """Its feature gate PartialAdmission. Without it, its webhook drops `minCount`."""
    works: bool = True
    """False: its controllers are stopped."""
    refusal: tuple[str, str] = ("Pending", NO_QUOTA)
    """Reason and words for a Workload that is not admitted."""
    positions: dict[str, int] | None = None
    """Positions of the Workloads that wait, by name. None: it serves no visibility API."""
    has_topology: bool = False
    """All its flavors have a Topology, so that it chooses a node for each pod."""
    checks: list[Manifest] = field(default_factory=list)
    """Admission checks of the ClusterQueue, with their states."""
    objects: dict[tuple[str, str], Manifest] = field(
        default_factory=lambda: {
            ("ResourceFlavor", "a100"): {
                "spec": {
                    "nodeLabels": {"pool": "a100"},
                    "tolerations": [{"key": "gpu", "operator": "Exists"}],
                }
            },
            ("ResourceFlavor", "cheap"): {"spec": {}},
            ("WorkloadPriorityClass", "urgent"): {"value": 1000},
        }
    )
    """Objects without a namespace, by kind and name."""

    def work(self, workload: Manifest | None, now: datetime) -> None:
        """Look at the Workload once."""
        if workload is None or not self.works or workloads.is_finished(workload):
            return
        if not workloads.is_active(workload):
            if workloads.condition_of(workload, "Evicted").get("status") != "True":
                self.evict(workload, now, "Deactivated", "The workload is deactivated")
            return
        if not workloads.holds_quota(workload):
            self._schedule(workload, now)
        if workloads.holds_quota(workload) and not workloads.is_evicted(workload):
            workload["status"]["admissionChecks"] = [dict(check) for check in self.checks]
            if all(check["state"] == "Ready" for check in self.checks):
                said = ("True", "Admitted", "The workload is admitted")
                self._set(workload, now, "Admitted", *said)

    def _schedule(self, workload: Manifest, now: datetime) -> None:
        counts, enough = workloads.pod_counts(workload), self.free
        for item in workload["spec"]["podSets"]:
            if not self.admits_parts:
                item.pop("minCount", None)
            if "minCount" in item:
                asked = counts[item["name"]]
                counts[item["name"]] = min(asked, self.elastic_pods)
                enough = enough and min(asked, item["minCount"]) <= self.elastic_pods
        if not enough:
            self._set(workload, now, "QuotaReserved", "False", *self.refusal)
            return
        assignments: list[dict[str, Any]] = [
            {
                "name": item["name"],
                "count": counts[item["name"]],
                "flavors": {"cpu": "cheap"}
                | ({"nvidia.com/gpu": "a100"} if item["name"] == "trainer" else {}),
            }
            | ({"topologyAssignment": {"levels": [], "slices": []}} if self.has_topology else {})
            for item in workload["spec"]["podSets"]
        ]
        said = f"Quota reserved in ClusterQueue {CLUSTER_QUEUE}"
        self._set(workload, now, "QuotaReserved", "True", "QuotaReserved", said)
        workload["status"]["admission"] = {
            "clusterQueue": CLUSTER_QUEUE,
            "podSetAssignments": assignments,
        }
        if workloads.condition_of(workload, "Evicted"):
            self._set(workload, now, "Evicted", "False", "QuotaReserved", "Previously: evicted")

    def evict(
        self, workload: Manifest, now: datetime, reason: str = "Preempted", words: str = PREEMPTED
    ) -> None:
        """Want the quota back; others get it."""
        self.free = False
        self._set(workload, now, "Evicted", "True", reason, words)

    @staticmethod
    def _set(
        workload: Manifest, now: datetime, kind: str, status: str, reason: str, words: str
    ) -> None:
        conditions = workload.setdefault("status", {}).setdefault("conditions", [])
        before = next((item for item in conditions if item["type"] == kind), None)
        if before and (before["status"], before["reason"], before["message"]) == (
            status,
            reason,
            words,
        ):
            return
        if before:
            conditions.remove(before)
        same = before is not None and before["status"] == status
        time = before["lastTransitionTime"] if before and same else format_time(now)
        conditions.append(
            {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": words,
                "lastTransitionTime": time,
            }
        )
