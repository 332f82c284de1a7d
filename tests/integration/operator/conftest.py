"""The operator's own client on the real apiserver, in a namespace that no operator serves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from agenticrun_api.names import LABEL_RUN
from agenticrun_operator.cluster import KubeClient, connect
from runs import run_with
from testcluster import ROOT, Cluster

NAMESPACE = "agenticrun-test-operator"


@pytest.fixture(scope="session")
def place(cluster: Cluster) -> Iterator[Cluster]:
    """A namespace of a cluster with the committed CRD."""
    cluster.kubectl(
        "apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds/agenticruns.yaml")
    )
    cluster.wait_for_crd("agenticruns.agenticrun.dev")
    with cluster.new_namespace(NAMESPACE) as inside:
        yield inside


@pytest.fixture
async def kube(place: Cluster, kubeconfig: Path) -> AsyncIterator[KubeClient]:
    """The operator's client, with the kubeconfig's rights."""
    client = KubeClient(await connect(kubeconfig), [NAMESPACE])
    yield client
    await client.close()


@pytest.fixture
def run_document(place: Cluster, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Yield a run on the apiserver that no operator acts on.

    It waits for a ConfigMap that does not belong to it.
    """
    name = request.node.name.replace("_", "-").removeprefix("test-")[:40].rstrip("-")
    place.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{name}-run", "labels": {LABEL_RUN: "none"}},
        }
    )
    place.apply(run_with(name=name))
    found = place.get("agenticruns", name)
    assert found is not None
    yield found
    place.kubectl("delete", "agenticrun", name, "--ignore-not-found")
