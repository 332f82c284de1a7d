"""Checks of a cluster, for runs of any kind and for one run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from typing_extensions import override

from agenticrun_api import AgenticRun
from agenticrun_api.crd import custom_resource_definition
from agenticrun_api.names import GROUP, PLURAL
from agenticrun_api.quantities import quantity
from agenticrun_api.version import __version__, is_supported
from agenticrun_workers.cli.doctor.network import network_finding
from agenticrun_workers.cli.doctor.placement import (
    Node,
    fits_quotas,
    pods_fit,
    usable_nodes,
    volume_reaches,
)
from agenticrun_workers.cli.doctor.queue import (
    KUEUE_API,
    leaves_rayclusters,
    queue_has_quota,
    queue_is_open,
    rights_for_queues,
    serves_workloads,
)
from agenticrun_workers.cli.doctor.references import images_are_known, objects_exist
from agenticrun_workers.cli.kubectl import Kubectl, NoCluster, NoKubectl, SourceError
from agenticrun_workers.cli.local_code import PackagingError, find_local_code
from agenticrun_workers.cli.plan import plan_finding
from agenticrun_workers.findings import Finding, Verdict, failed, not_checked, ok, warning
from agenticrun_workers.sizing.gpus import Gpu, recognize

MIN_KUBERNETES = (1, 30)
MIN_KUBERAY = (1, 6)
MIN_KUEUE = (0, 15)
GPU = "nvidia.com/gpu"
PRODUCT, PRODUCT_MIB = "nvidia.com/gpu.product", "nvidia.com/gpu.memory"
"""Labels of nodes: name and memory of their GPUs."""

Objects = list[dict[str, Any]]
CRD_COMMAND = "python -m agenticrun_api.crd | kubectl apply --server-side --force-conflicts -f -"
"""Works from a checkout and from the wheel: the module prints the CRD of this version."""


class KubectlOfOneLook(Kubectl):
    """Kubectl that reads each list once: several checks look at the same nodes and pods."""

    def __init__(self, namespace: str | None = None, context: str | None = None) -> None:
        super().__init__(namespace, context)
        self._read: dict[tuple[str, ...], dict[str, Any] | SourceError] = {}

    @override
    def json(self, *words: str) -> dict[str, Any]:
        if words not in self._read:
            try:
                self._read[words] = super().json(*words)
            except SourceError as error:
                self._read[words] = error
        found = self._read[words]
        if isinstance(found, SourceError):
            raise found
        return found


def cluster_findings(kubectl: Kubectl) -> dict[str, Finding]:
    """Return the findings about the cluster, by name; only `apiserver` if it cannot be reached."""
    try:
        server = json.loads(kubectl.run("version", "-o", "json", timeout=20))["serverVersion"]
    except NoKubectl:
        return {"apiserver": not_checked("kubectl is not installed: install it to check a cluster")}
    except NoCluster:
        return {"apiserver": not_checked("kubectl knows no cluster: set KUBECONFIG to check one")}
    except SourceError as error:
        return {
            "apiserver": failed(
                f"the cluster cannot be reached: {error}",
                "check KUBECONFIG, --context, your login and the network; --local leaves the "
                "cluster out",
            )
        }
    checks: dict[str, Callable[[Kubectl], Finding]] = {
        "CRD": _crd,
        "operator": _operator,
        "KubeRay": _kuberay,
        "GPUs": _gpus,
        "quotas": lambda kubectl: quotas_left(kubectl.json("resourcequotas")["items"]),
        "storage": lambda kubectl: default_class(kubectl.json("storageclasses")["items"]),
        "rights": _rights,
    }
    return {"apiserver": kubernetes(server), **_checked(checks, kubectl)}


def _checked(
    checks: Mapping[str, Callable[[Kubectl], Finding]], kubectl: Kubectl
) -> dict[str, Finding]:
    found = {}
    for name, check in checks.items():
        try:
            found[name] = check(kubectl)
        except SourceError as error:
            found[name] = not_checked(f"cannot be read: {error}")
    return found


def run_there(run: AgenticRun, folder: Path, kubectl: Kubectl) -> dict[str, Finding]:
    """Return what a run lacks on the cluster, by name.

    Args:
        folder: of the run's file, with modules that the pods may need.
    """
    claim = run.spec.storage.volume_claim if run.spec.storage else None
    # Only a claim of the user's is there before the run, and may bind its pods to a node.
    users = claim is not None and claim.claim_name is not None
    checks: dict[str, Callable[[Kubectl], Finding]] = {
        "pods": lambda kubectl: pods_fit(
            run,
            _usable_nodes(kubectl),
            _architectures(kubectl),
            _claim(run, kubectl) if users else None,
        ),
        "quotas": lambda kubectl: fits_quotas(run, kubectl.json("resourcequotas")["items"]),
        "images": lambda kubectl: images_are_known(
            run, kubectl.json("nodes")["items"], _operators(kubectl)
        ),
        "code": lambda _: code_arrives(run, folder),
        "plan": lambda kubectl: plan_finding(run, pods=True, card=gpu_of(_usable_nodes(kubectl))),
    }
    if _claim_name(run):
        checks["volume"] = lambda kubectl: _volume(run, kubectl)
    if run.spec.queue:
        checks |= {
            "Kueue": _kueue,
            "queue": lambda kubectl: _queue(run, kubectl),
            "queue quota": lambda kubectl: _queue_quota(run, kubectl),
        }
    return {**_checked(checks, kubectl), **objects_exist(run, kubectl)}


def _items(kubectl: Kubectl, *kinds: str) -> list[Objects]:
    """Return the objects of some kinds of Kueue."""
    return [kubectl.json(f"{kind}.{KUEUE_API}")["items"] for kind in kinds]


def _queue(run: AgenticRun, kubectl: Kubectl) -> Finding:
    local, clusters, priorities = _items(
        kubectl, "localqueues", "clusterqueues", "workloadpriorityclasses"
    )
    namespaces = _readable(lambda: kubectl.json("namespaces")["items"])
    return queue_is_open(run, local, clusters, priorities, namespaces)


def _queue_quota(run: AgenticRun, kubectl: Kubectl) -> Finding:
    local, clusters, flavors = _items(kubectl, "localqueues", "clusterqueues", "resourceflavors")
    topologies: Objects | None = None
    if any(run.spec.roles.topology(role) for role in run.spec.roles.workers):
        with suppress(SourceError):
            (topologies,) = _items(kubectl, "topologies")
    return queue_has_quota(run, local, clusters, flavors, _configuration(kubectl), topologies)


def _readable(read: Callable[[], Objects]) -> Objects:
    """Return what is read; nothing if this user may not read it."""
    try:
        return read()
    except SourceError:
        return []


def _kueue(kubectl: Kubectl) -> Finding:
    name = "metadata.name=workloads.kueue.x-k8s.io"
    if found := serves_workloads(kubectl.json("crd", "--field-selector", name)["items"]):
        return found
    deployments = _kueue_deployments(kubectl)
    if not deployments:
        return warning(
            "its CRDs are there; no deployment kueue-controller-manager can be seen",
            "install Kueue's controller, unless it runs somewhere else",
        )
    runs = deployments_run(deployments, lambda v: numbers(v) >= MIN_KUEUE, "0.15 or newer")
    if runs.verdict is not Verdict.OK:
        return runs
    configuration = _configuration(kubectl)
    return (
        (configuration and leaves_rayclusters(configuration))
        or rights_for_queues(kubectl, deployments, _operators(kubectl))
        or ok(runs.found if configuration else f"{runs.found}; its settings cannot be read")
    )


def _kueue_deployments(kubectl: Kubectl) -> Objects:
    return [
        item
        for item in kubectl.json("deployments", "-A")["items"]
        # Its dashboard is kueue/kueueviz-backend and kueue/kueueviz-frontend.
        if re.search(r"/kueue([:@]|$)", item["spec"]["template"]["spec"]["containers"][0]["image"])
        or item["metadata"]["name"] == "kueue-controller-manager"
    ]


def _configuration(kubectl: Kubectl) -> str:
    """Return Kueue's configuration; empty if it cannot be read."""
    where = ("--field-selector", "metadata.name=kueue-manager-config")
    deployments = _readable(lambda: _kueue_deployments(kubectl))
    if not deployments:
        return ""
    namespace = deployments[0]["metadata"]["namespace"]
    found = _readable(lambda: kubectl.json("configmaps", "-n", namespace, *where)["items"])
    return next((text for item in found for text in (item.get("data") or {}).values()), "")


def _claim_name(run: AgenticRun) -> str | None:
    """Return the name of the claim for the run's checkpoints; None if it has none."""
    claim = run.spec.storage.volume_claim if run.spec.storage else None
    if claim and claim.claim_name:
        return claim.claim_name
    made = claim is not None or run.spec.gets_default_claim
    return f"{run.metadata.name}-checkpoints" if made else None


def _claim(run: AgenticRun, kubectl: Kubectl) -> dict[str, Any] | None:
    name = _claim_name(run)
    claims: Objects = kubectl.json("persistentvolumeclaims")["items"] if name else []
    return next((item for item in claims if item["metadata"]["name"] == name), None)


def _volume(run: AgenticRun, kubectl: Kubectl) -> Finding:
    claim = _claim(run, kubectl)
    name = claim["spec"].get("volumeName") if claim else None
    volumes: Objects = kubectl.json("persistentvolumes")["items"] if name else []
    return volume_reaches(
        run,
        _usable_nodes(kubectl),
        claim=claim,
        volume=next((item for item in volumes if item["metadata"]["name"] == name), None),
        classes=kubectl.json("storageclasses")["items"],
        architectures=_architectures(kubectl),
    )


def _architectures(kubectl: Kubectl) -> list[str]:
    """Return the architectures of the operator's worker images; none if it cannot be seen."""
    found = _settings(kubectl, "AGENTICRUN_ARCHITECTURES")
    return [name for value in found for name in value.split(",") if name]


def _settings(kubectl: Kubectl, name: str) -> list[str]:
    """Return the values of a variable of the operators that are installed."""
    return [
        variable.get("value", "")
        for item in _operators(kubectl)
        for container in item["spec"]["template"]["spec"]["containers"]
        for variable in container.get("env") or []
        if variable["name"] == name
    ]


def try_network(kubectl: Kubectl) -> Finding:
    """Return whether the cluster enforces NetworkPolicies, tried with two pods.

    Args:
        kubectl: keeps nothing that it has read.
    """
    try:
        images = [image for image in _settings(kubectl, "AGENTICRUN_WORKER_IMAGE") if image]
        architectures = _architectures(kubectl)
    except SourceError as error:
        return not_checked(f"the worker image of the installation cannot be read: {error}")
    return network_finding(kubectl, next(iter(images), None), architectures)


def code_arrives(run: AgenticRun, folder: Path) -> Finding:
    """Return whether modules of the run's folder have a way into the pods."""
    code, images = run.spec.code, (run.spec.image, run.spec.roles.env.image)
    try:
        needed = find_local_code(run, folder).files
    except PackagingError as error:
        if code is None and not any(images):
            return failed(str(error), "bring it to the pods: docs/own-code.md")
        return ok("by spec.code or an image; what is in it is not known here")
    if not needed:
        return ok("no modules of its own")
    if code is None and not any(images):
        return failed(
            f"{_few(sorted(needed))} beside the run is in no pod",
            "agenticrun package -f with this file says what to write: docs/own-code.md",
        )
    return ok(f"{len(needed)} files come by spec.code or an image")


def kubernetes(server: Mapping[str, str]) -> Finding:
    """Return whether Kubernetes is new enough."""
    version = server["gitVersion"]
    if numbers(version) < MIN_KUBERNETES:
        return failed(version, "Kubernetes 1.30 or newer is needed")
    return ok(version)


def numbers(version: str) -> tuple[int, int]:
    """Return major and minor of the first version number in a text; (0, 0) without one."""
    found = re.search(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _crd(kubectl: Kubectl) -> Finding:
    name = f"{PLURAL}.{GROUP}"
    items = kubectl.json("crd", "--field-selector", f"metadata.name={name}")["items"]
    if not items:
        return failed("the cluster does not serve AgenticRuns", f"install it: {CRD_COMMAND}")
    return crd_matches(items[0])


def crd_matches(served: Mapping[str, Any]) -> Finding:
    """Compare the served CRD with that of this version."""
    (ours,) = custom_resource_definition()["spec"]["versions"]
    theirs = next(
        (v for v in served["spec"]["versions"] if v["name"] == ours["name"] and v["served"]), None
    )
    if theirs is None:
        return failed(
            f"{ours['name']} is not served", f"apply the one of this version: {CRD_COMMAND}"
        )
    have, want = (set(fields(v["schema"]["openAPIV3Schema"])) for v in (theirs, ours))
    if lacking := sorted(want - have):
        return failed(
            f"it lacks {len(lacking)} fields of AgenticRun {__version__}: {_few(lacking)}",
            f"helm does not upgrade it: {CRD_COMMAND}",
        )
    if more := sorted(have - want):
        return warning(
            f"it has {len(more)} fields that AgenticRun {__version__} does not know: {_few(more)}",
            "a newer release installed it: use its agenticrun command, too",
        )
    return ok(f"{ours['name']}, the fields of AgenticRun {__version__}")


def fields(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the paths of all fields of a structural schema."""
    for name, child in (schema.get("properties") or {}).items():
        yield f"{path}{name}"
        yield from fields(child, f"{path}{name}.")
    if isinstance(items := schema.get("items"), dict):
        yield from fields(items, f"{path[:-1]}[].")


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


OPERATOR_LABELS = {
    "app.kubernetes.io/name": "agenticrun",
    "app.kubernetes.io/component": "operator",
}.items()


def _operators(kubectl: Kubectl) -> Objects:
    return [
        item
        for item in kubectl.json("deployments", "-A")["items"]
        if (item["metadata"].get("labels") or {}).items() >= OPERATOR_LABELS
    ]


def _operator(kubectl: Kubectl) -> Finding:
    deployments = _operators(kubectl)
    if not deployments:
        return failed("it is not installed", "install the chart: docs/install.md#the-operator")
    return deployments_run(deployments, is_supported, f"one minor version around {__version__}")


def _kuberay(kubectl: Kubectl) -> Finding:
    served = kubectl.json("crd", "--field-selector", "metadata.name=rayclusters.ray.io")["items"]
    if not served:
        return failed(
            "the cluster does not serve RayClusters",
            "install KubeRay 1.6 or newer with its CRDs: "
            "helm install kuberay-operator kuberay/kuberay-operator",
        )
    deployments = [
        item
        for item in kubectl.json("deployments", "-A")["items"]
        if item["metadata"]["name"].startswith("kuberay-operator")
        or "kuberay/operator" in item["spec"]["template"]["spec"]["containers"][0]["image"]
    ]
    if not deployments:
        return warning(
            "its CRD is there; no deployment kuberay-operator can be seen",
            "install KubeRay's operator, unless it runs somewhere else",
        )
    return deployments_run(deployments, lambda v: numbers(v) >= MIN_KUBERAY, "1.6 or newer")


def deployments_run(deployments: Objects, fits: Callable[[str], bool], wanted: str) -> Finding:
    """Return whether deployments have a pod that is available, and an image of a good version."""
    shown, bad = [], []
    for item in deployments:
        metadata = item["metadata"]
        name = f"{metadata['namespace']}/{metadata['name']}"
        image = item["spec"]["template"]["spec"]["containers"][0]["image"]
        labels = metadata.get("labels") or {}
        version = labels.get("app.kubernetes.io/version") or image.rpartition(":")[2]
        shown.append(f"{name} {version}")
        if not (item.get("status") or {}).get("availableReplicas"):
            where = f"deployment -n {name.replace('/', ' ')}"
            bad.append(
                f"{name} was stopped: kubectl scale {where} --replicas=1"
                if item["spec"].get("replicas") == 0
                else f"{name} has no available pod: kubectl describe {where}"
            )
        elif re.match(r"v?\d+\.\d+", version) and not fits(version):
            bad.append(f"{name}: upgrade it to {wanted}")
    found = ", ".join(shown)
    return failed(found, "; ".join(bad)) if bad else ok(found)


def _usable_nodes(kubectl: Kubectl) -> list[Node]:
    # Pods that have ended take no room on their node.
    active = "--field-selector=status.phase!=Succeeded,status.phase!=Failed"
    pods: Objects = kubectl.json("pods", "-A", active)["items"]
    return usable_nodes(kubectl.json("nodes")["items"], pods)


def _gpus(kubectl: Kubectl) -> Finding:
    return gpus_left(_usable_nodes(kubectl))


def gpu_of(nodes: list[Node]) -> Gpu | None:
    """Return the smallest GPU of the nodes, by the labels of NVIDIA's feature discovery."""
    found = [
        recognize(node.labels[PRODUCT], float(node.labels[PRODUCT_MIB]) * 2**20)
        for node in nodes
        if PRODUCT in node.labels and node.labels.get(PRODUCT_MIB, "").isdigit()
    ]
    return min(found, key=lambda gpu: gpu.memory, default=None)


def gpus_left(nodes: list[Node]) -> Finding:
    """Return how many GPUs the usable nodes have, and how many are free."""
    if not nodes:
        return failed("no node is ready and takes pods", "kubectl get nodes; kubectl describe node")
    # A node without the device plugin does not list the resource at all.
    with_gpus = [node for node in nodes if node.total.get(GPU)]
    if not with_gpus:
        return warning(
            f"{len(nodes)} nodes are ready, none with {GPU}",
            "runs with GPUs stay Pending: install NVIDIA's device plugin or GPU operator",
        )
    free = [node.free[GPU] for node in with_gpus]
    total = sum(node.total[GPU] for node in with_gpus)
    return ok(
        f"{sum(free):g} of {total:g} free on {len(with_gpus)} nodes; "
        f"at most {max(free):g} on one node"
    )


def limits_pods(name: str) -> bool:
    """Return whether a resource of a quota is one that pods or their volume claims use."""
    return name.startswith(("requests.", "limits.", "count/pods")) or name in (
        "pods",
        "cpu",
        "memory",
        "ephemeral-storage",
        "persistentvolumeclaims",
        "count/persistentvolumeclaims",
        GPU,
    )


def quotas_left(quotas: Objects) -> Finding:
    """Return which limits of a namespace are reached."""
    full, shown = [], []
    for quota in quotas:
        status = quota.get("status") or {}
        for name, hard in (status.get("hard") or {}).items():
            if not limits_pods(name):
                continue
            used = (status.get("used") or {}).get(name, "0")
            # Compared as amounts: 1000m and 1 are equal.
            if quantity(used) >= quantity(hard):
                full.append(f"{quota['metadata']['name']}: {name} {used} of {hard}")
            elif name.endswith(GPU) or name in ("pods", "requests.cpu", "requests.memory"):
                shown.append(f"{name} {used} of {hard}")
    if full:
        return warning(
            f"used up in this namespace: {', '.join(full)}",
            "pods of a new run would be denied: raise the quota, or use another namespace",
        )
    return ok(", ".join(shown) or "none in this namespace")


def default_class(classes: Objects) -> Finding:
    """Return whether there is a default StorageClass."""
    names = [item["metadata"]["name"] for item in classes]
    default = [
        item["metadata"]["name"]
        for item in classes
        if (item["metadata"].get("annotations") or {}).get(
            "storageclass.kubernetes.io/is-default-class"
        )
        == "true"
    ]
    if default:
        others = [name for name in names if name not in default]
        return ok(f"default {default[0]}" + (f"; also {', '.join(others)}" if others else ""))
    return warning(
        f"no default StorageClass among {', '.join(names) or 'none'}",
        "runs wait with reason ClaimPending: set checkpoint.uri to object storage, name a claim in "
        "checkpoint.volumeClaim, or make a StorageClass the default",
    )


RIGHTS: Mapping[tuple[str, str], str] = {
    ("create", RESOURCE := f"{PLURAL}.{GROUP}"): "apply a run",
    ("patch", RESOURCE): "stop, suspend and resume",
    ("create", "pods/exec"): "watch with curves, samples, report, trace, checkpoint and logs",
    ("create", "pods"): "watch, samples, logs and report of a run that has ended, from its claim",
    ("delete", "pods"): "deleting the pod that has read such a run (it stays for 20 minutes)",
    ("get", "pods/log"): "logs --role reporter",
}


def _rights(kubectl: Kubectl) -> Finding:
    denied = {}
    for (verb, resource), purpose in RIGHTS.items():
        try:
            answer = kubectl.run("auth", "can-i", verb, resource)
        except SourceError:  # kubectl ends with 1 after a no
            answer = b"no"
        if answer.strip() != b"yes":
            denied[f"{verb} {resource}"] = purpose
    if denied:
        return warning(
            f"you may not {', '.join(denied)}",
            f"these do not work: {', '.join(denied.values())}. Ask who gives out roles",
        )
    return ok("you may apply runs, steer them and look into their pods")
