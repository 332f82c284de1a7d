"""`agenticrun doctor`: say what a cluster and this machine lack for a run, and how to fix it."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from agenticrun_api.crd import custom_resource_definition
from agenticrun_api.names import GROUP, PLURAL
from agenticrun_api.version import __version__, is_supported
from agenticrun_workers.cli.check_env import table
from agenticrun_workers.cli.source import (
    Context,
    Kubectl,
    Namespace,
    NoCluster,
    NoKubectl,
    SourceError,
)
from agenticrun_workers.findings import Finding, Report, Verdict, failed, not_checked, ok, warning
from agenticrun_workers.reporting.run_folder import gpus

MIN_KUBERNETES = (1, 30)
MIN_KUBERAY = (1, 6)
GPU = "nvidia.com/gpu"
SHM_GIB = 1.0
"""/dev/shm that a tiny run on one machine needs; docs/gpus.md says how much others do."""
DISK_GIB = 5.0
IMPORT_SECONDS = 120.0

Objects = list[dict[str, Any]]
CRD_COMMAND = "python -m agenticrun_api.crd | kubectl apply --server-side --force-conflicts -f -"
"""Works from a checkout and from the wheel: the module prints the CRD of this version."""


def doctor(
    local: Annotated[bool, typer.Option("--local", help="Check this machine only.")] = False,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Check this machine and the cluster that kubectl reaches, and say what to fix.

    Exit codes: 0 nothing stands in the way, 1 something does.
    """
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    reports = {"this machine": Report(machine_findings())}
    console.print(table(reports["this machine"], f"this machine, AgenticRun {__version__}"))
    if not local:
        reports["the cluster"] = Report(cluster_findings(Kubectl(namespace, context)))
        console.print(table(reports["the cluster"], "the cluster"))
    failed = [
        f"{place}: {name}"
        for place, report in reports.items()
        for name in report.of(Verdict.FAILED)
    ]
    if failed:
        console.print(f"to fix: {', '.join(failed)}")
    raise typer.Exit(int(bool(failed)))


def machine_findings() -> dict[str, Finding]:
    """Return the findings about this machine, by name."""
    return {
        "Python": _python(),
        "PyTorch": _torch(gpus()),
        "engines": _engines(),
        "/dev/shm": space(Path("/dev/shm"), SHM_GIB, "weights on their way to engines", SHM_ADVICE),
        "disk": space(
            Path(), DISK_GIB, "checkpoints in this folder", "free some space, or use --output"
        ),
    }


SHM_ADVICE = (
    "mount a larger one (docker run --shm-size=8g, mount -o remount,size=8g /dev/shm), or set "
    "pipeline.weightSync.transport to ObjectStore"
)


def _python() -> Finding:
    found = f"{platform.python_version()}, {len(os.sched_getaffinity(0))} CPUs"
    if sys.platform != "linux":
        return failed(f"{found} on {sys.platform}", "agenticrun run needs Linux")
    return ok(found)


def _torch(cards: list[str]) -> Finding:
    """Import PyTorch as a run does, in a process of its own: a broken one may crash."""
    program = "import torch; print(torch.__version__, torch.cuda.device_count())"
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return failed(f"not imported in {IMPORT_SECONDS:.0f} s", "look at the disk and the memory")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return failed(
            f"cannot be imported: {last}", "make setup, or pip install agenticrun[workers]"
        )
    version, count = done.stdout.split()[-2:]
    if cards and count == "0":
        return warning(
            f"{version} sees no GPU; nvidia-smi sees {len(cards)}: {cards[0]}",
            "install a PyTorch with CUDA that this driver supports",
        )
    return ok(
        f"{version}, {f'{count} GPUs: {cards[0]}' if cards else 'no GPU: models train on CPUs'}"
    )


def _engines() -> Finding:
    from agenticrun_workers.inference.engine import EngineStartError
    from agenticrun_workers.inference.server_process import find_engine
    from agenticrun_workers.inference.sglang.server import VERSIONS as SGLANG
    from agenticrun_workers.inference.vllm.server import PACKAGES
    from agenticrun_workers.inference.vllm.server import VERSIONS as VLLM

    found = ["transformers"]
    missing: list[str] = []
    broken: list[str] = []
    for name, packages, versions in (("sglang", ["sglang"], SGLANG), ("vllm", PACKAGES, VLLM)):
        try:
            find_engine(name, packages, versions)
            found.append(f"{name} {versions.lstrip('=')}")
        except EngineStartError as error:
            if "does not exist" in str(error):
                missing.append(name)
            else:
                broken.append(str(error))
    shown = ", ".join(found)
    if broken:
        return failed(shown, "; ".join(broken))
    if missing:
        return ok(f"{shown}; not {' and '.join(missing)}: `make engines`, or an image with them")
    return ok(shown)


def space(folder: Path, gib: float, purpose: str, advice: str) -> Finding:
    """Return how much space a folder has for a purpose."""
    if not folder.exists():
        return failed(f"{folder} does not exist", advice)
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free, for {purpose}"
    return ok(found) if usage.free >= gib * 2**30 else failed(found, advice)


def cluster_findings(kubectl: Kubectl) -> dict[str, Finding]:
    """Return the findings about the cluster, by name."""
    try:
        server = json.loads(kubectl.run("version", "-o", "json", timeout=20))["serverVersion"]
    except NoKubectl:
        return {"apiserver": not_checked("kubectl is not installed: install it to check a cluster")}
    except NoCluster:
        return {"apiserver": not_checked("kubectl knows no cluster: set KUBECONFIG to check one")}
    except SourceError as error:
        return {"apiserver": failed(str(error), "check KUBECONFIG, --context and the network")}
    checks: dict[str, Callable[[Kubectl], Finding]] = {
        "CRD": _crd,
        "operator": _operator,
        "KubeRay": _kuberay,
        "GPUs": _gpus,
        "quotas": _quotas,
        "storage": _storage,
        "rights": _rights,
    }
    found = {"apiserver": kubernetes(server)}
    for name, check in checks.items():
        try:
            found[name] = check(kubectl)
        except SourceError as error:
            found[name] = not_checked(f"cannot be read: {error}")
    return found


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


def _operator(kubectl: Kubectl) -> Finding:
    label = "app.kubernetes.io/name=agenticrun,app.kubernetes.io/component=operator"
    deployments = kubectl.json("deployments", "-A", f"--selector={label}")["items"]
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
            bad.append(
                f"{name} has no available pod: "
                f"kubectl describe deployment -n {name.replace('/', ' ')}"
            )
        elif re.match(r"v?\d+\.\d+", version) and not fits(version):
            bad.append(f"{name}: upgrade it to {wanted}")
    found = ", ".join(shown)
    return failed(found, "; ".join(bad)) if bad else ok(found)


def _gpus(kubectl: Kubectl) -> Finding:
    nodes = kubectl.json("nodes")["items"]
    pods = kubectl.json(
        "pods", "-A", "--field-selector=status.phase!=Succeeded,status.phase!=Failed"
    )
    return gpus_left(nodes, pods["items"])


def gpus_left(nodes: Objects, pods: Objects) -> Finding:
    """Return how many GPUs the nodes have, and how many are free."""
    ready = [
        node
        for node in nodes
        if not node["spec"].get("unschedulable")
        and any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for condition in node["status"].get("conditions") or []
        )
    ]
    if not ready:
        return failed(
            f"{len(nodes)} nodes, none of them ready", "kubectl get nodes; kubectl describe node"
        )
    total = {
        node["metadata"]["name"]: int(node["status"].get("allocatable", {}).get(GPU, 0))
        for node in ready
    }
    used = dict.fromkeys(total, 0)
    for pod in pods:
        node = pod["spec"].get("nodeName")
        if node in used:
            used[node] += sum(
                int((box.get("resources") or {}).get("requests", {}).get(GPU, 0))
                for box in pod["spec"]["containers"]
            )
    free = {node: total[node] - used[node] for node in total}
    with_gpus = [node for node, count in total.items() if count]
    if not with_gpus:
        return warning(
            f"{len(ready)} nodes are ready, none with {GPU}",
            "runs with GPUs stay Pending: install NVIDIA's device plugin or GPU operator",
        )
    return ok(
        f"{sum(free.values())} of {sum(total.values())} free on {len(with_gpus)} nodes; "
        f"at most {max(free.values())} on one node"
    )


def _quotas(kubectl: Kubectl) -> Finding:
    return quotas_left(kubectl.json("resourcequotas")["items"])


SUFFIXES = {
    "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60,
}  # fmt: skip


def quantity(text: str) -> float:
    """Return the value of a Kubernetes quantity: 500m, 2, 4Gi, 1e3."""
    digits = text.rstrip("".join(SUFFIXES)) if not text[-1:].isdigit() else text
    return float(digits) * SUFFIXES.get(text[len(digits) :], 1)


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


def _storage(kubectl: Kubectl) -> Finding:
    return default_class(kubectl.json("storageclasses")["items"])


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
    ("create", "pods/exec"): "watch with curves, samples, report and checkpoint",
    ("get", "pods/log"): "logs",
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
