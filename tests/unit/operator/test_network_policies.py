"""The NetworkPolicies of a run: who gets in, who gets out, and that they are there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from itertools import product
from typing import Any

import pytest

from agenticrun_api import AgenticRun, ConditionType, InvalidRun, Phase, Role, parse_run
from agenticrun_api.load import parse_served
from agenticrun_api.names import DASHBOARD_PORT, KIND, LABEL_RUN, REPORTER_PORT
from agenticrun_operator.errors import ClusterError, Denied, NotServed, RightMissing
from agenticrun_operator.resources import (
    POLICY_KIND,
    Manifest,
    WorkerImages,
    desired_children,
    network_policies,
)
from agenticrun_operator.resources.raycluster import HEAD_PORTS
from network_rules import Endpoint, can_connect
from operator_world import IMAGES, NAME, NAMESPACE, Operator, World, condition, happened, training
from runs import run_with

SYSTEM = "agenticrun-system"
UID = "1234-uid"
RAY_AGENT = 52365
PORTS = (*HEAD_PORTS.values(), RAY_AGENT, 1024, 65535)
INTERNET = Endpoint("93.184.216.34")
OPERATOR_POD = {
    "app.kubernetes.io/name": "agenticrun",
    "app.kubernetes.io/component": "operator",
    "app.kubernetes.io/instance": "any",
}


def a_run(network: dict[str, Any] | None = None, uid: str = UID) -> AgenticRun:
    changes = (("spec.network", network),) if network else ()
    document = run_with(*changes, name=NAME)
    document["metadata"] |= {"uid": uid, "namespace": NAMESPACE}
    return parse_run(document)


def pods_of(run: AgenticRun) -> dict[Role, Endpoint]:
    """Return a pod of each role, with the labels that KubeRay gives to it."""
    cluster = desired_children(run, WorkerImages("worker:1"), "tokens")[-1]["spec"]
    groups = {Role.DRIVER.value: cluster["headGroupSpec"]}
    groups |= {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    return {
        Role(name): Endpoint(f"10.0.1.{number}", NAMESPACE, group["template"]["metadata"]["labels"])
        for number, (name, group) in enumerate(groups.items())
    }


def reached(network: dict[str, Any] | None, source: Endpoint) -> set[tuple[Role, int]]:
    """Return the ports of a run's pods that an endpoint can connect to."""
    run = a_run(network)
    policies = network_policies(run, SYSTEM)
    return {
        (role, port)
        for (role, pod), port in product(pods_of(run).items(), PORTS)
        if can_connect(policies, source, pod, port)
    }


def pod(namespace: str = NAMESPACE, **labels: str) -> Endpoint:
    return Endpoint("10.0.9.9", namespace, labels)


# -- who gets in -----------------------------------------------------------------------------------

OWN_LABELS: Mapping[str, str] = pods_of(a_run())[Role.ENV].labels

STRANGERS = {
    "a pod of the namespace": pod(app="web"),
    "a pod that has the name of the run as a label": pod(**{LABEL_RUN: NAME}),
    "a pod of another run of the namespace": pods_of(a_run(uid="another"))[Role.ENV],
    "a pod of another namespace": pod("elsewhere", app="web"),
    "a pod of another namespace with all labels of the run's pods": pod("elsewhere", **OWN_LABELS),
    "a pod that calls itself the operator, in the run's namespace": pod(**OPERATOR_POD),
    "another pod of the operator's namespace": pod(SYSTEM, app="web"),
    "an address outside": INTERNET,
}


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_strangers_reach_no_port_of_any_pod(stranger: Endpoint) -> None:
    assert reached(None, stranger) == set()


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_without_policies_they_reach_every_port(stranger: Endpoint) -> None:
    pods = pods_of(a_run()).values()
    assert network_policies(a_run(), "") == ()
    assert all(can_connect((), stranger, pod, port) for pod, port in product(pods, PORTS))


def test_the_operator_reaches_two_ports_of_the_head() -> None:
    operator = pod(SYSTEM, **OPERATOR_POD)
    assert reached(None, operator) == {
        (Role.DRIVER, DASHBOARD_PORT),
        (Role.DRIVER, REPORTER_PORT),
    }


@pytest.mark.parametrize("network", [None, {"egress": [{"role": role.value} for role in Role]}])
def test_pods_of_a_run_reach_each_other_at_every_port(network: dict[str, Any] | None) -> None:
    run = a_run(network)
    policies, pods = network_policies(run, SYSTEM), pods_of(run).values()
    assert all(
        can_connect(policies, source, target, port, protocol)
        for source, target, port, protocol in product(pods, pods, PORTS, ("TCP", "UDP"))
    )


def test_the_namespaces_own_policies_may_allow_more() -> None:
    """Policies add up, so a pod creator who may make policies can open a run."""
    run = a_run()
    opened = {
        "metadata": {"namespace": NAMESPACE},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{}]},
    }
    head = pods_of(run)[Role.DRIVER]
    assert can_connect((*network_policies(run, SYSTEM), opened), pod(app="web"), head, 8265)


def test_a_run_with_pods_on_the_network_of_their_nodes_does_not_lock_them_out() -> None:
    document = run_with(
        ("spec.roles.trainer", {"podTemplate": {"spec": {"hostNetwork": True}}}), name=NAME
    )
    document["metadata"] |= {"uid": UID, "namespace": NAMESPACE}
    assert network_policies(parse_run(document), SYSTEM) == ()


def test_a_client_reaches_the_role_and_ports_that_it_was_given() -> None:
    network = {
        "allowFrom": [
            {"role": "env", "podLabels": {"app": "agents"}},
            {"role": "driver", "namespace": "monitoring", "ports": [8787]},
            {"cidr": "198.51.100.0/24", "ports": [1024]},
            {"namespace": "tools", "podLabels": {"app": "agents"}, "ports": [65535]},
        ]
    }
    run = a_run(network)
    every = set(pods_of(run))
    assert reached(network, pod(app="agents")) == {(Role.ENV, port) for port in PORTS}
    assert reached(network, pod("monitoring", app="any")) == {(Role.DRIVER, 8787)}
    assert reached(network, Endpoint("198.51.100.7")) == {(role, 1024) for role in every}
    assert reached(network, pod("tools", app="agents")) == {(role, 65535) for role in every}
    for stranger in (pod(app="web"), pod("tools", app="web"), pod("elsewhere", app="agents")):
        assert reached(network, stranger) == set()
    assert reached(network, INTERNET) == set()


# -- who gets out ----------------------------------------------------------------------------------

SERVER = Endpoint("203.0.113.5")
CLUSTER_DNS = Endpoint("10.0.0.10", "kube-system", {"k8s-app": "kube-dns"})
METADATA_SERVICE = Endpoint("169.254.169.254")


def left(network: dict[str, Any] | None, role: Role, target: Endpoint, port: int) -> bool:
    run = a_run(network)
    return can_connect(network_policies(run, SYSTEM), pods_of(run)[role], target, port)


@pytest.mark.parametrize("role", list(pods_of(a_run())))
def test_by_default_all_pods_may_connect_to_everything(role: Role) -> None:
    for target in (INTERNET, SERVER, METADATA_SERVICE, pod("elsewhere")):
        assert left(None, role, target, 443)


def test_a_role_with_egress_reaches_dns_and_what_is_named_and_other_roles_everything() -> None:
    network = {"egress": [{"role": "env", "to": [{"cidr": "203.0.113.0/24", "ports": [443]}]}]}
    assert left(network, Role.ENV, SERVER, 443)
    assert left(network, Role.ENV, CLUSTER_DNS, 53)
    assert left(network, Role.ENV, Endpoint("169.254.20.10"), 53)
    for target, port in (
        (SERVER, 80),
        (INTERNET, 443),
        (INTERNET, 53),
        (METADATA_SERVICE, 80),
        (pod("elsewhere"), 443),
        (pod("kube-system"), 443),
        (Endpoint("10.96.0.1"), 443),
    ):
        assert not left(network, Role.ENV, target, port)
        assert left(network, Role.TRAINER, target, port)


def test_a_closed_role_still_lets_its_clients_in() -> None:
    network = {
        "allowFrom": [{"role": "env", "podLabels": {"app": "agents"}}],
        "egress": [{"role": "env"}],
    }
    assert reached(network, pod(app="agents")) == {(Role.ENV, port) for port in PORTS}
    assert not left(network, Role.ENV, INTERNET, 443)


@pytest.mark.parametrize(
    ("network", "path", "words"),
    [
        ({"allowFrom": [{"ports": [1]}]}, "spec.network.allowFrom[0].podLabels", "names no one"),
        (
            {"allowFrom": [{"cidr": "10.0.0.0/8", "namespace": "a"}]},
            "spec.network.allowFrom[0].cidr",
            "write two entries",
        ),
        (
            {"egress": [{"role": "env", "to": [{}]}]},
            "spec.network.egress[0].to[0]",
            "names no one",
        ),
        ({"egress": [{"role": "judge"}]}, "spec.network.egress[0].role", "'judge'"),
        ({"egress": [{}]}, "spec.network.egress[0].role", "required"),
        ({"egress": [{"role": "env"}] * 2}, "spec.network.egress", "a role twice"),
        *(
            ({"allowFrom": [{"cidr": cidr}]}, "spec.network.allowFrom[0].cidr", "pattern")
            for cidr in ("10.0.0.0", "10.0.0.256/8", "10.0.0.0/33", "all", "fe80::/129", "")
        ),
        ({"allowFrom": [{"namespace": "a", "ports": [0]}]}, "spec.network.allowFrom[0].ports", ""),
    ],
)
def test_what_no_policy_could_mean_is_refused(
    network: dict[str, Any], path: str, words: str
) -> None:
    with pytest.raises(InvalidRun) as refused:
        a_run(network)
    (line,) = refused.value.errors
    assert line.startswith(path)
    assert words in line


@pytest.mark.parametrize(
    "cidr", ["0.0.0.0/0", "10.1.2.3/32", "2001:db8::/32", "::/0", "fd00::1/128"]
)
def test_ranges_of_both_families_are_taken(cidr: str) -> None:
    assert a_run({"allowFrom": [{"cidr": cidr}]}).spec.network is not None


# -- that they are there ---------------------------------------------------------------------------


def walled(world: World) -> Operator:
    operator = Operator(world)
    operator.upgrade(replace(IMAGES, operator_namespace=SYSTEM))
    return operator


@pytest.fixture
def operator(world: World) -> Operator:
    return walled(world)


def policies(world: World) -> dict[str, Manifest]:
    return {name: item for (kind, name), item in world.objects.items() if kind == POLICY_KIND}


def as_wanted(world: World) -> bool:
    """Return True if the world has the policies of the run's spec, and no others."""
    wanted = network_policies(parse_served(world.run), SYSTEM)
    found = {name: item["spec"] for name, item in policies(world).items()}
    return found == {item["metadata"]["name"]: item["spec"] for item in wanted}


async def test_they_exist_before_the_raycluster(world: World, operator: Operator) -> None:
    await operator.reconcile()
    made = [request for request in world.requests if request.startswith("create ")]
    assert made[:3] == ["create Secret", *[f"create {POLICY_KIND}"] * 2]
    assert made[-1] == "create RayCluster"
    assert as_wanted(world)
    assert set(policies(world)) == {f"{NAME}-network", f"{NAME}-network-driver"}


async def test_an_operator_without_a_namespace_makes_none(world: World) -> None:
    await training(Operator(world))
    assert policies(world) == {}


async def test_an_upgrade_gives_them_to_a_run_that_trains(world: World) -> None:
    await training(Operator(world))
    await walled(world).settle(2)
    assert as_wanted(world)
    assert world.status.phase is Phase.RUNNING
    assert len(world.jobs) == 1


async def test_a_run_that_trains_costs_no_request_for_them(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.requests.clear()
    for step in range(1, 60):
        world.drive(step, max_steps=100)
        await operator.reconcile(changed=False)
        world.now += timedelta(seconds=5)
    asked = {request for request in world.requests if request.startswith(("get", "list", "put"))}
    assert asked == {"get job", "get progress"}


async def test_they_go_with_the_run(world: World, operator: Operator) -> None:
    await training(operator)
    world.delete_run()
    world.collect_garbage()
    assert policies(world) == {}


def removed(world: World) -> None:
    del world.objects[POLICY_KIND, f"{NAME}-network-driver"]


def opened(world: World) -> None:
    world.objects[POLICY_KIND, f"{NAME}-network"]["spec"]["ingress"] = [{}]


def unlabelled(world: World) -> None:
    world.objects[POLICY_KIND, f"{NAME}-network"]["metadata"]["labels"] = {}


def disowned(world: World) -> None:
    del world.objects[POLICY_KIND, f"{NAME}-network"]["metadata"]["ownerReferences"]


@pytest.mark.parametrize("tamper", [removed, opened, unlabelled, disowned])
async def test_what_someone_changes_comes_back(
    world: World, operator: Operator, tamper: Any
) -> None:
    await training(operator)
    tamper(world)
    await operator.settle(3)
    assert as_wanted(world)
    for item in policies(world).values():
        assert item["metadata"]["labels"][LABEL_RUN] == NAME
        (owner,) = item["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == (KIND, world.run["metadata"]["uid"])
    assert world.status.phase is Phase.RUNNING
    assert ("NetworkPoliciesChanged" in happened(world)) is (tamper is not removed)


async def test_another_controller_that_keeps_changing_them_is_answered_now_and_then(
    world: World, operator: Operator
) -> None:
    await training(operator)
    for _ in range(60):
        opened(world)
        await operator.reconcile()
        world.drive(1)
        world.now += timedelta(seconds=1)
    assert 2 <= world.requests.count(f"put {POLICY_KIND}") <= 3
    await operator.settle(31)
    assert as_wanted(world)


async def test_they_follow_the_spec_of_a_run_that_trains(world: World, operator: Operator) -> None:
    await training(operator)
    world.change_run(
        ("network", {"allowFrom": [{"namespace": "tools"}], "egress": [{"role": "env"}]})
    )
    await operator.settle(3)
    assert as_wanted(world)
    assert f"{NAME}-network-env" in policies(world)
    world.now += timedelta(seconds=60)
    world.change_run(("network", {"egress": []}))
    await operator.settle(3)
    assert as_wanted(world)
    assert f"{NAME}-network-env" not in policies(world)
    assert world.status.phase is Phase.RUNNING
    assert len(world.jobs) == 1


async def test_a_policy_of_the_users_that_names_the_run_stays(
    world: World, operator: Operator
) -> None:
    theirs = {
        "kind": POLICY_KIND,
        "metadata": {"name": "mine", "namespace": NAMESPACE, "labels": {LABEL_RUN: NAME}},
        "spec": {"podSelector": {}},
    }
    await world.create(theirs)
    await training(operator)
    world.change_run(("network", {"egress": [{"role": "env"}]}))
    await operator.settle(3)
    assert policies(world)["mine"]["spec"] == {"podSelector": {}}


async def test_a_policy_of_others_under_its_name_is_in_the_way(
    world: World, operator: Operator
) -> None:
    theirs = {
        "kind": POLICY_KIND,
        "metadata": {"name": f"{NAME}-network", "namespace": NAMESPACE},
        "spec": {"podSelector": {}},
    }
    await world.create(theirs)
    await operator.settle()
    assert world.status.phase is Phase.PENDING
    found = condition(world, ConditionType.CLUSTER_PROVISIONED)
    assert (found.reason, f"NetworkPolicy {NAME}-network exists" in found.message) == (
        "NameConflict",
        True,
    )
    assert ("RayCluster", NAME) not in world.objects
    del world.objects[POLICY_KIND, f"{NAME}-network"]
    await operator.settle()
    assert as_wanted(world)
    assert ("RayCluster", NAME) in world.objects


MISSING_RIGHT = RightMissing(
    'networkpolicies.networking.k8s.io is forbidden: User "x" cannot list resource '
    '"networkpolicies" in API group "networking.k8s.io" in the namespace "team"'
)


@pytest.mark.parametrize(
    ("error", "whose_move"),
    [
        (NotServed("404 page not found"), "its administrator turns them on"),
        (MISSING_RIGHT, "the administrator of the operator's release runs helm upgrade"),
    ],
)
async def test_where_they_cannot_be_read_a_new_run_waits_and_says_whose_move_it_is(
    world: World, operator: Operator, error: ClusterError, whose_move: str
) -> None:
    world.policy_error = error
    await operator.settle()
    assert world.status.phase is Phase.PENDING
    assert ("RayCluster", NAME) not in world.objects
    found = condition(world, ConditionType.CLUSTER_PROVISIONED)
    assert found.reason == "NetworkPoliciesUnavailable"
    assert whose_move in found.message
    assert "networkPolicy.enabled" in found.message
    assert "\n" not in found.message
    assert world.status.message == found.message
    assert happened(world).count("NetworkPoliciesUnavailable") == 1
    world.policy_error = None
    await operator.settle(12)
    assert as_wanted(world)
    assert ("RayCluster", NAME) in world.objects


async def test_a_right_to_create_that_is_missing_is_said_too(
    world: World, operator: Operator
) -> None:
    world.create_errors[POLICY_KIND] = RightMissing(str(MISSING_RIGHT).replace("list", "create"))
    await operator.settle()
    assert world.status.phase is Phase.PENDING
    found = condition(world, ConditionType.CLUSTER_PROVISIONED)
    assert found.reason == "NetworkPoliciesUnavailable"
    assert ("RayCluster", NAME) not in world.objects


async def test_a_quota_or_policy_that_denies_them_is_said_in_its_words(
    world: World, operator: Operator
) -> None:
    world.create_errors[POLICY_KIND] = Denied("exceeded quota: count/networkpolicies")
    await operator.settle()
    found = condition(world, ConditionType.CLUSTER_PROVISIONED)
    assert (found.reason, "exceeded quota" in found.message) == ("Denied", True)
    assert ("RayCluster", NAME) not in world.objects


async def test_a_run_that_trains_continues_where_they_can_no_longer_be_read(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.policy_error = MISSING_RIGHT
    for step in range(1, 20):
        world.drive(step, max_steps=100)
        await operator.reconcile()
        world.now += timedelta(seconds=10)
    assert world.status.phase is Phase.RUNNING
    assert world.status.step == 19
    assert "NetworkPoliciesUnavailable" not in happened(world)


async def test_no_new_pods_without_them(world: World, operator: Operator) -> None:
    """A run whose RayCluster is lost waits until they can be read again."""
    await training(operator)
    world.policy_error = MISSING_RIGHT
    world.delete_cluster()
    world.collect_garbage()
    for _ in range(20):
        world.make_pods()
        await operator.reconcile()
        world.now += timedelta(seconds=10)
    assert ("RayCluster", NAME) not in world.objects
    assert "helm upgrade" in (world.status.message or "")
    world.policy_error = None
    await operator.settle(40)
    assert len(world.jobs) == 2
