"""Metrics of runs: their values, what stays of a run that has ended, and their names."""

from __future__ import annotations

from datetime import timedelta

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from agenticrun_api import Outcome
from agenticrun_api.metrics import STEP_METRICS
from agenticrun_api.status import CheckpointStatus
from agenticrun_operator.metrics import UNREADABLE_RUNS
from agenticrun_operator.run_metrics import SERIES, run_registry
from agenticrun_workers.driver.progress import headline_metrics
from operator_world import NAME, NAMESPACE, Operator, World, training

Labels = dict[str, str]


def scraped(operator: Operator) -> dict[str, list[tuple[Labels, float]]]:
    """Return the samples by name, without the labels of the run."""
    text = generate_latest(run_registry(operator.reconciler.run_states())).decode()
    found: dict[str, list[tuple[Labels, float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("namespace"), labels.pop("run")) == (NAMESPACE, NAME)
            found.setdefault(sample.name, []).append((labels, sample.value))
    return found


async def test_a_run_that_trains_has_its_numbers(world: World, operator: Operator) -> None:
    figures = {"tokens_per_second": 1234.5, "staleness": 0.25, "reward": 0.000123}
    names = {"rollout/idle/env": 0.5, "no/dashboard/shows": 1.0}
    await training(operator, 1, metrics=names, **figures)
    found = scraped(operator)
    assert found["agenticrun_run_phase"] == [({"phase": "Running"}, 1)]
    assert found["agenticrun_run_activity"] == [({"activity": "training"}, 1)]
    assert found["agenticrun_run_step"] == [({}, 1)]
    for name, value in figures.items():
        assert found[f"agenticrun_run_{name}"] == [({}, value)], "not rounded as in the status"
    assert found["agenticrun_run_metric"] == [({"name": "rollout/idle/env"}, 0.5)]
    assert ({"type": "Training", "status": "True", "reason": "DriverRunning"}, 1) in found[
        "agenticrun_run_condition"
    ]
    assert ({"role": "driver"}, 1) in found["agenticrun_run_ready_pods"]
    assert found["agenticrun_run_restarts_total"] == [({}, 0)]
    assert found["agenticrun_run_disruptions_total"] == [({}, 0)]


async def test_the_last_numbers_stay_while_a_driver_starts_again(
    world: World, operator: Operator
) -> None:
    await training(operator, 1, staleness=0.5)
    world.end_driver(None)
    await operator.settle(4)
    found = scraped(operator)
    assert found["agenticrun_run_staleness"] == [({}, 0.5)]
    assert found["agenticrun_run_restarts_total"] == [({}, 1)]
    assert found["agenticrun_run_failures_without_progress"] == [({}, 1)]


async def test_a_run_that_has_ended_keeps_what_is_about_its_end(
    world: World, operator: Operator
) -> None:
    await training(operator, 1, staleness=0.5, metrics={"time/step": 1.0})
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(10)
    found = scraped(operator)
    assert found["agenticrun_run_phase"] == [({"phase": "Succeeded"}, 1)]
    assert {labels["type"] for labels, _ in found["agenticrun_run_condition"]} == {
        "Complete",
        "Failed",
    }
    assert found["agenticrun_run_completion_timestamp_seconds"][0][1] > 1.7e9
    gone = {"staleness", "metric", "pods", "ready_pods", "gpus", "activity", "step_seconds"}
    gone.add("failures_without_progress")
    assert not {f"agenticrun_run_{name}" for name in gone} & set(found)


async def test_a_suspended_run_has_no_numbers_of_steps(world: World, operator: Operator) -> None:
    await training(operator, 1, reward=0.5, tokens_per_second=100.0, metrics={"time/step": 1.0})
    world.change_run(("suspend", True))
    await operator.settle()
    world.end_driver(Outcome.STOPPED)
    await operator.settle()
    world.collect_garbage()
    await operator.settle()
    found = scraped(operator)
    assert found["agenticrun_run_phase"] == [({"phase": "Suspended"}, 1)]
    assert found["agenticrun_run_step"] == [({}, 1)]
    of_steps = {"reward", "tokens_per_second", "staleness", "step_seconds", "metric"}
    assert not {f"agenticrun_run_{name}" for name in of_steps} & set(found)


async def test_gpu_seconds_go_to_what_the_run_used_its_gpus_for() -> None:
    world = World()
    world.apply_run(("spec.roles.trainer", {"gpus": 8}))
    operator = Operator(world)

    async def wait(seconds: int) -> None:
        world.now += timedelta(seconds=seconds)
        await operator.reconcile()

    await operator.settle()
    await wait(100)
    used = dict(scraped(operator)["agenticrun_run_gpu_seconds_total"][0][0])
    assert used == {"role": "trainer", "use": "starting"}
    world.drive(1)
    await operator.settle(2)
    await wait(0)
    before, then = gpu_seconds(operator), world.now
    await wait(10)
    world.drive(2)
    await wait(20)
    trained = gpu_seconds(operator)["training"] - before.get("training", 0.0)
    assert trained == 8 * (world.now - then).total_seconds() >= 8 * 30
    assert gpu_seconds(operator)["starting"] == before["starting"] >= 800
    world.change_run(("suspend", True))
    await operator.settle()
    await wait(0)
    before, then = gpu_seconds(operator), world.now
    await wait(5)
    stopped = gpu_seconds(operator)["stopping"] - before["stopping"]
    assert stopped == 8 * (world.now - then).total_seconds() >= 8 * 5
    world.end_driver(Outcome.STOPPED)
    await operator.settle()
    world.collect_garbage()
    await operator.settle()
    before = gpu_seconds(operator)
    await wait(1000)
    assert gpu_seconds(operator) == before, "a suspended run holds no GPUs"
    found = scraped(operator)["agenticrun_run_phase_seconds_total"]
    assert {labels["phase"]: value for labels, value in found}["Suspended"] >= 1000


def gpu_seconds(operator: Operator) -> dict[str, float]:
    """Return the GPU-seconds of the trainers by use."""
    found = scraped(operator)["agenticrun_run_gpu_seconds_total"]
    assert {labels["role"] for labels, _ in found} == {"trainer"}
    return {labels["use"]: value for labels, value in found}


async def test_steps_that_no_checkpoint_holds_are_unsaved_and_then_lost(
    world: World, operator: Operator
) -> None:
    saved = CheckpointStatus(step=4, uri="s3://bucket/step-4", time="2026-01-01T00:00:00Z")
    await training(operator, 7, checkpoint=saved)
    found = scraped(operator)
    assert found["agenticrun_run_unsaved_steps"] == [({}, 3)]
    assert found["agenticrun_run_save_steps"] == [({}, 50)]
    assert found["agenticrun_run_lost_steps_total"] == [({}, 0)]
    world.end_driver(None)
    await operator.settle(2)
    world.now += timedelta(seconds=30)  # the backoff
    await operator.settle(4)
    assert scraped(operator)["agenticrun_run_lost_steps_total"] == [({}, 3)]


async def test_a_run_without_storage_has_no_checkpoint_that_could_be_too_old() -> None:
    world = World()
    world.apply_run(("spec.checkpoint", {"none": True}))
    operator = Operator(world)
    await training(operator, 7)
    found = scraped(operator)
    assert found["agenticrun_run_step"] == [({}, 7)]
    assert not {"agenticrun_run_save_steps", "agenticrun_run_unsaved_steps"} & set(found)


async def test_the_series_of_a_deleted_run_go(world: World, operator: Operator) -> None:
    await training(operator)
    world.delete_run()
    await operator.reconcile()
    assert scraped(operator) == {}


def unreadable() -> float:
    """Return the number of runs that the operator says that it cannot read."""
    (family,) = UNREADABLE_RUNS.collect()
    return family.samples[0].value


NONSENSE = ("model", {"nonsense": 1})
"""A change that the operator cannot read."""


async def test_a_run_that_cannot_be_read_is_counted_until_it_can(
    world: World, operator: Operator
) -> None:
    await operator.settle()
    model = world.run["spec"]["model"]
    world.change_run(NONSENSE)
    await operator.reconcile()
    assert (unreadable(), scraped(operator)) == (1, {})
    assert operator.reconciler.known_keys() == [(NAMESPACE, NAME)], "or it may miss its deletion"
    world.change_run(("model", model))
    await operator.reconcile()
    assert unreadable() == 0


async def test_a_run_with_a_damaged_status_is_counted_until_it_is_deleted(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.run["status"]["job"] = {"attempt": "one"}
    await operator.reconcile()
    assert (unreadable(), scraped(operator)) == (1, {})
    world.run["metadata"]["finalizers"] = ["example.com/keeps-it"]
    world.delete_run()
    await operator.reconcile()
    assert unreadable() == 0


async def test_a_run_that_fails_at_once_because_of_its_spec_is_a_failed_run(
    world: World, operator: Operator
) -> None:
    world.change_run(NONSENSE)  # a rule that the CRD cannot express
    await operator.settle(2)
    found = scraped(operator)
    assert unreadable() == 0
    assert found["agenticrun_run_phase"] == [({"phase": "Failed"}, 1)]
    failed = {"type": "Failed", "status": "True", "reason": "InvalidConfig"}
    assert (failed, 1) in found["agenticrun_run_condition"]
    assert len(found["agenticrun_run_completion_timestamp_seconds"]) == 1
    world.delete_run()
    await operator.reconcile()
    assert scraped(operator) == {}


async def test_an_ended_run_that_cannot_be_read_any_more_keeps_its_series(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(10)
    before = scraped(operator)
    world.change_run(NONSENSE)
    await operator.settle(2)
    assert (unreadable(), scraped(operator)) == (0, before)


def test_names_follow_the_conventions_of_prometheus() -> None:
    for series in SERIES:
        assert series.name.startswith("agenticrun_run_")
        assert not series.name.endswith(("_total", "_count", "_sum", "_bucket")), series.name
        assert series.help.endswith(".")
        assert not {"namespace", "run", "job", "instance"} & set(series.labels)


def test_a_snapshot_has_every_metric_that_has_a_series() -> None:
    """Even when a step has far more metrics than a snapshot may have."""
    others = {
        f"{group}/some_{n}": 1.0 for group in ("actor", "env/Lake", "val/Lake") for n in range(40)
    }
    others |= {f"rollout/{word}": 1.0 for word in ("aborted_tokens", "discarded", "engine_busy")}
    kept = headline_metrics(others | dict.fromkeys(STEP_METRICS, 2.0))
    assert set(STEP_METRICS) <= set(kept)


async def test_the_metrics_of_a_run_that_has_ended_are_those_after_a_restart(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(10)
    before = scraped(operator)
    operator.upgrade(operator.images)
    await operator.reconcile()
    assert scraped(operator) == before
