"""Many runs of one operator, on a real apiserver with KubeRay; kubelets and heads are simulated.

`benchmarks/many_runs.py` has the figures.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from kwok_fleet import KwokFleet, kwok_fleet
from operator_process import OperatorProcess

RUNS = int(os.environ.get("AGENTICRUN_FLEET_RUNS", "30"))
STEP_SECONDS = 10.0


@pytest.mark.timeout(1200)  # KWOK is built first
async def test_each_run_trains_once_across_a_crash_of_the_operator(tmp_path: Path) -> None:
    names = [f"run-{number}" for number in range(RUNS)]
    async with kwok_fleet(tmp_path, STEP_SECONDS) as fleet:
        operator = fleet.start_operator()
        try:
            await fleet.create_runs(names)
            await fleet.until(lambda: fleet.shows(dict.fromkeys(names, 1)), "all runs have a step")
            before = uids(fleet)
            await asyncio.to_thread(operator.crash)
            steps = fleet.make_steps()
            assert not fleet.shows(steps)
            operator = fleet.start_operator()
            await fleet.until(lambda: fleet.shows(steps), "the steps that it missed are shown")
            assert before == {
                name: item["metadata"]["uid"] for name, item in fleet.clusters.items()
            }
            assert {name: len(head.submissions) for name, head in fleet.heads.items()} == (
                dict.fromkeys(names, 1)
            )
            made, written = steps_and_writes(fleet, operator)
            await asyncio.sleep(2 * STEP_SECONDS)
            made_later, written_later = steps_and_writes(fleet, operator)
            # A step costs one write. The first ones of the new operator may still be due.
            assert written_later - written <= made_later - made + RUNS
            await fleet.delete_all()
        finally:
            await asyncio.to_thread(operator.stop)


def uids(fleet: KwokFleet) -> dict[str, str]:
    """Return the uid of each RayCluster, by name."""
    return {name: item["metadata"]["uid"] for name, item in fleet.clusters.items()}


def steps_and_writes(fleet: KwokFleet, operator: OperatorProcess) -> tuple[float, float]:
    """Return the number of steps of all runs so far, and of writes of their status."""
    made = sum(len(head.steps) for head in fleet.heads.values())
    return made, operator.metrics()["status_writes_total"]
