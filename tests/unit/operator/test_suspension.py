"""spec.suspend: the driver saves, the pods go, nothing is made until the run is resumed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from agenticrun_api import Activity, ConditionType, Outcome, Phase, Role
from agenticrun_api.names import KIND
from agenticrun_api.status import CheckpointStatus
from agenticrun_api.version import __version__
from agenticrun_operator.errors import Denied
from agenticrun_operator.planning.times import format_time
from agenticrun_operator.resources import Manifest, OperatorKey, WorkerImages, images_in
from operator_world import NAME, Gpus, Operator, World, condition, happened, training

GRACE_SECONDS = 61
"""roles.driver.terminationGracePeriodSeconds, by default: a step, and a save of a tiny model."""
SUSPEND, RESUME = ("suspend", True), ("suspend", False)


def a_run(*changes: tuple[str, Any]) -> Operator:
    """Return an operator on a run that saves checkpoints on a claim."""
    world = World()
    world.apply_run(
        ("spec.checkpoint", {"volumeClaim": {"size": "1Gi"}}),
        ("spec.failurePolicy", {"maxRestarts": 2, "backoffSeconds": 10}),
        *changes,
    )
    return Operator(world)


def checkpoint(world: World, step: int) -> CheckpointStatus:
    return CheckpointStatus(step=step, uri=f"/checkpoints/{step}", time=format_time(world.now))


async def pass_time(operator: Operator, seconds: int, step: int = 5) -> None:
    for _ in range(seconds // step):
        operator.world.make_pods()
        await operator.reconcile()
        operator.world.now += timedelta(seconds=step)


def driver_stops(world: World, saved: int | None = 1) -> None:
    """The driver does as it was asked: it saves a checkpoint, says so, and ends."""
    assert world.stop_requests, "nobody has asked it"
    if saved:
        world.drive(saved, checkpoint=checkpoint(world, saved))
    world.end_driver(Outcome.STOPPED)


def holds_nothing(world: World) -> bool:
    return not world.pods() and ("RayCluster", NAME) not in world.objects


def suspended(world: World) -> tuple[str, str, str]:
    """Return the phase, and status and reason of the condition Suspended."""
    found = condition(world, ConditionType.SUSPENDED)
    return world.status.phase.value, found.status, found.reason


SUSPENDED = ("Suspended", "True", "Suspended")
SUSPENDING = ("Suspending", "Unknown", "Suspending")


async def test_a_run_that_trains_saves_gives_its_pods_back_and_resumes_without_a_step_lost() -> (
    None
):
    operator = a_run()
    world = operator.world
    await training(operator, checkpoint=checkpoint(world, 0), observed_generation=1)
    world.change_run(SUSPEND)
    await operator.settle(3)
    assert suspended(world) == SUSPENDING
    assert world.stop_requests == 1
    assert len(world.live_jobs()) == 1, "it is saving"
    assert "configure" not in world.requests, "the driver ends: it needs no new settings"
    driver_stops(world)
    await operator.settle(3)
    assert suspended(world) == SUSPENDED
    assert holds_nothing(world)
    told = condition(world, ConditionType.SUSPENDED).message
    assert "resumes from the checkpoint of step 1" in told
    assert world.status.message == told
    for kind in (ConditionType.CLUSTER_PROVISIONED, ConditionType.ROLES_READY):
        assert (condition(world, kind).status, condition(world, kind).reason) == (
            "False",
            "Suspended",
        )
    assert condition(world, ConditionType.TRAINING).status == "False"
    assert {role.ready for role in world.status.roles} == {0}
    assert {kind for kind, _ in world.objects} == {
        KIND,
        "Secret",
        "ConfigMap",
        "PersistentVolumeClaim",
    }
    world.change_run(RESUME)
    await operator.settle()
    assert [job.attempt for job in world.jobs] == [1, 2]
    world.drive(1, checkpoint=checkpoint(world, 1))
    await operator.settle(2)
    found = condition(world, ConditionType.SUSPENDED)
    assert (found.status, found.reason) == ("False", "Resumed")
    assert found.message == "", "what it resumed from is history"
    (resumed,) = [event.message for event in world.events if event.reason == "Resumed"]
    assert resumed == "the run resumes from the checkpoint of step 1"
    assert (world.status.phase, world.status.step) == (Phase.RUNNING, 1)
    assert (world.status.restarts, world.status.failures_without_progress) == (0, 0)
    said = happened(world)
    assert (said.count("Suspended"), said.count("Resumed"), said.count("Stopped")) == (1, 1, 0)
    assert {event.type for event in world.events} == {"Normal"}


async def test_a_run_that_is_created_suspended_makes_nothing_until_it_is_resumed() -> None:
    operator = a_run(("spec.suspend", True))
    world = operator.world
    await pass_time(operator, 600, 30)
    assert suspended(world) == SUSPENDED
    assert set(world.objects) == {(KIND, NAME)}
    assert world.status.start_time is None
    assert "starts from the beginning" in condition(world, ConditionType.SUSPENDED).message
    writes = world.status_writes
    world.requests.clear()
    await pass_time(operator, 600, 30)
    assert world.status_writes == writes, "nothing happens"
    assert set(world.requests) <= {f"get {KIND}", "get RayCluster", "list pods"}
    world.change_run(RESUME)
    await operator.reconcile()
    assert world.status.phase is Phase.STARTING
    assert world.status.progress == "0/2"
    await operator.settle()
    assert [job.attempt for job in world.jobs] == [1]
    assert happened(world)[:2] == ["Suspended", "Resumed"]


async def test_a_run_that_is_suspended_while_it_starts_gives_its_pods_back_at_once() -> None:
    operator = a_run()
    world = operator.world
    await operator.reconcile()
    world.make_pods(ready=False)
    await operator.reconcile()
    assert world.status.phase is Phase.STARTING
    world.change_run(SUSPEND)
    await operator.settle(2)
    assert suspended(world) == SUSPENDED
    assert holds_nothing(world)
    assert world.status.start_time is None
    world.change_run(RESUME)
    await operator.settle()
    assert [job.attempt for job in world.jobs] == [1]


async def test_a_run_without_checkpoints_says_that_it_begins_again() -> None:
    world = World()
    world.apply_run(("spec.checkpoint", {"none": True}))
    operator = Operator(world)
    await training(operator)
    world.change_run(SUSPEND)
    await operator.settle(2)
    driver_stops(world, saved=None)
    await operator.settle(3)
    assert suspended(world) == SUSPENDED
    assert "starts again at step 0: it saves no checkpoints" in (world.status.message or "")


async def test_a_run_that_has_not_saved_yet_says_so() -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    world.change_run(SUSPEND)
    await pass_time(operator, GRACE_SECONDS + 20)
    assert suspended(world) == SUSPENDED
    assert "it has saved no checkpoint yet" in condition(world, ConditionType.SUSPENDED).message


@pytest.mark.parametrize("trouble", ["frozen", "ray", "reporter", "both", "node", "partition"])
async def test_a_driver_that_does_not_end_holds_the_pods_no_longer_than_its_grace_period(
    trouble: str,
) -> None:
    operator = a_run()
    world = operator.world
    await training(operator, checkpoint=checkpoint(world, 1))
    world.ray_down = trouble in ("ray", "both")
    world.reporter_down = trouble in ("reporter", "both")
    if trouble in ("node", "partition"):
        world.lose_node(Role.DRIVER, partition=trouble == "partition")
    world.change_run(SUSPEND)
    await pass_time(operator, GRACE_SECONDS - 5)
    if trouble != "node":  # whose driver is dead
        assert suspended(world) == SUSPENDING
        assert ("RayCluster", NAME) in world.objects, "it may be saving"
    # The time to stop begins when the driver was asked.
    await pass_time(operator, 40 if trouble in ("frozen", "ray") else 120)
    assert ("RayCluster", NAME) not in world.objects
    if trouble not in ("node", "partition"):  # whose head is lost
        (warning,) = [event for event in world.events if event.type == "Warning"][-1:]
        assert (warning.reason, "has not stopped in time" in warning.message) == ("Suspended", True)
    if trouble not in ("node", "partition"):
        assert suspended(world) == SUSPENDED
    else:  # the pod stays until its node answers, or it is removed by force
        assert suspended(world) == SUSPENDING
        await pass_time(operator, 120)
        assert suspended(world) == SUSPENDED
    assert holds_nothing(world)
    assert "step 1" in condition(world, ConditionType.SUSPENDED).message
    world.ray_down = world.reporter_down = False
    world.change_run(RESUME)
    await operator.settle()
    assert [job.attempt for job in world.jobs] == [1, 2]
    assert world.status.restarts == 0


async def test_a_driver_in_a_long_step_gets_the_time_to_end_it() -> None:
    operator = a_run()
    world = operator.world
    await training(operator, seconds_per_step=600.0)
    world.change_run(SUSPEND)
    await pass_time(operator, 600 + GRACE_SECONDS - 30, 10)
    assert suspended(world) == SUSPENDING
    assert len(world.live_jobs()) == 1
    await pass_time(operator, 90, 10)
    assert suspended(world) == SUSPENDED


async def test_a_driver_that_says_that_it_saves_gets_more_time() -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    world.change_run(SUSPEND)
    await operator.settle(2)
    world.drive(1, activity=Activity.CHECKPOINT)
    await pass_time(operator, 300, 10)
    assert suspended(world) == SUSPENDING
    driver_stops(world, saved=2)
    await operator.settle(3)
    assert suspended(world) == SUSPENDED
    assert "step 2" in (world.status.message or "")


async def test_a_success_that_arrives_while_the_driver_stops_is_a_success() -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    world.change_run(SUSPEND)
    await operator.settle(2)
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(3)
    assert world.status.phase is Phase.SUCCEEDED
    found = condition(world, ConditionType.SUSPENDED)
    assert (found.status, found.reason) == ("False", "RunSucceeded")
    assert holds_nothing(world)


async def test_a_success_counts_although_the_reporter_answers_late() -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    world.change_run(SUSPEND)
    await operator.settle(2)
    world.reporter_down = True
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(5)
    assert ("RayCluster", NAME) in world.objects, "the report is only there"
    world.reporter_down = False
    await operator.settle(3)
    assert world.status.phase is Phase.SUCCEEDED


async def test_a_failure_for_good_while_the_driver_stops_ends_the_run() -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    world.change_run(SUSPEND)
    await operator.settle(2)
    world.end_driver(Outcome.FAILED, retryable=False)
    await operator.settle(3)
    assert world.status.phase is Phase.FAILED
    found = condition(world, ConditionType.SUSPENDED)
    assert (found.status, found.reason) == ("False", "Told")


async def test_a_failure_that_a_retry_may_solve_is_told_and_the_run_is_suspended() -> None:
    operator = a_run()
    world = operator.world
    await training(operator, checkpoint=checkpoint(world, 1))
    world.change_run(SUSPEND)
    await operator.settle(2)
    world.end_driver(Outcome.FAILED)
    await operator.settle(3)
    assert suspended(world) == SUSPENDED
    assert condition(world, ConditionType.TRAINING).reason == "Told"
    assert (world.status.restarts, world.status.failures_without_progress) == (0, 0)
    assert world.status.log_tail == "the last line"
    (warning,) = [event for event in world.events if event.type == "Warning"]
    assert "attempt 1 failed (Told): the driver's words" in warning.message


async def test_a_run_that_is_resumed_before_its_driver_has_ended_restarts_on_the_same_pods() -> (
    None
):
    operator = a_run()
    world = operator.world
    await training(operator, checkpoint=checkpoint(world, 1))
    before = world.objects["RayCluster", NAME]["metadata"]["uid"]
    world.change_run(SUSPEND)
    await operator.settle(2)
    world.change_run(RESUME)
    await operator.settle(2)
    assert world.status.phase is Phase.RUNNING
    assert condition(world, ConditionType.SUSPENDED).reason == "Resumed"
    assert happened(world).count("DriverRunning") == 1
    driver_stops(world)
    await operator.settle(2)
    assert (world.status.phase, world.status.restarts) == (Phase.RESTARTING, 1)
    world.now += timedelta(seconds=20)
    await operator.settle()
    assert [job.attempt for job in world.jobs] == [1, 2]
    assert world.objects["RayCluster", NAME]["metadata"]["uid"] == before


async def test_a_run_that_is_suspended_twice_gives_its_driver_the_whole_time_twice() -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    world.change_run(SUSPEND)
    await pass_time(operator, 20)
    world.change_run(RESUME)
    await pass_time(operator, 60)
    world.change_run(SUSPEND)
    await pass_time(operator, 25)
    assert suspended(world) == SUSPENDING
    assert len(world.live_jobs()) == 1


@pytest.mark.parametrize("waits_for", ["retry", "queue", "queue before the first attempt"])
async def test_a_run_that_waits_is_suspended_at_once_and_does_not_wait_when_it_is_resumed(
    waits_for: str,
) -> None:
    operator = a_run(
        ("spec.roles.trainer", {"gpus": 1}),
        ("spec.failurePolicy", {"backoffSeconds": 600, "startupDeadlineSeconds": 60}),
    )
    world = operator.world
    attempts = 0 if "first" in waits_for else 1
    if attempts:
        await training(operator)
        world.end_driver(None)
    if "queue" in waits_for:
        world.gpus = Gpus(0, [world])
        world.delete_cluster()
        world.collect_garbage()
        while world.status.startup_timeouts == 0:
            await pass_time(operator, 30)
    await operator.settle(2)
    assert world.status.phase is (Phase.RESTARTING if waits_for == "retry" else Phase.PENDING)
    failures = world.status.failures_without_progress
    world.change_run(SUSPEND)
    await operator.settle(2)
    assert suspended(world) == SUSPENDED
    assert holds_nothing(world)
    assert world.status.startup_timeouts == 0
    world.gpus = None
    world.change_run(RESUME)
    await operator.settle(4)
    assert [job.attempt for job in world.jobs] == list(range(1, attempts + 2))
    assert world.status.failures_without_progress == failures


@pytest.mark.parametrize(
    "obstacle", ["kuberay", "engine", "claim", "pods denied", "cluster denied", "name"]
)
async def test_an_obstacle_does_not_keep_a_run_from_being_suspended(obstacle: str) -> None:
    engine = {"strategy": {"name": "vllm"}} if obstacle == "engine" else {}
    operator = a_run(*[("spec.pipeline.actorInfer", engine)] * bool(engine))
    world = operator.world
    world.kuberay_missing = obstacle == "kuberay"
    world.storage_down = obstacle == "claim"
    world.pods_denied = "exceeded quota" if obstacle == "pods denied" else ""
    if obstacle == "cluster denied":
        world.create_errors["RayCluster"] = Denied("exceeded quota")
    if obstacle == "name":
        theirs = {"kind": "RayCluster", "metadata": {"name": NAME, "namespace": "team"}}
        spec: Manifest = {"headGroupSpec": {}, "workerGroupSpecs": []}
        await world.create({**theirs, "spec": spec})
    for _ in range(30):
        if obstacle != "name":
            world.make_pods()
        await operator.reconcile()
        world.now += timedelta(seconds=1)
    assert world.status.phase in (Phase.PENDING, Phase.STARTING)
    world.change_run(SUSPEND)
    for _ in range(3):
        await operator.reconcile()
        world.now += timedelta(seconds=1)
    assert suspended(world) == SUSPENDED
    assert not world.pods()
    assert (("RayCluster", NAME) in world.objects) == (obstacle == "name"), "theirs stays"


async def test_a_cluster_that_appears_while_the_run_is_suspended_is_deleted() -> None:
    operator = a_run()
    world = operator.world
    await operator.reconcile()
    ours = world.objects["RayCluster", NAME]
    world.change_run(SUSPEND)
    await operator.settle(2)
    await world.create(ours)  # by an operator that was behind
    await operator.settle(3)
    assert suspended(world) == SUSPENDED
    assert holds_nothing(world)


@pytest.mark.parametrize("when", ["wrote status", "delete RayCluster", "deleted"])
async def test_a_crash_of_the_operator_leaves_no_half_suspended_run(when: str) -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    world.change_run(SUSPEND)
    await operator.settle(2)
    driver_stops(world)
    world.interruption = (when, world.crash)
    await operator.settle(3)
    assert operator.crashes == 1
    assert suspended(world) == SUSPENDED
    assert holds_nothing(world)
    world.change_run(RESUME)
    await operator.settle()
    assert [job.attempt for job in world.jobs] == [1, 2]


async def test_an_attempt_that_was_never_submitted_is_not_submitted_any_more() -> None:
    operator = a_run()
    world = operator.world
    world.submit_down = True
    await operator.settle()
    assert world.status.job is not None
    assert world.jobs == []
    world.submit_down = False
    world.change_run(SUSPEND)
    await operator.settle(2)
    assert suspended(world) == SUSPENDED
    assert world.jobs == []
    assert "DriverLost" not in happened(world)
    world.change_run(RESUME)
    await operator.settle()
    assert [job.attempt for job in world.jobs] == [2]


async def test_the_deadline_does_not_run_while_the_run_is_suspended() -> None:
    operator = a_run(("spec.activeDeadlineSeconds", 100))
    world = operator.world
    await training(operator)
    world.change_run(SUSPEND)
    await operator.settle(2)
    await pass_time(operator, 150)
    assert suspended(world) == SUSPENDED
    assert world.status.start_time is None
    await pass_time(operator, 1000, 50)
    world.change_run(RESUME)
    resumed_at = world.now
    await operator.settle()
    assert world.status.start_time == format_time(resumed_at)
    world.drive(1)
    await pass_time(operator, 80)
    assert world.status.phase is Phase.RUNNING
    await pass_time(operator, 50 + GRACE_SECONDS)
    assert condition(world, ConditionType.FAILED).reason == "DeadlineExceeded"


async def test_the_deadline_does_not_end_a_run_that_is_being_suspended() -> None:
    operator = a_run(("spec.activeDeadlineSeconds", 100))
    world = operator.world
    await training(operator)
    await pass_time(operator, 85)
    world.change_run(SUSPEND)
    await operator.settle(1)
    world.drive(1, activity=Activity.CHECKPOINT)
    await pass_time(operator, 100)
    assert suspended(world) == SUSPENDING
    driver_stops(world)
    await operator.settle(3)
    assert suspended(world) == SUSPENDED


async def test_the_status_stays_true_while_the_driver_stops() -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    world.change_run(SUSPEND)
    await operator.settle(2)
    world.drive(1, activity=Activity.CHECKPOINT)
    world.delete_pod(Role.ENV)
    await operator.reconcile()
    assert {role.name: role.ready for role in world.status.roles}["env"] == 0
    assert condition(world, ConditionType.TRAINING).status == "True"
    world.reporter_down = True
    await operator.settle(2)
    told = condition(world, ConditionType.TRAINING)
    assert (told.status, told.reason) == ("Unknown", "ProgressUnavailable")
    assert happened(world).count("DriverRunning") == 1


async def test_a_head_that_turns_out_to_be_lost_is_not_said_to_be_built_again() -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    world.lose_node(Role.DRIVER)
    await pass_time(operator, 110)
    assert world.status.phase is Phase.RUNNING
    world.change_run(SUSPEND)
    await pass_time(operator, 15)
    assert ("RayCluster", NAME) not in world.objects
    assert condition(world, ConditionType.TRAINING).reason == "NodeLost"
    assert not [event for event in world.events if "built again" in event.message]


@pytest.mark.parametrize("kind", [ConditionType.STALLED, ConditionType.TRAINING])
async def test_a_suspended_run_neither_stalls_nor_trains(kind: ConditionType) -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    if kind is ConditionType.STALLED:
        world.drive(1, idle_seconds=1e6)
    else:  # unknown, because the operator has another key than the pods
        world.end_driver(None)
        await operator.settle(2)
        operator.key = OperatorKey("another key, also of 32 characters")
        operator.upgrade(operator.images)
        world.now += timedelta(seconds=30)
    await operator.settle(2)
    assert condition(world, kind).status != "False"
    world.change_run(SUSPEND)
    await pass_time(operator, GRACE_SECONDS + 30)
    assert suspended(world) == SUSPENDED
    assert (condition(world, kind).status, condition(world, kind).reason) == ("False", "Suspended")


async def test_the_resumed_run_keeps_its_images_and_its_numbers() -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    images = images_in(world.objects["RayCluster", NAME])
    world.change_run(SUSPEND)
    await operator.settle(2)
    driver_stops(world)
    await operator.settle(3)
    operator.upgrade(WorkerImages("worker:2"))
    world.change_run(RESUME)
    await operator.settle(2)
    assert images_in(world.objects["RayCluster", NAME]) == images
    assert (world.status.progress, world.status.step) == ("1/2", 1)


async def test_a_claim_that_was_deleted_meanwhile_ends_the_run_when_it_is_resumed() -> None:
    operator = a_run()
    world = operator.world
    await training(operator)
    world.change_run(SUSPEND)
    await operator.settle(2)
    driver_stops(world)
    await operator.settle(3)
    world.delete_claim()
    await operator.settle(2)
    assert suspended(world) == SUSPENDED
    world.change_run(RESUME)
    await operator.settle(2)
    assert condition(world, ConditionType.FAILED).reason == "CheckpointsLost"


async def test_a_suspended_run_can_be_deleted() -> None:
    operator = a_run(("spec.suspend", True))
    world = operator.world
    await operator.settle(2)
    world.run["metadata"]["finalizers"] = ["example.com/slow"]
    world.delete_run()
    await operator.settle(2)
    assert world.status.phase is Phase.SUSPENDED
    assert condition(world, ConditionType.PROGRESSING).reason == "RunDeleted"


async def test_a_finished_run_is_not_suspended() -> None:
    operator = a_run(("spec.cleanup", {"onSuccess": "Keep"}))
    world = operator.world
    await training(operator)
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(2)
    conditions = world.status.conditions
    world.change_run(SUSPEND)
    await operator.settle(3)
    assert world.status.phase is Phase.SUCCEEDED
    assert world.status.conditions == conditions
    assert world.pods()


def env_pods(number: int) -> tuple[str, Any]:
    return "roles", {"env": {"replicas": number}}


async def test_other_replicas_make_the_driver_save_and_go_on_with_other_pods() -> None:
    operator = a_run()
    world = operator.world
    await training(operator, checkpoint=checkpoint(world, 0), version=__version__)
    started = world.status.start_time
    world.change_run(env_pods(3))
    await operator.settle(3)
    assert suspended(world) == ("Suspending", "Unknown", "Rescaling")
    assert len(world.pods(Role.ENV)) == 1, "the driver is saving"
    driver_stops(world)
    await operator.settle(3)
    world.collect_garbage()
    await operator.settle()
    assert len(world.pods(Role.ENV)) == 3
    assert [job.replicas for job in world.jobs] == [{}, {"inference": 1, "env": 3}]
    world.drive(1, checkpoint=checkpoint(world, 1))
    await operator.settle(2)
    assert (world.status.phase, world.status.start_time) == (Phase.RUNNING, started)
    assert (world.status.restarts, world.status.failures_without_progress) == (0, 0)
    said = happened(world)
    assert (said.count("Rescaling"), said.count("Resumed"), said.count("Stopped")) == (1, 1, 0)


async def test_one_missed_answer_does_not_end_a_long_step() -> None:
    operator = a_run()
    world = operator.world
    await training(operator, checkpoint=checkpoint(world, 0), seconds_per_step=600.0)
    world.change_run(SUSPEND)
    await pass_time(operator, GRACE_SECONDS + 30)
    world.reporter_down = True
    await pass_time(operator, 10)
    world.reporter_down = False
    await pass_time(operator, 500)
    assert suspended(world) == SUSPENDING
    assert len(world.live_jobs()) == 1
    await pass_time(operator, 120)
    assert suspended(world) == SUSPENDED, "it had the time of a step and its grace period"


async def test_a_driver_has_its_time_from_when_it_was_asked_although_the_operator_was_away() -> (
    None
):
    operator = a_run()
    world = operator.world
    await training(operator, checkpoint=checkpoint(world, 0))
    world.interruption = ("request stop", world.crash)
    world.change_run(SUSPEND)
    while not operator.crashes:
        await operator.reconcile()
    assert (suspended(world), world.stop_requests) == (SUSPENDING, 0)
    world.now += timedelta(minutes=5)
    await operator.settle(2)
    assert (world.stop_requests, len(world.live_jobs())) == (1, 1), "asked first, then judged"
    driver_stops(world)
    await operator.settle(3)
    assert suspended(world) == SUSPENDED


async def test_a_refused_change_of_settings_does_not_delay_the_request_to_stop() -> None:
    operator = a_run()
    world = operator.world
    await training(operator, checkpoint=checkpoint(world, 0), observed_generation=1)
    world.reporter_down = True
    world.change_run(("pipeline.maxSteps", 9))
    await pass_time(operator, 60)
    world.reporter_down = False
    world.change_run(SUSPEND)
    await operator.settle(2)
    assert world.stop_requests == 1


async def test_a_driver_that_saves_may_be_silent_for_minutes() -> None:
    operator = a_run()
    world = operator.world
    await training(operator, checkpoint=checkpoint(world, 0))
    world.change_run(SUSPEND)
    world.drive(1, activity=Activity.CHECKPOINT, silent_seconds=200.0)
    await pass_time(operator, 200)
    assert suspended(world) == SUSPENDING


async def test_a_driver_that_hangs_after_its_report_is_stopped_and_not_asked_again() -> None:
    operator = a_run(("spec.roles", {"driver": {"terminationGracePeriodSeconds": 600}}))
    world = operator.world
    await training(operator, checkpoint=checkpoint(world, 0))
    world.change_run(SUSPEND)
    await operator.settle(2)
    (job,) = world.live_jobs()
    world.end_driver(Outcome.STOPPED)
    job.status = "RUNNING"
    await pass_time(operator, 100)
    assert world.stop_requests == 1
    assert world.requests.count("stop") == 1


async def test_a_driver_is_never_given_up_for_other_replicas() -> None:
    operator = a_run()
    world = operator.world
    await training(operator, checkpoint=checkpoint(world, 0), version=__version__)
    world.change_run(env_pods(3))
    await pass_time(operator, 3600)
    assert suspended(world) == ("Suspending", "Unknown", "Rescaling")
    assert len(world.live_jobs()) == 1


@pytest.mark.parametrize(
    ("change", "fields", "why"),
    [
        (("spec.checkpoint", {"none": True}), {"version": __version__}, "no checkpoints"),
        (("spec.seed", None), {"step": 0}, "no step yet"),
    ],
)
async def test_a_run_that_would_lose_what_it_has_learnt_keeps_its_pods(
    change: tuple[str, Any], fields: dict[str, Any], why: str
) -> None:
    operator = a_run(change) if change[1] else a_run()
    world = operator.world
    await training(operator, **fields)
    world.change_run(env_pods(3))
    await pass_time(operator, 600)
    assert world.status.phase is Phase.RUNNING
    told = condition(world, ConditionType.SUSPENDED)
    assert (told.status, told.reason) == ("False", "NotRescaled")
    assert why in told.message
    assert happened(world).count("NotRescaled") == 1
    world.change_run(env_pods(1))
    await operator.settle(2)
    assert condition(world, ConditionType.SUSPENDED).reason == "Resumed"


async def test_a_ray_cluster_that_others_have_scaled_is_left_alone() -> None:
    operator = a_run()
    world = operator.world
    await training(operator, checkpoint=checkpoint(world, 0), version=__version__)
    for group in world.objects["RayCluster", NAME]["spec"]["workerGroupSpecs"]:
        group["replicas"] = group["minReplicas"] = 5
    await pass_time(operator, 60)
    assert world.status.phase is Phase.RUNNING


async def test_other_replicas_before_the_first_attempt_cost_no_attempt() -> None:
    operator = a_run()
    world = operator.world
    await operator.settle(1)
    assert ("RayCluster", NAME) in world.objects
    world.change_run(env_pods(2))
    await operator.settle()
    world.collect_garbage()
    await operator.settle()
    assert len(world.pods(Role.ENV)) == 2
    assert [(job.attempt, job.replicas["env"]) for job in world.jobs] == [(1, 2)]


async def test_a_finished_run_is_not_rescaled() -> None:
    operator = a_run(("spec.cleanup", {"onSuccess": "Keep"}))
    world = operator.world
    await training(operator)
    world.end_driver(Outcome.SUCCEEDED)
    await operator.settle(2)
    world.change_run(env_pods(2))
    await operator.settle(3)
    assert (world.status.phase, len(world.pods(Role.ENV))) == (Phase.SUCCEEDED, 1)
