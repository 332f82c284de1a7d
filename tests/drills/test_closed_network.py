"""A platform without internet, as docs/install.md says, whose policies are enforced; and attacks.

The development cluster runs kube-router. Its registry is the one of the platform: the images are
copied into it by the page's own loop, in which a program that copies inside of the registry stands
in for docker. KubeRay is the one of the cluster, because its chart is outside.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from agenticrun_api.names import LABEL_RUN
from agenticrun_api.version import __version__
from devcluster.settings import Settings
from enforced_network import CONNECT
from installation import RELEASE, RUNS, SYSTEM
from pages import blocks, commands
from testcluster import ROOT, Cluster, devcluster
from waiting import eventually
from watching import Watch

ELSEWHERE = "agenticrun-e2e-elsewhere"
KUBERAY = "kuberay-system"
SETTINGS = Settings.from_environment()
RELEASED, MIRROR = (f"{SETTINGS.registry}/drill/{name}" for name in ("released", "mirror"))
PAGE = ROOT / "docs/install.md"
PAGE_MIRROR = "registry.internal/agenticrun"
PORTS = {"GCS": 6379, "Ray's job API": 8265, "the reporter": 8787}
OUTSIDE = (SETTINGS.host_ip, SETTINGS.registry_port)
"""Listens on this machine, and is no pod and no Service."""
ENFORCE_SECONDS = 60
CLOSED: dict[str, Any] = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "no-internet"},
    "spec": {
        "podSelector": {},
        "policyTypes": ["Egress"],
        "egress": [
            {
                # Pods; Services, DNS among them; the apiserver behind its Service.
                "to": [
                    {"ipBlock": {"cidr": cidr}}
                    for cidr in (
                        SETTINGS.pod_cidr,
                        SETTINGS.service_cidr,
                        f"{SETTINGS.node_ip}/32",
                    )
                ]
            }
        ],
    },
}
DOCKER = (
    f"#!{sys.executable}\n"
    + r'''
"""docker pull, tag, push and buildx imagetools inspect, of images of one registry."""
import json, pathlib, sys, urllib.request

TYPES = "application/vnd.oci.image.manifest.v1+json"
TYPES += ",application/vnd.docker.distribution.manifest.v2+json"
open_url = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
tags = pathlib.Path(__file__).with_name("tags.json")
known = json.loads(tags.read_text()) if tags.exists() else {}

def request(method, reference, what, body=None, kind=TYPES):
    host, _, name = reference.partition("/")
    head = {"Accept": TYPES, "Content-Type": kind}
    url = f"http://{host}/v2/{name}/{what}"
    return open_url(urllib.request.Request(url, body, head, method=method))

def split(reference):
    name, _, digest = reference.partition("@")
    name, _, tag = name.rpartition(":")
    return name, digest or tag

def manifest(reference):
    name, version = split(reference)
    return request("GET", name, f"manifests/{version}")

def push(reference):
    source, (target, tag) = known[reference], split(reference)
    found = manifest(source)
    kind, body = found.headers["Content-Type"], found.read()
    name = split(source)[0].partition("/")[2]
    for blob in (json.loads(body)["config"], *json.loads(body)["layers"]):
        query = f"blobs/uploads/?mount={blob['digest']}&from={name}"
        assert request("POST", target, query, b"").status == 201, blob
    request("PUT", target, f"manifests/{tag}", body, kind)

match sys.argv[1:]:
    case ["pull", reference]:
        manifest(reference)
    case ["tag", source, name]:
        tags.write_text(json.dumps(known | {name: source}))
    case ["push", reference]:
        push(reference)
    case ["buildx", "imagetools", "inspect", reference, "--format", "{{json .Manifest}}"]:
        print(json.dumps({"digest": manifest(reference).headers["Docker-Content-Digest"]}))
    case ["rmi", reference]:
        name = split(reference)[0]
        digest = manifest(reference).headers["Docker-Content-Digest"]
        request("DELETE", name, f"manifests/{digest}")
    case words:
        sys.exit(f"not docker: {words}")
'''
)


@dataclass(frozen=True)
class Docker:
    """The program in a folder that is first on the PATH."""

    folder: Path

    def __call__(self, *words: str) -> str:
        """Run a command in the folder."""
        path = f"{self.folder}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            words, cwd=self.folder, env={**os.environ, "PATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stderr}"
        return done.stdout


def forget_images(docker: Docker) -> None:
    """Delete the copies from the registry and the node, or they would hold their layers for ever.

    The node's client of the CRI removes an image with all its names, `ctr` only one of them.
    """
    ctr = ("ctr", "--address", str(SETTINGS.containerd_socket), "--namespace", "k8s.io", "images")
    for name in docker(*ctr, "list", "--quiet").split():
        if name.startswith((RELEASED, MIRROR)):
            docker(*ctr, "remove", name)
    for registry in (RELEASED, MIRROR):
        for name in ("operator", "worker"):
            reference = f"{registry}/{name}:{__version__}"
            subprocess.run([docker.folder / "docker", "rmi", reference], capture_output=True)


def mirrored(docker: Docker) -> None:
    """Release the images of this tree, list them, and copy them as the page says."""
    built = json.loads(devcluster("images").stdout)
    for name in ("operator", "worker"):
        released = f"{RELEASED}/{name}:{__version__}"
        docker("docker", "tag", built[name], released)
        docker("docker", "push", released)
    listed = docker(
        sys.executable, str(ROOT / "tools/images.py"), "list", RELEASED, "--engines", ""
    )
    ours = [name for name in listed.split() if name.startswith(RELEASED)]
    (docker.folder / "images.txt").write_text("".join(f"{name}\n" for name in ours))
    (loop,) = (text for text in blocks(PAGE, "bash") if "images.txt" in text)
    docker("bash", "-c", loop.replace(PAGE_MIRROR, MIRROR))


def install_command(chart: Path) -> list[str]:
    """Return the page's command that installs a packed chart, with the names of this drill."""
    (words,) = (
        words
        for words in commands(PAGE.read_text())
        if words[:3] == ["helm", "install", "agenticrun"] and words[3].endswith(".tgz")
    )
    assert words[3] == "agenticrun-$VERSION.tgz"
    names = {"agenticrun-system": SYSTEM, f"registry={PAGE_MIRROR}": f"registry={MIRROR}"}
    return ["helm", "install", RELEASE, str(chart), *(names.get(word, word) for word in words[4:])]


def sleeper(name: str, labels: dict[str, str]) -> dict[str, Any]:
    """Return a pod that waits for commands."""
    container = {
        "name": "pod",
        "image": f"{MIRROR}/worker:{__version__}",
        "command": ["sleep", "infinity"],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [container]},
    }


def start(inside: Cluster, name: str, labels: dict[str, str] | None = None) -> None:
    """Start a pod, and wait until it is ready."""
    inside.apply(sleeper(name, labels or {}))
    inside.kubectl("wait", "--for=condition=Ready", f"pod/{name}", "--timeout=300s")


def connects(inside: Cluster, pod: str, *targets: tuple[str, int]) -> set[tuple[str, int]]:
    """Return the addresses and ports that a pod connects to."""
    words = ("python", "-c", CONNECT, json.dumps(targets))
    return {
        (address, port) for address, port in json.loads(inside.kubectl("exec", pod, "--", *words))
    }


@pytest.fixture
def platform(cluster: Cluster, tmp_path: Path) -> Iterator[Cluster]:
    """The cluster, which enforces policies, with three namespaces and the copied images."""
    assert devcluster("up", "--with", "network-policy").returncode == 0, "see its output above"
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    docker = Docker(tmp_path)
    forget_images(docker)  # of a killed test
    with ExitStack() as stack:
        stack.callback(forget_images, docker)
        mirrored(docker)
        for name in (RUNS, ELSEWHERE, SYSTEM):
            stack.enter_context(cluster.new_namespace(name))
        yield cluster


@pytest.mark.timeout(3000, func_only=True)
def test_a_run_trains_without_internet_and_its_ports_are_closed_to_others(
    platform: Cluster, tmp_path: Path
) -> None:
    cluster = platform
    runs, system, elsewhere, kuberay = map(cluster.in_namespace, (RUNS, SYSTEM, ELSEWHERE, KUBERAY))
    start(runs, "probe")
    assert connects(runs, "probe", OUTSIDE) == {OUTSIDE}, "it is open before the policy"
    with ExitStack() as stack:
        for place in (runs, system, kuberay):
            place.apply(CLOSED)
        stack.callback(kuberay.kubectl, "delete", "networkpolicy", CLOSED["metadata"]["name"])
        eventually(
            lambda: not connects(runs, "probe", OUTSIDE), ENFORCE_SECONDS, "egress is closed"
        )
        print("\negress is closed")
        crds = str(ROOT / "charts/agenticrun/crds/agenticruns.yaml")
        cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", crds)
        cluster.command("helm", "package", str(ROOT / "charts/agenticrun"), "-d", str(tmp_path))
        install = install_command(tmp_path / f"agenticrun-{__version__}.tgz")
        system.command(*install, "--set=networkPolicy.enabled=false", "--wait", "--timeout=10m")
        stack.callback(system.command, "helm", "uninstall", RELEASE, "-n", SYSTEM, "--wait")
        stack.callback(runs.kubectl, "delete", "agenticruns", "--all", "--wait=true")
        run = yaml.safe_load((ROOT / "examples/frozen-lake.yaml").read_text())
        name = run["metadata"]["name"]
        with Watch(runs, name) as watch:
            runs.apply(run)
            watch.wait(lambda seen: seen.phase == "Running", 600, "it runs")
            pods = {pod["metadata"]["name"]: pod for pod in runs.list("pods", LABEL_RUN)}
            images = {
                container["image"]
                for pod in [*pods.values(), *system.list("pods")]
                for container in pod["spec"]["containers"]
            }
            assert images
            assert all(image.startswith(f"{MIRROR}/") for image in images), images
            (head,) = (
                pod
                for pod in pods.values()
                if pod["metadata"]["labels"]["ray.io/node-type"] == "head"
            )
            targets = [(head["status"]["podIP"], port) for port in PORTS.values()]
            # The labels of one of its own pods help only in the run's namespace.
            (own, *_) = (pod["metadata"]["labels"] for pod in pods.values() if pod is not head)
            start(elsewhere, "attacker", own)
            before = connects(elsewhere, "attacker", *targets)
            assert before == set(targets), "without policies of the run all ports are open"
            upgrade = [*install[:1], "upgrade", *install[2:4], "-n", SYSTEM, "--reuse-values"]
            system.command(*upgrade, "--set=networkPolicy.enabled=true", "--wait", "--timeout=10m")
            eventually(
                lambda: not connects(elsewhere, "attacker", *targets),
                300,
                "the attacker reaches no port",
                interval=1.0,
            )
            step = watch.history[-1].step
            print(f"ports {sorted(port for _, port in before)} were open, and are closed")
            shorter = json.dumps({"spec": {"pipeline": {"maxSteps": step + 2}}})
            runs.kubectl("patch", "agenticrun", name, "--type=merge", "-p", shorter)
            end = watch.wait(lambda seen: seen.phase == "Succeeded", 900, "it ends")
        assert end.step >= step + 2
        assert not connects(runs, "probe", OUTSIDE), "egress has stayed closed"
        print(f"the run has ended at step {end.step}")
