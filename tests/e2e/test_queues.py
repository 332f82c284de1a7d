"""Runs in a queue of Kueue, with real pods and drivers: they wait, preempt, and lose no step.

`make drills` runs this (AGENTICRUN_E2E_DRILLS=all); it builds Kueue the first time. The figures of
docs/queues.md are what it prints.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agenticrun_api.names import LABEL_ROLE, LABEL_RUN
from agenticrun_api.placement import HOSTNAME
from agenticrun_operator.resources import Manifest, workloads
from curves import read_curve
from installation import ALL_DRILLS, RUNS, Operator
from lake import EPISODES, Pods, behind_gate, small_lake
from testcluster import Cluster, CommandFailed, devcluster
from waiting import eventually
from watching import Seen, Watch

pytestmark = pytest.mark.skipif(not ALL_DRILLS, reason="AGENTICRUN_E2E_DRILLS=all")
API = {"apiVersion": f"{workloads.KUEUE_GROUP}/{workloads.KUEUE_VERSION}"}
WORKLOADS = f"workloads.{workloads.KUEUE_GROUP}"
QUOTA = {"cpu": "1", "memory": "20Gi", "ephemeral-storage": "10Gi"}
"""Room for one run: its four pods ask for 0.7 CPUs."""
POSITION = re.compile(r"queue research, position (\d+): ")
STEPS = 14
WARMUP_STEPS = 30
"""It gets rewards after so many."""
PREEMPT_AFTER = 4
"""The step after which a run waits at its gate, and one with a higher priority comes."""


def a_queue(name: str, cluster_queue: str, flavor: str, nodes: Manifest) -> list[Manifest]:
    """Return a LocalQueue with quota for one run on the nodes of a flavor."""
    quota = [{"name": resource, "nominalQuota": amount} for resource, amount in QUOTA.items()]
    flavors = [{"name": flavor, "resources": quota}]
    return [
        {**API, "kind": "ResourceFlavor", "metadata": {"name": flavor}, "spec": nodes},
        {
            **API,
            "kind": "ClusterQueue",
            "metadata": {"name": cluster_queue},
            "spec": {
                "namespaceSelector": {},
                "preemption": {"withinClusterQueue": "LowerPriority"},
                "resourceGroups": [{"coveredResources": [*QUOTA], "flavors": flavors}],
            },
        },
        {
            **API,
            "kind": "LocalQueue",
            "metadata": {"name": name},
            "spec": {"clusterQueue": cluster_queue},
        },
    ]


def queue_objects() -> list[Manifest]:
    """Return the objects of docs/queues.md, and a queue that gives each pod its node."""
    linux = {"nodeLabels": {"kubernetes.io/os": "linux"}, "topologyName": "hosts"}
    return [
        {
            **API,
            "kind": "Topology",
            "metadata": {"name": "hosts"},
            "spec": {"levels": [{"nodeLabel": HOSTNAME}]},
        },
        *a_queue("research", "one-run", "node", {}),
        *a_queue("near", "one-run-by-host", "host", linux),
        {
            **API,
            "kind": "WorkloadPriorityClass",
            "metadata": {"name": "urgent"},
            "value": 1000,
            "description": "first",
        },
    ]


@pytest.fixture(scope="module")
def queue(cluster: Cluster, operator: Operator) -> Iterator[None]:
    """Kueue with quota for one run; it is removed at the end."""
    assert devcluster("up", "--with", "kueue").returncode == 0, "see its output above"
    inside = cluster.in_namespace(RUNS)

    def is_applied() -> bool:
        try:
            inside.apply(*queue_objects())
        except CommandFailed:  # the webhook is not reached yet
            return False
        return True

    eventually(is_applied, 120, "the queue is there", interval=2.0)
    yield
    for item in reversed(queue_objects()):
        kind, name = f"{item['kind'].lower()}.{workloads.KUEUE_GROUP}", item["metadata"]["name"]
        inside.kubectl("delete", kind, name, "--timeout=120s")
    # What leads to its Services would hold up the namespace, and other tests.
    kinds = "apiservice,mutatingwebhookconfiguration,validatingwebhookconfiguration"
    inside.kubectl("delete", kinds, "-l", "app.kubernetes.io/name=kueue")
    inside.kubectl("delete", "namespace", "kueue-system", "--timeout=300s")


def a_run(name: str, steps: int = STEPS, **queue: Any) -> tuple[Manifest, Manifest]:
    """Return a deterministic run that saves only when it is asked to, and its code.

    An attempt waits after step PREEMPT_AFTER until `Pods.allow`, but not one that resumes: it has
    no warm-up, whose episodes count at the gate.
    """
    document = small_lake(
        name,
        max_steps=steps,
        save_steps=0,
        checkpoint={"uri": "/checkpoints", "volumeClaim": {"size": "1Gi", "retain": False}},
        queue={"name": "research", "preemption": {"graceSeconds": 300}, **queue},
    )
    document["spec"]["pipeline"]["deterministic"] = True
    document["spec"]["pipeline"]["warmup"] = {"steps": WARMUP_STEPS, "batchSize": EPISODES}
    code = behind_gate(document, steps=WARMUP_STEPS + PREEMPT_AFTER, seconds=1.0)
    for env in document["spec"]["pipeline"]["envs"]:
        env.pop("stepTimeoutSeconds", None)  # a deterministic run does not depend on the clock
    return code, document


@dataclass
class Quota:
    """Faults of the quota that a watch has seen, and the number of its looks."""

    faults: set[str] = field(default_factory=set)
    looks: int = 0
    failures: list[str] = field(default_factory=list)
    """Looks for which kubectl failed."""


@contextmanager
def quota_watched(runs: Cluster) -> Iterator[Quota]:
    """Look at the quota once a second."""
    seen = Quota()

    def look(before: set[str]) -> set[str]:
        pods = {pod["metadata"]["labels"].get(LABEL_RUN, "") for pod in runs.list("pods")}
        now = {
            item["metadata"]["labels"][LABEL_RUN]
            for item in runs.list(WORKLOADS)
            if workloads.holds_quota(item)
        }
        if len(pods) > 1:
            seen.faults.add(f"pods of {sorted(pods)} at the same time")
        # A Workload may give its quota back between the two lists, after its last pod.
        seen.faults.update(f"{name} has pods and no quota" for name in pods - before - now)
        seen.looks += 1
        return now

    def watch() -> None:
        held: set[str] = set()
        while not done.wait(1.0):
            try:
                held = look(held)
            except CommandFailed as error:
                seen.failures.append(str(error))

    done = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            yield seen
        finally:
            done.set()
    watching.result()  # raises what has ended the watch


def output_of(cluster: Cluster, name: str) -> Path:
    """Return the output folder of a run on its claim, which is a folder of this machine."""
    claim = cluster.in_namespace(RUNS).get("persistentvolumeclaim", f"{name}-checkpoints")
    assert claim is not None
    volume = cluster.get("persistentvolume", claim["spec"]["volumeName"])
    assert volume is not None
    (found,) = Path(volume["spec"]["hostPath"]["path"]).rglob("metrics.jsonl")
    return found.parent


def first(history: list[Seen], phase: str, since: float = 0.0) -> Seen:
    """Return the first version with a phase."""
    return next(seen for seen in history if seen.phase == phase and seen.at >= since)


@pytest.mark.timeout(2400, func_only=True)
def test_a_preempted_run_ends_as_if_nothing_had_happened(
    runs: Cluster, cluster: Cluster, queue: None
) -> None:
    """Quota for one run: `later` waits for the end of `steady`, and `urgent` preempts it."""
    began = time.time()
    with (
        Watch(runs, "steady") as steady,
        Watch(runs, "later") as later,
        Watch(runs, "urgent") as urgent,
        quota_watched(runs) as quota,
    ):
        runs.apply(*a_run("steady"))
        steady.wait(lambda seen: seen.phase in ("Starting", "Running"), 120, "it has quota")
        runs.apply(*a_run("later"))
        later.wait(
            lambda seen: "insufficient unused quota" in seen.status.get("message", ""),
            120,
            "it waits with the words of Kueue",
        )
        steady.wait(lambda seen: seen.step >= PREEMPT_AFTER, 600, "it trains")
        runs.apply(*a_run("urgent", 3, priorityClass="urgent"))
        evicted = time.time()
        steady.wait(lambda seen: seen.phase == "Suspending", 60, "it is asked to save")
        waits = steady.wait(lambda seen: seen.phase == "Queued", 300, "it has no pods")
        saved = waits.status["checkpoint"]["step"]
        assert saved == waits.step == PREEMPT_AFTER, "all that was trained is saved"
        assert f"resumes from the checkpoint of step {saved}" in waits.status["message"]
        end = partial(Watch.wait, wanted=lambda seen: seen.phase == "Succeeded", seconds=900)
        end(urgent, what="it ends")
        assert first(urgent.history, "Running").at > waits.at
        assert later.history[-1].phase == "Queued"
        end(steady, what="it resumes and ends")
        later.wait(lambda seen: seen.phase == "Running", 300, "it is admitted at last")
        Pods(runs, "later").allow(WARMUP_STEPS + STEPS)
        end(later, what="it ends, too")
    words = [seen.status.get("message", "") for seen in later.history]
    places = [found[1] for text in words if (found := POSITION.match(text))]
    assert places, "Kueue says its position"
    assert {"1"} <= set(places) <= {"1", "2"}
    final = steady.history[-1].status
    steps = [seen.step for seen in steady.history]
    assert steps == sorted(steps), "no step is made twice"
    assert (final["step"], final["disruptions"], final["restarts"]) == (STEPS, 1, 0)
    assert final["job"]["attempt"] == 2
    assert first(later.history, "Running").at > first(steady.history, "Succeeded").at
    assert quota.looks > 10 * len(quota.failures), quota.failures
    assert not quota.faults
    disturbed, undisturbed = (read_curve(output_of(cluster, name)) for name in ("steady", "later"))
    assert sorted(step for step, _ in undisturbed) == list(range(1, STEPS + 1))
    assert disturbed == undisturbed
    resumed = first(steady.history, "Running", since=waits.at)
    took = {
        "evicted and without pods": waits.at - evicted,
        "then the other run trains": first(urgent.history, "Running").at - waits.at,
        "resumed after its end": resumed.at - first(urgent.history, "Succeeded").at,
        "all": time.time() - began,
    }
    print(
        f"\nstep {saved}", *(f"{what}: {seconds:.0f} s" for what, seconds in took.items()), sep="; "
    )


@pytest.mark.timeout(900, func_only=True)
def test_kueue_gives_the_pods_of_a_run_their_nodes(
    runs: Cluster, cluster: Cluster, queue: None
) -> None:
    """It opens the gates of KubeRay's pods, not those of savers."""
    code, document = a_run("near", 2)
    document["spec"]["queue"]["name"] = "near"
    document["spec"]["roles"]["env"]["topology"] = {"required": HOSTNAME}
    with Watch(runs, "near") as near:
        runs.apply(code, document)
        near.wait(lambda seen: seen.phase == "Running", 300, "it runs")
        pods = {pod["metadata"]["labels"][LABEL_ROLE]: pod for pod in runs.list("pods")}
        near.wait(lambda seen: seen.phase == "Succeeded", 300, "it ends")
    (node,) = cluster.list("nodes")
    chosen = {role: pod["spec"]["nodeSelector"].get(HOSTNAME) for role, pod in pods.items()}
    name = node["metadata"]["labels"][HOSTNAME]
    assert chosen == {"driver": None, "trainer": None, "env": name, "inference": name}
    annotations = pods["env"]["metadata"]["annotations"]
    assert annotations["kueue.x-k8s.io/podset-required-topology"] == HOSTNAME
    assert not [pod for pod in pods.values() if "schedulingGates" in pod["spec"]]
