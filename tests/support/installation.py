"""The operator under test: what the chart installed."""

from __future__ import annotations

import os
from dataclasses import dataclass

from testcluster import Cluster
from waiting import eventually

SYSTEM = "agenticrun-e2e-system"
"""Namespace of the operator."""
RUNS = "agenticrun-e2e"
"""Namespace of the runs that it serves."""
RELEASE = "agenticrun-e2e"
ENGINES = [name for name in os.environ.get("AGENTICRUN_E2E_ENGINES", "").split(",") if name]
"""Engines with worker images that are built and tried in pods.

A drill sets sglang,vllm: their images take 17 and 12 GB of disk.
"""
ALL_DRILLS = os.environ.get("AGENTICRUN_E2E_DRILLS") == "all"
"""Run the slow fault drills, too."""
_KINDS = (
    "pods,services,configmaps,secrets,persistentvolumeclaims,rayclusters,networkpolicies,ingresses,"
    "serviceaccounts,roles,rolebindings"
)


def objects(runs: Cluster) -> set[tuple[str, str]]:
    """Kind and name of everything in the namespace that a run might leave behind."""
    return {(item["kind"], item["metadata"]["name"]) for item in runs.list(_KINDS)}


@dataclass(frozen=True)
class Operator:
    """The operator under test."""

    system: Cluster
    release: str = RELEASE

    def scale(self, replicas: int) -> None:
        """Set the number of operators, and wait until it is so."""
        self.system.kubectl("scale", f"deployment/{self.release}", f"--replicas={replicas}")
        if replicas:
            self.wait_ready()
        else:
            eventually(
                lambda: not self.system.list("pods"),
                600,
                "the operator's pods are gone",
                interval=0.5,
            )

    def delete_pod(self) -> None:
        """Kill the operator's pods and wait until those that replace them are ready."""
        for pod in self.system.list("pods"):
            self.system.kubectl("delete", "pod", pod["metadata"]["name"], "--ignore-not-found")
        self.wait_ready()

    def wait_ready(self) -> None:
        self.system.kubectl("rollout", "status", f"deployment/{self.release}", "--timeout=600s")

    def log(self) -> str:
        """What the operator has written, for a failure's report."""
        return self.system.kubectl("logs", f"deployment/{self.release}", "--tail=200")


@dataclass(frozen=True)
class Images:
    """References of the images built from this tree."""

    operator: str
    worker: str
    workers: dict[str, str]
    """Of workers with an engine in them, by its name: those that `ENGINES` names."""
