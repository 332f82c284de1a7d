"""The real cluster that integration and e2e tests use, through kubectl and tools/devcluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
DEVCLUSTER = (sys.executable, str(ROOT / "tools/devcluster"))
KEEP_CLUSTER = "AGENTICRUN_TEST_KEEP_CLUSTER"
"""Environment variable: leave a cluster up that the tests brought up."""

DETACHED_GROUP = "detached.agenticrun.dev"
"""API group of a copy of the CRD, for objects that no operator acts on."""


class CommandFailed(AssertionError):
    """A command ended with an error; `stderr` is what it said."""

    def __init__(self, command: Iterable[str], stderr: str):
        self.stderr = stderr
        super().__init__(f"{' '.join(command)}\n{stderr.strip()}")


@dataclass(frozen=True)
class Cluster:
    """kubectl and helm against one cluster, in one namespace."""

    env: dict[str, str]
    namespace: str = "default"

    def command(self, *words: str, stdin: str | None = None) -> str:
        """Run a program with the cluster's environment; returns stdout, raises `CommandFailed`."""
        done = subprocess.run(
            words, env=self.env, input=stdin, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise CommandFailed(words, done.stderr)
        return done.stdout

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        """kubectl in this namespace."""
        return self.command("kubectl", "--namespace", self.namespace, *words, stdin=stdin)

    def apply(self, *documents: dict[str, Any], options: tuple[str, ...] = ()) -> str:
        """`kubectl apply -f -`, with the apiserver's warnings left out."""
        return self.kubectl(
            "apply", *options, "-f", "-", stdin=yaml.safe_dump_all(documents, sort_keys=False)
        )

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """One object, or None if there is none."""
        out = self.kubectl("get", kind, name, "-o", "json", "--ignore-not-found")
        found: dict[str, Any] | None = json.loads(out) if out.strip() else None
        return found

    def wait_for_crd(self, name: str) -> None:
        """Wait until the definition serves.

        `kubectl wait` would fail on a new definition that has no conditions yet.
        """

        def established() -> bool:
            conditions = (self.get("crd", name) or {}).get("status", {}).get("conditions") or []
            return any(
                condition["type"] == "Established" and condition["status"] == "True"
                for condition in conditions
            )

        eventually(established, 120, f"{name} is established", interval=0.5)

    def list(self, kinds: str, selector: str = "") -> list[dict[str, Any]]:
        """Objects of the given kinds (`pods,services`), optionally by label."""
        selected = ("--selector", selector) if selector else ()
        items: list[dict[str, Any]] = json.loads(
            self.kubectl("get", kinds, *selected, "-o", "json")
        )["items"]
        return items

    def in_namespace(self, namespace: str) -> Cluster:
        return Cluster(self.env, namespace)

    @contextmanager
    def new_namespace(self, name: str) -> Iterator[Cluster]:
        """Yield a new namespace and delete it with its contents at the end.

        First delete what a killed test has left of it.
        """
        delete = (
            "delete",
            "namespace",
            name,
            "--ignore-not-found",
            "--wait=true",
            "--timeout=400s",
        )
        self.kubectl(*delete)
        self.kubectl("create", "namespace", name)
        try:
            inside = self.in_namespace(name)
            eventually(
                lambda: inside.get("serviceaccount", "default"),
                120,
                f"the default service account of {name}",
                interval=0.5,
            )
            yield inside
        finally:
            self.kubectl(*delete)


def devcluster(*command: str) -> subprocess.CompletedProcess[str]:
    """Run one command of tools/devcluster; its progress goes to the test's stderr."""
    return subprocess.run(
        [*DEVCLUSTER, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )


def cluster_environment() -> dict[str, str]:
    """This process's environment with the KUBECONFIG and PATH that `devcluster env` exports."""
    exports = devcluster("env")
    exports.check_returncode()
    shown = subprocess.run(
        ["bash", "-c", f"{exports.stdout}\nenv -0"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    return dict(line.split("=", 1) for line in shown.split("\0") if "=" in line)


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Yield the development cluster.

    If it was down, start it, and stop it at the end unless `KEEP_CLUSTER` is set.
    """
    was_up = devcluster("status", "--wait", "30").returncode == 0
    if not was_up and devcluster("up").returncode:
        raise AssertionError("no cluster: `tools/devcluster up` failed, see its output above")
    try:
        yield Cluster(cluster_environment())
    finally:
        if not was_up and not os.environ.get(KEEP_CLUSTER):
            devcluster("down")
