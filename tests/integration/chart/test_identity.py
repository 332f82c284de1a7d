"""What the operator's identity may do with exactly the chart's rights: its work, and no attack.

The attacker has the identity's credentials and may send any request. A second identity has the same
rights without the admission policy: it shows that each attack is a valid request.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from agenticrun_api import AgenticRun, Role, parse_run
from agenticrun_operator.resources import (
    Manifest,
    OperatorKey,
    WorkerImages,
    desired_children,
    network_policies,
    repaired,
    rescaled,
    run_labels,
    tokens_name,
    tokens_secret,
)
from runs import run_with
from testcluster import ROOT, Cluster, CommandFailed
from waiting import eventually

SYSTEM, TEAM = "agenticrun-test-identity", "agenticrun-test-identity-team"
OPERATOR, UNLIMITED = "limited", "unlimited"
"""Releases: with the admission policy, and without."""
KEY = OperatorKey("k" * 32)
UID = "3f1c1f5e-0000-4000-8000-000000000000"

Change = Callable[[Manifest], None]


class Identity:
    """The ServiceAccount of a release."""

    def __init__(self, cluster: Cluster, release: str):
        self._cluster = cluster.in_namespace(TEAM)
        self._as = f"--as=system:serviceaccount:{SYSTEM}:{release}"

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        return self._cluster.kubectl(*words, self._as, stdin=stdin)

    def create(self, manifest: Manifest) -> str:
        return self.kubectl(
            *("create", "--dry-run=server", "--validate=false", "-f", "-"),
            *("--namespace", manifest["metadata"].get("namespace", TEAM)),
            stdin=yaml.safe_dump(manifest),
        )

    def may(self, verb: str, resource: str, namespace: str) -> bool:
        resource, _, subresource = resource.partition(":")
        try:
            words = ("auth", "can-i", verb, resource, f"--subresource={subresource}")
            return self.kubectl(*words, "--namespace", namespace).strip() == "yes"
        except CommandFailed:
            return False


def a_run(*changes: tuple[str, Any], namespace: str = TEAM) -> AgenticRun:
    document = run_with(*changes, name="lake")
    document["metadata"] |= {"uid": UID, "namespace": namespace}
    return parse_run(document)


def children(run: AgenticRun) -> dict[str, Manifest]:
    """Return what the operator creates for a run, by kind."""
    images = WorkerImages("worker:1", operator_namespace=SYSTEM)
    found = (tokens_secret(run, KEY), *desired_children(run, images, tokens_name(run, KEY.id)))
    return {child["kind"]: child for child in found}


def own_name(release: str, name: str) -> str:
    """Return the name of a cluster-wide object of this release."""
    return f"{SYSTEM}-{release}-{name}"


def install(cluster: Cluster, release: str, *, policy: bool) -> list[str]:
    """Apply the rights of a release as the chart renders them, under names of their own."""
    values = {
        "registry": "registry.example.org/agents",
        "lease": {"namespace": SYSTEM},
        "admissionPolicy": {"enabled": policy, "serviceAccountNames": ["trainer"]},
    }
    out = cluster.command(
        *("helm", "template", release, str(ROOT / "charts/agenticrun"), "-n", SYSTEM, "-f", "-"),
        stdin=json.dumps(values),
    )
    cluster_wide = []
    for document in yaml.safe_load_all(out):
        if not document or document["kind"] in ("Deployment", "Service", "Secret"):
            continue
        if document["kind"] in ("ClusterRole", "ClusterRoleBinding"):
            # The name is that of every release; another one may be installed.
            document["metadata"]["name"] = own_name(release, document["metadata"]["name"])
        if document["kind"] == "ClusterRoleBinding":
            document["roleRef"]["name"] = own_name(release, document["roleRef"]["name"])
        if "namespace" not in document["metadata"]:
            cluster_wide.append(f"{document['kind']}/{document['metadata']['name']}")
        cluster.in_namespace(SYSTEM).apply(document)
    return cluster_wide


@pytest.fixture(scope="module")
def team(cluster: Cluster) -> Iterator[Cluster]:
    """A namespace with runs. Both releases have their rights there."""
    crd = ROOT / "crds/agenticruns.yaml"
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(crd))
    cluster.wait_for_crd("agenticruns.agenticrun.dev")
    cluster_wide = []
    with cluster.new_namespace(SYSTEM), cluster.new_namespace(TEAM) as inside:
        try:
            cluster_wide += install(cluster, OPERATOR, policy=True)
            cluster_wide += install(cluster, UNLIMITED, policy=False)
            operator, unlimited = Identity(cluster, OPERATOR), Identity(cluster, UNLIMITED)
            secret = children(a_run())["Secret"]

            def in_force() -> bool:
                """Return True if the apiserver has learned of the rights and of the policy."""
                try:
                    unlimited.create(opaque_secret())
                    operator.create(secret)
                except CommandFailed:
                    return False
                try:
                    operator.create(opaque_secret())
                except CommandFailed:
                    return True
                return False

            eventually(in_force, 120, "rights and policy are in force", interval=0.5)
            yield inside
        finally:
            for name in cluster_wide:
                cluster.kubectl("delete", name, "--ignore-not-found")


@pytest.fixture
def operator(team: Cluster) -> Identity:
    return Identity(team, OPERATOR)


@pytest.fixture
def unlimited(team: Cluster) -> Identity:
    return Identity(team, UNLIMITED)


def opaque_secret() -> Manifest:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "any"}}


RUNS = {
    "plain": (),
    "with-a-claim": (("spec.checkpoint", {"volumeClaim": {"size": "1Gi"}}),),
    "with-a-claim-that-goes-with-the-run": (
        ("spec.checkpoint", {"volumeClaim": {"size": "1Gi", "retain": False}}),
    ),
    "with-a-service-account-that-the-platform-allows": (
        (
            "spec.roles.trainer.podTemplate",
            {"spec": {"serviceAccountName": "trainer", "automountServiceAccountToken": True}},
        ),
    ),
    "with-everything": (
        (
            "spec.code",
            {
                "git": {"url": "https://host.example/mine", "secretName": "mine"},
                "pip": {"requirements": ["emoji"], "secretName": "mine", "cacheClaimName": "mine"},
            },
        ),
        ("spec.huggingFace", {"secretName": "hf", "cacheClaimName": "models"}),
        ("spec.roles.reference", {"gpus": 1}),
        ("spec.checkpoint.volumeClaim", {"size": "1Gi", "accessMode": "ReadWriteMany"}),
        ("spec.disruptionBudget", "Block"),
        ("spec.network", {"allowFrom": [{"namespace": "tools"}], "egress": [{"role": "driver"}]}),
        ("spec.pipeline.algorithm", {"name": "grpo", "lossKl": {}}),
        ("spec.roles.env", {"volumes": [{"name": "d", "secret": {"secretName": "mine"}}]}),
    ),
}


@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS)
def test_it_may_create_what_a_run_needs(
    operator: Identity, changes: tuple[tuple[str, Any], ...]
) -> None:
    run = a_run(*changes)
    for child in (*children(run).values(), *network_policies(run, SYSTEM)):
        assert "created (server dry run)" in operator.create(child)


def test_it_may_post_events_on_runs_and_hold_its_lease(operator: Identity) -> None:
    assert operator.create(event("AgenticRun", "agenticrun.dev/v1alpha1"))
    assert operator.create(lease("agenticrun-operator"))


def event(kind: str, version: str) -> Manifest:
    subject = {"kind": kind, "apiVersion": version, "name": "lake", "namespace": TEAM}
    metadata = {"name": "lake.1", "namespace": TEAM}
    return {"apiVersion": "v1", "kind": "Event", "metadata": metadata, "involvedObject": subject}


def lease(name: str) -> Manifest:
    metadata = {"name": name, "namespace": SYSTEM}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}


def changed(kind: str, change: Change) -> Manifest:
    """Return a child of a run with a change that the operator never makes."""
    run = a_run(
        ("spec.checkpoint", {"volumeClaim": {"size": "1Gi", "retain": False}}),
        ("spec.disruptionBudget", "Block"),
    )
    child = copy.deepcopy(children(run)[kind])
    change(child)
    return child


def in_pods(change: Change) -> Change:
    """Apply a change to the pods of the last worker group."""
    return lambda cluster: change(cluster["spec"]["workerGroupSpecs"][-1]["template"]["spec"])


def disown(child: Manifest) -> None:
    del child["metadata"]["ownerReferences"]


def token_of_a_service_account(secret: Manifest) -> None:
    del secret["data"]
    secret["type"] = "kubernetes.io/service-account-token"
    secret["metadata"]["annotations"] = {"kubernetes.io/service-account.name": "default"}


def volume(source: Manifest) -> Change:
    return in_pods(lambda pod: pod["volumes"].append({"name": "x", **source}))


def setting(path: str, value: object) -> Change:
    def change(child: Manifest) -> None:
        *parents, last = path.split(".")
        node = child
        for parent in parents:
            node = node[parent]
        node[last] = value

    return change


def privileged(pod: Manifest) -> None:
    init = {"name": "x", "image": "x", "securityContext": {"privileged": True}}
    pod["initContainers"] = [init]


def host_port(pod: Manifest) -> None:
    pod["containers"][0]["ports"] = [{"containerPort": 8000, "hostPort": 8000}]


def capability(pod: Manifest) -> None:
    pod["containers"][0]["securityContext"]["capabilities"] = {"add": ["SYS_ADMIN"]}


ATTACKS: dict[str, tuple[str, Change]] = {
    "a token of any ServiceAccount": ("Secret", token_of_a_service_account),
    "a Secret without owner": ("Secret", disown),
    "a Secret of another type": ("Secret", setting("type", "example.com/other")),
    "a Secret under another name": ("Secret", setting("metadata.name", "cloud-credentials")),
    "a Secret with other keys": ("Secret", setting("data.kubeconfig", "eA==")),
    "a Secret that can change": ("Secret", setting("immutable", False)),
    "a Secret of another owner": (
        "Secret",
        lambda secret: secret["metadata"]["ownerReferences"][0].update(kind="Deployment"),
    ),
    "a ConfigMap without owner": ("ConfigMap", disown),
    "a ConfigMap under another name": ("ConfigMap", setting("metadata.name", "aws-auth")),
    "a claim on a volume of others": (
        "PersistentVolumeClaim",
        setting("spec.volumeName", "their-data"),
    ),
    "a claim with the content of another": (
        "PersistentVolumeClaim",
        setting("spec.dataSource", {"kind": "PersistentVolumeClaim", "name": "their-data"}),
    ),
    "a budget without owner": ("PodDisruptionBudget", disown),
    "a budget under another name": ("PodDisruptionBudget", setting("metadata.name", "web")),
    "a budget for the pods of others": (
        "PodDisruptionBudget",
        setting("spec.selector.matchLabels", {"app": "web"}),
    ),
    "a budget for all pods": ("PodDisruptionBudget", setting("spec.selector", {})),
    "a network policy without owner": ("NetworkPolicy", disown),
    "a network policy under another name": ("NetworkPolicy", setting("metadata.name", "web")),
    "a network policy for the pods of others": (
        "NetworkPolicy",
        setting("spec.podSelector.matchLabels", {"app": "web"}),
    ),
    "a network policy for all pods": ("NetworkPolicy", setting("spec.podSelector", {})),
    "a network policy that lets everyone in": ("NetworkPolicy", setting("spec.ingress", [{}])),
    "a RayCluster without owner": ("RayCluster", disown),
    "pods with a token": ("RayCluster", in_pods(setting("automountServiceAccountToken", True))),
    "pods that do not refuse a token": (
        "RayCluster",
        in_pods(lambda pod: pod.pop("automountServiceAccountToken")),
    ),
    "a head with a token": (
        "RayCluster",
        setting("spec.headGroupSpec.template.spec.automountServiceAccountToken", True),
    ),
    "pods of another ServiceAccount": (
        "RayCluster",
        in_pods(setting("serviceAccountName", "cluster-admin")),
    ),
    "pods of another ServiceAccount, by the old field": (
        "RayCluster",
        in_pods(setting("serviceAccount", "cluster-admin")),
    ),
    "pods with a projected token": (
        "RayCluster",
        volume({"projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}),
    ),
    "pods with the node's files": ("RayCluster", volume({"hostPath": {"path": "/"}})),
    "pods in the node's network": ("RayCluster", in_pods(setting("hostNetwork", True))),
    "pods with the node's processes": ("RayCluster", in_pods(setting("hostPID", True))),
    "privileged containers": ("RayCluster", in_pods(privileged)),
    "containers with capabilities": ("RayCluster", in_pods(capability)),
    "containers at the node's ports": ("RayCluster", in_pods(host_port)),
    "a Service that the internet reaches": (
        "RayCluster",
        setting("spec.headGroupSpec.serviceType", "LoadBalancer"),
    ),
    "an Ingress": ("RayCluster", setting("spec.headGroupSpec.enableIngress", True)),
    "a worker group that is suspended": (
        "RayCluster",
        lambda cluster: cluster["spec"]["workerGroupSpecs"][0].update(suspend=True),
    ),
    "an autoscaler with KubeRay's rights": (
        "RayCluster",
        setting("spec.enableInTreeAutoscaling", True),
    ),
}


@pytest.mark.parametrize(("kind", "change"), ATTACKS.values(), ids=ATTACKS)
def test_it_may_not_create_what_an_attacker_wants(
    operator: Identity, unlimited: Identity, kind: str, change: Change
) -> None:
    manifest = changed(kind, change)
    unlimited.create(manifest)
    with pytest.raises(CommandFailed, match="denied request"):
        operator.create(manifest)


@pytest.mark.parametrize(
    "spec",
    [
        {"serviceAccountName": "another"},
        {"hostNetwork": True},
        {"volumes": [{"name": "data", "hostPath": {"path": "/data"}}]},
    ],
    ids=lambda spec: next(iter(spec)),
)
def test_a_run_does_not_get_by_its_pod_template_what_the_platform_does_not_allow(
    operator: Identity, unlimited: Identity, spec: Manifest
) -> None:
    cluster = children(a_run(("spec.roles.env.podTemplate", {"spec": spec})))["RayCluster"]
    unlimited.create(cluster)
    with pytest.raises(CommandFailed, match="the chart's value admissionPolicy"):
        operator.create(cluster)


def test_the_policy_names_the_fields_that_a_webhook_has_added(operator: Identity) -> None:
    """The webhook sees the operator's RayCluster before the policy does."""
    cluster = children(a_run())["RayCluster"]
    cluster["spec"]["gcsFaultToleranceOptions"] = {"redisAddress": "redis:6379"}
    cluster["spec"]["headGroupSpec"]["serviceType"] = "ClusterIP"
    cluster["spec"]["workerGroupSpecs"][-1] |= {"idleTimeoutSeconds": 60, "suspend": False}
    name = cluster["spec"]["workerGroupSpecs"][-1]["groupName"]
    with pytest.raises(CommandFailed) as denied:
        operator.create(cluster)
    for field in (
        "spec.gcsFaultToleranceOptions",
        "spec.headGroupSpec.serviceType",
        f"spec.workerGroupSpecs[{name}].idleTimeoutSeconds",
        f"spec.workerGroupSpecs[{name}].suspend",
    ):
        assert field in str(denied.value)
    assert "mutating admission webhook" in str(denied.value)


@pytest.mark.parametrize("namespace", ["kube-system", SYSTEM])
@pytest.mark.parametrize("kind", ["Secret", "ConfigMap", "RayCluster"])
def test_it_may_create_nothing_where_clusters_and_operators_keep_their_secrets(
    operator: Identity, unlimited: Identity, namespace: str, kind: str
) -> None:
    manifest = children(a_run(namespace=namespace))[kind]
    unlimited.create(manifest)
    with pytest.raises(CommandFailed, match="apply the run in another namespace"):
        operator.create(manifest)


@pytest.mark.parametrize(
    "manifest", [event("Pod", "v1"), lease("of-another")], ids=["event", "lease"]
)
def test_it_may_not_pretend_to_be_another_component(
    operator: Identity, unlimited: Identity, manifest: Manifest
) -> None:
    unlimited.create(manifest)
    with pytest.raises(CommandFailed, match="denied request"):
        operator.create(manifest)


def key_secret() -> Manifest:
    """Return the Secret with the key of the operator as it creates it."""
    metadata = {"name": f"{OPERATOR}-operator-key", "namespace": SYSTEM}
    data = {"key": "a2V5"}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque"} | {
        "data": data
    }


def test_it_may_create_its_own_key(operator: Identity) -> None:
    assert operator.create(key_secret())


@pytest.mark.parametrize(
    "change",
    [
        setting("metadata.name", "another-operator-key"),
        setting("metadata.namespace", "kube-system"),
        setting("metadata.namespace", TEAM),
        setting("data.token", "eA=="),
        setting("type", "example.com/other"),
        setting("metadata.annotations", {"kubernetes.io/service-account.name": "default"}),
    ],
    ids=["name", "system", "team", "data", "type", "token"],
)
def test_its_right_to_create_its_key_is_good_for_nothing_else(
    operator: Identity, unlimited: Identity, change: Change
) -> None:
    secret = key_secret()
    change(secret)
    if "annotations" in secret["metadata"]:
        token_of_a_service_account(secret)
    if secret["metadata"]["namespace"] == SYSTEM:
        unlimited.create(secret)
    with pytest.raises(CommandFailed, match=r"denied request|forbidden"):
        operator.create(secret)


READS_AND_CHANGES = (
    *((verb, "secrets") for verb in ("get", "list", "watch", "update", "patch", "delete")),
    *((verb, "configmaps") for verb in ("list", "update", "patch", "delete")),
    *((verb, "persistentvolumeclaims") for verb in ("update", "patch", "delete")),
    ("patch", "rayclusters.ray.io"),
    ("patch", "networkpolicies.networking.k8s.io"),
    *((verb, "agenticruns.agenticrun.dev") for verb in ("create", "update", "patch")),
    ("create", "pods"),
    ("create", "pods:exec"),
    ("create", "pods:ephemeralcontainers"),
    ("get", "pods:log"),
    ("create", "serviceaccounts:token"),
    ("impersonate", "serviceaccounts"),
    ("create", "rolebindings.rbac.authorization.k8s.io"),
    ("create", "validatingadmissionpolicies.admissionregistration.k8s.io"),
    ("delete", "validatingadmissionpolicybindings.admissionregistration.k8s.io"),
    ("update", "leases.coordination.k8s.io/of-another"),
)


@pytest.mark.parametrize("request_", READS_AND_CHANGES, ids=" ".join)
def test_it_has_no_right_to(operator: Identity, request_: tuple[str, str]) -> None:
    verb, resource = request_
    assert operator.may("list", "pods", TEAM)
    assert not operator.may(verb, resource, TEAM)
    assert not operator.may(verb, resource, SYSTEM)


def test_it_reads_no_secret_but_its_key(operator: Identity, team: Cluster) -> None:
    key = key_secret()
    team.in_namespace(SYSTEM).apply(key)
    name = key["metadata"]["name"]
    assert name in operator.kubectl("get", "secret", name, "-n", SYSTEM, "-o", "name")
    team.apply(children(a_run())["Secret"])
    name = tokens_name(a_run(), KEY.id)
    for words in (("get", "secret", name), ("get", "secrets"), ("get", "secrets", "-A")):
        with pytest.raises(CommandFailed, match="forbidden"):
            operator.kubectl(*words)


def head(path: str, value: object) -> Change:
    return setting(f"spec.headGroupSpec.{path}", value)


def group(path: str, value: object) -> Change:
    return lambda cluster: setting(path, value)(cluster["spec"]["workerGroupSpecs"][-1])


def owner_of_the_users(team: Cluster, name: str) -> Manifest:
    """Return a reference to a ConfigMap. Without its uid, garbage collection deletes the object."""
    found = team.get("configmap", name)
    assert found is not None
    return {"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": found["metadata"]["uid"]}


def rescale(team: Cluster, who: Identity, name: str, change: Change) -> None:
    """Replace the RayCluster by one that was changed, as the apiserver has it now."""
    for again in (True, True, True, True, False):
        manifest = team.get("raycluster", name)
        assert manifest is not None
        change(manifest)
        text = yaml.safe_dump(manifest)
        try:
            who.kubectl("replace", "--dry-run=server", "--validate=false", "-f", "-", stdin=text)
        except CommandFailed as error:
            if again and "(Conflict)" in str(error):  # KubeRay has written it meanwhile
                continue
            raise
        return


def test_it_may_change_the_numbers_of_pods_of_a_run_and_nothing_else_of_a_raycluster(
    operator: Identity, unlimited: Identity, team: Cluster
) -> None:
    waits = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "scales-run"}}
    team.apply(waits, run_with(("spec.suspend", True), name="scales"))
    found = team.get("agenticrun", "scales")
    assert found is not None
    document = run_with(name="scales") | {"metadata": found["metadata"] | {"namespace": TEAM}}
    ours = children(parse_run(document))["RayCluster"]
    ours["spec"]["suspend"] = True
    mine = copy.deepcopy(ours["metadata"]["ownerReferences"])
    theirs = copy.deepcopy(ours)
    theirs["metadata"] = {"name": "of-another"}
    team.apply(ours, theirs)

    def takes_over(manifest: Manifest) -> None:
        kept = {"ownerReferences", "labels"}
        manifest["metadata"] |= {key: ours["metadata"][key] for key in kept}
        manifest["metadata"]["labels"]["agenticrun.dev/run"] = manifest["metadata"]["name"]
        manifest["metadata"]["ownerReferences"][0]["name"] = manifest["metadata"]["name"]

    def group_twice(manifest: Manifest) -> None:
        manifest["spec"]["workerGroupSpecs"][1] = manifest["spec"]["workerGroupSpecs"][0]

    def scales(manifest: Manifest) -> None:
        changed = rescaled(manifest, {Role.ENV: 3}, ["scales-env-1"])
        manifest.clear()
        manifest.update(changed)

    rescale(team, operator, "scales", scales)
    for name, change in (
        ("of-another", takes_over),
        ("scales", in_pods(lambda pod: pod["containers"][0].update(image="evil"))),
        ("scales", head("template.spec.terminationGracePeriodSeconds", 1)),
        ("scales", head("rayStartParams", {"num-cpus": "9; evil"})),
        ("scales", head("serviceType", "LoadBalancer")),
        ("scales", group("rayStartParams", {"num-cpus": "9; evil"})),
        ("scales", group("groupName", "evil")),
        ("scales", group("numOfHosts", 9)),
        ("scales", group("suspend", True)),
        ("scales", lambda manifest: manifest["spec"]["workerGroupSpecs"].pop()),
        ("scales", lambda manifest: manifest["spec"].pop("workerGroupSpecs")),
        ("scales", group_twice),
        ("scales", setting("spec.suspend", False)),
        ("scales", lambda manifest: manifest["spec"].pop("suspend")),
        ("scales", setting("spec.rayVersion", "2.0.0")),
        ("scales", setting("spec.authOptions.secretName", "of-another")),
        ("scales", setting("spec.upgradeStrategy", {"type": "Recreate"})),
    ):
        rescale(team, unlimited, name, change)
        with pytest.raises(CommandFailed, match="only the numbers of pods"):
            rescale(team, operator, name, change)

    def give_back(manifest: Manifest) -> None:
        changed = repaired(parse_run(document), manifest)
        manifest.clear()
        manifest.update(changed)

    def removes_the_other_owner(manifest: Manifest) -> None:
        give_back(manifest)
        manifest["metadata"]["ownerReferences"] = mine

    team.kubectl("label", "raycluster", "scales", "agenticrun.dev/run-")
    rescale(team, operator, "scales", give_back)
    no_owner = json.dumps({"metadata": {"ownerReferences": None}})
    team.kubectl("patch", "raycluster", "scales", "--type=merge", "-p", no_owner)
    rescale(team, operator, "scales", give_back)
    other = owner_of_the_users(team, "scales-run")
    second = json.dumps({"metadata": {"ownerReferences": [other]}})
    team.kubectl("patch", "raycluster", "scales", "--type=merge", "-p", second)
    rescale(team, operator, "scales", give_back)
    with pytest.raises(CommandFailed, match="only the numbers of pods"):
        rescale(team, operator, "scales", removes_the_other_owner)
    second = json.dumps({"metadata": {"ownerReferences": [*mine, other]}})
    team.kubectl("patch", "raycluster", "scales", "--type=merge", "-p", second)
    rescale(team, operator, "scales", give_back)
    team.kubectl("patch", "raycluster", "scales", "--type=merge", "-p", no_owner)
    team.kubectl("label", "raycluster", "scales", "agenticrun.dev/run-uid-")
    rescale(team, unlimited, "scales", give_back)
    with pytest.raises(CommandFailed, match="only the numbers of pods"):
        rescale(team, operator, "scales", give_back)


def test_it_may_change_and_delete_the_network_policies_of_runs_and_no_others(
    operator: Identity, unlimited: Identity, team: Cluster
) -> None:
    waits = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "walled-run"}}
    team.apply(waits, run_with(("spec.suspend", True), name="walled"))
    found = team.get("agenticrun", "walled")
    assert found is not None
    network = {"allowFrom": [{"namespace": "tools"}], "egress": [{"role": "env"}]}
    document = run_with(("spec.network", network), name="walled")
    run = parse_run(document | {"metadata": found["metadata"] | {"namespace": TEAM}})
    base, head, env = network_policies(run, SYSTEM)
    name = base["metadata"]["name"]
    theirs = {**base, "metadata": {"name": "walled-network-of-others"}}
    team.apply(base, head, env, theirs)

    def replace(who: Identity, name: str, change: Change) -> None:
        manifest = team.get("networkpolicy", name)
        assert manifest is not None
        change(manifest)
        text = yaml.safe_dump(manifest)
        who.kubectl("replace", "--dry-run=server", "-f", "-", stdin=text)

    def takes_over(manifest: Manifest) -> None:
        kept = {"ownerReferences", "labels"}
        manifest["metadata"] |= {key: base["metadata"][key] for key in kept}

    replace(operator, name, lambda manifest: manifest["spec"]["ingress"].pop())
    for target, change in (
        (theirs["metadata"]["name"], takes_over),
        (name, setting("spec.ingress", [{}])),
        (name, setting("spec.podSelector", {})),
        (name, disown),
    ):
        replace(unlimited, target, change)
        with pytest.raises(CommandFailed, match="only the NetworkPolicies of a run's own pods"):
            replace(operator, target, change)

    def delete(who: Identity, name: str) -> None:
        who.kubectl("delete", "networkpolicy", name, "--dry-run=server", "--wait=false")

    delete(operator, env["metadata"]["name"])
    for target in (name, theirs["metadata"]["name"]):
        delete(unlimited, target)
        with pytest.raises(CommandFailed, match="only the NetworkPolicies of a run's own pods"):
            delete(operator, target)


def test_it_may_delete_runs_with_a_ttl_and_clusters_of_runs_and_nothing_else(
    operator: Identity, unlimited: Identity, team: Cluster
) -> None:
    run = run_with(("spec.ttlSecondsAfterFinished", 100), name="with-ttl")
    waits = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "with-ttl-run"}}
    other = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "without-ttl-run"}}
    team.apply(waits, other, run, run_with(name="without-ttl"))
    theirs = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "theirs"},
        "spec": children(a_run())["RayCluster"]["spec"] | {"suspend": True},
    }
    ours = copy.deepcopy(theirs)
    found = team.get("agenticrun", "with-ttl")
    assert found is not None
    document = run | {"metadata": found["metadata"] | {"namespace": TEAM}}
    ours["metadata"] = children(parse_run(document))["RayCluster"]["metadata"]
    team.apply(ours, theirs)

    def delete(who: Identity, kind: str, name: str) -> None:
        who.kubectl("delete", kind, name, "--dry-run=server", "--wait=false")

    def patch(name: str, **metadata: Any) -> None:
        words = ("raycluster", name, "--type=merge", "-p", json.dumps({"metadata": metadata}))
        team.kubectl("patch", *words)

    delete(operator, "agenticrun", "with-ttl")
    delete(operator, "raycluster", "with-ttl")
    owners, labels = ours["metadata"]["ownerReferences"], ours["metadata"]["labels"]
    other = owner_of_the_users(team, "with-ttl-run")
    patch("with-ttl", ownerReferences=[*owners, other])
    delete(operator, "raycluster", "with-ttl")
    patch("with-ttl", labels=dict.fromkeys(labels))
    delete(operator, "raycluster", "with-ttl")
    patch("with-ttl", ownerReferences=[other])
    delete(unlimited, "raycluster", "with-ttl")
    with pytest.raises(CommandFailed, match=r"look at metadata\.ownerReferences"):
        delete(operator, "raycluster", "with-ttl")
    patch("with-ttl", labels=labels)
    delete(operator, "raycluster", "with-ttl")
    patch("theirs", ownerReferences=[other | {"controller": True}])
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "spec": {"maxUnavailable": 0},
    }
    team.apply(
        budget | {"metadata": {"name": "with-ttl", "ownerReferences": owners}},
        budget | {"metadata": {"name": "theirs"}},
    )
    delete(operator, "pdb", "with-ttl")
    container = {"name": "c", "image": "none"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "theirs"}}
    team.apply(pod | {"spec": {"containers": [container], "nodeSelector": {"no-such": "node"}}})
    labels = run_labels(parse_run(document)) | {"ray.io/cluster": "with-ttl"}
    left = pod | {"metadata": {"name": "left-over", "labels": labels}}
    team.apply(left | {"spec": {"containers": [container], "nodeSelector": {"no-such": "node"}}})
    delete(operator, "pod", "left-over")
    for kind, name in (
        ("agenticrun", "without-ttl"),
        ("raycluster", "theirs"),
        ("pod", "theirs"),
        ("pdb", "theirs"),
    ):
        delete(unlimited, kind, name)
        with pytest.raises(CommandFailed, match="denied request"):
            delete(operator, kind, name)
