"""Math with the agent of the guide: several trajectories of an episode."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from agenticrun_api import Outcome, parse_run
from agenticrun_workers.rollout.recording import Recording
from agenticrun_workers.types import StopReason
from tiny_runs import InProcessAttempt, tiny_document

SUMS = Path(__file__).parents[3] / "examples/math/sums.jsonl"
ANSWERS = [str(number) for number in range(11)]


def document(tmp_path: Path, env: dict[str, Any]) -> dict[str, Any]:
    written = tiny_document(
        maxSteps=2,
        saveSteps=0,
        sequenceLength=64,
        record={"to": str(tmp_path / "recording")},
        envs=[
            {
                "tag": "Math",
                "maxSteps": 2,
                "maxTokensPerStep": 2,
                "dataset": {"path": str(SUMS), "valSplit": "train"},
                **env,
            }
        ],
        trainEnvs={"groups": 4, "groupSize": 2, "tags": ["Math"]},
        valEnvs={"groups": 8, "tags": ["Math"]},
    )
    written["spec"]["model"]["initialize"]["words"] = [*ANSWERS, "+", "=", "again"]
    return written


async def test_each_turn_of_the_guides_agent_is_a_sample_of_its_group(tmp_path: Path) -> None:
    env = {
        "type": "math_single_step",
        "config": {"instruction": "", "randomAnswers": ANSWERS},
        "agent": {"type": "math_multi_turn", "config": {"numTurns": 2, "wrongTemplate": "again"}},
    }
    session = InProcessAttempt(parse_run(document(tmp_path, env)), tmp_path)
    report = await asyncio.wait_for(session.execute(), 240)
    assert report.outcome is Outcome.SUCCEEDED, report.message
    steps = session.training_steps()
    assert sorted(steps) == [1, 2]
    for step, metrics in steps.items():
        trained = Recording(str(tmp_path / "recording")).read(step).trajectories
        episodes = Counter((t.key.group, t.key.member) for t in trained)
        assert len(episodes) == 8
        assert len({t.key for t in trained}) == len(trained) > 8
        assert metrics["system/samples"] == len(trained)
        for trajectory in trained:
            last_try = (
                trajectory.key.branch == episodes[trajectory.key.group, trajectory.key.member] - 1
            )
            assert (trajectory.score > 0) == (last_try and trajectory.metrics["success"] == 1.0)
            assert trajectory.response_mask_T.sum() in (1, 2)


async def test_the_conversation_plays_with_the_agent_of_every_day(tmp_path: Path) -> None:
    env = {
        "type": "math",
        "config": {
            "instruction": "",
            "wrongFeedback": "again",
            "rightFeedback": "=",
            "randomAnswers": ANSWERS,
        },
        "agent": {"config": {"systemTemplate": ""}},
    }
    session = InProcessAttempt(parse_run(document(tmp_path, env)), tmp_path)
    report = await asyncio.wait_for(session.execute(), 240)
    assert report.outcome is Outcome.SUCCEEDED, report.message
    trained = [
        t for step in (1, 2) for t in Recording(str(tmp_path / "recording")).read(step).trajectories
    ]
    assert {t.stop_reason for t in trained} <= {StopReason.COMPLETED, StopReason.MAX_TURNS}
    assert {len(t.turns) for t in trained} <= {1, 2}
    assert all(t.metrics["verify_timeouts"] == 0 for t in trained)
