"""Runs with failures.

A killed driver, a name that is used again at once, a deleted head pod, code that does not import, a
missing image.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import pytest

from agenticrun_api.names import LABEL_RUN, LABEL_RUN_UID
from drills import ENDED, Recorder, Report, broken_promises
from installation import Images, objects
from lake import Pods, behind_gate, small_lake
from testcluster import Cluster
from waiting import eventually
from watching import Watch

SEEN_SECONDS = 25
"""Time limit from a pod's failure to the run's status.

The operator watches pods. Otherwise it would look every 30 s only (SAFETY_NET_SECONDS).
"""


@pytest.mark.timeout(1800, func_only=True)
def test_a_run_loses_its_driver_its_name_is_used_again_at_once_and_that_run_loses_its_head(
    runs: Cluster,
) -> None:
    """Kill the driver and wait for the resume; then delete the run and apply it again unchanged.

    The second run loses its head pod, as in the drill of that name. The parts share two clusters,
    because each costs half a minute.
    """
    name, empty = "phoenix", objects(runs)
    document = small_lake(
        name,
        max_steps=14,
        save_steps=3,
        checkpoint={"uri": "/checkpoints", "volumeClaim": {"size": "1Gi"}},
        failurePolicy={"backoffSeconds": 1},
        cleanup={"onSuccess": "Keep"},
    )
    gate = behind_gate(document, steps=10)  # in each attempt
    pods = Pods(runs, name)
    with Watch(runs, name) as watch:
        runs.apply(gate, document)
        saved = watch.wait(
            lambda seen: seen.step >= 4 and "checkpoint" in seen.status,
            600,
            "a checkpoint and a step after it",
        )
        ray_cluster = runs.get("raycluster", name)
        assert len(pods.kill_driver()) == 1
        pods.allow(100)
        killed = watch.wait(
            lambda seen: seen.status["restarts"] == 1,
            300,
            "the loss of the driver is noticed",
            since=saved,
        )
        end = watch.wait(
            lambda seen: seen.phase == "Succeeded", 600, "the run completes in its second attempt"
        )
        attempts = [
            seen for seen in watch.history if seen.status.get("job", {}).get("attempt") == 2
        ]

        assert _uid(runs.get("raycluster", name)) == _uid(ray_cluster), (
            "the driver restarts on the same cluster"
        )
        assert killed.condition("Training")["reason"] in ("DriverFailed", "DriverLost")
        assert (end.status["restarts"], end.status["job"]["attempt"], end.step) == (1, 2, 14)
        assert min(seen.step for seen in attempts) >= saved.status["checkpoint"]["step"], (
            "training went on from the checkpoint"
        )
        assert end.status["startTime"] == saved.status["startTime"]

        with held_back(runs, name):
            runs.kubectl("delete", "agenticrun", name)
            runs.apply(document)
            waiting = watch.wait(
                lambda seen: (
                    seen.condition("ClusterProvisioned").get("reason") == "WaitingForPreviousRun"
                ),
                300,
                "the second run waits for the first one's cluster",
                after=end,
            )
        assert waiting.phase == "Pending"
        eventually(
            lambda: not runs.list("pods", f"{LABEL_RUN_UID}={end.uid}"),
            300,
            "the first run's pods are gone",
            interval=0.5,
        )
        with Recorder(runs, name) as recorder:
            again = watch.wait(lambda seen: seen.step >= 1, 600, "the second run trains", after=end)
            saves = recorder.wait(lambda seen: seen.trains and seen.checkpoint >= 3, 300)
            assert saves, Report(recorder.samples, time.time()).timeline()
            second = runs.get("raycluster", name)
            report = loses_its_head(recorder, pods)
        steps = [seen.step for seen in watch.history if seen.uid == again.uid]
        assert steps[0] == 0
        assert again.step < end.step, "it began at step 0, not at the first run's last checkpoint"
        assert (again.status["job"]["attempt"], again.status["restarts"]) == (1, 0)
        assert _uid(second) != _uid(ray_cluster)

    print(report.timeline())
    assert not [*broken_promises(report)]
    runs.kubectl("delete", "agenticrun", name)
    runs.kubectl("delete", "configmap", gate["metadata"]["name"])
    claim = ("PersistentVolumeClaim", f"{name}-checkpoints")
    eventually(lambda: objects(runs) - empty == {claim}, 60, "only the claim is left", interval=0.5)
    runs.kubectl("delete", "persistentvolumeclaims", "--selector", f"{LABEL_RUN}={name}")
    eventually(lambda: not _volumes(runs), 300, "its volume is gone", interval=0.5)


def loses_its_head(recorder: Recorder, pods: Pods) -> Report:
    """Delete the head pod of a run that is recorded, and wait for the end of the run."""
    injected = time.time()
    pods.cluster.kubectl("delete", "pod", pods.head()["metadata"]["name"], "--wait=false")
    recorder.wait(lambda seen: seen.phase in ENDED, 240)
    return Report(recorder.samples, injected)


@contextmanager
def held_back(runs: Cluster, name: str) -> Iterator[None]:
    """The RayCluster of this name, once deleted, stays with its pods for as long as this lasts."""

    def finalizers(names: list[str] | None) -> None:
        patch = json.dumps({"metadata": {"finalizers": names}})
        runs.kubectl("patch", "raycluster", name, "--type=merge", "--patch", patch)

    finalizers(["test.agenticrun.dev/held-back"])
    try:
        yield
    finally:
        finalizers(None)


def _volumes(runs: Cluster) -> list[dict[str, Any]]:
    return [
        item
        for item in runs.list("persistentvolumes")
        if item["spec"].get("claimRef", {}).get("namespace") == runs.namespace
    ]


def _uid(found: dict[str, Any] | None) -> str:
    assert found is not None
    uid: str = found["metadata"]["uid"]
    return uid


@pytest.mark.timeout(1800, func_only=True)
def test_what_cannot_work_says_why(runs: Cluster, images: Images) -> None:
    """Check the messages for an environment that does not import and for a missing image.

    Both runs exist at once. The one with the missing image requests almost no resources.
    """
    code = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "my-envs"},
        "data": {"my_lake.py": "import no_such_module\n\nclass Lake: ...\n"},
    }
    broken = small_lake("broken-env", max_steps=5, save_steps=0, code={"configMap": "my-envs"})
    broken["spec"].pop("checkpoint")
    broken["spec"]["pipeline"]["envs"][0] |= {"type": "my_lake:Lake", "config": {}}
    unpullable = small_lake(
        "no-image",
        max_steps=5,
        save_steps=0,
        image=f"{images.worker.rsplit(':', 1)[0]}:no-such-tag",
    )
    for role in unpullable["spec"]["roles"].values():
        role |= {"cpus": "1m", "memory": "16Mi"}
    with Watch(runs, "broken-env") as broken_watch, Watch(runs, "no-image") as image_watch:
        runs.apply(code, broken)
        runs.apply(unpullable)
        shown = image_watch.wait(
            lambda seen: seen.condition("RolesReady").get("reason") == "ImagePullFailed",
            300,
            "the pull failure shows",
        )
        assert "no-such-tag" in shown.condition("RolesReady")["message"]
        assert shown.at - _first_failed_pull(runs, "no-image") < SEEN_SECONDS
        assert shown.phase == "Starting"
        assert shown.status["restarts"] == 0
        runs.kubectl("delete", "agenticrun", "no-image")

        failed = broken_watch.wait(lambda seen: seen.phase == "Failed", 600, "the run fails")
    assert failed.condition("Failed")["reason"] == "InvalidConfig"
    assert "No module named 'no_such_module'" in failed.condition("Failed")["message"]
    assert "No module named 'no_such_module'" in failed.status["message"]
    assert (failed.status["restarts"], failed.status["job"]["attempt"]) == (0, 1)
    eventually(
        lambda: [run["status"]["job"]["status"] for run in runs.list("agenticruns")] == ["FAILED"],
        60,
        "the driver ends by itself",
    )
    eventually(
        lambda: not runs.list("rayclusters,pods"),
        300,
        "the cluster of the failed run is deleted",
        interval=0.5,
    )
    time.sleep(3)
    assert [run["status"]["phase"] for run in runs.list("agenticruns")] == ["Failed"], (
        "it is not tried again"
    )


def _first_failed_pull(runs: Cluster, name: str) -> float:
    """When the kubelet first said so of a pod of this run, in seconds since the epoch."""
    failures: list[dict[str, Any]] = []

    def told() -> bool:  # the pod's status, which the operator reads, may be earlier
        failures[:] = [
            item
            for item in runs.list("events")
            if item["reason"] == "Failed" and item["involvedObject"]["name"].startswith(f"{name}-")
        ]
        return bool(failures)

    eventually(told, 30, "the kubelet posts an event about the image")
    return min(datetime.fromisoformat(item["firstTimestamp"]).timestamp() for item in failures)
