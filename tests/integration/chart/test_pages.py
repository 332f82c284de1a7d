"""What the pages tell to type is typed: options of kubectl and helm, manifests, copying images."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pages import PAGES, ROOT, blocks, commands
from testcluster import Cluster
from waiting import eventually

NAMESPACE = "default"
OPTION = re.compile(r"^ +(?:(-\w), )?(--[\w-]+)", re.MULTILINE)


def verb(words: list[str]) -> tuple[str, ...]:
    """Return a command without options and arguments: `kubectl create secret generic`."""
    program, *rest = words
    values = {"-n", "--namespace"}
    plain = [
        word
        for word, before in zip(rest, ["", *rest], strict=False)
        if not word.startswith("-") and before not in values
    ]
    # With --help, arguments that are no further verbs change nothing.
    return (program, *plain[: {"create": 3, "auth": 2, "repo": 2, "show": 2}.get(plain[0], 1)])


class Help:
    """The options of kubectl and helm, asked once for each command."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[tuple[str, ...], set[str]] = {}

    def options(self, command: tuple[str, ...]) -> set[str]:
        if command not in self._known:
            text = self._cluster.command(
                *command, *(["--help"] if command[1:] != ("options",) else [])
            )
            self._known[command] = {name for pair in OPTION.findall(text) for name in pair}
        return self._known[command]

    def unknown(self, words: list[str]) -> set[str]:
        """Return the options of a command that the program does not have."""
        known = self.options(verb(words)) | {"--help"}
        if words[0] == "kubectl":
            known |= self.options(("kubectl", "options"))
        own = words[: words.index("--")] if "--" in words else words
        used = {word.partition("=")[0] for word in own[1:] if re.match(r"--?[a-z]", word)}
        return used - known


def test_options_of_kubectl_and_helm_exist(cluster: Cluster) -> None:
    wrong = []
    shown = Help(cluster)
    for page in PAGES:
        for words in commands(page.read_text()):
            if words[0] not in ("kubectl", "helm") or words[1:2] == ["agenticrun"]:
                continue
            if len(words) == 1 or "..." in words:
                continue  # the program's name in a sentence
            if unknown := shown.unknown(words):
                wrong.append((page.name, " ".join(words), sorted(unknown)))
    assert wrong == []


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("kubectl create secret generic a --from-literals=b=c", "--from-literals"),
        (
            "helm upgrade a charts/agenticrun -n b --reset-and-reuse-values",
            "--reset-and-reuse-values",
        ),
        ("kubectl -n b apply --server-side --force-conflict -f a.yaml", "--force-conflict"),
    ],
)
def test_a_wrong_option_is_noticed(cluster: Cluster, line: str, option: str) -> None:
    assert Help(cluster).unknown(line.split()) == {option}


def manifests() -> list[dict[str, Any]]:
    """Return the objects of Kubernetes itself on the pages."""
    documents = (
        document
        for page in PAGES
        for text in blocks(page, "yaml", "yml")
        for document in yaml.safe_load_all(text)
    )
    return [
        document
        for document in documents
        if isinstance(document, dict)
        and "apiVersion" in document
        and _is_of_kubernetes(document["apiVersion"])
    ]


def _is_of_kubernetes(api_version: str) -> bool:
    """Return False for the API of AgenticRun and of other projects, such as Argo CD."""
    group = api_version.rpartition("/")[0]
    return "." not in group or group.endswith(".k8s.io")


def test_manifests_of_kubernetes_objects_are_taken(cluster: Cluster) -> None:
    assert {"PersistentVolumeClaim", "ClusterRole"} <= {found["kind"] for found in manifests()}
    for manifest in manifests():
        manifest["metadata"].pop("namespace", None)  # that of Argo CD is not there
        cluster.apply(manifest, options=("--dry-run=server", "--validate=strict"))


def test_the_rights_for_openshift_let_the_pods_of_runs_use_the_scc(cluster: Cluster) -> None:
    """On a cluster without SCCs the right to use one is a right like any other."""
    (role,) = (
        found
        for found in manifests()
        if found["kind"] == "ClusterRole"
        and "securitycontextconstraints" in found["rules"][0]["resources"]
    )
    (binding,) = (
        words
        for words in commands((ROOT / "docs/install.md").read_text())
        if words[:5] == ["kubectl", "-n", "team-a", "create", "rolebinding"]
    )
    # `kubectl auth can-i` knows only resources that the apiserver serves.
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": f"system:serviceaccount:{NAMESPACE}:default",
            "resourceAttributes": {
                "namespace": NAMESPACE,
                "verb": "use",
                "group": "security.openshift.io",
                "resource": "securitycontextconstraints",
                "name": "nonroot-v2",
            },
        },
    }

    def allowed() -> bool:
        answer = cluster.kubectl("create", "-f", "-", "-o", "json", stdin=json.dumps(review))
        return bool(json.loads(answer)["status"]["allowed"])

    cluster.apply(role)
    try:
        cluster.command(*(word.replace("team-a", NAMESPACE) for word in binding))
        eventually(allowed, 30, "pods of runs may use the SCC", interval=0.5)
    finally:
        cluster.kubectl("delete", "clusterrole", role["metadata"]["name"])
        cluster.kubectl("delete", "rolebinding", "nonroot-v2", "--ignore-not-found")


def test_the_loop_copies_every_image_of_the_list(tmp_path: Path) -> None:
    (script,) = (text for text in blocks(ROOT / "docs/install.md", "bash") if "images.txt" in text)
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\necho "$@" >> calls\n')
    docker.chmod(0o755)
    pinned = "r.example:5000/a/worker:7@sha256:" + "a" * 64
    (tmp_path / "images.txt").write_text(f"{pinned}\nquay.io/kuberay/operator:v1\n")
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["bash", "-c", script], cwd=tmp_path, env={"PATH": path}, check=True)
    mirror = "registry.internal/agenticrun"
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"pull {pinned}",
        f"tag {pinned} {mirror}/worker:7",
        f"push {mirror}/worker:7",
        "pull quay.io/kuberay/operator:v1",
        f"tag quay.io/kuberay/operator:v1 {mirror}/kuberay-operator:v1",
        f"push {mirror}/kuberay-operator:v1",
    ]
