"""An operator that the user has installed, such as that of the demo, changes no run of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from testcluster import DEMO_USER, KEEP_OFF, Cluster, CommandFailed, operator_users

AS_DEMO = (f"--as={DEMO_USER}", "--as-group=system:masters")
"""The identity of the demo's operator, with all rights, so that only a policy can refuse. That
of the chart says nothing about ServiceAccounts and the status of runs."""


def create(inside: Cluster, name: str) -> str:
    return inside.kubectl("create", "serviceaccount", name, "--dry-run=server", *AS_DEMO)


def remove(inside: Cluster, _name: str) -> str:
    return inside.kubectl("delete", "serviceaccount", "default", "--dry-run=server", *AS_DEMO)


def write_status(inside: Cluster, name: str) -> str:
    patch = ("--subresource=status", "--type=merge", '--patch={"status":{"phase":"Pending"}}')
    return inside.kubectl("patch", "agenticrun", name, *patch, *AS_DEMO)


@pytest.mark.parametrize("act", [create, remove, write_status])
def test_the_demos_operator_may_change_nothing_here(
    place: Cluster, run_document: dict[str, Any], act: Callable[[Cluster, str], str]
) -> None:
    with pytest.raises(CommandFailed, match=KEEP_OFF):
        act(place, run_document["metadata"]["name"])


def test_it_serves_the_users_runs_while_tests_run(place: Cluster) -> None:
    assert "created" in create(place.in_namespace("default"), "probe")


@pytest.fixture
def teams_operator(place: Cluster) -> Iterator[str]:
    """Yield the identity of a release in a namespace of a team; its Deployment has no pods."""
    labels = {"app.kubernetes.io/name": "agenticrun", "app.kubernetes.io/instance": "team"}
    pod = {
        "serviceAccountName": "team",
        "containers": [{"name": "operator", "image": "registry.example.org/operator"}],
    }
    spec = {
        "replicas": 0,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    metadata = {"name": "keep-off-probe", "labels": labels}
    kind = {"apiVersion": "apps/v1", "kind": "Deployment"}
    inside = place.in_namespace("default")
    inside.apply({**kind, "metadata": metadata, "spec": spec})
    yield "system:serviceaccount:default:team"
    inside.kubectl("delete", "deployment", "keep-off-probe")


def test_each_release_of_the_chart_is_kept_off(place: Cluster, teams_operator: str) -> None:
    assert set(operator_users(place)) >= {DEMO_USER, teams_operator}
