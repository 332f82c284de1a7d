"""Two runs that each hold a half of what both need, on a real apiserver; pods are simulated.

The scheduler places pods one by one, so that each run gets one of the two GPUs that both need.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from agenticrun_api.names import LABEL_RUN
from agenticrun_operator.cluster import KubeClient, connect
from agenticrun_operator.resources import Manifest
from control_plane import control_plane
from operator_process import OperatorProcess, Release
from operator_world import gpus_of
from runs import run_with
from simulated_cluster import SimulatedCluster

ALL = os.environ.get("AGENTICRUN_HALF_PLACED") == "1"
pytestmark = pytest.mark.skipif(not ALL, reason="AGENTICRUN_HALF_PLACED=1")
NAMESPACE, SYSTEM = "runs", "default"
RELEASE = Release("agenticrun", SYSTEM, (NAMESPACE,))
WAIT_SECONDS = 900.0


def a_run(name: str) -> Manifest:
    return run_with(
        ("spec.pipeline.maxSteps", 3),
        ("spec.checkpoint.uri", "s3://bucket/prefix"),
        ("spec.roles.trainer", {"gpus": 1}),
        ("spec.roles.inference", {"gpus": 1}),
        ("spec.failurePolicy", {"holdSeconds": 15}),
        name=name,
    )


@pytest.mark.timeout(1200)
async def test_two_half_placed_runs_do_not_block_each_other_for_ever(tmp_path: Path) -> None:
    with control_plane(tmp_path) as plane:
        RELEASE.set_up(plane)
        plane.apply(*RELEASE.cluster_rights(plane))
        kube = KubeClient(await connect(Path(plane.env["KUBECONFIG"])), [NAMESPACE])
        settings = {"AGENTICRUN_NAMESPACES": NAMESPACE, **RELEASE.lease(plane)}
        operator = OperatorProcess.start(tmp_path, RELEASE.kubeconfig(plane), **settings)
        try:
            async with SimulatedCluster(kube, NAMESPACE, gpus=2).work() as cluster:
                await both_end(cluster, operator)
        finally:
            await asyncio.to_thread(operator.stop)
            await kube.close()


async def both_end(cluster: SimulatedCluster, operator: OperatorProcess) -> None:
    names, began = ("one", "other"), time.monotonic()
    for name in names:
        await cluster.create_run(a_run(name))
    halves, most = 0.0, 0
    status: dict[str, dict[str, object]] = {}
    while {found.get("phase") for found in status.values()} != {"Succeeded"}:
        passed = time.monotonic() - began
        assert passed < WAIT_SECONDS, f"{status}\n{operator.log.read_text()[-3000:]}"
        await asyncio.sleep(0.3)
        status = {name: run.get("status") or {} for name, run in cluster.runs.items()}
        held = {
            pod["metadata"]["labels"][LABEL_RUN]
            for pod in cluster.pods
            if "nodeName" in pod["spec"] and gpus_of(pod)
        }
        most = max(most, len(held))
        halves = passed if len(held) == 2 else halves
    assert most == 2, "each of them has held a GPU that the other one needed"
    assert [len(cluster.histories[name].submissions) for name in names] == [1, 1]
    print(
        f"\nhalf placed until second {halves:.0f}; both ended after "
        f"{time.monotonic() - began:.0f} s"
    )
