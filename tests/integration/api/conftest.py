"""The CRD of this tree on the real apiserver, and a namespace to try it in."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from agenticrun_api.crd import custom_resource_definition
from testcluster import DETACHED_GROUP, ROOT, Cluster
from waiting import eventually


def _install(cluster: Cluster, definition: dict[str, Any]) -> None:
    cluster.apply(definition, options=("--server-side", "--force-conflicts"))
    name = definition["metadata"]["name"]
    cluster.wait_for_crd(name)
    plural = f"{definition['spec']['names']['plural']}.{definition['spec']['group']}"
    eventually(
        lambda: (
            plural
            in cluster.kubectl(
                "api-resources", "--api-group", definition["spec"]["group"], "-o", "name"
            )
        ),
        120,
        plural,
        interval=0.5,
    )


@pytest.fixture(scope="session")
def detached_definition() -> dict[str, Any]:
    """The CRD under the group of `detached`."""
    definition = copy.deepcopy(custom_resource_definition())
    definition["metadata"]["name"] = f"agenticruns.{DETACHED_GROUP}"
    definition["metadata"]["annotations"] = {"api-approved.kubernetes.io": "unapproved, test"}
    definition["spec"]["group"] = DETACHED_GROUP
    for name in ("shortNames", "categories"):
        del definition["spec"]["names"][name]
    return definition


@pytest.fixture(scope="session")
def api(cluster: Cluster) -> Iterator[Cluster]:
    """A namespace of a cluster that has the committed CRD, installed as the documentation says."""
    _install(cluster, yaml.safe_load((ROOT / "crds/agenticruns.yaml").read_text()))
    with cluster.new_namespace("agenticrun-test-api") as inside:
        yield inside


@pytest.fixture(scope="session")
def detached(api: Cluster, detached_definition: dict[str, Any]) -> Iterator[Cluster]:
    """Yield a namespace with a copy of the CRD under another group: no operator acts on it."""
    _install(api, detached_definition)
    yield api
    api.kubectl("delete", "crd", f"agenticruns.{DETACHED_GROUP}", "--wait=true", "--timeout=400s")
