"""Three recorded steps, trained on again without playing: same batches, same losses."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agenticrun_api import FinalReport, Outcome
from agenticrun_workers.rollout.env_pool import EnvPool
from agenticrun_workers.rollout.recording import Recording
from tiny_runs import InProcessAttempt, tiny_run

SETTINGS: dict[str, Any] = {"evalSteps": 0, "warmup": None}
COMPARED = (
    "rollout/score/mean",
    "tokens/response",
    "actor/entropy",
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/lr",
)


async def execute(session: InProcessAttempt) -> FinalReport:
    return await asyncio.wait_for(session.execute(), 240)


async def test_a_replay_trains_as_the_recorded_run_did_and_plays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = str(tmp_path / "recording")
    recorded = InProcessAttempt(tiny_run(**SETTINGS, record={"to": uri}), tmp_path / "recorded")
    report = await execute(recorded)
    assert report.outcome is Outcome.SUCCEEDED, report.message
    assert Recording(uri).steps() == [1, 2, 3]

    async def refuse(*_arguments: object) -> None:
        raise AssertionError("a replay plays nothing")

    monkeypatch.setattr(EnvPool, "run", refuse)
    replayed = InProcessAttempt(tiny_run(**SETTINGS, record={"replay": uri}), tmp_path / "replayed")
    report = await execute(replayed)
    assert report.outcome is Outcome.SUCCEEDED, report.message
    for step, expected in recorded.training_steps().items():
        found = replayed.training_steps()[step]
        assert {k: found[k] for k in COMPARED} == pytest.approx(
            {k: expected[k] for k in COMPARED}, rel=1e-4, abs=1e-6
        ), step

    longer = InProcessAttempt(
        tiny_run(**SETTINGS, maxSteps=5, record={"replay": uri}), tmp_path / "longer"
    )
    report = await execute(longer)
    assert (report.outcome, report.reason) == (Outcome.FAILED, "InvalidConfig")
    assert "step 4 is not recorded: " in report.message
    assert "holds 3 steps (1 to 3), and maxSteps is 5" in report.message


async def test_what_is_recorded_is_what_was_trained_on(tmp_path: Path) -> None:
    uri = str(tmp_path / "recording")
    session = InProcessAttempt(tiny_run(**SETTINGS, record={"to": uri}), tmp_path)
    assert (await execute(session)).outcome is Outcome.SUCCEEDED
    for step, metrics in session.training_steps().items():
        trajectories = Recording(uri).read(step).trajectories
        assert len(trajectories) == 8
        assert np.mean([t.score for t in trajectories]) == pytest.approx(
            metrics["rollout/score/mean"], abs=1e-6
        )
        assert {int(t.versions_T.max()) for t in trajectories} == {step - 1}
