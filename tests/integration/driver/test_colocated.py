"""Engines that take turns with the trainers, on a real Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

import pytest

from agenticrun_api import Activity, AgenticRun, Outcome, parse_run
from tiny_runs import InProcessAttempt, TinyAttempt, tiny_document, tiny_run

pytestmark = pytest.mark.usefixtures("ray_node")

PIPELINE = {"deterministic": True, "maxSteps": 2, "evalSteps": 0}


def colocated() -> AgenticRun:
    document = tiny_document(**PIPELINE)
    document["spec"]["placement"] = "Colocated"
    return parse_run(document)


async def trained(session: TinyAttempt) -> dict[int, dict[str, float]]:
    report = await asyncio.wait_for(session.execute(), 550)
    assert report.outcome is Outcome.SUCCEEDED, report.message
    return session.training_steps()


async def test_taking_turns_changes_nothing_but_who_has_the_devices(tmp_path: Path) -> None:
    together = await trained(TinyAttempt(colocated(), tmp_path / "together"))
    apart = await trained(InProcessAttempt(tiny_run(**PIPELINE), tmp_path / "apart"))
    assert [step["system/handovers"] for step in together.values()] == [2, 4], (
        "to the engines and back, in every step"
    )
    for name in (
        "rollout/score/mean",
        "tokens/response",
        "actor/entropy",
        "actor/pg_loss",
        "actor/grad_norm",
    ):
        assert [step[name] for step in together.values()] == [
            step[name] for step in apart.values()
        ], name


async def test_an_engine_that_dies_while_trainers_compute_is_replaced_before_the_next_rollout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    session = TinyAttempt(colocated(), tmp_path)
    running = asyncio.create_task(asyncio.wait_for(session.execute(), 550))
    while (
        not session.sink.snapshots or session.sink.snapshots[-1].activity is not Activity.TRAINING
    ):
        assert not running.done(), running.result().message
        await asyncio.sleep(0.005)
    (engine,) = (
        record.args
        for record in caplog.records
        if "runs on" in record.msg and "engine-0" in str(record.args)
    )
    assert isinstance(engine, tuple)
    os.kill(int(str(engine[3])), signal.SIGKILL)
    report = await running
    assert report.outcome is Outcome.SUCCEEDED, report.message
    assert "engine-1 runs on" in caplog.text
