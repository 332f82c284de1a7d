"""The real apiserver stores the NetworkPolicies of runs unchanged, so they need no correction."""

from __future__ import annotations

from typing import Any

from agenticrun_api.load import parse_served
from agenticrun_operator.cluster import KubeClient
from agenticrun_operator.resources import corrected_policies, network_policies, policy_summary

SYSTEM = "agenticrun-system"
NETWORKS: list[dict[str, Any]] = [
    {},
    {
        "allowFrom": [
            {"role": "env", "podLabels": {"app": "agents"}},
            {"namespace": "monitoring", "ports": [8787]},
            {"namespace": "tools", "podLabels": {"app": "a"}, "ports": [1, 65535]},
            {"cidr": "10.1.2.3/8"},
            {"cidr": "2001:db8::/32"},
        ]
    },
    {
        "egress": [
            {"role": "env"},
            {
                "role": "trainer",
                "to": [{"cidr": "0.0.0.0/0", "ports": [443]}, {"namespace": "s3"}],
            },
        ]
    },
]


async def test_what_is_stored_needs_no_correction(
    kube: KubeClient, run_document: dict[str, Any]
) -> None:
    for network in NETWORKS:
        document = {**run_document, "spec": {**run_document["spec"], "network": network}}
        run = parse_served(document)
        wanted = network_policies(run, SYSTEM)
        for policy in wanted:
            await kube.create(policy)
        stored = await kube.list_policies(*run.key)
        names = {item["metadata"]["name"]: item["metadata"]["uid"] for item in stored}
        assert set(names) == {policy["metadata"]["name"] for policy in wanted}
        assert [*corrected_policies(wanted, stored)] == []
        assert [*corrected_policies(wanted, map(policy_summary, stored))] == []
        for name, uid in names.items():
            await kube.delete("NetworkPolicy", run.metadata.namespace, name, uid)


async def test_a_corrected_policy_is_taken_once(
    kube: KubeClient, run_document: dict[str, Any]
) -> None:
    run = parse_served(run_document)
    base, head = wanted = network_policies(run, SYSTEM)
    opened = {**base, "spec": {**base["spec"], "ingress": [{}]}}
    unlabelled = {**head["metadata"], "labels": {}}
    for policy in (opened, {**head, "metadata": unlabelled}):
        await kube.create(policy)
    found = [
        await kube.get("NetworkPolicy", run.metadata.namespace, policy["metadata"]["name"])
        for policy in (base, head)
    ]
    for policy in corrected_policies(wanted, filter(None, found)):
        await kube.put(policy)
    stored = await kube.list_policies(*run.key)
    assert len(stored) == 2
    assert [*corrected_policies(wanted, stored)] == []
