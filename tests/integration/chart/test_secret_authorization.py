"""With secretAuthorization, a run names only Secrets that its user may read.

Users are tried by impersonation, on a real kube-apiserver.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from runs import run_with
from testcluster import ROOT, Cluster, CommandFailed
from waiting import eventually

SYSTEM, TEAM = "agenticrun-test-secrets", "agenticrun-test-secrets-team"
RELEASE = "secrets"
MAY, MAY_NOT = "mine", "theirs"
"""Names of Secrets: the user may read the first and not the second."""
MANY = 17
"""One more than the policy checks one by one."""
Changes = tuple[tuple[str, Any], ...]


def in_container(field: str, secret: str) -> dict[str, Any]:
    """Return the fields of a container that name a Secret in env or envFrom."""
    reference = {"name": secret}
    if field == "env":
        return {"env": [{"name": "A", "valueFrom": {"secretKeyRef": reference | {"key": "k"}}}]}
    return {"envFrom": [{"secretRef": reference}]}


def volumes(secret: str) -> dict[str, dict[str, Any]]:
    """Return sources of volumes that name a Secret, by their kind."""
    reference = {"name": secret}
    return {
        "secret": {"secret": {"secretName": secret}},
        "projected": {
            "projected": {"sources": [{"configMap": {"name": "c"}}, {"secret": reference}]}
        },
        "csi": {"csi": {"driver": "d", "nodePublishSecretRef": reference}},
        "azureFile": {"azureFile": {"secretName": secret, "shareName": "s"}},
        "flexVolume": {"flexVolume": {"driver": "d", "secretRef": reference}},
        "cephfs": {"cephfs": {"monitors": ["m"], "secretRef": reference}},
    }


def places(secret: str) -> dict[str, Changes]:
    """Return the changes of a run by which it names a Secret, one for each place in its spec."""
    template = "spec.roles.trainer.podTemplate"
    found: dict[str, Changes] = {
        "imagePullSecrets": (("spec.imagePullSecrets", [secret]),),
        "huggingFace": (("spec.huggingFace", {"secretName": secret}),),
        "git": (("spec.code", {"git": {"url": "https://h.example/r", "secretName": secret}}),),
        "pip": (("spec.code", {"pip": {"requirements": ["emoji"], "secretName": secret}}),),
        "podTemplate.imagePullSecrets": (
            (template, {"spec": {"imagePullSecrets": [{"name": secret}]}}),
        ),
    }
    for field in ("env", "envFrom"):
        found[f"driver.{field}"] = (("spec.roles.driver", in_container(field, secret)),)
        for kind in ("containers", "initContainers"):
            container = {"name": "sidecar", "image": "i", **in_container(field, secret)}
            found[f"podTemplate.{kind}.{field}"] = ((template, {"spec": {kind: [container]}}),)
    for kind, source in volumes(secret).items():
        volume = [{"name": "v", **source}]
        found[f"env.volumes.{kind}"] = (("spec.roles.env", {"volumes": volume}),)
        found[f"podTemplate.volumes.{kind}"] = ((template, {"spec": {"volumes": volume}}),)
    return found


class User:
    """A user who may create runs, and read some Secrets."""

    def __init__(self, cluster: Cluster, name: str):
        self._cluster = cluster.in_namespace(TEAM)
        self._as = f"--as={name}"

    def send(self, document: dict[str, Any], *words: str) -> str:
        words = words or ("create", "--dry-run=server")
        return self._cluster.kubectl(*words, self._as, "-f", "-", stdin=yaml.safe_dump(document))


def a_run(*changes: tuple[str, Any]) -> dict[str, Any]:
    document = run_with(*changes, name="lake")
    document["metadata"]["namespace"] = TEAM
    return document


def role(user: str, *rules: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a Role with these rules, and its binding to a user."""
    api = "rbac.authorization.k8s.io"
    metadata = {"name": user, "namespace": TEAM}
    return [
        {"apiVersion": f"{api}/v1", "kind": "Role", "metadata": metadata, "rules": list(rules)},
        {
            "apiVersion": f"{api}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": api, "kind": "Role", "name": user},
            "subjects": [{"apiGroup": api, "kind": "User", "name": user}],
        },
    ]


@pytest.fixture(scope="module")
def team(cluster: Cluster) -> Iterator[Cluster]:
    """A namespace with the policy, and the users `some` and `all`."""
    crd = ROOT / "crds/agenticruns.yaml"
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(crd))
    cluster.wait_for_crd("agenticruns.agenticrun.dev")
    values = {
        "registry": "registry.example.org/agents",
        "watchNamespaces": [TEAM],
        "secretAuthorization": {"enabled": True},
    }
    rendered = cluster.command(
        *("helm", "template", RELEASE, str(ROOT / "charts/agenticrun"), "-n", SYSTEM, "-f", "-"),
        stdin=json.dumps(values),
    )
    policy = [
        document
        for document in yaml.safe_load_all(rendered)
        if document and document["metadata"]["name"] == f"{SYSTEM}.{RELEASE}-secrets"
    ]
    assert len(policy) == 2, "a policy and its binding"
    runs = {
        "apiGroups": ["agenticrun.dev"],
        "resources": ["agenticruns"],
        "verbs": ["get", "create", "patch", "update"],
    }
    secrets: dict[str, Any] = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}
    with cluster.new_namespace(TEAM) as inside:
        try:
            inside.apply(*role("some", runs, secrets | {"resourceNames": [MAY]}))
            inside.apply(*role("all", runs, secrets))
            cluster.apply(*policy)

            def in_force() -> bool:
                """Return True if the apiserver has learned of the rights and of the policy."""
                try:
                    User(cluster, "all").send(a_run())
                    User(cluster, "some").send(a_run(("spec.imagePullSecrets", [MAY])))
                    User(cluster, "some").send(a_run(("spec.imagePullSecrets", [MAY_NOT])))
                except CommandFailed as failure:
                    return f"names Secret {MAY_NOT}" in failure.stderr
                return False

            eventually(in_force, 120, "rights and policy are in force", interval=0.5)
            yield inside
        finally:
            for document in policy:
                name = f"{document['kind']}/{document['metadata']['name']}"
                cluster.kubectl("delete", name, "--ignore-not-found")


@pytest.fixture
def some(team: Cluster) -> User:
    return User(team, "some")


@pytest.mark.parametrize("place", places(MAY_NOT))
def test_a_secret_that_the_user_may_not_read_is_refused_wherever_it_is_named(
    some: User, team: Cluster, place: str
) -> None:
    with pytest.raises(CommandFailed, match=f"names Secret {MAY_NOT}, which some may not read"):
        some.send(a_run(*places(MAY_NOT)[place]))
    assert some.send(a_run(*places(MAY)[place]))
    assert User(team, "all").send(a_run(*places(MAY_NOT)[place]))


def test_each_of_several_secrets_is_checked(some: User) -> None:
    with pytest.raises(CommandFailed, match=f"names Secret {MAY_NOT}"):
        some.send(a_run(("spec.imagePullSecrets", [MAY] * 10 + [MAY_NOT])))


def test_more_secrets_than_are_checked_need_the_right_to_all(some: User, team: Cluster) -> None:
    pulls = [f"s{number}" for number in range(MANY - 1)]
    named = a_run(
        ("spec.imagePullSecrets", pulls), ("spec.huggingFace", {"secretName": "one-more"})
    )
    with pytest.raises(CommandFailed, match="more than 16 Secrets"):
        some.send(named)
    assert User(team, "all").send(named)


def test_a_user_without_the_right_may_suspend_a_run_of_a_colleague(
    some: User, team: Cluster
) -> None:
    run = a_run(("spec.imagePullSecrets", [MAY_NOT]))
    User(team, "all").send(run, "apply", "--server-side")
    try:
        suspended = copy.deepcopy(run)
        suspended["spec"]["suspend"] = True
        assert some.send(suspended, "apply", "--server-side", "--force-conflicts")
    finally:
        team.kubectl("delete", "agenticrun", "lake")
