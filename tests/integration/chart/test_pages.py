"""What the pages tell to type is typed: options of kubectl and helm, manifests, copying images."""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from pathlib import Path

import yaml

from pages import PAGES, ROOT, blocks, commands
from testcluster import Cluster, CommandFailed

NAMESPACE = "agenticrun-test-pages"
OPTION = re.compile(r"^ +(?:(-\w), )?(--[\w-]+)", re.MULTILINE)


@cache
def options(help_text: str) -> frozenset[str]:
    return frozenset(name for pair in OPTION.findall(help_text) for name in pair if name)


def verb(words: list[str]) -> list[str]:
    """Return the command without its options and arguments: [`helm`, `show`, `crds`]."""
    program, *rest = words
    values = {"-n", "--namespace"}
    plain = [
        word
        for word, before in zip(rest, ["", *rest], strict=False)
        if not word.startswith("-") and before not in values
    ]
    nested = {"helm": ("repo", "show"), "kubectl": ("create", "auth", "rollout")}[program]
    return [program, *plain[: 2 if plain[0] in nested else 1]]


def unknown_options(cluster: Cluster, words: list[str]) -> set[str]:
    """Return the options of a command that the program does not have."""
    command = verb(words)
    try:
        text = cluster.command(*command, "--help")
    except CommandFailed:  # `kubectl create -f`
        text = cluster.command(*command[:2], "--help")
    known = options(text) | {"--help"}
    if command[0] == "kubectl":
        known |= options(cluster.command("kubectl", "options")) | {"-n", "-s", "-v"}
    own = words[: words.index("--")] if "--" in words else words
    used = {word.partition("=")[0] for word in own[1:] if re.match(r"--?[a-z]", word)}
    return used - known


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
    line = "helm upgrade a charts/agenticrun -n b --reset-and-reuse-values"
    assert unknown_options(cluster, line.split()) == {"--reset-and-reuse-values"}
    line = "kubectl -n b apply --server-side --force-conflict -f a.yaml"
    assert unknown_options(cluster, line.split()) == {"--force-conflict"}
    line = "kubectl -n b create role a --verb=use --resource-names=c"
    assert unknown_options(cluster, line.split()) == {"--resource-names"}


def test_manifests_of_kubernetes_objects_are_taken(cluster: Cluster) -> None:
    found = [
        document
        for page in PAGES
        for text in blocks(page, "yaml", "yml")
        for document in yaml.safe_load_all(text)
        if isinstance(document, dict) and document.get("apiVersion", "agentic").count("/") == 0
    ]
    manifests = [document for document in found if "apiVersion" in document]
    assert "PersistentVolumeClaim" in {document["kind"] for document in manifests}
    with cluster.new_namespace(NAMESPACE) as inside:
        for manifest in manifests:
            inside.apply(manifest, options=("--dry-run=server", "--validate=strict"))


def test_commands_for_openshift_make_the_roles(cluster: Cluster) -> None:
    """On a cluster without SCCs the right to use one is a right like any other."""
    typed = list(commands((ROOT / "docs/install.md").read_text()))
    with cluster.new_namespace(NAMESPACE) as inside:
        for words in typed:
            if words[:4] == ["kubectl", "-n", "team-a", "create"]:
                inside.command(*(word.replace("team-a", NAMESPACE) for word in words))
        allowed = inside.command(
            *("kubectl", "auth", "can-i", "use"),
            "securitycontextconstraints.security.openshift.io/nonroot-v2",
            *("-n", NAMESPACE, f"--as=system:serviceaccount:{NAMESPACE}:default"),
        )
    assert allowed.strip() == "yes"


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
