"""Small runs of the frozen-lake example for e2e tests, and requests to the pods of a run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import yaml

from agenticrun_api import Role
from agenticrun_api.names import (
    LABEL_ROLE,
    LABEL_RUN,
    REPORTER_PORT,
    REPORTER_TOKEN_FILE,
    TOKEN_HEADER,
)
from testcluster import ROOT, Cluster

HEAD_CONTAINER = "ray"

_PROGRESS = f"""
import urllib.request
token = open({REPORTER_TOKEN_FILE!r}).read().strip()
request = urllib.request.Request("http://localhost:{REPORTER_PORT}/progress", \
headers={{{TOKEN_HEADER!r}: "Bearer " + token}})
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""
_KILL_DRIVER = """
import os, pathlib, signal
killed = []
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        words = (folder / "cmdline").read_bytes().split(b"\\0")
        if words[1:3] == [b"-m", b"agenticrun_workers.driver"]:
            os.kill(int(folder.name), signal.SIGKILL)
            killed.append(int(folder.name))
    except OSError:  # a process that has ended meanwhile
        continue
print(killed)
"""
EPISODES = 16
"""Of one training step."""
_GATE = "/tmp/episodes-allowed"
_GATED_LAKE = """
import asyncio, pathlib
from agenticrun_workers.envs import FrozenLake

gate = pathlib.Path({gate!r})
begun = 0

class GatedLake(FrozenLake):
    async def reset(self, seed, split):
        global begun
        begun += 1
        number = begun
        await asyncio.sleep({seconds})
        while number > (int(gate.read_text()) if gate.exists() else {episodes}):
            await asyncio.sleep(0.1)
        return super().reset(seed, split)
"""


def small_lake(
    name: str, *, max_steps: int, save_steps: int, eval_steps: int = 0, gpus: int = 0, **spec: Any
) -> dict[str, Any]:
    """Return examples/frozen-lake.yaml with few episodes per step and small pods.

    `spec` replaces whole fields of the spec.

    Args:
        gpus: of each trainer pod and each inference pod.
    """
    document: dict[str, Any] = yaml.safe_load((ROOT / "examples/frozen-lake.yaml").read_text())
    document["metadata"]["name"] = name
    small: dict[str, Any] = {"cpus": "100m", "memory": "2Gi", "terminationGracePeriodSeconds": 5}
    document["spec"]["roles"] = {
        "driver": {**small},
        "trainer": small | {"gpus": gpus},
        "inference": small | {"gpus": gpus},
        "env": {**small},
    }
    pipeline = document["spec"]["pipeline"]
    pipeline |= {"maxSteps": max_steps, "saveSteps": save_steps, "evalSteps": eval_steps}
    pipeline |= {"rolloutBatchSize": EPISODES, "valBatchSize": 16}
    pipeline["trainEnvs"] |= {"groups": 4, "groupSize": 4}
    pipeline["valEnvs"] |= {"groups": 16, "groupSize": 1}
    pipeline["warmup"] = {"steps": 2, "batchSize": 8}
    pipeline["actorTrain"]["training"].pop("miniBatchSize", None)
    document["spec"] |= spec
    return document


def behind_gate(document: dict[str, Any], *, steps: int, seconds: float = 0.0) -> dict[str, Any]:
    """Give a run an environment that stops before step `steps` + 1 until `Pods.allow`.

    So a test acts at a known place of the run, however fast the machine is. Episodes of the warm-up
    and of validations count too, so the run may stop a little earlier. Returns the ConfigMap to
    apply with the run.

    Args:
        seconds: that each step takes at least.
    """
    name = "gated-lake"
    document["spec"]["code"] = {"configMap": name}
    document["spec"]["pipeline"]["envs"][0] |= {
        "type": "gated_lake:GatedLake",
        "stepTimeoutSeconds": 3600,
    }
    module = _GATED_LAKE.format(gate=_GATE, seconds=seconds, episodes=steps * EPISODES)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {"gated_lake.py": module},
    }


@dataclass(frozen=True)
class Pods:
    """The pods of one run."""

    cluster: Cluster
    run: str

    def of(self, role: Role) -> list[dict[str, Any]]:
        """Pods of a role that are not on their way out."""
        found = self.cluster.list("pods", f"{LABEL_RUN}={self.run},{LABEL_ROLE}={role}")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def execute(self, pod: dict[str, Any], *command: str) -> str:
        """Run a command in the pod's Ray container."""
        return self.cluster.kubectl(
            "exec", pod["metadata"]["name"], "-c", HEAD_CONTAINER, "--", *command
        )

    def head(self) -> dict[str, Any]:
        (pod,) = self.of(Role.DRIVER)
        return pod

    def progress(self) -> dict[str, Any]:
        """What the reporter says, asked inside the head pod."""
        found: dict[str, Any] = json.loads(self.execute(self.head(), "python", "-c", _PROGRESS))
        return found

    def kill_driver(self) -> list[int]:
        """SIGKILL to the driver process; its process ids."""
        killed: list[int] = json.loads(self.execute(self.head(), "python", "-c", _KILL_DRIVER))
        return killed

    def allow(self, steps: int) -> None:
        """Let a run that is behind a gate make steps up to this one."""
        for pod in self.of(Role.ENV):
            self.execute(
                pod, "sh", "-c", f"echo {steps * EPISODES} > {_GATE}.new && mv {_GATE}.new {_GATE}"
            )

    def actors(self) -> list[dict[str, Any]]:
        """The living actors as Ray's state API lists them."""
        command = (
            "ray",
            "list",
            "actors",
            "--detail",
            "--format",
            "json",
            "--filter",
            "state=ALIVE",
        )
        found: list[dict[str, Any]] = json.loads(self.execute(self.head(), *command))
        return found

    def ray_nodes(self) -> dict[str, str]:
        """Ray node id -> pod IP."""
        nodes = json.loads(self.execute(self.head(), "ray", "list", "nodes", "--format", "json"))
        return {node["node_id"]: node["node_ip"] for node in nodes}
