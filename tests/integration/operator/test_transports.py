"""A pod's port through the apiserver's proxy.

The pod is KubeRay's own operator: every test cluster has it.
"""

from __future__ import annotations

import json

import pytest

from agenticrun_operator.cluster import KubeClient, ProxyTransport
from agenticrun_operator.cluster.transports import PodAddress
from agenticrun_operator.errors import HeadUnreachable
from testcluster import Cluster

METRICS_PORT = 8080


@pytest.fixture
def pod(cluster: Cluster) -> PodAddress:
    found = json.loads(
        cluster.kubectl(
            "get", "pods", "-A", "-l", "app.kubernetes.io/component=kuberay-operator", "-o", "json"
        )
    )["items"]
    running = next(item for item in found if item["status"]["phase"] == "Running")
    return PodAddress(
        running["metadata"]["namespace"], running["metadata"]["name"], running["status"]["podIP"]
    )


async def test_a_port_of_a_pod_answers_through_the_apiserver(
    kube: KubeClient, pod: PodAddress
) -> None:
    answer = await ProxyTransport(kube).request(
        "GET", pod, METRICS_PORT, "/metrics", headers={"X-Ray-Authorization": "x"}, limit=2**24
    )
    assert answer.status == 200
    assert b"go_goroutines" in answer.body


async def test_the_proxy_keeps_the_limit_and_tells_a_closed_port(
    kube: KubeClient, pod: PodAddress
) -> None:
    transport = ProxyTransport(kube)
    with pytest.raises(HeadUnreachable, match="more than 10 bytes"):
        await transport.request("GET", pod, METRICS_PORT, "/metrics", headers={}, limit=10)
    with pytest.raises(HeadUnreachable, match="cannot reach it"):
        await transport.request("GET", pod, 9, "/metrics", headers={}, limit=10_000)
