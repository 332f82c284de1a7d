"""Tries with two pods if the network plug-in of the cluster enforces NetworkPolicies.

One pod listens at a port that its NetworkPolicy opens and at one that it closes; the other one
connects to both. That the first port answers shows that only the policy can have closed the second.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import typer

from agenticrun_api.names import GROUP
from agenticrun_api.pods import POD_USER, RESTRICTED
from agenticrun_workers.cli.kubectl import Kubectl, SourceError
from agenticrun_workers.findings import Finding, failed, not_checked, ok

LABEL_CHECK = f"{GROUP}/network-check"
"""Has a name of its own for each check, on all its objects."""
LABEL_PART = f"{GROUP}/network-check-part"
OPEN, CLOSED = 8787, 6379
"""Ports of a head pod: the reporter's, and that of Ray's control plane."""
START_SECONDS = 300.0
"""Patience with each pod: its node may have to pull the image."""
ENFORCE_SECONDS = 30
"""Time that a network plug-in has to close the port of a new pod."""
POLL_SECONDS = 1.0

SERVER = """
import socket, sys, time
family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
dual = family == socket.AF_INET6
servers = [
    socket.create_server(("", int(port)), family=family, dualstack_ipv6=dual, backlog=128)
    for port in sys.argv[1:]
]
time.sleep(900)
"""
"""Listens; the kernel completes connections that no one accepts."""
CLIENT = """
import json, socket, sys, time
address, opened, closed, patience, report = sys.argv[1:]
def connects(port):
    try:
        socket.create_connection((address, int(port)), timeout=3).close()
    except OSError:
        return False
    return True
def becomes(wanted, port):
    end = time.monotonic() + float(patience)
    while connects(port) is not wanted:
        if time.monotonic() > end:
            return False
        time.sleep(0.5)
    return True
found = {"open": becomes(True, opened), "closed": becomes(False, closed)}
found["open"] = found["open"] and becomes(True, opened)
with open(report, "w") as file:
    json.dump(found, file)
"""


def network_finding(kubectl: Kubectl, image: str | None, architectures: list[str]) -> Finding:
    """Start two pods in the namespace of kubectl, try, and delete them.

    Args:
        kubectl: keeps nothing that it has read.
        image: a worker image of the installation; None: there is none.
        architectures: of that image, as nodes name theirs; none: of every node.
    """
    if image is None:
        return not_checked("no operator is installed whose worker image the pods could have")
    name = f"agenticrun-network-check-{uuid4().hex[:6]}"
    typer.echo(f"starting two pods {name}-... (with {image})", err=True)
    try:
        # The policy first, as for a run: no pod is open until it is there.
        kubectl.create(policy(name))
        kubectl.create(server_pod(name, image, architectures))
        server = _wait(kubectl, f"{name}-server", lambda pod: bool(pod["status"].get("podIP")))
        kubectl.create(client_pod(name, image, architectures, server["status"]["podIP"]))
        client = _wait(kubectl, f"{name}-client", lambda pod: _report(pod) is not None)
        return judge(_report(client) or "")
    except SourceError as error:
        return not_checked(f"the pods could not be tried: {error}")
    finally:
        _delete(kubectl, name)


def judge(report: str) -> Finding:
    """Return the finding for what the client has reported."""
    try:
        found = json.loads(report)
        opened, closed = bool(found["open"]), bool(found["closed"])
    except (ValueError, KeyError, TypeError):
        return not_checked(f"the client pod ended with: {report[:200]!r}")
    if not opened:
        return not_checked(
            "two pods of this namespace cannot connect even at a port that is open to them: "
            "other NetworkPolicies, or the network itself, are in the way"
        )
    if closed:
        return ok("enforced: a pod could not connect to a port that a NetworkPolicy closes")
    return failed(
        "not enforced: a pod connected to a port that a NetworkPolicy closes",
        "install a network plug-in that enforces them (Calico, Cilium); until then only tokens "
        "keep other pods from a run: docs/security.md#network",
    )


def policy(name: str) -> dict[str, Any]:
    """Return the NetworkPolicy of the server: every pod of its namespace may use one port."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "labels": {LABEL_CHECK: name}},
        "spec": {
            "podSelector": {"matchLabels": {LABEL_CHECK: name, LABEL_PART: "server"}},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": {}}], "ports": [{"protocol": "TCP", "port": OPEN}]}
            ],
        },
    }


def server_pod(name: str, image: str, architectures: list[str]) -> dict[str, Any]:
    """Return the pod that listens at both ports."""
    return _pod(name, "server", image, architectures, [SERVER, str(OPEN), str(CLOSED)])


def client_pod(name: str, image: str, architectures: list[str], address: str) -> dict[str, Any]:
    """Return the pod that tries both ports of the server, and reports by its last words."""
    words = [CLIENT, address, str(OPEN), str(CLOSED), str(ENFORCE_SECONDS), "/dev/termination-log"]
    return _pod(name, "client", image, architectures, words)


def _pod(
    name: str, part: str, image: str, architectures: list[str], words: list[str]
) -> dict[str, Any]:
    only = {"kubernetes.io/arch": architectures[0]} if len(architectures) == 1 else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{name}-{part}",
            "labels": {LABEL_CHECK: name, LABEL_PART: part},
        },
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": 1200,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            **({"nodeSelector": only} if only else {}),
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": POD_USER,
                "runAsGroup": POD_USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": part,
                    "image": image,
                    "command": ["python", "-c", *words],
                    "resources": {
                        "requests": {"cpu": "10m", "memory": "32Mi"},
                        "limits": {"cpu": "500m", "memory": "128Mi"},
                    },
                    "securityContext": RESTRICTED | {"readOnlyRootFilesystem": True},
                }
            ],
        },
    }


def _report(pod: dict[str, Any]) -> str | None:
    """Return the last words of a pod that has ended; None if it has not."""
    for status in pod["status"].get("containerStatuses") or ():
        if ended := (status.get("state") or {}).get("terminated"):
            return str(ended.get("message") or ended.get("reason") or "")
    return None


def _wait(kubectl: Kubectl, name: str, is_done: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    end = time.monotonic() + START_SECONDS
    while True:
        pod = kubectl.json("pod", name)
        if is_done(pod):
            return pod
        if time.monotonic() > end:
            raise SourceError(f"pod {name} has not started for {START_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)


def _delete(kubectl: Kubectl, name: str) -> None:
    what = ("pod,networkpolicy", "--selector", f"{LABEL_CHECK}={name}")
    try:
        kubectl.run("delete", *what, "--ignore-not-found", "--wait=false")
    except SourceError as error:
        typer.echo(f"delete {' '.join(what)} by hand: {error}", err=True)
