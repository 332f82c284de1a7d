"""Engines and env workers join and leave a run that trains."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agenticrun_api import AgenticRun, Commands, LiveConfig, Outcome, PoolStatus, Role
from tiny_runs import TinyAttempt, tiny_run
from waiting import eventually_in_loop

pytestmark = pytest.mark.usefixtures("ray_node")

SECONDS = 180
"""Starting an engine takes a few, on a busy machine many."""


def wanting(run: AgenticRun, generation: int, replicas: int) -> Commands:
    """Return the operator's commands when both roles are to have this number of pods."""
    changed = run.with_replicas({"inference": replicas, "env": replicas})
    config = LiveConfig.of(changed).model_copy(update={"generation": generation})
    return Commands(config=config)


def sizes(attempt: TinyAttempt) -> dict[Role, tuple[int, int, int]]:
    """Return how many serve, join and leave, by role."""
    pools: dict[Role, PoolStatus] = next((s.pools or {} for s in attempt.sink.snapshots[-1:]), {})
    return {role: (pool.serving, pool.joining, pool.leaving) for role, pool in pools.items()}


@pytest.mark.timeout(900)
async def test_engines_and_env_workers_join_and_leave_a_run_that_trains(tmp_path: Path) -> None:
    run = tiny_run(maxSteps=10_000, evalSteps=0, saveSteps=0)
    attempt = TinyAttempt(run, tmp_path)
    running = asyncio.create_task(attempt.execute())

    async def until(wanted: int) -> None:
        """Wait until so many of each are there, and then for two more steps."""
        both = dict.fromkeys((Role.INFERENCE, Role.ENV), (wanted, 0, 0))
        told = f"{wanted} engines and env workers"
        await eventually_in_loop(lambda: running.done() or sizes(attempt) == both, SECONDS, told)
        step = attempt.sink.step + 2
        await eventually_in_loop(
            lambda: running.done() or attempt.sink.step >= step, SECONDS, f"it trains with {told}"
        )
        assert not running.done(), running.result().message

    await until(1)
    attempt.requests.apply(wanting(run, 2, 2))
    await until(2)
    grown = attempt.sink.step
    attempt.requests.apply(wanting(run, 3, 1))
    await until(1)
    pools = attempt.sink.snapshots[-1].pools or {}
    assert {pool.replicas for pool in pools.values()} == {1}
    attempt.requests.stop.set()
    report = await running
    assert report.outcome is Outcome.STOPPED, report.message
    steps = attempt.training_steps()
    assert list(steps) == list(range(1, len(steps) + 1)), "no step was made twice"
    assert steps[grown]["system/engines"] == steps[grown]["system/env_workers"] == 2
    used = {name for step in steps.values() for name in step if name.startswith("engine/engine-")}
    assert any(name.startswith("engine/engine-1/") for name in used), "the new one has sampled"
    assert steps[len(steps)]["system/engines"] == steps[len(steps)]["system/env_workers"] == 1
