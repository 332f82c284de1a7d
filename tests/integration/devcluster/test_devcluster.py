"""The development cluster is a real one.

It has pods, DNS, Services, tokens under RBAC, counted GPUs, and volumes that last.
"""

import json
import socket
import struct
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agenticrun_api.names import ENV_SIMULATED_GPUS
from devcluster.settings import Settings
from testcluster import Cluster, CommandFailed
from waiting import eventually

pytestmark = pytest.mark.timeout(600)

_ROOT = Path(__file__).resolve().parents[3]
_TOOL = (sys.executable, str(_ROOT / "tools" / "devcluster"))
# Reads its own token as a client of the apiserver would, and prints the status of a request.
_ASK_APISERVER = """
import ssl, sys, urllib.error, urllib.request
folder = "/var/run/secrets/kubernetes.io/serviceaccount/"
headers = {"Authorization": "Bearer " + open(folder + "token").read()}
request = urllib.request.Request("https://kubernetes.default.svc" + sys.argv[1], headers=headers)
trust = ssl.create_default_context(cafile=folder + "ca.crt")
try:
    print(urllib.request.urlopen(request, context=trust, timeout=60).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""

# Prints the memory limit of its container, by version one or two of cgroups, and wants more.
_EAT_MEMORY = """
import pathlib
folder = pathlib.Path("/sys/fs/cgroup")
limit = next(file for file in (folder / "memory.max", folder / "memory/memory.limit_in_bytes") \
if file.exists())
print(limit.read_text(), end="", flush=True)
x = bytearray(200 << 20)
"""
_FETCH = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=60).status)"

Kubectl = Callable[..., str]


def container(image: str, command: list[str], **more: Any) -> dict[str, Any]:
    """A small container of the base image."""
    resources = {"requests": {"cpu": "10m", "memory": "16Mi"}, **more.pop("resources", {})}
    return {"name": "main", "image": image, "command": command, "resources": resources, **more}


def pod(name: str, main: dict[str, Any], **spec: Any) -> str:
    """A pod as JSON, labelled app=<name>."""
    body = {"terminationGracePeriodSeconds": 0, "containers": [main], **spec}
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {"app": name}},
            "spec": body,
        }
    )


@pytest.fixture(scope="module")
def image() -> str:
    """A Debian with Python that the node has."""
    published = subprocess.run(
        [*_TOOL, "images", "operator"], check=True, capture_output=True, text=True
    ).stdout
    return str(json.loads(published)["base"])


@pytest.fixture(scope="module")
def kubectl(cluster: Cluster) -> Iterator[Kubectl]:
    """kubectl in a namespace of this module's own, which is deleted in the end."""
    with cluster.new_namespace(f"devcluster-{uuid.uuid4().hex[:8]}") as inside:
        yield inside.kubectl


@pytest.fixture(scope="module")
def pods(kubectl: Kubectl, image: str) -> None:
    """Start a web server behind a Service and a headless Service, and a client pod.

    The client may read pods and holds two GPUs.
    """
    probe = {
        "httpGet": {"path": "/", "port": 8000},
        "periodSeconds": 1,
        "timeoutSeconds": 10,
        "failureThreshold": 60,
    }
    kubectl(
        "apply",
        "-f-",
        stdin=pod(
            "web", container(image, ["python3", "-um", "http.server", "8000"], readinessProbe=probe)
        ),
    )
    for name, extra in {"web": {}, "web-headless": {"clusterIP": "None"}}.items():
        spec = {"selector": {"app": "web"}, "ports": [{"port": 8000}], **extra}
        kubectl(
            "apply",
            "-f-",
            stdin=json.dumps(
                {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}
            ),
        )
    kubectl(
        "create",
        "rolebinding",
        "view-pods",
        "--clusterrole=view",
        "--serviceaccount=" + namespace_of(kubectl) + ":default",
    )
    client = container(
        image,
        ["bash", "-c", "echo hello; sleep 100000"],
        resources={"limits": {"nvidia.com/gpu": 2}},
    )
    kubectl("apply", "-f-", stdin=pod("client", client))
    kubectl("wait", "--for=condition=Ready", "pod/web", "pod/client", "--timeout=180s")
    for command in (
        ("getent", "hosts", "web-headless"),
        ("python3", "-c", _FETCH, "http://web:8000/"),
    ):
        eventually(
            partial(succeeds_in_client, kubectl, *command),
            180,
            f"the web server is behind its Services: {command}",
            interval=0.5,
        )


def namespace_of(kubectl: Kubectl) -> str:
    """The module's namespace, as the apiserver names it for an object in it."""
    return kubectl("get", "serviceaccount", "default", "-ojsonpath={.metadata.namespace}")


def in_client(kubectl: Kubectl, *command: str) -> str:
    """Output of a command in the client pod."""
    return kubectl("exec", "client", "--", *command).strip()


def succeeds_in_client(kubectl: Kubectl, *command: str) -> bool:
    """Whether a command in the client pod does."""
    try:
        in_client(kubectl, *command)
    except CommandFailed:
        return False
    return True


def ask_dns(name: str) -> bytes:
    """What the cluster's DNS answers the host about the address of `name`."""
    question = (
        b"".join(bytes([len(label)]) + label for label in name.encode().split(b"."))
        + b"\0"
        + struct.pack(">HH", 1, 1)
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(60)
        client.sendto(
            struct.pack(">6H", 1, 0x100, 1, 0, 0, 0) + question,
            (Settings.from_environment().dns_ip, 53),
        )
        return client.recv(512)


def field(kubectl: Kubectl, kind: str, name: str, path: str) -> str:
    """One field of an object."""
    return kubectl("get", kind, name, f"-ojsonpath={{{path}}}")


@pytest.mark.usefixtures("pods")
class TestPods:
    """Checks against the two pods."""

    def test_logs_and_exec(self, kubectl: Kubectl) -> None:
        eventually(
            lambda: kubectl("logs", "client") == "hello\n",
            120,
            "the container's words are in its log",
            interval=0.5,
        )
        assert in_client(kubectl, "bash", "-c", "echo $((6 * 7))") == "42"

    def test_dns_gives_the_address_of_a_service(self, kubectl: Kubectl) -> None:
        assert in_client(kubectl, "getent", "hosts", "web").split()[0] == field(
            kubectl, "service", "web", ".spec.clusterIP"
        )

    def test_dns_gives_the_pods_address_for_a_headless_service(self, kubectl: Kubectl) -> None:
        assert in_client(kubectl, "getent", "hosts", "web-headless").split()[0] == field(
            kubectl, "pod", "web", ".status.podIP"
        )

    def test_a_name_outside_the_cluster_is_answered_with_no_such_name(
        self, kubectl: Kubectl
    ) -> None:
        """Instead of with nothing, after which a resolver waits for 5 s each time."""
        (flags,) = struct.unpack(">H", ask_dns("example.invalid")[2:4])
        assert flags & 0xF == 3
        assert (
            in_client(kubectl, "bash", "-c", "getent hosts example.invalid || echo none") == "none"
        )

    def test_a_pod_reaches_a_pod_through_a_service(self, kubectl: Kubectl) -> None:
        assert in_client(kubectl, "python3", "-c", _FETCH, "http://web:8000/") == "200"

    def test_a_pod_reaches_itself_through_its_service(self, kubectl: Kubectl) -> None:
        address = field(kubectl, "service", "web", ".spec.clusterIP")
        assert (
            kubectl("exec", "web", "--", "python3", "-c", _FETCH, f"http://{address}:8000/").strip()
            == "200"
        )

    def test_the_host_reaches_pods_and_services(self, kubectl: Kubectl) -> None:
        for address in (
            field(kubectl, "service", "web", ".spec.clusterIP"),
            field(kubectl, "pod", "web", ".status.podIP"),
        ):
            with urllib.request.urlopen(f"http://{address}:8000/", timeout=60) as response:
                assert response.status == 200

    def test_the_host_can_ask_cluster_dns(self, kubectl: Kubectl) -> None:
        answer = ask_dns(f"web.{namespace_of(kubectl)}.svc.cluster.local")
        assert socket.inet_ntoa(answer[-4:]) == field(kubectl, "service", "web", ".spec.clusterIP")

    def test_a_token_may_do_what_its_role_says_and_no_more(self, kubectl: Kubectl) -> None:
        namespace = namespace_of(kubectl)
        assert (
            in_client(
                kubectl, "python3", "-c", _ASK_APISERVER, f"/api/v1/namespaces/{namespace}/pods"
            )
            == "200"
        )
        assert (
            in_client(
                kubectl, "python3", "-c", _ASK_APISERVER, f"/api/v1/namespaces/{namespace}/secrets"
            )
            == "403"
        )
        assert in_client(kubectl, "python3", "-c", _ASK_APISERVER, "/api/v1/nodes") == "403"

    def test_a_container_sees_the_gpus_it_asked_for(self, kubectl: Kubectl) -> None:
        ids = in_client(kubectl, "printenv", "CUDA_VISIBLE_DEVICES").split(",")
        assert len(set(ids)) == 2
        assert in_client(kubectl, "printenv", "NVIDIA_VISIBLE_DEVICES").split(",") == ids
        assert in_client(kubectl, "printenv", ENV_SIMULATED_GPUS).strip() == "1"

    def test_more_gpus_than_the_node_has_do_not_fit(self, kubectl: Kubectl, image: str) -> None:
        kubectl(
            "apply",
            "-f-",
            stdin=pod(
                "greedy", container(image, ["true"], resources={"limits": {"nvidia.com/gpu": 9}})
            ),
        )
        kubectl("wait", "--for=condition=PodScheduled=false", "pod/greedy", "--timeout=120s")
        assert "Insufficient nvidia.com/gpu" in field(
            kubectl, "pod", "greedy", ".status.conditions[0].message"
        )

    def test_memory_limit_is_written_to_the_cgroup_and_enforced(
        self, kubectl: Kubectl, image: str
    ) -> None:
        """Detect it by the exit code.

        The reason OOMKilled comes from an event that is separate from the exit and may be late.
        """
        main = container(
            image, ["python3", "-c", _EAT_MEMORY], resources={"limits": {"memory": "64Mi"}}
        )
        kubectl("apply", "-f-", stdin=pod("eater", main, restartPolicy="Never"))
        kubectl("wait", "--for=jsonpath={.status.phase}=Failed", "pod/eater", "--timeout=180s")
        assert (
            field(kubectl, "pod", "eater", ".status.containerStatuses[0].state.terminated.exitCode")
            == "137"
        )
        eventually(
            lambda: kubectl("logs", "eater") == f"{64 << 20}\n",
            120,
            "the limit is in its log",
            interval=0.5,
        )


def test_a_claim_is_bound_written_by_any_user_kept_between_pods_and_cleaned_up(
    kubectl: Kubectl, image: str
) -> None:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "data"},
        "spec": spec,
    }
    kubectl("apply", "-f-", stdin=json.dumps(claim))
    volume = {
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "restartPolicy": "Never",
    }
    mounts = [{"name": "data", "mountPath": "/data"}]
    for name, command in {"writer": "echo kept > /data/file", "reader": "cat /data/file"}.items():
        main = container(
            image,
            ["bash", "-c", command],
            volumeMounts=mounts,
            securityContext={"runAsUser": 1000, "runAsNonRoot": True},
        )
        kubectl("apply", "-f-", stdin=pod(name, main, **volume))
        kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", f"pod/{name}", "--timeout=180s")
    assert kubectl("logs", "reader") == "kept\n"
    persistent = field(kubectl, "persistentvolumeclaim", "data", ".spec.volumeName")
    folder = Path(field(kubectl, "persistentvolume", persistent, ".spec.hostPath.path"))
    assert (folder / "file").read_text() == "kept\n"
    kubectl("delete", "pod/writer", "pod/reader", "persistentvolumeclaim/data")
    kubectl("wait", "--for=delete", f"persistentvolume/{persistent}", "--timeout=180s")
    assert not folder.exists()


def test_kuberay_serves_its_api_and_runs_in_a_pod_without_cluster_admin(kubectl: Kubectl) -> None:
    assert "rayclusters" in kubectl("api-resources", "--api-group=ray.io", "--output=name")
    account = "--as=system:serviceaccount:kuberay-system:kuberay-operator"
    assert kubectl("auth", "can-i", "create", "pods", account).strip() == "yes"
    answer = json.loads(
        kubectl("get", "deployments", "--namespace=kuberay-system", "--output=json")
    )
    assert [item["status"]["availableReplicas"] for item in answer["items"]] == [1]


def test_up_leaves_a_cluster_that_is_up_alone() -> None:
    before = started_processes()
    subprocess.run([*_TOOL, "up"], check=True, capture_output=True)
    assert started_processes() == before
    assert (
        subprocess.run(
            [*_TOOL, "status", "--wait", "60"], check=True, capture_output=True, text=True
        )
        .stdout.strip()
        .endswith(": up")
    )


def test_unchanged_images_are_not_built_again(image: str) -> None:
    again = subprocess.run(
        [*_TOOL, "images", "operator"], check=True, capture_output=True, text=True
    )
    assert json.loads(again.stdout)["base"] == image
    assert "building" not in again.stderr


def started_processes() -> dict[str, str]:
    """The record of each process of the host cluster, by name."""
    folder = Settings.from_environment().state / "processes"
    return {path.stem: path.read_text() for path in folder.iterdir()}
