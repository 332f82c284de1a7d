"""Names and values of metrics."""

from __future__ import annotations

import math

import pytest

from agenticrun_workers.pipeline.metrics import rollout_metrics, success_of, telling, validation_metrics
from agenticrun_workers.rollout.controller import Batch, RolloutCounts
from agenticrun_workers.rollout.groups import Group
from agenticrun_workers.types import StopReason
from rollout_fakes import result


def test_a_batch_tells_scores_ages_and_why_episodes_ended() -> None:
    played = (result(0, 0, score=1.0, version=4), result(0, 1, stop=StopReason.MAX_TURNS, version=5))
    failed = result(0, 2, stop=StopReason.TIMEOUT)
    batch = Batch((Group(0, "A", played),), RolloutCounts(rerolled=2, dropped=1, untrainable=[failed, failed]), queue_depth=3)
    metrics = rollout_metrics(batch, version=5)
    expected = {
        "rollout/score/mean": 0.5,
        "staleness/mean": 0.5,
        "staleness/max": 1.0,
        "stop/completed": 0.25,
        "stop/timeout": 0.5,
        "group/rerolled": 2.0,
        "group/dropped": 1.0,
        "rollout/discarded": 2.0,
        "rollout/queue_depth": 3.0,
        "env/A/success": 0.5,
        "env/A/action_is_valid": 1.0,
        "tokens/response": 10.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_validation_is_averaged_per_tag_and_then_over_tags() -> None:
    metrics = validation_metrics([result(0, score=1.0), result(1, score=0.0), result(2, score=1.0, tag="B")])
    assert metrics["val/A/success"] == 0.5
    assert metrics["val/B/success"] == 1.0
    assert success_of(metrics) == 0.75
    assert success_of({"val/A/score": 1.0}) is None


def test_a_snapshot_holds_the_most_telling_metrics_and_nothing_that_the_api_refuses() -> None:
    many = {f"time/phase{i}": 1.0 for i in range(100)}
    shown = telling({**many, "val/A/success": 0.5, "env/A/bad name": 1.0, "actor/entropy": math.nan, "rollout/score/mean": 0.1})
    assert len(shown) == 64
    assert list(shown)[:2] == ["val/A/success", "rollout/score/mean"]
    assert "actor/entropy" not in shown
    assert "env/A/bad name" not in shown
