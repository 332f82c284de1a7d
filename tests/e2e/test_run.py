"""One run from `kubectl apply` to the end.

The operator is killed in the middle and absent at the end.

The steps build on each other, because a Ray cluster costs half a minute: they are one test with
named parts.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from agenticrun_api import Role
from installation import Operator
from lake import Pods, behind_gate, small_lake
from testcluster import Cluster, CommandFailed
from waiting import eventually
from watching import Seen, Watch

NAME = "lake"
MAX_STEPS = 45
OPERATOR_DOWN_SECONDS = float(os.environ.get("AGENTICRUN_E2E_OPERATOR_DOWN_SECONDS", "5"))
"""How long the operator stays away after the driver has finished. A drill sets 300."""
MAX_LAG_SECONDS = 5.0
"""Between the end of a step, of a second at least, and its arrival in .status, as a rule."""
ROLE_OF_ACTOR = {
    "TrainerActor": Role.TRAINER,
    "TrajectoryStore": Role.TRAINER,
    "EngineActor": Role.INFERENCE,
    "EnvWorker": Role.ENV,
}


@pytest.mark.timeout(1800 + OPERATOR_DOWN_SECONDS, func_only=True)
def test_a_run_trains_to_the_end_whatever_the_operator_goes_through(
    runs: Cluster, operator: Operator, tmp_path: Path
) -> None:
    document = small_lake(NAME, max_steps=MAX_STEPS, save_steps=10, eval_steps=MAX_STEPS, gpus=1)
    gate = behind_gate(document, steps=14, seconds=1.0)
    pods = Pods(runs, NAME)
    with Watch(runs, NAME) as watch:
        runs.apply(gate, document)
        watch.wait(lambda seen: seen.step >= 2, 600, "the run trains")

        gpus_are_scheduled(pods)
        actors_are_on_the_pods_of_their_roles(pods)
        the_columns_show_the_run(runs)
        the_model_of_a_running_run_cannot_change(runs, document)
        progress_arrives_in_time(watch)

        before = watch.history[-1]
        pods.allow(22)
        operator.delete_pod()
        pods.allow(32)
        watch.wait(
            lambda seen: seen.step > 22, 300, "steps are reported after the operator's restart"
        )

        operator.scale(0)
        assert watch.history[-1].phase == "Running"
        pods.allow(2 * MAX_STEPS)
        eventually(
            lambda: has_finished(pods),
            600,
            "the driver finishes while no operator runs",
            interval=2,
        )
        time.sleep(OPERATOR_DOWN_SECONDS)
        assert watch.history[-1].phase == "Running", "nobody but the operator writes the status"
        operator.scale(1)
        end = watch.wait(
            lambda seen: seen.phase == "Succeeded", 300, "the final report is in the status"
        )

    the_operators_troubles_changed_nothing(before, end)
    the_status_tells_the_end(end)
    eventually(
        lambda: not runs.list("rayclusters,pods"),
        300,
        "the cluster of a successful run is deleted",
        interval=0.5,
    )
    assert runs.get("agenticrun", NAME) is not None, "only the cluster goes, never the run"
    the_report_has_curves(runs, tmp_path / "report.html")


def the_report_has_curves(runs: Cluster, page: Path) -> None:
    """Without a pod of the run, by one that reads its claim."""
    command = (sys.executable, "-m", "agenticrun_workers.cli", "report", NAME)
    runs.command(*command, "--namespace", runs.namespace, "--output", str(page))
    text = page.read_text()
    assert "rollout/score/mean" in text
    assert "Not on this page" not in text
    eventually(lambda: not runs.list("pods"), 60, "the pod that read the claim is gone")


def has_finished(pods: Pods) -> bool:
    """By the driver's own report; a busy pod may not answer this time."""
    try:
        return bool(pods.progress().get("final"))
    except CommandFailed:
        return False


def gpus_are_scheduled(pods: Pods) -> None:
    """Trainer and inference pods have a device each, and not the same one; the others have none."""
    devices = []
    for role in (Role.TRAINER, Role.INFERENCE):
        (pod,) = pods.of(role)
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
        devices.append(pods.execute(pod, "printenv", "NVIDIA_VISIBLE_DEVICES").strip())
    assert len(set(devices)) == 2
    for role in (Role.DRIVER, Role.ENV):
        for pod in pods.of(role):
            assert all(
                "nvidia.com/gpu" not in container["resources"].get("limits", {})
                for container in pod["spec"]["containers"]
            )


def actors_are_on_the_pods_of_their_roles(pods: Pods) -> None:
    """By Ray's own account of where each actor lives."""
    role_of_ip = {pod["status"]["podIP"]: role for role in Role for pod in pods.of(role)}
    assert len(role_of_ip) == 4
    ip_of_node = pods.ray_nodes()
    found = {
        actor["class_name"]: role_of_ip[ip_of_node[actor["node_id"]]] for actor in pods.actors()
    }
    assert {name: found[name] for name in ROLE_OF_ACTOR} == ROLE_OF_ACTOR
    assert {name for name, role in found.items() if role is Role.DRIVER} == {"JobSupervisor"}


def the_columns_show_the_run(runs: Cluster) -> None:
    header, row = (line.split() for line in runs.kubectl("get", "agenticruns").splitlines())
    shown = dict(zip(header, row, strict=True))
    assert shown["NAME"] == NAME
    assert shown["PHASE"] == "Running"
    step, steps = shown["STEP"].split("/")
    assert int(step) >= 2
    assert int(steps) == MAX_STEPS
    assert -1 <= float(shown["REWARD"]) <= 1
    assert shown["RESTARTS"] == "0"
    assert {"TOK/S", "STALENESS", "LAST-STEP", "AGE"} <= set(header)


def the_model_of_a_running_run_cannot_change(runs: Cluster, document: dict[str, object]) -> None:
    changed = json.loads(json.dumps(document))
    changed["spec"]["model"]["initialize"]["layers"] = 3
    with pytest.raises(CommandFailed, match=r"spec\.model: .*cannot change"):
        runs.apply(changed)


def progress_arrives_in_time(watch: Watch) -> None:
    """The steps that the status showed so far were there within the limit, and none went backwards.

    Most of them: six processes hand a step on, and if one of them gets no processor for a moment,
    one step is late. A slow operator makes all steps late.
    """
    watch.wait(lambda seen: seen.step >= 10, 300, "ten steps")
    history = watch.history
    arrivals = [now for before, now in pairwise(history) if now.step > before.step]
    assert len(arrivals) >= 3
    assert statistics.median(seen.lag for seen in arrivals) < MAX_LAG_SECONDS
    assert all(now.step >= before.step for before, now in pairwise(history))


def the_operators_troubles_changed_nothing(before: Seen, end: Seen) -> None:
    assert end.uid == before.uid
    assert end.status["restarts"] == 0
    for field in ("attempt", "submissionId", "incarnation"):
        assert end.status["job"][field] == before.status["job"][field]
    assert end.status["rayCluster"] == before.status["rayCluster"]


def the_status_tells_the_end(end: Seen) -> None:
    assert end.step == MAX_STEPS
    assert end.status["progress"] == f"{MAX_STEPS}/{MAX_STEPS}"
    assert end.condition("Complete")["status"] == "True"
    assert end.condition("Failed")["status"] == "False"
    assert end.status["checkpoint"]["step"] == MAX_STEPS
    metrics = {metric["name"]: float(metric["value"]) for metric in end.status["metrics"]}
    assert 0 <= metrics["val/FrozenLake/success"] <= 1
    assert end.status["completionTime"] >= end.status["startTime"]
