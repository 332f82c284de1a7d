"""The operator's own process and Kueue itself on a real apiserver; pods and drivers are simulated.

The queue has quota for one run. Runs wait in it, take it from each other and give it back, with the
rights and limits that the chart gives the operator.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agenticrun_api import Role
from agenticrun_api.names import KIND, LABEL_ROLE, LABEL_RUN
from agenticrun_api.placement import HOSTNAME
from agenticrun_operator.cluster import KubeClient, connect
from agenticrun_operator.cluster.kube import object_path
from agenticrun_operator.resources import Manifest, workloads
from control_plane import add_node, control_plane
from kueue_process import kueue
from operator_process import OperatorProcess, Release
from runs import run_with
from simulated_cluster import SimulatedCluster
from testcluster import Cluster

KUEUE = os.environ.get("AGENTICRUN_KUEUE", "")
"""Set: build Kueue, which takes minutes once, and run these tests."""
pytestmark = pytest.mark.skipif(not KUEUE, reason="AGENTICRUN_KUEUE=1")
NAMESPACE, SYSTEM = "runs", "default"
RELEASE = Release("agenticrun", SYSTEM, (NAMESPACE,))
PREEMPTIONS = int(os.environ.get("AGENTICRUN_KUEUE_PREEMPTIONS", "2"))
WAIT_SECONDS = 180.0
API = {"apiVersion": f"{workloads.KUEUE_GROUP}/{workloads.KUEUE_VERSION}"}
PLENTY = ("cpu", "memory", "ephemeral-storage")
RACK = "example.com/rack"
RACKS = {"a1": "a", "b1": "b", "b2": "b"}
"""The racks of the nodes, which have a GPU each. Only a Topology of Kueue is about them."""
ROOM = {"cpu": "64", "memory": "1Ti", "ephemeral-storage": "1Ti", "pods": "99"}
ROOM |= {"nvidia.com/gpu": "1"}


def a_queue(name: str, cluster_queue: str, gpus: int, flavor_name: str = "pool") -> list[Manifest]:
    """Return a LocalQueue with quota for some GPUs."""
    quota = [{"name": resource, "nominalQuota": "1000G"} for resource in PLENTY]
    flavor = {
        "name": flavor_name,
        "resources": [*quota, {"name": "nvidia.com/gpu", "nominalQuota": gpus}],
    }
    return [
        {
            **API,
            "kind": "ClusterQueue",
            "metadata": {"name": cluster_queue},
            "spec": {
                "namespaceSelector": {},
                "preemption": {"withinClusterQueue": "LowerPriority"},
                "resourceGroups": [
                    {"coveredResources": [*PLENTY, "nvidia.com/gpu"], "flavors": [flavor]}
                ],
            },
        },
        {
            **API,
            "kind": "LocalQueue",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"clusterQueue": cluster_queue},
        },
    ]


def queue_objects() -> list[Manifest]:
    """Return the objects of docs/queues.md, with quota for one run with a GPU, and for three."""
    return [
        {
            **API,
            "kind": "ResourceFlavor",
            "metadata": {"name": "pool"},
            "spec": {"nodeLabels": {"example.com/pool": "a100"}},
        },
        *a_queue("research", "gpus", 1),
        *a_queue("wide", "three-gpus", 3),
        *a_queue("racks", "near", len(RACKS), "racks"),
        {
            **API,
            "kind": "ResourceFlavor",
            "metadata": {"name": "racks"},
            "spec": {"nodeLabels": {"example.com/pool": "racks"}, "topologyName": "racks"},
        },
        {
            **API,
            "kind": "Topology",
            "metadata": {"name": "racks"},
            "spec": {"levels": [{"nodeLabel": RACK}, {"nodeLabel": HOSTNAME}]},
        },
        {
            **API,
            "kind": "WorkloadPriorityClass",
            "metadata": {"name": "urgent"},
            "value": 1000,
            "description": "first",
        },
    ]


def a_run(
    name: str, *changes: tuple[str, Any], steps: int = 4, gpus: int = 1, queue: Any = ()
) -> Manifest:
    return run_with(
        ("spec.pipeline.maxSteps", steps),
        ("spec.pipeline.saveSteps", 1000),
        ("spec.checkpoint.uri", "s3://bucket/prefix"),
        ("spec.roles.trainer", {"gpus": gpus}),
        ("spec.queue", {"name": "research", "preemption": {"graceSeconds": 60}} | dict(queue)),
        *changes,
        name=name,
    )


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("plane")
    with control_plane(folder) as cluster, kueue(cluster, folder):
        RELEASE.set_up(cluster)
        cluster.apply(*RELEASE.cluster_rights(cluster))
        cluster.in_namespace(NAMESPACE).apply(*queue_objects())
        for name, rack in RACKS.items():
            add_node(cluster, name, {RACK: rack, "example.com/pool": "racks"}, ROOM)
        yield cluster


@dataclass
class Quota:
    """Faults of the quota, seen in Workloads and pods several times a second."""

    cluster: SimulatedCluster
    faults: set[str] = field(default_factory=set)
    runs: int = 1
    """There is quota for so many runs at the same time."""
    looks: int = 0

    async def watch(self) -> None:
        while True:
            before = await self._admitted()
            pods = await self.cluster.objects("Pod")
            after = await self._admitted()
            labels = [pod["metadata"]["labels"] for pod in pods]
            holders = {one[LABEL_RUN] for one in labels}
            if len(holders) > self.runs:
                self.faults.add(f"pods of {sorted(holders)} at the same time")
            for (name, role), number in Counter(
                (one[LABEL_RUN], one[LABEL_ROLE]) for one in labels
            ).items():
                admitted = max(known.get((name, role), 0) for known in (before, after))
                if number > admitted:
                    self.faults.add(f"{name} has {number} {role} pods, quota for {admitted}")
            self.looks += 1
            await asyncio.sleep(0.2)

    async def _admitted(self) -> dict[tuple[str, str], int]:
        """Return the number of pods that have quota, by run and role."""
        return {
            (item["metadata"]["labels"][LABEL_RUN], role): number
            for item in await self.cluster.objects(workloads.WORKLOAD_KIND)
            if workloads.holds_quota(item)
            for role, number in workloads.admitted_pods(item).items()
        }


@dataclass
class Place:
    """A namespace with an operator, a queue and simulated pods."""

    cluster: SimulatedCluster
    quota: Quota
    operator: OperatorProcess
    start_operator: Callable[[], OperatorProcess]

    async def restart_operator(self) -> None:
        await asyncio.to_thread(self.operator.stop)
        self.operator = self.start_operator()

    async def change_run(self, name: str, spec: dict[str, Any]) -> None:
        await self.cluster._send(
            "PATCH",
            object_path(KIND, NAMESPACE, name),
            body={"spec": spec},
            headers={"Content-Type": "application/merge-patch+json"},
        )

    def pods(self, name: str, role: Role) -> int:
        labels = [pod["metadata"]["labels"] for pod in self.cluster.pods]
        return sum((one[LABEL_RUN], one[LABEL_ROLE]) == (name, role.value) for one in labels)

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.runs.get(name, {}).get("status") or {}
        return found

    def phase(self, name: str) -> str:
        return str(self.status(name).get("phase"))

    async def until(self, what: str, condition: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while not condition():
                    await asyncio.sleep(0.2)
        except TimeoutError:
            states = {name: self.status(name) for name in self.cluster.runs}
            log = self.operator.log.read_text()[-3000:]
            raise AssertionError(f"not in time: {what}\n{states}\n{log}") from None

    async def until_phase(self, name: str, phase: str) -> None:
        await self.until(f"{name} is {phase}", lambda: self.phase(name) == phase)

    async def until_step(self, name: str, step: int) -> None:
        history = self.cluster.histories[name]
        await self.until(f"{name} is at step {step}", lambda: (history.step or 0) >= step)

    async def workload(self, name: str) -> Manifest:
        found = await self.cluster.objects(workloads.WORKLOAD_KIND)
        return next(item for item in found if item["metadata"]["labels"][LABEL_RUN] == name)


@pytest.fixture
async def place(plane: Cluster, tmp_path: Path) -> AsyncIterator[Place]:
    async with _place(plane, tmp_path) as found:
        yield found
        # The pods of a deleted run outlive its Workload.
        await found.until("the pods of ended runs are gone", lambda: not found.cluster.pods)
        for name in list(found.cluster.runs):
            await found.cluster.delete("AgenticRun", name)
        await found.until(
            "all runs are gone", lambda: not (found.cluster.runs or found.cluster.pods)
        )
    assert found.quota.looks
    assert not found.quota.faults


@asynccontextmanager
async def _place(plane: Cluster, folder: Path) -> AsyncIterator[Place]:
    kube = KubeClient(await connect(Path(plane.env["KUBECONFIG"])), [NAMESPACE])
    config = await asyncio.to_thread(RELEASE.kubeconfig, plane)
    lease = await asyncio.to_thread(RELEASE.lease, plane)

    def start() -> OperatorProcess:
        return OperatorProcess.start(folder, config, AGENTICRUN_NAMESPACES=NAMESPACE, **lease)

    try:
        async with SimulatedCluster(kube, NAMESPACE).work() as cluster:
            place = Place(cluster, Quota(cluster), start(), start)
            watching = asyncio.create_task(place.quota.watch())
            try:
                yield place
            finally:
                watching.cancel()
                await asyncio.to_thread(place.operator.stop)
                with suppress(asyncio.CancelledError):
                    await watching  # raises what has ended the watch
    finally:
        await kube.close()


@pytest.mark.timeout(600)
async def test_a_run_waits_until_another_one_has_ended(place: Place) -> None:
    await place.cluster.create_run(a_run("first", steps=10_000))
    await place.until_phase("first", "Running")
    await place.cluster.create_run(a_run("second"))
    await place.until_phase("second", "Queued")
    await place.until(
        "the words of Kueue are shown",
        lambda: "insufficient unused quota" in place.status("second").get("message", ""),
    )
    pods = [pod for pod in place.cluster.pods if pod["metadata"]["labels"][LABEL_RUN] == "first"]
    assert {pod["spec"]["nodeSelector"]["example.com/pool"] for pod in pods} == {"a100"}
    last = place.status("first")["step"] + 4
    await place.change_run("first", {"pipeline": {"maxSteps": last}})
    await place.until_phase("first", "Succeeded")
    await place.until_phase("second", "Succeeded")
    finished = await place.workload("first")
    assert workloads.condition_of(finished, "Finished")["reason"] == "Succeeded"


@pytest.mark.timeout(600 + 120 * PREEMPTIONS)
async def test_a_run_that_is_preempted_saves_gives_its_quota_up_and_loses_no_step(
    place: Place,
) -> None:
    """At any moment, also while the operator restarts. `make drills` preempts 50 times.

    The run has steps for as long as a slow machine takes, and ends by a smaller `maxSteps`.
    """
    chance, began, restarts = random.Random(1), time.monotonic(), 0
    await place.cluster.create_run(a_run("steady", steps=1000 * PREEMPTIONS))
    for number in range(PREEMPTIONS):
        await place.until_phase("steady", "Running")
        step = place.cluster.histories["steady"].step or 0
        goal = step + chance.randint(1, 3)
        await place.until_step("steady", goal)
        await asyncio.sleep(chance.random())
        urgent = f"urgent-{number}"
        await place.cluster.create_run(a_run(urgent, steps=2, queue={"priorityClass": "urgent"}))
        if chance.random() < 0.2:
            await asyncio.sleep(3 * chance.random())
            await place.restart_operator()
            restarts += 1
        await place.until_phase("steady", "Queued")
        assert "resumes from the checkpoint of step" in place.status("steady")["message"]
        await place.until_phase(urgent, "Succeeded")
    await place.until_phase("steady", "Running")
    history = place.cluster.histories["steady"]
    last = (history.step or 0) + 12
    await place.change_run("steady", {"pipeline": {"maxSteps": last}})
    await place.until_phase("steady", "Succeeded")
    status = place.status("steady")
    steps = [step for _, _, step in history.steps]
    assert len(steps) >= last
    assert steps == list(range(1, len(steps) + 1)), "each step is made once"
    assert status["disruptions"] == PREEMPTIONS
    assert (status.get("restarts", 0), history.lost, history.overlaps) == (0, [], [])
    print(
        f"\n{PREEMPTIONS} preemptions and {restarts} restarts of the operator in "
        f"{time.monotonic() - began:.0f} s: {len(steps)} steps, {len(history.lost)} lost; quota "
        f"looked at {place.quota.looks} times, faults: {sorted(place.quota.faults) or 'none'}"
    )


@pytest.mark.timeout(600)
async def test_a_run_is_admitted_with_the_engines_that_there_is_quota_for(place: Place) -> None:
    engines = ("spec.roles.inference", {"gpus": 1, "replicas": 4, "minReplicas": 1})
    await place.cluster.create_run(a_run("part", engines, steps=4, queue={"name": "wide"}))
    await place.until_phase("part", "Running")
    assert place.pods("part", Role.INFERENCE) == 2, "the trainer has the third GPU"
    asked = (await place.workload("part"))["spec"]["podSets"]
    assert {item["name"]: item.get("minCount") for item in asked}["inference"] == 1
    desired = {item["name"]: item["desired"] for item in place.status("part")["roles"]}
    assert desired["inference"] == 2
    conditions = {item["type"]: item for item in place.status("part")["conditions"]}
    assert "with 2 of 4 inference pods" in conditions["Queued"]["message"]
    await place.until_phase("part", "Succeeded")


@pytest.mark.timeout(600)
async def test_a_run_that_gets_smaller_makes_room_for_another_one(place: Place) -> None:
    place.quota.runs = 2
    engines = ("spec.roles.inference", {"gpus": 1, "replicas": 2})
    await place.cluster.create_run(a_run("large", engines, steps=40, queue={"name": "wide"}))
    await place.until("a step", lambda: bool(place.cluster.histories["large"].step))
    await place.cluster.create_run(a_run("small", queue={"name": "wide"}))
    await place.until_phase("small", "Queued")
    await place.change_run("large", {"roles": {"inference": {"replicas": 1}}})
    await place.until_phase("small", "Running")
    assert place.phase("large") == "Running"
    assert place.pods("large", Role.INFERENCE) == 1
    for name in ("small", "large"):
        await place.until_phase(name, "Succeeded")
    assert len(place.cluster.histories["large"].submissions) == 1, "it trains on"


@pytest.mark.timeout(600)
async def test_the_engines_of_a_run_get_nodes_of_one_rack(place: Place) -> None:
    def engines(number: int) -> tuple[str, Any]:
        topology = {"required": RACK}
        return "spec.roles.inference", {"gpus": 1, "replicas": number, "topology": topology}

    queue = {"name": "racks"}
    await place.cluster.create_run(a_run("far", engines(3), gpus=0, queue=queue))
    await place.until(
        "the words of Kueue are shown",
        lambda: "allows to fit only 2 out of 3 pod(s)" in place.status("far").get("message", ""),
    )
    await place.cluster.create_run(a_run("near", engines(2), gpus=0, queue=queue))
    await place.until_phase("near", "Running")
    nodes: dict[str, list[str]] = {}
    for pod in place.cluster.pods:
        assert "schedulingGates" not in pod["spec"]
        assert pod["spec"]["nodeName"] in RACKS
        nodes.setdefault(pod["metadata"]["labels"][LABEL_ROLE], []).append(pod["spec"]["nodeName"])
    assert sorted(nodes.pop("inference")) == ["b1", "b2"]
    assert nodes.keys() == {"driver", "trainer", "env"}
    await place.until_phase("near", "Succeeded")


@pytest.mark.timeout(600)
async def test_kueues_words_say_whose_move_it_is(place: Place) -> None:
    await place.cluster.create_run(a_run("lost", queue={"name": "no-such-queue"}))
    await place.cluster.create_run(a_run("large", gpus=2))
    await place.until("lost is named", lambda: "doesn't exist" in str(place.status("lost")))
    await place.until("large is named", lambda: "maximum capacity" in str(place.status("large")))
    for name in ("lost", "large"):
        conditions = {item["type"]: item for item in place.status(name)["conditions"]}
        assert conditions["Queued"]["reason"] == "Inadmissible"
        assert conditions["Progressing"]["status"] == "False"
    assert not place.cluster.pods


@pytest.mark.timeout(600)
async def test_a_run_that_is_suspended_leaves_the_queue_to_others(place: Place) -> None:
    await place.cluster.create_run(a_run("first", steps=30))
    await place.until("a step", lambda: bool(place.cluster.histories["first"].step))
    await place.cluster.create_run(a_run("second"))
    await place.until_phase("second", "Queued")
    await place.cluster.suspend("first", True)
    await place.until_phase("first", "Suspended")
    await place.until_phase("second", "Succeeded")
    await place.cluster.suspend("first", False)
    await place.until_phase("first", "Succeeded")
    steps = [step for _, _, step in place.cluster.histories["first"].steps]
    assert steps == list(range(1, 31))
