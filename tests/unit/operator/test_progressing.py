"""The condition Progressing, which sums up the others."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from agenticrun_api import ConditionType, Phase, Role
from agenticrun_operator.planning.result import Result, Said, finish
from operator_world import Operator, World, condition, training
from tiny_runs import tiny_run

NOW = datetime(2026, 1, 1, tzinfo=UTC)
C = ConditionType
READY = [(C.CLUSTER_PROVISIONED, "True", "ClusterCreated"), (C.ROLES_READY, "True", "PodsReady")]
TRAINS = [*READY, (C.TRAINING, "True", "DriverRunning"), (C.STALLED, "False", "Progressing")]


@pytest.mark.parametrize(
    ("phase", "others", "expected"),
    [
        (Phase.PENDING, [], ("True", "ClusterCreating")),
        (Phase.PENDING, [(C.CLUSTER_PROVISIONED, "False", "NoEngineImage")], "False"),
        (Phase.PENDING, [(C.CLUSTER_PROVISIONED, "False", "WaitingForPreviousRun")], "True"),
        (Phase.STARTING, [READY[0], (C.ROLES_READY, "False", "PodsPending")], "True"),
        (Phase.STARTING, [READY[0], (C.ROLES_READY, "False", "Unschedulable")], "False"),
        (Phase.RESTARTING, [READY[0], (C.ROLES_READY, "False", "NodeLost")], "True"),
        (Phase.PENDING, [(C.CLUSTER_PROVISIONED, "False", "StartupDeadlineExceeded")], "False"),
        (Phase.STARTING, [*READY, (C.TRAINING, "False", "Submitting")], "True"),
        (Phase.STARTING, [*READY, (C.TRAINING, "False", "SubmissionRefused")], "False"),
        (Phase.RUNNING, TRAINS, ("True", "DriverRunning")),
        (Phase.RUNNING, [*READY, (C.TRAINING, "Unknown", "DriverSilent")], "Unknown"),
        (Phase.RUNNING, [*TRAINS[:3], (C.STALLED, "True", "NoProgress")], "False"),
        (
            # what trains is not held up by a pod that is replaced meanwhile
            Phase.RUNNING,
            [READY[0], (C.ROLES_READY, "False", "NodeLost"), *TRAINS[2:]],
            ("True", "DriverRunning"),
        ),
        (Phase.RESTARTING, [*READY, (C.TRAINING, "False", "DriverFailed")], "True"),
        (Phase.SUSPENDING, [*TRAINS, (C.SUSPENDED, "Unknown", "Suspending")], "False"),
        (Phase.SUSPENDING, [*TRAINS, (C.SUSPENDED, "Unknown", "Rescaling")], "True"),
        (Phase.SUSPENDED, [(C.SUSPENDED, "True", "Suspended")], "False"),
        (Phase.RUNNING, [*TRAINS, (C.SUSPENDED, "False", "Resumed")], ("True", "DriverRunning")),
        (Phase.SUCCEEDED, [*TRAINS, (C.FAILED, "False", "RunSucceeded")], "False"),
        (Phase.FAILED, [*READY, (C.FAILED, "True", "InvalidConfig")], "False"),
        (Phase.FAILED, [], ("False", "Failed")),  # somebody has removed the conditions
    ],
)
def test_it_is_true_unless_the_run_stands_still(
    phase: Phase,
    others: list[tuple[ConditionType, str, str]],
    expected: str | tuple[str, str],
) -> None:
    said = {
        kind: Said(status, reason, f"why {reason}")  # type: ignore[arg-type]
        for kind, status, reason in others
    }
    plan = finish(tiny_run().status, Result({"phase": phase}, said), 1, NOW, None)
    assert plan.status is not None
    found = next(item for item in plan.status.conditions if item.type == "Progressing")
    if isinstance(expected, str):  # the reason is that of the last condition
        expected = (expected, others[-1][2] if others else "ClusterCreating")
    assert (found.status, found.reason) == expected
    assert found.message == (f"why {found.reason}" if others else "")
    types = [item.type for item in plan.status.conditions]
    assert types == [kind.value for kind in ConditionType if kind.value in types]


async def test_a_run_whose_only_env_pod_is_gone_stands_still_and_says_why(
    world: World, operator: Operator
) -> None:
    await training(operator)
    world.delete_pod(Role.ENV)
    await operator.reconcile()
    summary = condition(world, C.PROGRESSING)
    assert (summary.status, summary.reason) == ("False", "PodsPending")
    assert world.status.phase is Phase.RUNNING
    assert "no step can end: env: 0 of 1 pods ready" in (world.status.message or "")


async def test_it_follows_a_run_to_its_end(world: World, operator: Operator) -> None:
    await operator.reconcile()
    assert condition(world, C.PROGRESSING).status == "True"
    await training(operator)
    before = condition(world, C.PROGRESSING)
    assert (before.status, before.reason) == ("True", "DriverRunning")
    world.drive(1)
    await operator.settle(2)
    assert condition(world, C.PROGRESSING) == before, "a step changes nothing"
