"""A run from creation to end, on fake clients: the status in each phase and after faults."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from agenticrun_api import Activity, ConditionType, Outcome, Phase, Role
from agenticrun_api.names import KIND, LABEL_ROLE, LABEL_RUN_UID, ExitCode
from agenticrun_api.status import CheckpointStatus
from agenticrun_api.version import __version__
from agenticrun_operator.errors import Denied, Refused
from agenticrun_operator.planning.times import format_time
from agenticrun_operator.resources import WorkerImages, images_in
from operator_world import IMAGE, NAME, Operator, World, condition, happened, training


def phase(world: World) -> Phase:
    return world.status.phase


async def test_children_are_made_before_the_cluster_that_mounts_them(
    world: World, operator: Operator
) -> None:
    await operator.reconcile()
    created = [request for request in world.requests if request.startswith("create ")]
    assert created == [
        "create Secret",
        "create ConfigMap",
        "create PersistentVolumeClaim",
        "create RayCluster",
    ]
    assert phase(world) is Phase.STARTING
    assert world.status.progress == "0/2"


async def test_a_worker_image_of_an_unsupported_version_is_reported_once_and_trains_on(
    world: World, operator: Operator
) -> None:
    await training(operator, version="9.9.0")
    for step in (1, 2):
        world.drive(step, version="9.9.0", max_steps=9)
        await operator.settle(3)
    accepted = condition(world, ConditionType.ACCEPTED)
    assert (accepted.status, accepted.reason) == ("Unknown", "VersionSkew")
    assert "AgenticRun 9.9.0" in accepted.message
    assert happened(world).count("VersionSkew") == 1
    assert phase(world) is Phase.RUNNING
    assert world.status.job is not None
    assert world.status.job.version == "9.9.0"
    world.drive(3, version=__version__, max_steps=9)
    await operator.settle(3)
    assert condition(world, ConditionType.ACCEPTED).status == "True"


async def test_pods_with_different_commits_of_a_branch_that_moved_are_reported_once(
    world: World, operator: Operator
) -> None:
    await training(operator)

    def fetched(commit: str, pods: slice) -> None:
        for pod in world.pods()[pods]:
            pod["spec"]["initContainers"] = [{"name": "fetch-code", "image": IMAGE}]
            state = {"terminated": {"exitCode": 0, "message": commit * 40}}
            pod["status"]["initContainerStatuses"] = [{"name": "fetch-code", "state": state}]

    fetched("a", slice(None))
    await operator.settle(2)
    assert "CodeDiffers" not in happened(world)
    fetched("b", slice(1))
    for _ in range(3):
        await operator.settle(2)
    ready = condition(world, ConditionType.ROLES_READY)
    assert (ready.status, ready.reason) == ("True", "CodeDiffers")
    assert "pods have different commits of spec.code.git: " in ready.message
    assert {"aaaaaaaaaaaa (", "bbbbbbbbbbbb ("} <= {word + " (" for word in ready.message.split()}
    assert happened(world).count("CodeDiffers") == 1
    assert phase(world) is Phase.RUNNING


MAX_STEPS = "pipeline.maxSteps"


async def test_changed_settings_reach_a_driver_that_trains(
    world: World, operator: Operator
) -> None:
    await training(operator, observed_generation=1)
    assert "configure" not in world.requests
    world.change_run((MAX_STEPS, 9))
    await operator.settle(2)
    assert world.status.max_steps == 2
    world.drive(2)
    await operator.settle(3)
    assert world.status.max_steps == 9
    assert world.status.job is not None
    assert (world.status.job.attempt, world.status.job.observed_generation) == (1, 2)
    assert happened(world).count("Configured") == 1
    assert phase(world) is Phase.RUNNING


async def test_changed_settings_reach_the_driver_of_a_new_cluster_before_it_starts(
    world: World, operator: Operator
) -> None:
    await training(operator, observed_generation=1)
    world.change_run((MAX_STEPS, 9))
    world.delete_pod(Role.DRIVER)
    await operator.settle()
    world.now += timedelta(seconds=30)
    await operator.settle()
    assert world.requests.index("configured") < len(world.requests) - 1
    last_submit = max(i for i, what in enumerate(world.requests) if what == "submitted")
    assert "configured" in world.requests[:last_submit]
    world.drive(2)
    await operator.settle(2)
    assert (world.status.max_steps, phase(world)) == (9, Phase.RUNNING)


async def test_a_driver_that_ends_before_it_sees_more_steps_goes_on_with_the_next_attempt(
    world: World, operator: Operator
) -> None:
    await training(operator, observed_generation=1)
    saved = CheckpointStatus(step=2, uri="/checkpoints/step-2", time=format_time(world.now))
    world.drive(2, observed_generation=1, checkpoint=saved)
    await operator.settle(1)
    world.end_driver(Outcome.SUCCEEDED)
    world.change_run((MAX_STEPS, 9))
    await operator.settle(2)
    assert (phase(world), world.status.failures_without_progress) == (Phase.RESTARTING, 0)
    world.now += timedelta(seconds=30)
    await operator.settle()
    assert [job.attempt for job in world.jobs] == [1, 2]
    assert world.configs
    # The second attempt finds that the learning rate is 0, so that more steps make no sense.
    world.drive(2, checkpoint=saved)
    await operator.settle(2)
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(2)
    world.now += timedelta(minutes=1)
    await operator.settle(2)
    assert phase(world) is Phase.SUCCEEDED
    assert (world.status.step, world.status.max_steps, len(world.jobs)) == (2, 9, 2)
    assert world.status.message == "the driver's words"


async def test_without_a_checkpoint_steps_that_come_too_late_do_not_begin_again_at_step_0(
    world: World, operator: Operator
) -> None:
    await training(operator, observed_generation=1)
    world.end_driver(Outcome.SUCCEEDED)
    world.change_run((MAX_STEPS, 9))
    await operator.settle(2)
    assert phase(world) is Phase.SUCCEEDED


async def test_settings_are_sent_once_until_the_driver_has_had_time_for_a_step(
    world: World, operator: Operator
) -> None:
    await training(operator, observed_generation=1)
    world.change_run((MAX_STEPS, 9))
    for _ in range(10):
        world.drive(1, observed_generation=1)  # still in the step that it had begun
        await operator.settle(1)
    assert world.requests.count("configure") == 1
    world.now += timedelta(seconds=30)
    world.drive(1, observed_generation=1)
    await operator.settle(1)
    assert world.requests.count("configure") == 2


async def test_a_driver_that_never_sends_a_snapshot_is_stalled(
    world: World, operator: Operator
) -> None:
    await operator.settle()
    for job in world.live_jobs():
        job.status = "RUNNING"
    await operator.settle(2)
    assert phase(world) is Phase.RUNNING
    world.now += timedelta(seconds=1801)
    await operator.settle(2)
    stalled = condition(world, ConditionType.STALLED)
    assert (stalled.status, stalled.reason) == ("True", "NoProgress")
    assert "no snapshot from the driver for more than 30m" in stalled.message


async def test_the_time_before_an_attempt_does_not_make_its_start_late(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.change_run(("suspend", True))
    await operator.settle(3)
    world.end_driver(Outcome.STOPPED)
    await operator.settle(4)
    world.now += timedelta(hours=8)
    world.change_run(("suspend", False))
    for _ in range(10):
        await operator.settle(1)
        for job in world.live_jobs():
            job.status = "RUNNING"
    assert phase(world) is Phase.RUNNING
    assert condition(world, ConditionType.STALLED).status == "False"


async def test_an_older_driver_is_sent_no_settings(world: World, operator: Operator) -> None:
    await training(operator)
    world.change_run((MAX_STEPS, 9))
    await operator.settle(3)
    assert "configure" not in world.requests
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(3)
    assert phase(world) is Phase.SUCCEEDED


async def test_a_driver_of_the_release_that_tells_no_version_is_accepted(
    world: World, operator: Operator
) -> None:
    await training(operator)
    assert world.status.job is not None
    assert world.status.job.version is None
    assert all(item.type != "Accepted" for item in world.status.conditions)


async def test_nothing_is_submitted_before_every_role_is_ready(
    world: World, operator: Operator
) -> None:
    await operator.reconcile()
    world.make_pods(ready=False)
    await operator.reconcile()
    assert world.jobs == []
    assert world.status.job is None
    assert condition(world, ConditionType.ROLES_READY).status == "False"
    world.make_pods()
    await operator.reconcile()
    assert [job.attempt for job in world.jobs] == [1]


async def test_the_attempt_is_stored_before_it_is_submitted(
    world: World, operator: Operator
) -> None:
    await operator.settle()
    assert world.requests.index("submit") > max(
        index
        for index, name in enumerate(world.requests[: world.requests.index("submit")])
        if name == "wrote status"
    )
    assert world.status.job is not None
    assert world.status.job.submission_id == world.jobs[0].submission_id
    assert world.status.job.incarnation == world.incarnation()


async def test_conditions_are_in_the_order_of_a_runs_life(world: World, operator: Operator) -> None:
    await training(operator, version="0.9.0")
    assert [item.type for item in world.status.conditions] == [
        "Accepted",
        "ClusterProvisioned",
        "RolesReady",
        "Training",
        "Progressing",
        "Stalled",
        "Complete",
        "Failed",
    ]


async def test_a_step_shows_in_the_status(world: World, operator: Operator) -> None:
    await training(
        operator,
        1,
        reward=0.25,
        tokens_per_second=1234.5,
        staleness=0.0,
        metrics={"val/success": 0.5},
    )
    status = world.status
    assert (status.step, status.progress, status.reward) == (1, "1/2", "0.250")
    assert (status.tokens_per_second, status.staleness, status.eta) == ("1234", "0.00", "3s")
    assert [(metric.name, metric.value) for metric in status.metrics] == [("val/success", "0.5")]
    assert condition(world, ConditionType.TRAINING).status == "True"


async def test_the_status_tells_the_first_metrics_of_the_snapshot(
    world: World, operator: Operator
) -> None:
    metrics = {f"m{place:02}": 1.0 for place in reversed(range(40))}
    await training(operator, 1, metrics=metrics)
    assert [metric.name for metric in world.status.metrics] == [
        f"m{place}" for place in range(24, 40)
    ]


async def test_what_the_driver_says_shows_as_the_message(world: World, operator: Operator) -> None:
    await training(operator, 0, activity=Activity.WARMUP, message="10 of 150 batches")
    assert (world.status.activity, world.status.message) == ("warm-up", "10 of 150 batches")


async def test_nothing_new_is_not_written(world: World, operator: Operator) -> None:
    await training(operator)
    before = world.status_writes
    for _ in range(30):
        world.now += timedelta(seconds=2)
        await operator.reconcile(changed=False)
    assert world.status_writes == before


async def test_a_light_look_asks_the_apiserver_for_nothing(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.requests.clear()
    world.now += timedelta(seconds=2)
    await operator.reconcile(changed=False)
    assert world.requests == ["get job", "get progress"]


async def test_changes_between_steps_are_written_every_ten_seconds_at_most(
    world: World, operator: Operator
) -> None:
    await training(operator)
    before = world.status_writes
    for second in range(30):
        world.now += timedelta(seconds=1)
        world.drive(1, tokens_per_second=float(second))
        await operator.reconcile(changed=False)
    assert 2 <= world.status_writes - before <= 3


async def test_a_step_is_written_at_once(world: World, operator: Operator) -> None:
    await training(operator)
    world.drive(2)
    await operator.reconcile(changed=False)
    assert world.status.step == 2
    assert world.status.last_update_time == format_time(world.now)


async def test_fast_steps_are_written_every_two_seconds_and_the_newest_is_not_lost(
    world: World, operator: Operator
) -> None:
    await training(operator, max_steps=100)
    before = world.status_writes
    for half_second in range(60):
        world.now += timedelta(seconds=0.5)
        world.drive(2 + half_second, max_steps=100)
        await operator.reconcile(changed=False)
    assert 13 <= world.status_writes - before <= 16
    world.drive(99, max_steps=100)
    delay = await operator.reconcile(changed=False)
    assert delay is not None
    assert delay <= 2, "a write that waits is planned"
    world.now += timedelta(seconds=delay)
    await operator.reconcile(changed=False)
    assert world.status.step == 99


async def test_a_report_of_success_completes_the_run_and_deletes_the_cluster(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(5)
    assert phase(world) is Phase.SUCCEEDED
    assert condition(world, ConditionType.COMPLETE).status == "True"
    assert condition(world, ConditionType.CLUSTER_PROVISIONED).reason == "ClusterDeleted"
    assert ("RayCluster", NAME) not in world.objects
    assert happened(world) == [
        "ClusterCreated",
        "PodsReady",
        "DriverRunning",
        "RunSucceeded",
        "ClusterDeleted",
    ]


async def test_a_driver_gets_time_to_exit_before_its_cluster_goes(
    world: World, operator: Operator
) -> None:
    await training(operator)
    job = world.jobs[0]
    world.end_driver(Outcome.SUCCEEDED)
    job.status = "RUNNING"
    await operator.settle(10)
    assert phase(world) is Phase.SUCCEEDED
    assert ("RayCluster", NAME) in world.objects
    job.status = "SUCCEEDED"
    await operator.settle(2)
    assert ("RayCluster", NAME) not in world.objects
    assert world.status.job is not None
    assert world.status.job.status == "SUCCEEDED"


async def test_the_cluster_is_kept_where_the_run_says_so() -> None:
    world = World()
    world.apply_run(("spec.cleanup", {"onSuccess": "Keep"}))
    operator = Operator(world)
    await training(operator)
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(5)
    assert ("RayCluster", NAME) in world.objects


async def test_the_end_is_seen_by_an_operator_that_was_down_around_it(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.end_driver(Outcome.SUCCEEDED)
    world.now += timedelta(minutes=5)
    await Operator(world).settle(3)
    assert phase(world) is Phase.SUCCEEDED
    assert world.status.message == "the driver's words"


async def test_a_failure_that_cannot_pass_is_not_retried(world: World, operator: Operator) -> None:
    await training(operator)
    world.end_driver(Outcome.FAILED, retryable=False)
    await operator.settle(5)
    assert phase(world) is Phase.FAILED
    assert (
        condition(world, ConditionType.FAILED).reason,
        condition(world, ConditionType.FAILED).message,
    ) == ("Told", "the driver's words")
    assert len(world.jobs) == 1


async def test_the_exit_code_of_a_bad_configuration_is_not_retried(
    world: World, operator: Operator
) -> None:
    await operator.settle()
    world.end_driver(None, exit_code=64)
    await operator.settle(3)
    assert phase(world) is Phase.FAILED
    assert condition(world, ConditionType.FAILED).reason == "InvalidConfig"


async def test_a_killed_driver_is_submitted_again_on_the_same_cluster_after_a_backoff(
    world: World, operator: Operator
) -> None:
    await training(operator)
    cluster = world.objects["RayCluster", NAME]["metadata"]["uid"]
    world.end_driver(None, exit_code=-9)
    await operator.reconcile()
    assert phase(world) is Phase.RESTARTING
    assert world.status.restarts == 1
    assert world.status.log_tail == "the last line"
    await operator.settle(5)
    assert len(world.jobs) == 1, "the backoff is not over"
    world.now += timedelta(seconds=10)
    await operator.settle(2)
    assert [job.attempt for job in world.jobs] == [1, 2]
    assert world.objects["RayCluster", NAME]["metadata"]["uid"] == cluster
    world.drive(1)
    await operator.settle(1)
    assert phase(world) is Phase.RUNNING


async def test_the_backoff_doubles_and_survives_a_restart_of_the_operator(world: World) -> None:
    waits = []
    for attempt in (1, 2):
        operator = Operator(world)
        await operator.settle(8)
        assert len(world.jobs) == attempt
        world.end_driver(None)
        failed_at = world.now
        await operator.reconcile()
        while len(world.jobs) == attempt:
            assert phase(world) is Phase.RESTARTING
            await Operator(world).settle(1)
        waits.append((world.now - failed_at).total_seconds())
    assert waits == pytest.approx([10, 20], abs=2)


async def test_restarts_run_out(world: World, operator: Operator) -> None:
    for _ in range(3):
        await operator.settle(3)
        world.end_driver(None)
        await operator.settle(2)
        world.now += timedelta(minutes=1)
    assert phase(world) is Phase.FAILED
    assert condition(world, ConditionType.FAILED).reason == "RetriesExhausted"
    assert len(world.jobs) == 3


async def attempt_ends(operator: Operator, step: int, outcome: Outcome | None = None) -> None:
    """Let the next attempt reach a step and end there."""
    world = operator.world
    world.now += timedelta(minutes=11)
    await operator.settle(3)
    world.drive(step)
    await operator.settle(1)
    world.end_driver(outcome)
    await operator.settle(2)


async def test_only_failures_without_a_new_step_count(world: World, operator: Operator) -> None:
    world.run["spec"]["pipeline"]["maxSteps"] = 100
    for step in (5, 10, 20, 30, 40):
        await attempt_ends(operator, step)
        assert phase(world) is Phase.RESTARTING
    status = world.status
    assert (status.restarts, status.failures_without_progress) == (5, 1)
    for step in (35, 40):  # resumed from a checkpoint, it gets no further
        await attempt_ends(operator, step)
    assert phase(world) is Phase.FAILED
    failed = condition(world, ConditionType.FAILED)
    assert failed.reason == "RetriesExhausted"
    assert "after 2 restarts without a new step" in failed.message
    assert world.status.restarts == 6


async def test_an_orderly_stop_is_a_restart_but_no_failure(
    world: World, operator: Operator
) -> None:
    for _ in range(5):
        await attempt_ends(operator, 1, Outcome.STOPPED)
        assert phase(world) is Phase.RESTARTING
    assert (world.status.restarts, world.status.failures_without_progress) == (5, 0)
    for _ in range(3):
        await attempt_ends(operator, 1)
    assert phase(world) is Phase.FAILED


async def test_progress_between_a_failure_and_an_orderly_stop_counts(
    world: World, operator: Operator
) -> None:
    world.run["spec"]["pipeline"]["maxSteps"] = 100
    for step, outcome in ((5, None), (5, None), (9, Outcome.STOPPED), (9, None)):
        await attempt_ends(operator, step, outcome)
    assert (world.status.restarts, world.status.failures_without_progress) == (4, 1)


async def test_restarts_before_an_upgrade_from_version_0_1_0_do_not_count(
    world: World, operator: Operator
) -> None:
    for step in (5, 10):
        await attempt_ends(operator, step)
    for field in ("failuresWithoutProgress", "restartedAtStep"):
        del world.run["status"][field]  # which restarts got further, that version did not tell
    await attempt_ends(operator, 10)
    assert phase(world) is Phase.RESTARTING
    assert (world.status.restarts, world.status.failures_without_progress) == (3, 1)


async def test_a_driver_that_stopped_on_request_did_not_fail_although_its_report_is_lost(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.end_driver(None, exit_code=ExitCode.STOPPED)
    await operator.settle(2)
    assert phase(world) is Phase.RESTARTING
    assert (world.status.restarts, world.status.failures_without_progress) == (1, 0)


async def test_a_wrong_image_can_be_corrected_until_the_first_attempt(
    world: World, operator: Operator
) -> None:
    operator.upgrade(WorkerImages("wrong:1", {}))
    await operator.settle(1)
    assert {role.image for role in world.status.roles} == {"wrong:1"}
    operator.upgrade(WorkerImages(IMAGE, {}))
    world.delete_cluster()
    world.collect_garbage()
    await operator.settle(1)
    assert set(images_in(world.objects["RayCluster", NAME]).values()) == {IMAGE}
    assert {role.image for role in world.status.roles} == {IMAGE}


async def test_a_deleted_head_is_a_disruption_and_ends_in_a_new_attempt(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.delete_pod(Role.DRIVER)
    await operator.reconcile()
    assert phase(world) is Phase.RESTARTING
    assert "Disrupted" in happened(world)
    assert (world.status.restarts, world.status.disruptions) == (0, 1)
    assert world.status.failures_without_progress == 0
    world.now += timedelta(seconds=11)
    await operator.settle(3)
    assert [job.attempt for job in world.jobs] == [1, 2]
    assert world.status.job is not None
    assert world.status.job.disruption == ""
    assert world.status.job.incarnation == world.incarnation()


async def test_a_head_that_restarted_after_the_final_report_does_not_repeat_the_run(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.end_driver(Outcome.SUCCEEDED)
    world.restart_head_container()
    await operator.settle(2)
    assert phase(world) is Phase.SUCCEEDED


async def test_a_deleted_cluster_is_made_again(world: World, operator: Operator) -> None:
    await training(operator)
    del world.objects["RayCluster", NAME]
    world.collect_garbage()
    await operator.settle(1)
    world.now += timedelta(seconds=11)
    await operator.settle(4)
    assert [job.attempt for job in world.jobs] == [1, 2]


async def test_unreachable_progress_is_no_failure(world: World, operator: Operator) -> None:
    await training(operator)
    world.reporter_down = world.ray_down = True
    for _ in range(100):
        await operator.settle(1)
        world.now += timedelta(seconds=9)
    assert phase(world) is Phase.RUNNING
    training_now = condition(world, ConditionType.TRAINING)
    assert (training_now.status, training_now.reason) == ("Unknown", "ProgressUnavailable")
    world.reporter_down = world.ray_down = False
    await operator.settle(2)
    assert condition(world, ConditionType.TRAINING).status == "True"


@pytest.mark.parametrize(("saved", "then"), [(1, Phase.RESTARTING), (2, Phase.SUCCEEDED)])
async def test_exit_code_0_without_a_report_is_success_only_with_a_checkpoint_of_the_last_step(
    world: World, operator: Operator, saved: int, then: Phase
) -> None:
    checkpoint = CheckpointStatus(step=saved, uri="file:///c", time=format_time(world.now))
    await training(operator, checkpoint=checkpoint)
    world.reporter_down = True
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(10)
    assert phase(world) is Phase.RUNNING, "the report may still come"
    world.now += timedelta(seconds=60)
    await operator.settle(1)
    assert phase(world) is then
    if then is Phase.RESTARTING:
        assert "exit code 0" in (world.status.message or "")
        assert "step 1 of 2" in (world.status.message or "")
        assert ("RayCluster", NAME) in world.objects


async def test_the_wait_for_the_report_begins_when_the_job_ends(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.reporter_down = True
    await operator.settle(1)
    assert condition(world, ConditionType.TRAINING).status == "Unknown"
    world.now += timedelta(minutes=10)  # it was away long before the job ended
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(2)
    assert phase(world) is Phase.RUNNING
    assert world.status.job is not None
    assert world.status.job.end_time is not None
    world.reporter_down = False
    await operator.settle(1)
    assert phase(world) is Phase.SUCCEEDED


async def test_progress_of_an_earlier_attempt_is_ignored(world: World, operator: Operator) -> None:
    await training(operator, 2)
    world.end_driver(Outcome.FAILED)
    await operator.settle(2)
    world.now += timedelta(seconds=11)
    await operator.settle(30)
    assert len(world.jobs) == 2
    assert world.live_jobs(), "the first attempt's report must not end the second"
    assert world.status.step == 2
    assert phase(world) is Phase.RESTARTING


async def test_a_failed_driver_that_does_not_exit_is_stopped_before_the_next_attempt(
    world: World, operator: Operator
) -> None:
    await training(operator)
    job = world.jobs[0]
    world.end_driver(Outcome.FAILED)
    job.status = "RUNNING"
    for _ in range(60):
        await operator.settle(1)
        assert len(world.live_jobs()) <= 1
    assert job.status == "STOPPED"
    assert [item.attempt for item in world.jobs] == [1, 2]


@pytest.mark.parametrize(
    "ahead", [timedelta(0), timedelta(hours=1)], ids=["clocks agree", "the driver's is ahead"]
)
async def test_a_driver_whose_first_report_is_the_final_one_gets_time_to_exit(
    world: World, operator: Operator, ahead: timedelta
) -> None:
    """The time since Training became False says nothing about the exit if it never became True."""
    await operator.settle(15)
    (job,) = world.jobs
    world.now += ahead
    world.end_driver(Outcome.FAILED)
    world.now -= ahead
    job.status = "RUNNING"
    await operator.settle(20)
    assert job.status == "RUNNING"
    job.status = "FAILED"
    await operator.settle(2)
    assert phase(world) is Phase.RESTARTING
    assert condition(world, ConditionType.TRAINING).reason == "Told"


async def test_a_submission_that_reaches_a_restarted_head_is_stopped_before_the_next_attempt(
    world: World, operator: Operator
) -> None:
    await operator.reconcile()
    world.make_pods()
    world.interruption = ("submit", world.restart_head_container)
    await operator.reconcile()
    assert [(job.attempt, job.live) for job in world.jobs] == [(1, True)]
    assert world.status.job is not None
    assert world.status.job.incarnation != world.jobs[0].incarnation
    for _ in range(30):
        await operator.settle(1)
        assert len(world.live_jobs()) <= 1
    assert [(job.attempt, job.status) for job in world.jobs] == [(1, "STOPPED"), (2, "PENDING")]


async def test_the_same_name_again_waits_for_the_earlier_run_and_starts_fresh(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.delete_run()
    world.apply_run()
    await operator.reconcile()
    assert phase(world) is Phase.PENDING
    assert condition(world, ConditionType.CLUSTER_PROVISIONED).reason == "WaitingForPreviousRun"
    for pod in world.pods():
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"  # until its grace period ends
    world.collect_garbage()
    await operator.reconcile()
    assert phase(world) is Phase.PENDING, "the earlier run's pods would be counted as ours"
    for pod in world.pods():
        del world.objects["Pod", pod["metadata"]["name"]]
    await operator.settle()
    assert world.status.job is not None
    assert world.status.job.attempt == 1


async def test_someone_elses_object_is_never_taken_over(world: World, operator: Operator) -> None:
    theirs = {
        "kind": "ConfigMap",
        "metadata": {"name": f"{NAME}-run", "namespace": "team"},
        "data": {"theirs": "1"},
    }
    await world.create(theirs)
    await operator.settle(3)
    assert phase(world) is Phase.PENDING
    assert condition(world, ConditionType.CLUSTER_PROVISIONED).reason == "NameConflict"
    assert world.objects["ConfigMap", f"{NAME}-run"]["data"] == {"theirs": "1"}
    assert ("RayCluster", NAME) not in world.objects
    assert happened(world) == ["NameConflict"]
    del world.objects["ConfigMap", f"{NAME}-run"]
    await operator.settle()
    assert world.jobs


@pytest.mark.parametrize(("own", "default"), [(100, None), (None, 100), (100, 5)])
async def test_a_finished_run_is_deleted_when_its_time_is_over(
    own: int | None, default: int | None
) -> None:
    world = World()
    world.apply_run(*([("spec.ttlSecondsAfterFinished", own)] if own else []))
    operator = Operator(world)
    operator.default_ttl = default
    operator.upgrade(operator.images)
    await training(operator)
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(5)
    delay = await operator.reconcile()
    assert delay is not None
    assert 80 <= delay <= 100
    world.now += timedelta(seconds=100)
    await operator.reconcile()
    assert ("AgenticRun", NAME) not in world.objects


async def test_a_spec_that_only_the_crd_accepts_fails_with_the_path(
    world: World, operator: Operator
) -> None:
    world.run["spec"]["pipeline"]["trainEnvs"]["groupSize"] = "many"
    await operator.reconcile()
    assert world.run["status"]["phase"] == "Failed"
    assert world.run["status"]["message"].startswith("spec.pipeline.trainEnvs.groupSize: ")


async def test_a_driver_that_starts_does_not_take_back_the_last_attempts_numbers(
    world: World, operator: Operator
) -> None:
    await training(operator, 2, reward=0.75)
    world.end_driver(None)
    await operator.settle(2)
    world.now += timedelta(seconds=11)
    await operator.settle(2)
    world.drive(0, activity=Activity.STARTING, reward=None)
    await operator.settle(1)
    assert world.status.job is not None
    assert world.status.job.attempt == 2
    assert (world.status.progress, world.status.reward, world.status.activity) == (
        "2/2",
        "0.750",
        "starting",
    )
    world.drive(1, reward=0.5)
    await operator.settle(3)
    assert world.status.progress == "1/2", "the checkpoint it went on from"


async def test_a_driver_that_could_not_start_leaves_the_steps_alone(
    world: World, operator: Operator
) -> None:
    await operator.settle()
    world.drive(0, max_steps=0)
    world.end_driver(Outcome.FAILED, retryable=False)
    await operator.settle(2)
    assert (world.status.phase, world.status.progress) == (Phase.FAILED, "0/2")


async def test_a_changed_spec_touches_no_child_of_a_running_run(
    world: World, operator: Operator
) -> None:
    await training(operator)
    before = {key: item for key, item in world.objects.items() if key[0] != KIND}
    world.requests.clear()
    world.run["spec"]["failurePolicy"]["maxRestarts"] = 0
    world.run["metadata"] |= {"generation": 2, "resourceVersion": "changed"}
    await operator.settle(3)
    assert world.status.observed_generation == 2
    assert {key: item for key, item in world.objects.items() if key[0] != KIND} == before
    world.end_driver(Outcome.FAILED)
    await operator.settle(2)
    assert condition(world, ConditionType.FAILED).reason == "RetriesExhausted", (
        "it has taken effect"
    )


async def test_what_the_apiserver_refuses_fails_the_run_with_its_words(
    world: World, operator: Operator
) -> None:
    world.create_errors["RayCluster"] = Refused(
        'unknown field "spec.workerGroupSpecs[0].template.spec.tolerations[0].kee"'
    )
    await operator.settle(2)
    assert phase(world) is Phase.FAILED
    assert condition(world, ConditionType.FAILED).reason == "InvalidConfig"
    assert "tolerations[0].kee" in (world.status.message or "")


async def test_a_run_whose_engine_no_image_has_waits_and_says_what_to_set(
    world: World, operator: Operator
) -> None:
    world.run["spec"]["pipeline"]["actorInfer"]["strategy"] = {"name": "vllm"}
    await operator.settle(3)
    assert phase(world) is Phase.PENDING
    assert condition(world, ConditionType.CLUSTER_PROVISIONED).reason == "NoEngineImage"
    assert "no worker image with vllm is configured: set the chart's value images.workers.vllm" in (
        world.status.message or ""
    )
    assert happened(world) == ["NoEngineImage"]
    assert ("RayCluster", NAME) not in world.objects


async def test_engines_that_do_not_fit_their_pods_fail_the_run_before_it_has_any(
    world: World, operator: Operator
) -> None:
    world.run["spec"]["pipeline"]["actorInfer"]["strategy"] = {
        "name": "sglang",
        "config": {"tp_size": 2},
    }
    world.run["spec"]["roles"]["inference"]["gpus"] = 3
    await operator.settle(2)
    status = world.run["status"]
    assert status["phase"] == "Failed"
    assert status["message"].startswith("spec.roles.inference.gpus: an engine takes 2 GPUs")
    assert {item["reason"] for item in status["conditions"]} == {"InvalidConfig"}
    assert ("RayCluster", NAME) not in world.objects


async def test_what_the_apiserver_denies_is_shown_and_tried_again(
    world: World, operator: Operator
) -> None:
    world.create_errors["RayCluster"] = Denied("exceeded quota: no more RayClusters")
    await operator.settle(3)
    assert not world.status.phase.finished
    assert (
        condition(world, ConditionType.CLUSTER_PROVISIONED).message
        == "exceeded quota: no more RayClusters"
    )
    writes = world.status_writes
    await operator.settle(3)
    assert world.status_writes == writes, "the same trouble is not written again"
    world.create_errors.clear()
    await operator.settle()
    assert world.jobs
    assert world.status.message is None


async def test_a_submission_that_fails_shows_why_and_is_repeated_under_the_same_id(
    world: World, operator: Operator
) -> None:
    await operator.reconcile()
    world.make_pods()
    world.submit_down = True
    await operator.settle(3)
    assert condition(world, ConditionType.TRAINING).message.endswith("Ray did not take the job")
    assert world.status.job is not None
    assert world.status.job.attempt == 1
    world.submit_down = False
    await operator.settle(6)
    assert [job.attempt for job in world.jobs] == [1]


@pytest.mark.parametrize("field", ["spec", "spec.pipeline", "status", "status.job"])
async def test_fields_of_a_newer_crd_are_ignored(
    world: World, operator: Operator, field: str
) -> None:
    await training(operator)
    place: dict[str, Any] = world.run
    for part in field.split("."):
        place = place[part]
    place["brandNew"] = {"with": ["defaults"]}
    world.drive(2)
    await operator.settle(2)
    assert (phase(world), world.status.step) == (Phase.RUNNING, 2)
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(2)
    assert phase(world) is Phase.SUCCEEDED


async def test_a_spec_that_cannot_be_read_pauses_the_run_and_touches_nothing(
    world: World, operator: Operator
) -> None:
    await training(operator)
    objects = set(world.objects)
    world.run["spec"]["pipeline"]["trainEnvs"]["groupSize"] = "many"  # a newer CRD may allow it
    await operator.settle(4)
    stored = world.run["status"]
    accepted = next(item for item in stored["conditions"] if item["type"] == "Accepted")
    assert (stored["phase"], accepted["status"]) == ("Running", "False")
    summary = next(item for item in stored["conditions"] if item["type"] == "Progressing")
    assert (summary["status"], summary["reason"]) == ("Unknown", "InvalidConfig")
    assert "spec.pipeline.trainEnvs.groupSize" in accepted["message"]
    assert happened(world).count("InvalidConfig") == 1
    assert set(world.objects) == objects
    assert len(world.live_jobs()) == 1
    world.run["spec"]["pipeline"]["trainEnvs"]["groupSize"] = 2
    world.drive(2)
    await operator.settle(2)
    assert (phase(world), world.status.step) == (Phase.RUNNING, 2)
    assert condition(world, ConditionType.ACCEPTED).status == "True"


@pytest.mark.parametrize(
    "damage",
    [
        {"startTime": "1960-01-01T00:00:00Z"},
        {"restarts": -100},
        {"conditions": [{"type": "Training"}]},
        {"completionTime": "soon", "metrics": "many"},
    ],
    ids=lambda damage: ",".join(damage),
)
async def test_a_status_that_others_damaged_is_repaired(
    world: World, operator: Operator, damage: dict[str, Any]
) -> None:
    await training(operator)
    world.run["status"] |= damage
    world.drive(2)
    await operator.settle(3)
    assert world.status.step == 2
    assert world.status.restarts == 0
    assert [job.attempt for job in world.jobs] == [1]
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(3)
    assert phase(world) is Phase.SUCCEEDED


@pytest.mark.parametrize(
    "damage",
    [{"phase": "Strolling"}, {"job": {"attempt": "one"}}, {"nextRetryTime": "soon"}],
    ids=lambda damage: ",".join(damage),
)
async def test_a_status_without_its_control_fields_pauses_the_run(
    world: World, operator: Operator, damage: dict[str, Any]
) -> None:
    await training(operator)
    before = world.run["status"] | damage
    world.run["status"] = before
    objects = set(world.objects)
    await operator.settle(3)
    assert world.run["status"] == before, "a write would lose what is left"
    assert set(world.objects) == objects
    assert [job.attempt for job in world.jobs] == [1]
    (told,) = [event for event in world.events if "status is damaged" in event.message]
    assert told.type == "Warning"


async def test_a_finished_run_of_a_newer_operator_is_not_started_again(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(4)
    world.run["status"]["phase"] = "Archived"
    await operator.settle(4)
    assert world.run["status"]["phase"] == "Archived"
    assert len(world.jobs) == 1


async def test_a_cluster_that_is_refused_after_the_run_has_trained_is_tried_again(
    world: World, operator: Operator
) -> None:
    await training(operator)
    for key in [key for key in world.objects if key[0] in ("RayCluster", "Pod")]:
        del world.objects[key]
    world.create_errors["RayCluster"] = Refused("spec.headGroupSpec: unknown")
    await operator.settle(3)
    assert phase(world) is Phase.RESTARTING
    provisioned = condition(world, ConditionType.CLUSTER_PROVISIONED)
    assert (provisioned.reason, provisioned.message) == ("Denied", "spec.headGroupSpec: unknown")
    world.create_errors.clear()
    world.now += timedelta(seconds=60)
    await operator.settle()
    assert len(world.jobs) == 2


async def test_a_crd_without_the_end_time_does_not_hold_an_ended_run(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.reporter_down = True
    world.end_driver(Outcome.FAILED)
    for _ in range(8):
        await operator.settle(1)
        (world.run["status"].get("job") or {}).pop("endTime", None)
        world.now += timedelta(seconds=9)
    assert phase(world) is Phase.RESTARTING


async def test_a_child_that_is_refused_while_the_run_trains_is_no_failure(
    world: World, operator: Operator
) -> None:
    await training(operator)
    del world.objects["ConfigMap", f"{NAME}-run"]
    world.create_errors["ConfigMap"] = Refused("spec.size: may not shrink")
    world.run["metadata"] |= {"generation": 2, "resourceVersion": "changed"}
    await operator.settle(3)
    assert phase(world) is Phase.RUNNING
    assert len(world.live_jobs()) == 1


async def test_a_job_that_ray_has_forgotten_is_a_failed_attempt_and_never_submitted_again(
    world: World, operator: Operator
) -> None:
    await training(operator)
    (first,) = world.jobs
    world.jobs.clear()
    await operator.settle(1)
    assert "DriverLost" in happened(world)
    world.now += timedelta(seconds=11)
    await operator.settle(3)
    assert [job.attempt for job in world.jobs] == [2]
    assert world.jobs[0].submission_id != first.submission_id


async def test_a_head_that_restarted_is_asked_how_the_attempt_ended_before_it_counts_as_lost(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.end_driver(Outcome.SUCCEEDED)
    world.restart_head_container()
    world.reporter_down = True
    await operator.settle(5)
    assert phase(world) is Phase.RUNNING
    world.reporter_down = False
    await operator.settle(1)
    assert phase(world) is Phase.SUCCEEDED


@pytest.mark.parametrize("conflict", [False, True])
async def test_a_head_that_restarts_between_two_looks_does_not_get_the_attempt_twice(
    world: World, operator: Operator, conflict: bool
) -> None:
    """After a conflict, the objects that decide are read before Ray is asked."""
    await operator.reconcile()
    world.make_pods()
    await operator.reconcile()
    assert [job.attempt for job in world.jobs] == [1]
    if conflict:
        world.interruption = (
            "write status",
            lambda: world.change_run(("ttlSecondsAfterFinished", 60)),
        )
        await operator.reconcile()
        assert world.interruption is None
    world.interruption = ("get job", world.restart_head_container)
    await operator.reconcile()
    assert world.interruption is None
    assert [job.attempt for job in world.jobs] == [1], (
        "Ray knew nothing because it is new, not because the attempt is"
    )
    await operator.settle()
    assert world.status.restarts == 1


@pytest.mark.parametrize(
    "labels",
    [
        {},
        {LABEL_ROLE: Role.ENV.value},
        {LABEL_ROLE: "sidecar"},
        {LABEL_ROLE: Role.DRIVER.value, LABEL_RUN_UID: "another"},
    ],
    ids=["no-role", "no-uid", "unknown-role", "another-uid"],
)
async def test_a_stray_pod_with_our_label_changes_nothing(
    world: World, operator: Operator, labels: dict[str, str]
) -> None:
    world.add_stray_pod(labels)
    await training(operator)
    world.add_stray_pod(labels)
    world.drive(2)
    await operator.settle(3)
    assert world.status.step == 2
    assert condition(world, ConditionType.CLUSTER_PROVISIONED).status == "True"
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(3)
    assert phase(world) is Phase.SUCCEEDED


async def test_a_disruption_is_counted_while_a_quota_denies_the_next_cluster(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.delete_cluster()
    world.collect_garbage()
    world.create_errors["RayCluster"] = Denied("exceeded quota: no more RayClusters")
    await operator.settle(3)
    assert (phase(world), world.status.disruptions) == (Phase.RESTARTING, 1)
    assert happened(world).count("Disrupted") == 1
    denial = condition(world, ConditionType.CLUSTER_PROVISIONED)
    assert (denial.status, denial.message) == ("False", "exceeded quota: no more RayClusters")
    assert world.status.message == "exceeded quota: no more RayClusters"
    writes = world.status_writes
    await operator.settle(3)
    assert world.status_writes == writes, "the same trouble is not written again"
    world.create_errors.clear()
    await operator.settle(2)
    assert world.status.message is None
    world.now += timedelta(seconds=11)
    await operator.settle(3)
    assert [job.attempt for job in world.jobs] == [1, 2]


async def test_a_denied_child_of_an_existing_cluster_repeats_no_event(
    world: World, operator: Operator
) -> None:
    await operator.reconcile()
    world.make_pods(ready=False)
    del world.objects["ConfigMap", f"{NAME}-run"]
    world.create_errors["ConfigMap"] = Denied("exceeded quota: no more ConfigMaps")
    await operator.reconcile()
    writes, events = world.status_writes, list(world.events)
    for _ in range(5):
        world.now += timedelta(seconds=3)
        await operator.reconcile()
    assert (world.status_writes, world.events) == (writes, events)


async def test_a_success_is_kept_although_a_child_is_refused(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.end_driver(Outcome.SUCCEEDED)
    del world.objects["ConfigMap", f"{NAME}-run"]
    world.run["metadata"] |= {"generation": 2, "resourceVersion": "changed"}
    world.create_errors["ConfigMap"] = Denied("no more ConfigMaps")
    await operator.settle(2)
    assert phase(world) is Phase.SUCCEEDED


@pytest.mark.parametrize("crd", ["this version's", "one without images in the status"])
async def test_an_upgrade_of_the_operator_does_not_change_the_image_of_a_run(
    world: World, operator: Operator, crd: str
) -> None:
    await training(operator)
    if crd != "this version's":
        for role in world.run["status"]["roles"]:
            del role["image"]
    operator.upgrade(WorkerImages("worker:2", {}))
    await operator.settle(2)
    world.delete_cluster()
    world.collect_garbage()
    await operator.settle(3)
    cluster = world.objects["RayCluster", NAME]
    assert set(images_in(cluster).values()) == {IMAGE}
    assert {role.image for role in world.status.roles} == {IMAGE}


async def test_an_engines_image_that_is_no_longer_configured_is_that_of_the_start(
    world: World, operator: Operator
) -> None:
    world.run["spec"]["pipeline"]["actorInfer"]["strategy"] = {"name": "sglang"}
    await training(operator)
    operator.upgrade(WorkerImages("worker:2", {}))
    await operator.settle(2)
    assert condition(world, ConditionType.CLUSTER_PROVISIONED).status == "True"
    found = {role.name: role.image for role in world.status.roles}
    assert (found["env"], found["inference"]) == (IMAGE, "worker-sglang:1")


async def test_pods_that_a_quota_denies_are_shown_and_told_once(
    world: World, operator: Operator
) -> None:
    world.pods_denied = 'pods "lake-env" is forbidden: exceeded quota: gpus'
    await operator.settle(5)
    ready = condition(world, ConditionType.ROLES_READY)
    assert (ready.status, ready.reason) == ("False", "PodsDenied")
    assert "exceeded quota: gpus" in ready.message
    assert happened(world).count("PodsDenied") == 1
    world.pods_denied = ""
    await training(operator)


async def test_a_run_that_waits_for_its_next_attempt_does_nothing(
    world: World, operator: Operator
) -> None:
    await training(operator, activity=Activity.ROLLOUT)
    assert world.status.activity == "rollout"
    world.end_driver(Outcome.FAILED)
    await operator.settle(1)
    assert phase(world) is Phase.RESTARTING
    waiting = world.status
    assert (waiting.activity, waiting.eta) == (None, None)


async def test_a_silent_driver_does_not_look_alive(world: World, operator: Operator) -> None:
    await training(operator)
    world.drive(1, silent_seconds=8.0, idle_seconds=8.0)
    await operator.settle(2)
    told = condition(world, ConditionType.TRAINING)
    assert (told.status, told.reason) == ("Unknown", "DriverSilent")
    writes = world.status_writes
    world.drive(1, silent_seconds=75.0, idle_seconds=75.0)
    await operator.settle(2)
    assert world.status_writes == writes, "silence is written once"
    await training(operator, silent_seconds=0.5, idle_seconds=0.5)
    assert condition(world, ConditionType.TRAINING).status == "True"


async def test_a_stall_is_reported_until_there_is_news(world: World, operator: Operator) -> None:
    slow: dict[str, Any] = {"seconds_per_step": 300.0, "silent_seconds": 0.5}
    await training(operator, **slow, idle_seconds=2999.0)
    assert condition(world, ConditionType.STALLED).reason == "Progressing"
    for _ in range(3):
        world.drive(1, **slow, idle_seconds=3001.0)
        await operator.settle(2)
    stalled = condition(world, ConditionType.STALLED)
    assert (stalled.status, stalled.reason) == ("True", "NoProgress")
    assert world.status.message == stalled.message
    assert stalled.message.startswith("no step and no other news for more than 50m")
    assert happened(world).count("NoProgress") == 1
    assert phase(world) is Phase.RUNNING
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(2)
    assert condition(world, ConditionType.STALLED).status == "False"


async def test_a_stalled_attempt_is_restarted_if_the_run_says_so(
    world: World, operator: Operator
) -> None:
    world.run["spec"]["failurePolicy"]["stall"] = {"action": "Restart", "minSeconds": 60}
    await training(operator)
    world.drive(1, idle_seconds=61.0)
    await operator.settle(1)
    assert phase(world) is Phase.RESTARTING
    assert condition(world, ConditionType.TRAINING).reason == "NoProgress"
    world.now += timedelta(seconds=11)
    await operator.settle(4)
    assert [job.attempt for job in world.jobs] == [1, 2]
    assert not world.jobs[0].live, "the first driver was stopped"
    assert condition(world, ConditionType.STALLED).status == "False"
    assert world.status.failures_without_progress == 1


async def test_a_head_that_answers_nothing_after_a_stall_is_built_again(
    world: World, operator: Operator
) -> None:
    world.run["spec"]["failurePolicy"]["stall"] = {"action": "Restart", "minSeconds": 60}
    await training(operator)
    first = world.objects["RayCluster", NAME]["metadata"]["uid"]
    world.drive(1, silent_seconds=61.0, idle_seconds=61.0)
    world.ray_down = True
    await operator.settle(1)
    assert phase(world) is Phase.RESTARTING
    for _ in range(4):
        world.now += timedelta(seconds=25)
        await operator.settle(1)
    assert world.objects["RayCluster", NAME]["metadata"]["uid"] == first
    world.now += timedelta(seconds=60)
    await operator.settle(1)
    assert ("RayCluster", NAME) not in world.objects
    world.ray_down = False
    for _ in range(10):
        world.now += timedelta(seconds=10)
        await operator.settle(1)
    assert world.objects["RayCluster", NAME]["metadata"]["uid"] != first
    assert [job.attempt for job in world.jobs] == [1, 2]
    assert len(world.live_jobs()) == 1


async def test_pods_of_a_deleted_cluster_are_not_the_runs_pods(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.delete_cluster()
    await operator.reconcile()
    assert phase(world) is Phase.RESTARTING
    assert {role.ready for role in world.status.roles} == {0}
    world.now += timedelta(seconds=11)
    await operator.settle(4)
    assert len(world.live_jobs()) == 1, "the first driver still writes its checkpoints"
    waits = condition(world, ConditionType.TRAINING).message
    assert waits.startswith("waiting until pod lake-driver-")
    world.collect_garbage()
    await operator.settle(3)
    assert [job.attempt for job in world.jobs] == [1, 2]


async def test_orphans_that_a_finalizer_holds_are_named_and_delay_the_run(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.delete_cluster()
    for pod in world.pods():
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        del pod["metadata"]["labels"][LABEL_RUN_UID]
        pod["status"]["containerStatuses"][0]["state"] = {"terminated": {"exitCode": 0}}
    orphans = world.pods()
    for job in world.live_jobs():
        job.status = "FAILED"  # the kubelet has stopped the containers
    await operator.settle(2)
    world.now += timedelta(seconds=11)
    await operator.settle(4)
    head = next(role for role in world.status.roles if role.name == "driver")
    assert head.message.startswith("0 of 1 pods ready; pod lake-driver-")
    assert head.message.endswith("is being deleted")
    for pod in orphans:
        del world.objects["Pod", pod["metadata"]["name"]]
    await operator.settle(4)
    assert [job.attempt for job in world.jobs] == [1, 2]
    world.drive(2)
    await operator.settle(2)
    assert (phase(world), world.status.step) == (Phase.RUNNING, 2)


async def test_a_final_report_that_was_seen_counts_although_the_head_is_lost_then(
    world: World, operator: Operator
) -> None:
    await training(operator)
    (job,) = world.jobs
    world.end_driver(Outcome.FAILED, retryable=False)
    job.status = "RUNNING"
    await operator.settle(1)
    world.delete_pod(Role.DRIVER)
    await Operator(world).settle(3)
    assert phase(world) is Phase.FAILED
    assert condition(world, ConditionType.FAILED).reason == "Told"
    assert len(world.jobs) == 1


async def test_a_retryable_report_that_was_seen_names_the_cause_although_the_reporter_is_gone(
    world: World, operator: Operator
) -> None:
    await training(operator)
    (job,) = world.jobs
    world.end_driver(Outcome.FAILED)
    job.status = "RUNNING"
    await operator.settle(1)
    world.reporter_down = True
    await Operator(world).settle(2)
    job.status, job.exit_code = "FAILED", 64
    await Operator(world).settle(1)
    assert phase(world) is Phase.RESTARTING
    training_now = condition(world, ConditionType.TRAINING)
    assert (training_now.reason, training_now.message) == ("Told", "the driver's words")
    assert world.status.job is not None
    assert world.status.job.report is not None
    assert world.status.job.report.outcome is Outcome.FAILED


async def test_a_report_that_version_0_1_0_saw_and_did_not_store_leaves_the_exit_code(
    world: World, operator: Operator
) -> None:
    await training(operator)
    (job,) = world.jobs
    world.end_driver(Outcome.FAILED)
    job.status = "RUNNING"
    await operator.settle(1)
    del world.run["status"]["job"]["report"]
    world.reporter_down = True
    job.status = "FAILED"
    world.now += timedelta(minutes=2)
    await Operator(world).settle(2)
    assert phase(world) is Phase.RESTARTING
    assert condition(world, ConditionType.TRAINING).reason == "DriverFailed"


async def test_a_run_that_failed_by_its_report_keeps_the_log_of_the_driver(
    world: World, operator: Operator
) -> None:
    await training(operator)
    (job,) = world.jobs
    world.end_driver(Outcome.FAILED, retryable=False)
    job.status = "RUNNING"
    await operator.settle(2)
    assert ("RayCluster", NAME) in world.objects, "the driver gets time to exit"
    job.status = "FAILED"
    await operator.settle(3)
    assert world.status.log_tail == "the last line"
    assert ("RayCluster", NAME) not in world.objects


async def test_the_end_of_the_log_is_not_kept_where_the_run_forbids_it() -> None:
    world = World()
    world.apply_run(("spec.failurePolicy", {"keepLogTail": False}))
    operator = Operator(world)
    await training(operator)
    world.end_driver(None)
    await operator.settle(3)
    assert phase(world) is Phase.RESTARTING
    assert world.status.log_tail is None


async def test_the_words_of_a_quota_are_cleaned(world: World, operator: Operator) -> None:
    world.pods_denied = "quota \x1b[31m\x00 \U0001f6ab is\nused up"
    await operator.settle(2)
    denied = condition(world, ConditionType.ROLES_READY)
    assert denied.reason == "PodsDenied"
    assert "\U0001f6ab is used up" in denied.message
    assert denied.message.isprintable()
