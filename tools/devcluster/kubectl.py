"""The few requests that this tool makes to an apiserver, through kubectl."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from devcluster.shell import CommandFailed, run, succeeds
from devcluster.waiting import Report, last_line, reports_of


class Kubectl:
    """kubectl with one kubeconfig and, if one is named, a context of it."""

    def __init__(
        self, program: Path | str, kubeconfig: Path | None = None, context: str = ""
    ) -> None:
        """Without a kubeconfig, kubectl searches in its own order."""
        self._argv: list[str | Path] = [program]
        self._argv += ["--kubeconfig", kubeconfig] if kubeconfig else []
        self._argv += ["--context", context] if context else []

    def __call__(self, *arguments: str | Path, stdin: str | None = None) -> str:
        """Run one command and return its stdout; raise CommandFailed if it fails."""
        return run([*self._argv, *arguments], stdin=stdin)

    def ok(self, *arguments: str | Path) -> bool:
        """Return True if the command succeeds."""
        return succeeds([*self._argv, *arguments])

    def get(self, *arguments: str) -> Mapping[str, Any]:
        """Return one object or list as parsed JSON."""
        parsed: Mapping[str, Any] = json.loads(self("get", *arguments, "--output=json"))
        return parsed

    def find(self, *arguments: str) -> Mapping[str, Any] | None:
        """Return the same as `get`, but None if there is no such object or no apiserver."""
        try:
            return self.get(*arguments)
        except CommandFailed:
            return None

    def reports(
        self, namespace: str, kinds: str = "pods,replicasets", prefix: str = ""
    ) -> list[Report]:
        """Return what the objects of a namespace report, the newest last; see `waiting.reports_of`.

        Args:
            kinds: which objects.
            prefix: only objects with names that begin with this.
        """
        found = self.find(f"{kinds},events", f"--namespace={namespace}") or {"items": ()}
        items = [
            item
            for item in found["items"]
            if item["kind"] == "Event" or item["metadata"]["name"].startswith(prefix)
        ]
        return [self._with_last_words(report, namespace) for report in reports_of(items)]

    def _with_last_words(self, report: Report, namespace: str) -> Report:
        """Put the last log line of a container that keeps crashing into its report."""
        if report.reason != "CrashLoopBackOff":
            return report
        pod, _, container = report.source.removeprefix("pod ").partition(", container ")
        try:
            log = self(
                "logs",
                pod,
                f"--container={container}",
                f"--namespace={namespace}",
                "--previous",
                "--tail=20",
            )
        except CommandFailed:
            return report
        return replace(report, message=last_line(log) or report.message)

    def apply(self, source: Path | str, *, kustomization: bool = False) -> None:
        """Apply on the server: KubeRay's CRDs are too large for client-side apply."""
        self("apply", "--server-side", "--force-conflicts", "-k" if kustomization else "-f", source)

    def deployment_available(self, namespace: str, name: str) -> bool:
        """Return True if exactly the replicas of the newest generation are available."""
        found = self.find("deployment", name, f"--namespace={namespace}")
        return found is not None and rolled_out(found)


def rolled_out(deployment: Mapping[str, Any]) -> bool:
    """Return True if a Deployment is complete, as `kubectl rollout status` judges it.

    That command itself, with a time limit, says no on a machine that stalls.
    """
    status = deployment.get("status", {})
    counts = {status.get(kind, 0) for kind in ("replicas", "updatedReplicas", "availableReplicas")}
    return status.get("observedGeneration", 0) >= deployment["metadata"][
        "generation"
    ] and counts == {deployment["spec"]["replicas"]}


def is_ready(node: Mapping[str, Any]) -> bool:
    """Return True when the node's condition Ready is true."""
    return any(item["status"] == "True" for item in _ready_conditions(node))


def node_reports(node: Mapping[str, Any] | None) -> list[Report]:
    """Return why a node is not Ready, in the kubelet's words."""
    if node is None:
        return [
            Report("node", "NotRegistered", "the kubelet has not registered it with the apiserver")
        ]
    name = f"node {node['metadata']['name']}"
    return [
        Report(name, item["reason"], item["message"])
        for item in _ready_conditions(node)
        if item["status"] != "True"
    ]


def _ready_conditions(node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [
        item for item in node.get("status", {}).get("conditions", ()) if item["type"] == "Ready"
    ]
