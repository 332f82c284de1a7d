"""The operator's own process, with the rights that the chart gives it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from processes import free_port
from testcluster import ROOT, Cluster


@dataclass(frozen=True)
class Release:
    """Return what the chart renders for an operator of some namespaces."""

    name: str
    namespace: str
    watched: tuple[str, ...]
    shards: int = 1

    def documents(self, cluster: Cluster) -> list[dict[str, Any]]:
        """Return the chart's objects."""
        rendered = cluster.command(
            *("helm", "template", self.name, str(ROOT / "charts/agenticrun")),
            *("--namespace", self.namespace),
            *("--set", "registry=registry.example.org/agents"),
            *("--set", f"watchNamespaces={{{','.join(self.watched)}}}"),
            *("--set", "kueue.enabled=true"),
            *("--set", f"shards={self.shards}"),
        )
        return [document for document in yaml.safe_load_all(rendered) if document]

    def cluster_rights(self, cluster: Cluster) -> list[dict[str, Any]]:
        """Return the chart's rights and limits that belong to no namespace."""
        kinds = (
            "ClusterRole",
            "ClusterRoleBinding",
            "ValidatingAdmissionPolicy",
            "ValidatingAdmissionPolicyBinding",
        )
        return [item for item in self.documents(cluster) if item["kind"] in kinds]

    def rights(self, inside: Cluster) -> list[dict[str, Any]]:
        """Return the chart's rights in this namespace."""
        kinds = ("ServiceAccount", "Role", "RoleBinding")
        return [
            document
            for document in self.documents(inside)
            if document["kind"] in kinds and document["metadata"]["namespace"] == inside.namespace
        ]

    def grant(self, inside: Cluster) -> None:
        """Give the operator its rights in this namespace, as `helm upgrade` would."""
        inside.apply(*self.rights(inside))

    def set_up(self, cluster: Cluster) -> None:
        """Make the namespaces of runs on a new cluster, and give the operator its rights."""
        for namespace in self.watched:
            cluster.kubectl("create", "namespace", namespace)
        for namespace in (*self.watched, self.namespace):
            self.grant(cluster.in_namespace(namespace))

    def lease(self, cluster: Cluster, shard: int = 0) -> dict[str, str]:
        """Return the settings of Lease and shard that the chart gives the operator."""
        found = [item for item in self.documents(cluster) if item["kind"] == "Deployment"]
        (container,) = found[shard]["spec"]["template"]["spec"]["containers"]
        names = ("AGENTICRUN_LEASE_NAME", "AGENTICRUN_LEASE_NAMESPACE", "AGENTICRUN_SHARD")
        return {item["name"]: item["value"] for item in container["env"] if item["name"] in names}

    def kubeconfig(self, cluster: Cluster, server: str = "") -> dict[str, Any]:
        """Return a kubeconfig of the operator's identity.

        Args:
            server: the address of the apiserver, if it is another one than the cluster's.
        """
        config: dict[str, Any] = yaml.safe_load(Path(cluster.env["KUBECONFIG"]).read_text())
        inside = cluster.in_namespace(self.namespace)
        user = {"token": inside.kubectl("create", "token", self.name, "--duration=1h").strip()}
        config["users"] = [{"name": item["name"], "user": user} for item in config["users"]]
        for item in config["clusters"] if server else ():
            item["cluster"] = {"server": server}
        return config


@dataclass
class OperatorProcess:
    """`python -m agenticrun_operator`."""

    process: subprocess.Popen[bytes]
    probe_port: int
    metrics_port: int
    log: Path

    @classmethod
    def start(cls, folder: Path, config: dict[str, Any], **settings: str) -> OperatorProcess:
        """Start it with a kubeconfig and more settings."""
        kubeconfig, log = folder / "kubeconfig-operator", folder / "operator.log"
        kubeconfig.write_text(yaml.safe_dump(config))
        probe_port, metrics_port = free_port(), free_port()
        environment = {
            "KUBECONFIG": str(kubeconfig),
            "AGENTICRUN_OPERATOR_KEY": "k" * 32,
            "AGENTICRUN_WORKER_IMAGE": "worker:1",
            "AGENTICRUN_PROBE_PORT": str(probe_port),
            "AGENTICRUN_METRICS_PORT": str(metrics_port),
            **settings,
        }
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "agenticrun_operator"],
                env=os.environ | environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return cls(process, probe_port, metrics_port, log)

    def stop(self) -> None:
        """End it as the kubelet does, and wait."""
        self.process.terminate()
        self.process.wait(60)

    def crash(self) -> None:
        """End it without a chance to clean up, as for want of memory."""
        self.process.kill()
        self.process.wait(60)

    def metrics(self) -> dict[str, float]:
        """Return the operator's own counters and gauges: the sum of each over all labels but one.

        That one is the method of requests to the apiserver, which follows the name.
        """
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=60) as answer:
            text = answer.read().decode()
        found: dict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = " ".join([sample.name, *filter(None, [sample.labels.get("method")])])
                found[name.removeprefix("agenticrun_operator_")] += sample.value
        return found

    def check_alive(self) -> None:
        """Ask as the kubelet does, at an address of each family: a pod may have only one."""
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        for host in ("127.0.0.1", "[::1]"):
            url = f"http://{host}:{self.probe_port}/healthz"
            with urllib.request.urlopen(url, timeout=10) as answer:
                assert json.load(answer)["reconciling"] >= 0
