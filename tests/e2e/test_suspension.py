"""A run is suspended while it trains and resumed later, as a user does it, and loses no step."""

from __future__ import annotations

import json
import os

import pytest

from installation import Operator
from lake import behind_gate, small_lake
from testcluster import Cluster
from watching import Watch

ALL = os.environ.get("AGENTICRUN_E2E_DRILLS") == "all"
NAME = "pause"
MAX_STEPS = 20


@pytest.mark.skipif(not ALL, reason="AGENTICRUN_E2E_DRILLS=all")
@pytest.mark.timeout(1200, func_only=True)
def test_a_suspended_run_has_no_pods_and_resumes_without_a_step_lost(
    runs: Cluster, operator: Operator
) -> None:
    document = small_lake(
        NAME,
        max_steps=MAX_STEPS,
        save_steps=0,  # the only checkpoint before the end is that of the suspension
        checkpoint={"uri": "/checkpoints", "volumeClaim": {"size": "1Gi", "retain": False}},
    )
    document["spec"]["pipeline"].pop("warmup")
    code = behind_gate(document, steps=10 * MAX_STEPS, seconds=1.0)
    with Watch(runs, NAME) as watch:
        runs.apply(code, document)
        watch.wait(lambda seen: seen.step >= 3, 600, "the run trains")
        images = [role["image"] for role in watch.history[-1].status["roles"]]

        suspend(runs, True)
        runs.kubectl("wait", "agenticrun", NAME, "--for=condition=Suspended", "--timeout=180s")
        assert not runs.list("pods,rayclusters")
        assert len(runs.list("persistentvolumeclaims")) == 1
        paused = watch.wait(lambda seen: seen.phase == "Suspended", 30, "the run is suspended")
        step = paused.status["checkpoint"]["step"]
        assert step == paused.step >= 3, "what was trained is saved"
        assert f"resumes from the checkpoint of step {step}" in paused.status["message"]
        assert "startTime" not in paused.status
        assert {role["ready"] for role in paused.status["roles"]} == {0}
        assert "Suspended" in runs.kubectl("get", "agenticrun", NAME)

        suspend(runs, False)
        watch.wait(lambda seen: seen.phase == "Running", 600, "the run goes on", since=paused)
        end = watch.wait(
            lambda seen: seen.phase == "Succeeded", 600, "the run completes", since=paused
        )
        steps = [seen.step for seen in watch.history]
    assert steps == sorted(steps), "no step is made twice"
    assert end.step == MAX_STEPS
    assert (end.status["job"]["attempt"], end.status["restarts"]) == (2, 0)
    assert [role["image"] for role in end.status["roles"]] == images
    assert end.condition("Suspended")["reason"] == "Resumed"
    asking = any(seen.condition("Suspended").get("status") == "Unknown" for seen in watch.history)
    assert asking, "the status says that it is being suspended"


def suspend(runs: Cluster, suspend: bool) -> None:
    """As docs/checkpoints.md says it."""
    patch = json.dumps({"spec": {"suspend": suspend}})
    runs.kubectl("patch", "agenticrun", NAME, "--type=merge", "-p", patch)
