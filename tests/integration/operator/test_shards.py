"""Two operators, each with one half of all runs, on a real apiserver; pods are simulated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agenticrun_operator.cluster import KubeClient, connect
from agenticrun_operator.shard import Shard
from control_plane import control_plane
from operator_process import OperatorProcess, Release
from runs import run_with
from simulated_cluster import SimulatedCluster

NAMESPACE, SYSTEM = "runs", "default"
RELEASE = Release("agenticrun", SYSTEM, (NAMESPACE,), shards=2)
HALVES = (Shard(0, 2), Shard(1, 2))
FEWEST = 3
"""Runs of each half."""


@pytest.mark.timeout(900)
async def test_each_of_two_operators_follows_its_half_of_the_runs(tmp_path: Path) -> None:
    with control_plane(tmp_path) as plane:
        RELEASE.set_up(plane)
        plane.apply(*RELEASE.cluster_rights(plane))
        kube = KubeClient(await connect(Path(plane.env["KUBECONFIG"])), [NAMESPACE])
        config = RELEASE.kubeconfig(plane)

        def start(half: Shard) -> OperatorProcess:
            folder = tmp_path / f"operator-{half.number}"
            folder.mkdir(exist_ok=True)
            settings = RELEASE.lease(plane, half.number)
            return OperatorProcess.start(
                folder, config, AGENTICRUN_NAMESPACES=NAMESPACE, **settings
            )

        operators = [start(half) for half in HALVES]
        try:
            async with SimulatedCluster(kube, NAMESPACE).work() as cluster:
                await follow(cluster, operators, start)
        finally:
            for operator in operators:
                await asyncio.to_thread(operator.stop)
            await kube.close()


async def follow(
    cluster: SimulatedCluster,
    operators: list[OperatorProcess],
    start: Callable[[Shard], OperatorProcess],
) -> None:
    async def until(what: str, true: Callable[[], bool]) -> float:
        began = time.monotonic()
        while not true():
            logs = "".join(operator.log.read_text()[-2000:] for operator in operators)
            assert time.monotonic() < began + 240, f"not in time: {what}\n{logs}"
            await asyncio.sleep(0.2)
        return time.monotonic() - began

    def names(half: Shard) -> list[str]:
        runs = cluster.runs.items()
        return [name for name, run in runs if half.has(run["metadata"]["uid"])]

    def step(name: str) -> int:
        return int(cluster.runs[name].get("status", {}).get("step") or 0)

    number = 0
    while min(len(names(half)) for half in HALVES) < FEWEST:
        run = run_with(
            ("spec.pipeline.maxSteps", 100_000),
            ("spec.checkpoint.uri", "s3://bucket/prefix"),
            name=f"run-{number}",
        )
        await cluster.create_run(run)
        number += 1
        await until("the run is there", lambda: len(cluster.runs) == number)
    trains = await until("all train", lambda: all(step(name) >= 2 for name in cluster.runs))
    for operator, half in zip(operators, HALVES, strict=True):
        counted = await asyncio.to_thread(operator.metrics)
        assert counted["followed_runs"] == len(names(half)), "and no run of the other one"

    await asyncio.to_thread(operators[1].crash)
    await asyncio.sleep(3)  # what it has sent arrives
    before = {name: step(name) for name in cluster.runs}
    alone = await until(
        "the other operator works", lambda: all(step(n) > before[n] for n in names(HALVES[0]))
    )
    await asyncio.sleep(10)
    assert {n: step(n) for n in names(HALVES[1])} == {n: before[n] for n in names(HALVES[1])}

    operators[1] = start(HALVES[1])
    back = await until("it is back", lambda: all(step(n) > before[n] for n in names(HALVES[1])))
    assert {len(cluster.histories[name].submissions) for name in cluster.runs} == {1}
    print(
        f"\n{[len(names(half)) for half in HALVES]} runs: all train after {trains:.0f} s; one "
        f"operator killed: the others' steps after {alone:.0f} s; it is back after {back:.0f} s"
    )
