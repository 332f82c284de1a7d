"""Names and values of metrics."""

from __future__ import annotations

import ast
import math
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agenticrun_workers
from agenticrun_api.algorithm import Guards
from agenticrun_api.metrics import COLUMNS, FAMILIES, METRICS, STEP_METRICS, rank_of
from agenticrun_workers.driver.engine_time import EngineTime, engine_metrics
from agenticrun_workers.driver.evaluation import Validator, summarize
from agenticrun_workers.driver.guards import guards_of
from agenticrun_workers.driver.metrics import (
    rollout_metrics,
    success_of,
    sync_metrics,
    timing_metrics,
    validation_metrics,
)
from agenticrun_workers.driver.progress import headline_metrics
from agenticrun_workers.envs import EnvFault
from agenticrun_workers.envs.calls import check_metric_names
from agenticrun_workers.inference import EngineStats
from agenticrun_workers.reporting.display import success_rates, validation_result
from agenticrun_workers.rollout.controller import Batch, Group, RolloutCounts
from agenticrun_workers.trainer import actor_loss, critic
from agenticrun_workers.types import StopReason
from agenticrun_workers.weights.sync import SyncReport
from agenticrun_workers.weights.transports import Transport
from rollout_fakes import FakeBackend, result
from tiny_runs import tiny_run


def test_a_batch_tells_scores_ages_and_why_episodes_ended() -> None:
    played = (
        result(0, 0, score=1.0, version=4),
        result(0, 1, stop=StopReason.MAX_TURNS, version=5),
    )
    failed = result(0, 2, stop=StopReason.TIMEOUT)
    batch = Batch(
        (Group(0, "A", played),),
        RolloutCounts(
            rerolled=2,
            dropped=1,
            filtered=4,
            aborted_tokens=7,
            length_bias=-1.5,
            untrainable=[failed, failed],
            stale_episodes=[
                replace(
                    result(1, 0, stop=StopReason.STALE),
                    others=(result(1, 0, tokens=40, version=2),),
                ),
                result(1, 1, version=2),
            ],
        ),
        queue_depth=3,
    )
    metrics = rollout_metrics(batch, version=5)
    expected = {
        "rollout/score/mean": 0.5,
        "staleness/mean": 0.5,
        "staleness/max": 1.0,
        "staleness/share/0": 0.5,
        "staleness/share/1": 0.5,
        "stop/completed": 3 / 7,
        "stop/timeout": 2 / 7,
        "stop/stale": 1 / 7,
        "group/stale": 1.0,
        "rollout/stale": 2.0,
        "rollout/stale_tokens": 5.0 + 10.0 + 5.0,
        "group/rerolled": 2.0,
        "group/dropped": 1.0,
        "group/filtered": 4.0,
        "group/length_bias": -1.5,
        "rollout/aborted_tokens": 7.0,
        "rollout/discarded": 2.0,
        "rollout/queue_depth": 3.0,
        "env/A/success": 0.5,
        "env/A/action_is_valid": 1.0,
        "env/A/score": 0.5,
        "rollout/success/mean": 0.5,
        "rollout/score/max": 1.0,
        "rollout/turns/mean": 2.0,
        "tokens/prompt": 30.0,
        "tokens/response": 10.0,
        "tokens/prompt_length/mean": 15.0,
        "tokens/response_length/mean": 5.0,
        "tokens/turn_response_length/mean": 2.5,
        "system/samples": 2.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_episodes_that_a_judge_failed_are_counted_by_judge() -> None:
    failed = replace(
        result(0, 1, stop=StopReason.ENV_ERROR),
        metrics={"judge/style/failures": 1.0, "judge/style/seconds": 0.5},
    )
    judged = replace(result(0, 0), metrics={"reward/style": 2.0})
    batch = Batch(
        (Group(0, "A", (judged,)),), RolloutCounts(untrainable=[failed, failed]), queue_depth=0
    )
    metrics = rollout_metrics(batch, version=0)
    assert (metrics["judge/style/failures"], metrics["env/A/reward/style"]) == (2.0, 2.0)


def test_validation_is_averaged_per_tag_and_then_over_tags() -> None:
    metrics = validation_metrics(
        [result(0, score=1.0), result(1, score=0.0), result(2, score=1.0, tag="B")]
    )
    assert metrics["val/A/success"] == 0.5
    assert metrics["val/B/success"] == 1.0
    assert success_of(metrics) == 0.75
    assert success_of({"val/A/score": 1.0}) is None


def test_the_trajectories_of_an_episode_count_as_one_in_every_mean() -> None:
    alone, branch = result(0, score=1.0), result(1, tokens=40)
    branches = [replace(branch, key=replace(branch.key, branch=number)) for number in range(4)]
    metrics = validation_metrics([alone, *branches])
    assert metrics["val/score/mean"] == metrics["val/A/score"] == 0.5
    assert metrics["val/success/mean"] == 0.5
    lengths = [alone.response_tokens, branch.response_tokens]
    assert metrics["val/A/response_length"] == sum(lengths) / 2
    summary = summarize([alone, *branches], [1])["A"]
    assert (summary.score, summary.success) == (0.5, 0.5)
    assert summary.response_tokens == sum(lengths) / 2


def test_a_metric_of_an_environment_s_own_is_no_tag() -> None:
    own = replace(result(0), metrics={"success": 1.0, "easy/success": 0.0})
    metrics = validation_metrics([own])
    assert metrics["val/A/easy/success"] == 0.0
    assert metrics["val/success/mean"] == validation_result(metrics) == 1.0
    assert success_rates(metrics) == {"val/A/success": 1.0}
    validator = Validator(FakeBackend(), tiny_run().spec.pipeline)
    validator.record(0, [own])
    assert validator.baselines == {"val/A/warmup_success": 1.0}


def test_environments_cannot_replace_what_we_report_of_a_tag() -> None:
    plain = [replace(result(0), metrics={}), replace(result(1), metrics={})]
    batch = Batch((Group(0, "A", tuple(plain)),), RolloutCounts(), queue_depth=0)
    ours = {
        *rollout_metrics(batch, version=0),
        *validation_metrics(plain),
        *(f"val/A/{name}" for name in ("random_success", "random_errors", "warmup_success")),
    }
    names = {name.split("/", 2)[2] for name in ours if name.startswith(("env/A/", "val/A/"))}
    assert {"score", "turns", "response_length", "stop/completed"} <= names
    for name in names:
        with pytest.raises(EnvFault, match="reserved name"):
            check_metric_names([name])
    check_metric_names(["success", "action_is_valid", "num_actions", "length"])


def test_validation_tells_turns_and_why_episodes_ended() -> None:
    metrics = validation_metrics([result(0, score=1.0), result(1, stop=StopReason.MAX_TURNS)])
    expected = {
        "val/A/score": 0.5,
        "val/A/turns": 2.0,
        "val/A/response_length": 5.0,
        "val/A/stop/completed": 0.5,
        "val/A/stop/max_turns": 0.5,
        "val/score/mean": 0.5,
        "val/success/mean": 0.5,
    }
    assert {name: metrics.get(name) for name in expected} == expected
    assert "val/A/stop/timeout" not in metrics


@pytest.mark.parametrize(
    ("lora", "adapters", "merged"), [(False, False, None), (True, True, 0.0), (True, False, 1.0)]
)
def test_a_sync_says_how_adapters_went(lora: bool, adapters: bool, merged: float | None) -> None:
    metrics = sync_metrics(SyncReport(Transport.DISK, 64, 0.25, {}, adapters), lora=lora)
    assert metrics.get("weight_sync/lora_merged") == merged
    assert (
        metrics["weight_sync/bytes"],
        metrics["weight_sync/Disk"],
        metrics["weight_sync/SharedMemory"],
    ) == (64.0, 1.0, 0.0)
    assert sync_metrics(None, lora=lora) == {"weight_sync/bytes": 0.0}


def test_speed_does_not_count_the_validation_inside_a_step() -> None:
    metrics = timing_metrics({"step": 6.0, "val": 4.0, "sync": 0.5}, tokens=100)
    assert metrics == {
        "time/step": 6.0,
        "time/val": 4.0,
        "time/sync": 0.5,
        "train/idle/val": pytest.approx(4 / 6),
        "weight_sync/seconds": 0.5,
        "system/tps": 50.0,
    }


def test_trainers_wait_for_the_batch_and_for_validations() -> None:
    metrics = timing_metrics({"step": 8.0, "rollout": 4.0, "val": 2.0, "train": 1.0}, tokens=100)
    assert (metrics["train/idle/rollout"], metrics["train/idle/val"]) == (0.5, 0.25)


def engine_stats(generated: int, busy: float, **fields: Any) -> EngineStats:
    unused = {"policy_version": 1, "running": 0, "waiting": 0, "prompt_tokens": 0}
    return EngineStats(**unused | fields, generated_tokens=generated, busy_seconds=busy)


def test_engines_tell_speed_queue_and_how_busy_they_were_also_one_that_is_new() -> None:
    before = {"engine-0": engine_stats(100, 5.0), "engine-1": engine_stats(70, 5.0)}
    after = {"engine-0": engine_stats(300, 9.0, waiting=3), "engine-2": engine_stats(50, 2.0)}
    found = engine_metrics(before, after, dict.fromkeys(after, 10.0))
    assert found == {
        "engine/engine-0/tokens_per_second": 20.0,
        "engine/engine-0/queue": 3.0,
        "engine/engine-2/tokens_per_second": 5.0,
        "engine/engine-2/queue": 0.0,
        "rollout/engine_busy": pytest.approx(0.3),
    }
    assert engine_metrics(before, {}, {}) == {}


class Fleet:
    """Two engines, and the episodes that need them."""

    def __init__(self, stats: Callable[[], Awaitable[dict[str, EngineStats]]]) -> None:
        self._stats = stats
        self.count = 2
        self.ejected_seconds = self.idle_seconds = 0.0

    async def stats(self) -> dict[str, EngineStats]:
        return await self._stats()


async def test_utilization_counts_seats_and_not_engines_with_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    stats = {
        "engine-0": engine_stats(0, 5.0, seats=30, seat_seconds=40.0),
        "engine-1": engine_stats(0, 0.0, seats=10),
    }

    async def read() -> dict[str, EngineStats]:
        return dict(stats)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    fleet = Fleet(read)
    measured = EngineTime(fleet, fleet)
    now = 5.0
    await measured.metrics()
    now = 15.0
    stats["engine-0"] = engine_stats(0, 15.0, seats=30, seat_seconds=70.0)
    stats["engine-1"] = engine_stats(0, 10.0, seats=10, seat_seconds=90.0)
    found = await measured.metrics()
    assert found["rollout/engine_busy"] == 1.0
    assert found["rollout/utilization"] == pytest.approx((30 + 90) / (40 * 10))


def test_the_use_of_the_caches_is_the_mean_of_the_step_s_polls() -> None:
    before = {"engine-0": engine_stats(0, 0.0, kv_used=3.0, kv_polls=10)}
    after = {
        "engine-0": engine_stats(0, 0.0, kv_used=4.0, kv_polls=12),
        "engine-1": engine_stats(0, 0.0, kv_used=0.6, kv_polls=2),
        "engine-2": engine_stats(0, 0.0),
    }
    found = engine_metrics(before, after, dict.fromkeys(after, 10.0))
    assert found["engine/engine-0/kv_usage"] == 0.5
    assert found["engine/engine-1/kv_usage"] == 0.3
    assert "engine/engine-2/kv_usage" not in found
    assert found["rollout/kv_usage"] == pytest.approx(0.4)


async def test_the_time_of_idle_engines_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines for ten seconds: 2 of a sync, 3 without an episode, 5 with."""
    now = 0.0
    stats: dict[str, EngineStats] = {
        "engine-0": engine_stats(0, 0.0, seats=3),
        "engine-1": engine_stats(0, 0.0, seats=1),
    }

    async def read() -> dict[str, EngineStats]:
        return dict(stats)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    fleet = Fleet(read)
    measured = EngineTime(fleet, fleet)
    async with measured.syncing():
        now = fleet.idle_seconds = 2.0  # nothing is in flight during the sync
    now, fleet.idle_seconds = 10.0, 5.0
    stats["engine-0"] = engine_stats(0, 4.0, seats=3, seat_seconds=6.0)
    found = await measured.metrics()
    shares = {name: share for name, share in found.items() if name.startswith("rollout/idle/")}
    assert shares == {
        "rollout/idle/few_requests": pytest.approx(0.3 - 0.15),  # busy less utilization
        "rollout/idle/weights": pytest.approx(0.2),
        "rollout/idle/gate": pytest.approx(0.3),
        "rollout/idle/env": pytest.approx(0.2),
        "rollout/idle/lost": 0.0,
    }
    assert sum(shares.values()) + found["rollout/utilization"] == pytest.approx(1)
    now, fleet.ejected_seconds = 20.0, 5.0
    found = await measured.metrics()
    assert found["rollout/idle/env"] == pytest.approx(0.75), "the first ten seconds are told"
    assert found["rollout/idle/lost"] == pytest.approx(0.25), "one of two was slow for half of it"


async def test_a_sync_beside_running_episodes_leaves_the_engines_only_for_its_own_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    stats = {"engine-0": engine_stats(0, 0.0, seat_seconds=0.0)}

    async def read() -> dict[str, EngineStats]:
        return dict(stats)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    fleet = Fleet(read)
    measured = EngineTime(fleet, fleet)
    async with measured.syncing():
        now = 4.0  # the engine samples while weights travel, and is held for a second
        stats["engine-0"] = engine_stats(0, 3.0, seat_seconds=3.0)
    now = 10.0
    stats["engine-0"] = engine_stats(0, 8.0, seat_seconds=8.0)
    found = await measured.metrics()
    assert found["rollout/idle/weights"] == pytest.approx(0.1)
    assert found["rollout/idle/env"] == pytest.approx(0.1)
    assert found["rollout/idle/gate"] == 0.0


async def test_the_time_of_an_engine_that_dies_and_of_its_replacement_is_lost_and_not_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two busy engines; one dies in a step, and its replacement serves in the next one."""
    now = 0.0
    stats: dict[str, EngineStats] = {}

    def computed(engine: str, seconds: float) -> None:
        busy = stats[engine].busy_seconds + seconds if engine in stats else seconds
        aborted = stats[engine].aborted_tokens + 5 if engine in stats else 5
        stats[engine] = engine_stats(
            round(10 * busy), busy, seat_seconds=busy, aborted_tokens=aborted
        )

    async def read() -> dict[str, EngineStats]:
        return dict(stats)

    def shares(found: dict[str, float]) -> list[float]:
        """Return the shares of work, weights, gate, env, lost engines and few requests."""
        kinds = ("weights", "gate", "env", "lost", "few_requests")
        idle = [found[f"rollout/idle/{kind}"] for kind in kinds]
        assert sum(idle) + found["rollout/utilization"] == pytest.approx(1)
        return [round(share, 9) for share in (found["rollout/utilization"], *idle)]

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    fleet = Fleet(read)
    measured = EngineTime(fleet, fleet)
    for engine in ("engine-0", "engine-1"):
        stats[engine] = engine_stats(0, 0.0)
    now = 4.0
    for engine in ("engine-0", "engine-1"):
        computed(engine, 4.0)
    async with measured.syncing():
        pass
    del stats["engine-1"]
    now = 10.0
    computed("engine-0", 6.0)
    found = await measured.metrics()
    assert shares(found) == [0.7, 0.0, 0.0, 0.0, 0.3, 0.0]
    assert found["rollout/aborted_tokens"] == 15.0
    now = 20.0
    computed("engine-0", 10.0)
    computed("engine-2", 6.0)
    found = await measured.metrics()
    assert shares(found) == [0.8, 0.0, 0.0, 0.0, 0.2, 0.0]
    now = 30.0
    computed("engine-0", 5.0)
    computed("engine-2", 10.0)
    found = await measured.metrics()
    assert shares(found) == [0.75, 0.0, 0.0, 0.25, 0.0, 0.0]
    now = 40.0
    stats.clear()
    found = await measured.metrics()
    assert shares(found) == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]


async def test_an_engine_that_misses_a_reading_counts_each_second_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    stats: dict[str, EngineStats] = {"engine-0": engine_stats(0, 0.0)}

    async def read() -> dict[str, EngineStats]:
        return dict(stats)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    fleet = Fleet(read)
    measured = EngineTime(fleet, fleet)
    now = 10.0
    stats["engine-0"] = engine_stats(100, 10.0, seat_seconds=10.0, aborted_tokens=1)
    found = await measured.metrics()
    assert found["rollout/utilization"] == 1.0
    now, answer = 20.0, stats.pop("engine-0")
    found = await measured.metrics()
    assert (found["rollout/utilization"], found["rollout/idle/lost"]) == (0.0, 1.0)
    assert found["rollout/aborted_tokens"] == 0.0
    now = 30.0
    busy = answer.busy_seconds + 20
    stats["engine-0"] = engine_stats(300, busy, seat_seconds=busy, aborted_tokens=3)
    found = await measured.metrics()
    assert found["rollout/utilization"] == 1.0
    assert (found["rollout/idle/lost"], found["rollout/idle/env"]) == (0.0, 0.0)
    assert found["engine/engine-0/tokens_per_second"] == 10.0
    assert found["rollout/engine_busy"] == 1.0
    assert found["rollout/aborted_tokens"] == 2.0


async def test_an_engine_that_is_no_longer_wanted_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    stats = {f"engine-{number}": engine_stats(0, 0.0) for number in range(2)}

    async def read() -> dict[str, EngineStats]:
        return dict(stats)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    fleet = Fleet(read)
    measured = EngineTime(fleet, fleet)
    now = 10.0
    await measured.metrics()
    fleet.count = 1
    del stats["engine-1"]
    now = 20.0
    stats["engine-0"] = engine_stats(0, 10.0, seat_seconds=10.0)
    assert (await measured.metrics())["rollout/idle/lost"] == 0.5, "it left in this step"
    now = 30.0
    stats["engine-0"] = engine_stats(0, 20.0, seat_seconds=20.0)
    found = await measured.metrics()
    assert (found["rollout/utilization"], found["rollout/idle/lost"]) == (1.0, 0.0)
    fleet.count = 2
    now = 40.0
    stats["engine-0"] = engine_stats(0, 30.0, seat_seconds=30.0)
    assert (await measured.metrics())["rollout/idle/lost"] == 0.5, "one is wanted and not there"


async def test_the_wait_for_an_engine_that_does_not_answer_counts_for_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others have answered before it."""
    now = 0.0
    stats = {"engine-0": engine_stats(0, 0.0)}

    async def read() -> dict[str, EngineStats]:
        nonlocal now
        answers = dict(stats)
        now += 3.0
        return answers

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    fleet = Fleet(read)
    measured = EngineTime(fleet, fleet)
    now = 10.0
    stats["engine-0"] = engine_stats(0, 10.0, seat_seconds=10.0)
    found = await measured.metrics()
    assert found["rollout/utilization"] == pytest.approx(1)
    now = 20.0
    stats["engine-0"] = engine_stats(0, 20.0, seat_seconds=20.0)
    found = await measured.metrics()
    assert found["rollout/utilization"] == pytest.approx(1)


async def test_engines_that_are_gone_are_forgotten_and_the_whole_stays_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    stats: dict[str, EngineStats] = {}

    async def read() -> dict[str, EngineStats]:
        return dict(stats)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    fleet = Fleet(read)
    measured = EngineTime(fleet, fleet)
    for step in range(100):  # each engine dies after a step
        now += 10.0
        stats.clear()
        stats[f"engine-{step}"] = engine_stats(0, 10.0, seat_seconds=10.0)
        found = await measured.metrics()
        if step:
            assert found["rollout/utilization"] == pytest.approx(0.5)
            assert found["rollout/idle/lost"] == pytest.approx(0.5)
    assert max(len(measured._newest), len(measured._reported), len(measured._old_seats)) < 10


def test_a_snapshot_holds_the_most_telling_metrics_and_nothing_that_the_api_refuses() -> None:
    many = {f"time/phase{i}": 1.0 for i in range(100)}
    shown = headline_metrics(
        {
            **many,
            "val/A/success": 0.5,
            "env/A/bad name": 1.0,
            "actor/entropy": math.nan,
            "rollout/score/mean": 0.1,
        }
    )
    assert len(shown) == 64
    assert list(shown)[:3] == ["val/A/success", "rollout/score/mean", "time/phase0"]
    assert "actor/entropy" not in shown
    assert "env/A/bad name" not in shown


def test_many_environments_do_not_hide_the_losses() -> None:
    many = {
        f"val/Level{i:02}/{name}": 0.5 for i in range(30) for name in ("success", "score", "turns")
    }
    first = list(
        headline_metrics(
            {**many, "actor/total_loss": 0.1, "system/tps": 10.0, "actor/entropy": 1.0}
        )
    )[:16]
    assert first[:6] == [
        "val/Level00/success",
        "val/Level01/success",
        "val/Level02/success",
        "actor/total_loss",
        "actor/entropy",
        "system/tps",
    ]


PACKAGE = Path(agenticrun_workers.__file__).parent
METRIC = re.compile(rf"({'|'.join(FAMILIES)})/[A-Za-z0-9_/<>{{}},-]*[A-Za-z0-9>}}]")


def names_in_source() -> set[str]:
    """Return every metric name in a source file, with `x` for what an f-string fills in.

    Names with a variable family are left out.
    """
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.add(
                    "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "x"
                        for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return {
        name for name in found if METRIC.fullmatch(name) and not re.fullmatch("[a-z_]+/x", name)
    }


def test_every_metric_is_in_the_table() -> None:
    spreads = {
        f"{name}/mean"
        for name in (
            "critic/score",
            "critic/rewards",
            "critic/episode_rewards_norm",
            "critic/step_rewards_norm",
        )
    }
    measured = {
        *rollout_metrics(
            Batch((Group(0, "A", (result(0, 0),)),), RolloutCounts(), queue_depth=0), version=0
        ),
        *validation_metrics([result(0)]),
        *timing_metrics({"step": 1.0}, 1.0),
        *(f"actor/{name}" for name in (*actor_loss.SUMS, "ratio_max", "ratio_min", "ess")),
        *(f"critic/{name}" for name in critic.SUMS),
        *(
            f"guard/{guard.name}"
            for guard in guards_of(Guards(min_entropy=0.1, max_zero_variance_share=0.9))
        ),
        *spreads,
    }
    heads = {name.removesuffix("/mean") for name in measured if name.endswith("/mean")}
    missing = sorted(
        name
        for name in (measured | names_in_source()) - heads
        if not any(metric.matches(name) for metric in METRICS)
    )
    assert missing == [], f"crds/agenticrun_api/metrics.py needs a row for {missing}"


def test_what_is_shown_of_the_table_has_definite_names() -> None:
    shown = [*STEP_METRICS, *(name for _, name, _ in COLUMNS)]
    assert [name for name in shown if re.search("[<{]", name)] == []
    assert [label for label, _, _ in COLUMNS][:5] == ["reward", "success", "loss", "entropy", "kl"]


def test_a_metric_has_the_rank_of_its_row_or_of_its_family() -> None:
    assert rank_of("val/Lake/success") == 0
    assert rank_of("val/Lake/stop/timeout") == rank_of("val/Lake/random_errors") == 3
    assert rank_of("val/Lake/stop/max_turns") == rank_of("val/Lake/anything") == 25
    assert rank_of("env/Lake/success") < rank_of("env/Lake/score") == rank_of("env/A/reward/judge")
    assert rank_of("guard/entropy") < rank_of("actor/lr") < rank_of("judge/words/failures")
