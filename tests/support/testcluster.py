"""The real cluster that integration and e2e tests use, through kubectl and tools/devcluster."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
DEVCLUSTER = (sys.executable, str(ROOT / "tools/devcluster"))
KEEP_CLUSTER = "AGENTICRUN_TEST_KEEP_CLUSTER"
"""Environment variable: leave a cluster up that the tests brought up."""

TEST_NAMESPACES = "^agenticrun-(test|e2e)"
"""Regular expression of the namespaces in which tests create runs."""
OPERATORS = "app.kubernetes.io/name=agenticrun"
"""Label of the Deployment of every release of the chart."""
DEMO_USER = "system:serviceaccount:agenticrun-system:agenticrun"
"""The operator that `make demo` and the README install."""
KEEP_OFF = "agenticrun-tests-keep-off"
"""Name of the policy that keeps the user's operators off those namespaces."""

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
    kept_off: tuple[str, ...] = ()
    """Users that may change nothing in the tests' namespaces: the operators of others."""

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
        return replace(self, namespace=namespace)

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
            for user in self.kept_off if re.match(TEST_NAMESPACES, name) else ():
                eventually(
                    partial(inside.refuses, user), 120, f"{user} is kept off {name}", interval=0.3
                )
            yield inside
        finally:
            self.kubectl(*delete)

    def refuses(self, user: str) -> bool:
        """Return True if the policy refuses the user's writes, although the user has all rights.

        No other policy may refuse this one: that of the chart says nothing about ServiceAccounts.
        """
        identity = (f"--as={user}", "--as-group=system:masters")
        try:
            self.kubectl("create", "serviceaccount", "probe", "--dry-run=server", *identity)
        except CommandFailed as error:
            return KEEP_OFF in error.stderr
        return False


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
        with others_kept_off(Cluster(cluster_environment())) as cluster:
            yield cluster
    finally:
        if not was_up and not os.environ.get(KEEP_CLUSTER):
            devcluster("down")


@contextmanager
def others_kept_off(cluster: Cluster) -> Iterator[Cluster]:
    """Let the user's operators change nothing in the tests' namespaces, by an admission policy.

    An operator that serves all namespaces, such as that of `make demo`, would act on the tests'
    runs. To stop it would leave the user's runs alone. The policy touches neither, whatever the
    version of the operator is, and what a killed session leaves of it does no harm: the next
    session replaces it, and removes it at its end.
    """
    users = operator_users(cluster)
    cluster.apply(*_keep_off(users))
    try:
        yield replace(cluster, kept_off=users)
    finally:
        kinds = "validatingadmissionpolicybinding,validatingadmissionpolicy"
        cluster.kubectl("delete", kinds, KEEP_OFF, "--ignore-not-found")


def operator_users(cluster: Cluster) -> tuple[str, ...]:
    """Return the identities of the operators outside the tests' namespaces, and that of the demo.

    The demo may begin while tests run.
    """
    out = cluster.kubectl("get", "deployments", "-A", "-l", OPERATORS, "-o", "json")
    found = {DEMO_USER}
    for item in json.loads(out)["items"]:
        namespace = item["metadata"]["namespace"]
        if not re.match(TEST_NAMESPACES, namespace):
            account = item["spec"]["template"]["spec"].get("serviceAccountName", "default")
            found.add(f"system:serviceaccount:{namespace}:{account}")
    return tuple(sorted(found))


def _keep_off(users: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the policy and its binding."""
    condition = f"request.userInfo.username in {json.dumps(sorted(users))}"
    rule = {
        "apiGroups": ["*"],
        "apiVersions": ["*"],
        "resources": ["*/*"],
        "operations": ["CREATE", "UPDATE", "DELETE", "CONNECT"],
        "scope": "Namespaced",
    }
    refusal = {
        "expression": f"!request.namespace.matches('{TEST_NAMESPACES}')",
        "message": f"{KEEP_OFF}: this operator does not serve the namespaces of tests",
    }
    api = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": KEEP_OFF}}
    policy = {
        "failurePolicy": "Fail",
        "matchConditions": [{"name": "operators-of-others", "expression": condition}],
        "matchConstraints": {"resourceRules": [rule]},
        "validations": [refusal],
    }
    binding = {"policyName": KEEP_OFF, "validationActions": ["Deny"]}
    return (
        {**api, "kind": "ValidatingAdmissionPolicy", "spec": policy},
        {**api, "kind": "ValidatingAdmissionPolicyBinding", "spec": binding},
    )
