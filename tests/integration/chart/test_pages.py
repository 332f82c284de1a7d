"""What the pages tell to type is typed: options of kubectl and helm, manifests, copying images."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from pages import PAGES, ROOT, blocks, commands
from testcluster import Cluster

NAMESPACE = "agenticrun-test-pages"
OPTION = re.compile(r"^ +(?:(-\w), )?(--[\w-]+)", re.MULTILINE)


def verb(words: list[str]) -> list[str]:
    """Return a command without options, and at most two arguments: `kubectl create secret generic`.

    With --help, arguments that are no further verbs change nothing.
    """
    program, *rest = words
    values = {"-n", "--namespace"}
    plain = [
        word
        for word, before in zip(rest, ["", *rest], strict=False)
        if not word.startswith("-") and before not in values
    ]
    return [program, *plain[:3]]


def unknown_options(cluster: Cluster, words: list[str]) -> set[str]:
    """Return the options of a command that the program does not have."""
    text = cluster.command(*verb(words), "--help")
    if words[0] == "kubectl":
        text += cluster.command("kubectl", "options")
    known = {name for pair in OPTION.findall(text) for name in pair}
    own = words[: words.index("--")] if "--" in words else words
    used = {word.partition("=")[0] for word in own[1:] if re.match(r"--?[a-z]", word)}
    return used - known - {"--help"}


def test_options_of_kubectl_and_helm_exist(cluster: Cluster) -> None:
    wrong = []
    for page in PAGES:
        for words in commands(page.read_text()):
            if words[0] not in ("kubectl", "helm") or words[1:2] == ["agenticrun"]:
                continue
            if len(words) == 1 or "..." in words:
                continue  # the program's name in a sentence
            if unknown := unknown_options(cluster, words):
                wrong.append((page.name, " ".join(words), sorted(unknown)))
    assert wrong == []


def test_a_wrong_option_is_noticed(cluster: Cluster) -> None:
    line = "kubectl create secret generic a --from-literals=b=c"
    assert unknown_options(cluster, line.split()) == {"--from-literals"}
    line = "helm upgrade a charts/agenticrun -n b --reset-and-reuse-values"
    assert unknown_options(cluster, line.split()) == {"--reset-and-reuse-values"}
    line = "kubectl -n b apply --server-side --force-conflict -f a.yaml"
    assert unknown_options(cluster, line.split()) == {"--force-conflict"}
    line = "kubectl -n b create role a --verb=use --resource-names=c"
    assert unknown_options(cluster, line.split()) == {"--resource-names"}


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
        and not document["apiVersion"].startswith("agenticrun.dev/")
    ]


def test_manifests_of_kubernetes_objects_are_taken(cluster: Cluster) -> None:
    assert {"PersistentVolumeClaim", "ClusterRole"} <= {found["kind"] for found in manifests()}
    with cluster.new_namespace(NAMESPACE) as inside:
        for manifest in manifests():
            inside.apply(manifest, options=("--dry-run=server", "--validate=strict"))


def test_the_rights_for_openshift_let_the_pods_of_runs_use_the_scc(cluster: Cluster) -> None:
    """On a cluster without SCCs the right to use one is a right like any other."""
    (role,) = (found for found in manifests() if found["kind"] == "ClusterRole")
    (binding,) = (
        words
        for words in commands((ROOT / "docs/install.md").read_text())
        if words[:5] == ["kubectl", "-n", "team-a", "create", "rolebinding"]
    )
    account = f"--as=system:serviceaccount:{NAMESPACE}:default"
    question = "securitycontextconstraints.security.openshift.io/nonroot-v2"
    with cluster.new_namespace(NAMESPACE) as inside:
        inside.apply(role)
        try:
            inside.command(*(word.replace("team-a", NAMESPACE) for word in binding))
            assert inside.kubectl("auth", "can-i", "use", question, account).strip() == "yes"
        finally:
            inside.kubectl("delete", "clusterrole", role["metadata"]["name"])


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
        f"tag quay.io/kuberay/operator:v1 {mirror}/operator:v1",
        f"push {mirror}/operator:v1",
    ]
