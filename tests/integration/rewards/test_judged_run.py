"""Whole attempts whose only reward is a judge's, about the items of a data set."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agenticrun_api import FinalReport, Outcome
from quiz_runs import MODULE, quiz_run
from tiny_runs import InProcessAttempt


async def execute(session: InProcessAttempt) -> FinalReport:
    return await asyncio.wait_for(session.execute(), 240)


async def test_a_judges_scores_are_the_rewards_of_training_and_validation(tmp_path: Path) -> None:
    taught_to_answer = {"steps": 40, "batchSize": 8, "learningRate": 0.02}
    session = InProcessAttempt(quiz_run(warmup=taught_to_answer), tmp_path)
    report = await execute(session)
    assert report.outcome is Outcome.SUCCEEDED, report.message
    steps = session.training_steps()
    assert sorted(steps) == [1, 2, 3]
    for step in steps.values():
        assert step["rollout/score/mean"] == pytest.approx(step["env/Quiz/reward/right"])
        assert step["stop/env_error"] == 0
        assert 0 <= step["env/Quiz/judge/right/cached"] <= 1
    assert any(step["rollout/score/max"] > 0 for step in steps.values())


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"type": f"{MODULE}:nothing"}, "spec.pipeline.rewards[0].type"),
        ({"type": f"{MODULE}:right", "config": {"colour": 1}}, "spec.pipeline.rewards[0].config"),
    ],
)
async def test_a_judge_that_cannot_be_built_ends_the_run_at_once(
    tmp_path: Path, reward: dict[str, Any], message: str
) -> None:
    report = await execute(
        InProcessAttempt(quiz_run(rewards=[{"name": "bad", **reward}]), tmp_path)
    )
    assert (report.outcome, report.reason, report.retryable) == (
        Outcome.FAILED,
        "InvalidConfig",
        False,
    )
    assert message in report.message


async def test_a_judge_that_always_fails_ends_the_run_with_its_words(tmp_path: Path) -> None:
    rewards = [{"name": "broken", "type": "operator:truth"}, {"name": "worse", "type": "math:sqrt"}]
    report = await execute(InProcessAttempt(quiz_run(rewards=rewards, warmup=None), tmp_path))
    assert report.outcome is Outcome.FAILED
    assert "judge worse: TypeError: must be real number, not JudgedEpisode" in report.message
