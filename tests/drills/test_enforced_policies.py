"""A real network plug-in, kube-router, enforces the NetworkPolicies of runs against attackers.

What the kernel lets pass is compared with `network_rules.py`, on which the unit tests rely: for
each source, target and port, first without policies, then with those of a run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import pytest

from agenticrun_api import AgenticRun, Role
from agenticrun_api.load import parse_served
from agenticrun_operator.resources import Manifest, WorkerImages, desired_children, network_policies
from control_plane import control_plane
from enforced_network import HOST_IP, EnforcedNetwork, enforced_network
from network_rules import Endpoint, can_connect
from runs import run_with
from testcluster import Cluster
from waiting import eventually

TEAM, ELSEWHERE, SYSTEM = "team", "elsewhere", "agenticrun-system"
PORTS = (6379, 8265, 8787, 52365, 10001)
WEB, DNS = 8443, 53
SETTLE_SECONDS = 30.0
"""Time that the agent has to follow a change."""
OPERATOR = {"app.kubernetes.io/name": "agenticrun", "app.kubernetes.io/component": "operator"}
NETWORKS: dict[str, dict[str, Any] | None] = {
    "by default": None,
    "with clients": {
        "allowFrom": [
            {"role": "env", "podLabels": {"app": "agents"}},
            {"role": "driver", "namespace": ELSEWHERE, "ports": [8787]},
            {"cidr": f"{HOST_IP}/32", "ports": [10001]},
        ]
    },
    "with egress": {
        "egress": [
            {"role": "env"},
            {"role": "trainer", "to": [{"cidr": f"{HOST_IP}/32", "ports": [WEB]}]},
        ]
    },
}


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnforcedNetwork]:
    folder = tmp_path_factory.mktemp("walls")
    with control_plane(folder) as cluster:
        for name in (TEAM, ELSEWHERE, SYSTEM):
            cluster.kubectl("create", "namespace", name)
        for name in (TEAM, ELSEWHERE, SYSTEM):
            inside = cluster.in_namespace(name)
            eventually(partial(inside.get, "serviceaccount", "default"), 60, name)
        with enforced_network(cluster, folder) as made:
            yield made


def created(cluster: Cluster, name: str) -> AgenticRun:
    """Return a run that the apiserver has."""
    inside = cluster.in_namespace(TEAM)
    inside.kubectl("create", "-f", "-", stdin=json.dumps(run_with(name=name)))
    found = inside.get("agenticrun", name)
    assert found is not None
    return parse_served(found)


def pods_of(run: AgenticRun) -> dict[Role, dict[str, str]]:
    """Return the labels of the pods of each role."""
    cluster = desired_children(run, WorkerImages("worker:1"), "tokens")[-1]["spec"]
    groups = {Role.DRIVER.value: cluster["headGroupSpec"]}
    groups |= {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    return {Role(name): group["template"]["metadata"]["labels"] for name, group in groups.items()}


def endpoints(network: EnforcedNetwork, labels: dict[str, dict[str, str]]) -> dict[str, Endpoint]:
    return {
        name: Endpoint(address, None if name == "outside" else name.split("/")[0], labels[name])
        for name, address in network.addresses.items()
    }


def reached(network: EnforcedNetwork, ports: dict[str, tuple[int, ...]]) -> set[Any]:
    """Return who can connect to whom, at which port, as the kernel decides it."""
    names = {address: name for name, address in network.addresses.items()}
    targets = {(network.addresses[name], port) for name in ports for port in ports[name]}

    def tried(source: str) -> set[Any]:
        others = {target for target in targets if target[0] != network.addresses[source]}
        found = network.connects(source, others)
        return {(source, names[address], port) for address, port in found}

    with ThreadPoolExecutor() as pool:
        return set().union(*pool.map(tried, network.addresses))


def test_attackers_are_kept_out_and_the_kernel_decides_as_the_unit_tests_do(
    network: EnforcedNetwork,
) -> None:
    cluster = network.cluster
    run, other = created(cluster, "lake"), created(cluster, "river")
    labels: dict[str, dict[str, str]] = {"outside": {}}
    ports: dict[str, tuple[int, ...]] = {"outside": (WEB,)}

    def add(namespace: str, name: str, own: dict[str, str], listens: tuple[int, ...] = ()) -> None:
        labels[f"{namespace}/{name}"], ports[f"{namespace}/{name}"] = own, listens
        network.add_pod(namespace, name, own, listens)

    network.listen(None, HOST_IP, (WEB,))
    for role, own in pods_of(run).items():
        add(TEAM, f"lake-{role.value}", own, PORTS)
    add(TEAM, "river-driver", pods_of(other)[Role.DRIVER], PORTS)
    add(TEAM, "agents", {"app": "agents"})
    add(TEAM, "attacker", {"agenticrun.dev/run": "lake"})
    add(ELSEWHERE, "attacker", pods_of(run)[Role.ENV])
    add(ELSEWHERE, "dns", {"app": "dns"}, (DNS,))
    add(SYSTEM, "operator", OPERATOR)
    everyone = endpoints(network, labels)

    def expected(policies: list[Manifest]) -> set[Any]:
        return {
            (source, target, port)
            for source, target in product(everyone, everyone)
            for port in ports[target]
            if source != target and can_connect(policies, everyone[source], everyone[target], port)
        }

    everything = expected([])
    eventually(lambda: reached(network, ports) == everything, 60, "without policies all is open")
    for what, spec in NETWORKS.items():
        document = run.to_dict()
        document["spec"] |= {"network": spec} if spec else {}
        policies = [
            *network_policies(parse_served(document), SYSTEM),
            *network_policies(other, SYSTEM),
        ]
        inside = cluster.in_namespace(TEAM)
        inside.kubectl("delete", "networkpolicies", "--all")
        for policy in policies:
            inside.kubectl("create", "-f", "-", stdin=json.dumps(policy))
        wanted = expected(policies)
        assert wanted < everything
        intrusions = [item for item in wanted if "attacker" in item[0] and "lake" in item[1]]
        assert bool(intrusions) is (what == "with clients"), "only its second client is one"
        end = time.monotonic() + SETTLE_SECONDS
        while (found := reached(network, ports)) != wanted and time.monotonic() < end:
            time.sleep(1.0)
        assert sorted(found - wanted) == [], f"{what}: open, and should not be"
        assert sorted(wanted - found) == [], f"{what}: closed, and should be open"
        print(f"{what}: {len(wanted)} of {len(everything)} connections stay open")
