"""A real apiserver whose webhooks fail or hang, and which refuses objects, values and texts."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from agenticrun_api import AgenticRunStatus, Phase, Reason
from agenticrun_api.names import KIND
from agenticrun_api.status import CheckpointStatus
from agenticrun_operator.cluster import KubeClient, connect
from agenticrun_operator.errors import ClusterError, Denied, Refused, TooLarge, WebhookUnavailable
from agenticrun_operator.planning import Plan
from agenticrun_operator.resources import Event, Manifest
from control_plane import control_plane
from runs import run_with
from testcluster import Cluster

NAMESPACE = "refusals"
ADMISSION = "admissionregistration.k8s.io/v1"
RAY_CLUSTERS = {"apiGroups": ["ray.io"], "apiVersions": ["*"], "resources": ["rayclusters"]}
HOSTILE = (
    "\U0001f6ab not today, \ud83e\udd17",
    "\u00e9t\u00e9 \u4f60\u597d \U00020000 \U0001d400",
    "\udce9 and \ud83e alone",
    "\x00\x07\x1b[31m\x7f\x85\x9f\u2028\u2029\ufeff\ufffe\uffff",
    'a "quoted" \\ud83e: {not: yaml} # no comment',
)


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with control_plane(tmp_path_factory.mktemp("plane")) as cluster:
        cluster.kubectl("create", "namespace", NAMESPACE)
        cluster.in_namespace(NAMESPACE).apply(run_with(name="lake"))
        yield cluster


@pytest.fixture
async def kube(plane: Cluster) -> AsyncIterator[KubeClient]:
    client = KubeClient(await connect(Path(plane.env["KUBECONFIG"])), [NAMESPACE])
    yield client
    await client.close()


async def the_run(kube: KubeClient) -> Manifest:
    found = await kube.get(KIND, NAMESPACE, "lake")
    assert found
    return found


def ray_cluster(name: str, padding: int = 0) -> Manifest:
    env = [{"name": "PADDING", "value": "x" * padding}]
    pod = {"containers": [{"name": "ray", "image": "worker", "env": env}]}
    head = {"rayStartParams": {}, "template": {"spec": pod}}
    metadata = {"name": name, "namespace": NAMESPACE}
    spec = {"headGroupSpec": head}
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": spec}


async def refused_with(kube: KubeClient, prefix: str, error: type[ClusterError]) -> str:
    """Create RayClusters until one is refused: the apiserver reads its webhooks after a moment."""
    for number in range(100):
        try:
            await kube.create(ray_cluster(f"{prefix}-{number}"))
        except error as refusal:
            return str(refusal)
        await asyncio.sleep(0.2)
    raise AssertionError("nothing was refused")


def webhook(plane: Cluster, url: str, seconds: int) -> None:
    hook = {
        "name": "slow.example.com",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "timeoutSeconds": seconds,
        "clientConfig": {"url": url},
        "rules": [RAY_CLUSTERS | {"operations": ["CREATE"]}],
        "matchConditions": [
            {"name": "hooked", "expression": "object.metadata.name.startsWith('hooked')"}
        ],
    }
    metadata = {"name": "slow"}
    kind = "ValidatingWebhookConfiguration"
    plane.apply({"apiVersion": ADMISSION, "kind": kind, "metadata": metadata, "webhooks": [hook]})


@pytest.mark.parametrize("text", HOSTILE)
async def test_any_text_is_stored_in_the_status(kube: KubeClient, text: str) -> None:
    status = AgenticRunStatus().model_copy(update={"message": text})
    stored = await kube.write_status(await the_run(kube), status)
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert stored["status"]["message"] == whole
    await kube.post_event(stored, Event(Reason.DENIED, text, "Warning"))


@pytest.mark.parametrize(("hangs", "words"), [(False, "refused"), (True, "deadline exceeded")])
async def test_a_webhook_that_fails_or_hangs_is_named(
    plane: Cluster, kube: KubeClient, hangs: bool, words: str
) -> None:
    server = socket.create_server(("127.0.0.1", 0))  # it accepts, and answers nothing
    port = server.getsockname()[1] if hangs else 1
    webhook(plane, f"https://127.0.0.1:{port}/", seconds=7)
    try:
        began = time.monotonic()
        message = await refused_with(kube, "hooked", WebhookUnavailable)
        assert '"slow.example.com"' in message
        assert words in message
        assert (time.monotonic() - began > 6) is hangs
    finally:
        plane.kubectl("delete", "validatingwebhookconfiguration", "slow")
        server.close()


async def test_a_policy_may_deny_in_any_script(plane: Cluster, kube: KubeClient) -> None:
    constraints = {"resourceRules": [RAY_CLUSTERS | {"operations": ["CREATE"]}]}
    validations = [
        {"expression": "!object.metadata.name.startsWith('denied')", "message": HOSTILE[0][:11]}
    ]
    policy = {"matchConstraints": constraints, "validations": validations}
    binding = {"policyName": "never", "validationActions": ["Deny"]}
    kind = "ValidatingAdmissionPolicy"
    metadata: dict[str, Any] = {"name": "never"}
    plane.apply({"apiVersion": ADMISSION, "kind": kind, "metadata": metadata, "spec": policy})
    kind = "ValidatingAdmissionPolicyBinding"
    plane.apply({"apiVersion": ADMISSION, "kind": kind, "metadata": metadata, "spec": binding})
    try:
        message = await refused_with(kube, "denied", Denied)
    finally:
        plane.kubectl("delete", "validatingadmissionpolicybinding", "never")
    status = AgenticRunStatus(message=message)
    stored = await kube.write_status(await the_run(kube), status)
    assert HOSTILE[0][:11] in stored["status"]["message"]


@pytest.mark.filterwarnings("ignore:Sending a large body")
@pytest.mark.parametrize("size", [1_700_000, 4_000_000])
async def test_an_object_is_too_large_for_etcd_or_the_apiserver(
    kube: KubeClient, size: int
) -> None:
    with pytest.raises(TooLarge):
        await kube.create(ray_cluster("large", padding=size))


@pytest.mark.parametrize(("step", "when"), [(1, "2026-W01-4"), (2**70, "2026-01-01T00:00:00Z")])
async def test_a_status_with_a_bad_value_is_refused_and_stored_without_what_pods_report(
    kube: KubeClient, step: int, when: str
) -> None:
    bad = CheckpointStatus.model_construct(step=step, uri="/c", time=when)
    status = AgenticRunStatus(phase=Phase.RUNNING).model_copy(update={"checkpoint": bad})
    run = await the_run(kube)
    with pytest.raises(Refused):
        await kube.write_status(run, status)
    stored = await kube.write_status(run, Plan(status=status).without_reports(AgenticRunStatus()))
    assert stored["status"]["phase"] == "Running"
    assert "checkpoint" not in stored["status"]
