"""The operator's own process and Kueue itself on a real apiserver; pods and drivers are simulated.

The queue has quota for one run. Runs wait in it, take it from each other and give it back, with the
rights and limits that the chart gives the operator.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agenticrun_api.names import LABEL_RUN
from agenticrun_operator.cluster import KubeClient, connect
from agenticrun_operator.resources import Manifest, workloads
from control_plane import control_plane
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


def queue_objects() -> list[Manifest]:
    """Return the objects of docs/queues.md, with quota for one run with a GPU."""
    quota = [{"name": name, "nominalQuota": "1000G"} for name in PLENTY]
    gpus = {"name": "nvidia.com/gpu", "nominalQuota": 1}
    flavor = {"name": "pool", "resources": [*quota, gpus]}
    group = {"coveredResources": [*PLENTY, "nvidia.com/gpu"], "flavors": [flavor]}
    return [
        {
            **API,
            "kind": "ResourceFlavor",
            "metadata": {"name": "pool"},
            "spec": {"nodeLabels": {"example.com/pool": "a100"}},
        },
        {
            **API,
            "kind": "ClusterQueue",
            "metadata": {"name": "gpus"},
            "spec": {
                "namespaceSelector": {},
                "preemption": {"withinClusterQueue": "LowerPriority"},
                "resourceGroups": [group],
            },
        },
        {
            **API,
            "kind": "LocalQueue",
            "metadata": {"name": "research", "namespace": NAMESPACE},
            "spec": {"clusterQueue": "gpus"},
        },
        {
            **API,
            "kind": "WorkloadPriorityClass",
            "metadata": {"name": "urgent"},
            "value": 1000,
            "description": "first",
        },
    ]


def a_run(name: str, *, steps: int = 4, gpus: int = 1, queue: Any = ()) -> Manifest:
    return run_with(
        ("spec.pipeline.maxSteps", steps),
        ("spec.pipeline.saveSteps", 1000),
        ("spec.checkpoint.uri", "s3://bucket/prefix"),
        ("spec.roles.trainer", {"gpus": gpus}),
        ("spec.queue", {"name": "research", "preemption": {"graceSeconds": 60}} | dict(queue)),
        name=name,
    )


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("plane")
    with control_plane(folder) as cluster, kueue(cluster, folder):
        RELEASE.set_up(cluster)
        cluster.apply(*RELEASE.cluster_rights(cluster))
        cluster.in_namespace(NAMESPACE).apply(*queue_objects())
        yield cluster


@dataclass
class Quota:
    """Faults of the quota, seen in Workloads and pods several times a second."""

    cluster: SimulatedCluster
    faults: set[str] = field(default_factory=set)

    async def watch(self) -> None:
        while True:
            before = await self._reserved()
            pods = await self.cluster.objects("Pod")
            after = await self._reserved()
            holders = {pod["metadata"]["labels"][LABEL_RUN] for pod in pods}
            if len(holders) > 1:
                self.faults.add(f"pods of {sorted(holders)} at the same time")
            self.faults |= {f"{name} has pods, no quota" for name in holders - before - after}
            await asyncio.sleep(0.2)

    async def _reserved(self) -> set[str]:
        return {
            item["metadata"]["labels"][LABEL_RUN]
            for item in await self.cluster.objects(workloads.WORKLOAD_KIND)
            if workloads.holds_quota(item)
        }


@dataclass
class Place:
    """A namespace with an operator, a queue and simulated pods."""

    cluster: SimulatedCluster
    quota: Quota
    operator: OperatorProcess

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
    assert not found.quota.faults


@asynccontextmanager
async def _place(plane: Cluster, folder: Path) -> AsyncIterator[Place]:
    kube = KubeClient(await connect(Path(plane.env["KUBECONFIG"])), [NAMESPACE])
    config = await asyncio.to_thread(RELEASE.kubeconfig, plane)
    lease = await asyncio.to_thread(RELEASE.lease, plane)
    operator = OperatorProcess.start(folder, config, AGENTICRUN_NAMESPACES=NAMESPACE, **lease)
    try:
        async with SimulatedCluster(kube, NAMESPACE).work() as cluster:
            quota = Quota(cluster)
            watching = asyncio.create_task(quota.watch())
            try:
                yield Place(cluster, quota, operator)
            finally:
                watching.cancel()
    finally:
        await asyncio.to_thread(operator.stop)
        await kube.close()


@pytest.mark.timeout(600)
async def test_a_run_waits_until_another_one_has_ended(place: Place) -> None:
    await place.cluster.create_run(a_run("first", steps=6))
    await place.until_phase("first", "Running")
    await place.cluster.create_run(a_run("second"))
    await place.until_phase("second", "Queued")
    await place.until(
        "the words of Kueue are shown",
        lambda: "insufficient unused quota" in place.status("second").get("message", ""),
    )
    pods = [pod for pod in place.cluster.pods if pod["metadata"]["labels"][LABEL_RUN] == "first"]
    assert {pod["spec"]["nodeSelector"]["example.com/pool"] for pod in pods} == {"a100"}
    await place.until_phase("first", "Succeeded")
    await place.until_phase("second", "Succeeded")
    finished = await place.workload("first")
    assert workloads.condition_of(finished, "Finished")["reason"] == "Succeeded"


@pytest.mark.timeout(600 + 120 * PREEMPTIONS)
async def test_a_run_that_is_preempted_saves_gives_its_quota_up_and_loses_no_step(
    place: Place,
) -> None:
    chance = random.Random(1)
    await place.cluster.create_run(a_run("steady", steps=12 + 6 * PREEMPTIONS))
    for number in range(PREEMPTIONS):
        await place.until_phase("steady", "Running")
        step = place.cluster.histories["steady"].step or 0
        goal = step + chance.randint(1, 3)
        await place.until_step("steady", goal)
        urgent = f"urgent-{number}"
        await place.cluster.create_run(a_run(urgent, steps=2, queue={"priorityClass": "urgent"}))
        await place.until_phase("steady", "Queued")
        assert "resumes from the checkpoint of step" in place.status("steady")["message"]
        await place.until_phase(urgent, "Succeeded")
    await place.until_phase("steady", "Succeeded")
    history, status = place.cluster.histories["steady"], place.status("steady")
    steps = [step for _, _, step in history.steps]
    assert steps == list(range(1, 13 + 6 * PREEMPTIONS)), "each step is made once"
    assert status["disruptions"] == PREEMPTIONS
    assert (status.get("restarts", 0), history.lost, history.overlaps) == (0, [], [])


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
