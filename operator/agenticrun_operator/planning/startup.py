"""The startup deadline: a run whose pods are not ready in time gives them back or fails.

Kubernetes places pods one by one. So two runs can each hold a part of the GPUs that both need, and
wait for the rest forever. At the deadline a run deletes its RayCluster and queues: it tries again
after a wait that doubles each time. The wait differs between runs (jitter by the run's uid), so
that one of them finds all GPUs free.
"""

from __future__ import annotations

import random
from datetime import timedelta

from agenticrun_api import ConditionType, Phase, Reason
from agenticrun_operator.observed import Observed
from agenticrun_operator.planning import ending
from agenticrun_operator.planning.draft import Draft
from agenticrun_operator.planning.lost_pods import delete_cluster
from agenticrun_operator.planning.times import backoff_seconds, format_span, format_time, parse_time

FIRST_WAIT_SECONDS = 60.0
"""Longer than the pods of another run need to be placed, and shorter than people are patient."""
MAX_WAIT_SECONDS = 900.0
_ERRORS_OF_THE_RUN = (
    Reason.IMAGE_PULL_FAILED,
    Reason.CONTAINER_CRASHED,
    Reason.CODE_UNAVAILABLE,
)
"""Problems that a run has on every node, so that another try does not help."""


def check_deadline(draft: Draft, observed: Observed) -> None:
    """Give the pods back or fail the run if its pods are not ready in time.

    A run that has trained before never fails here: its images and containers did work.
    """
    cluster = observed.own_cluster(draft.run)
    unready = draft.find(ConditionType.ROLES_READY)
    if cluster is None or unready is None or unready.status == "True":
        return
    times = [
        cluster["metadata"].get("creationTimestamp"),
        unready.last_transition_time,
        draft.status.next_retry_time,
    ]
    limit = draft.run.spec.failure_policy.startup_deadline_seconds
    left = limit - (draft.now - max(parse_time(time) for time in times if time)).total_seconds()
    if left > 0:
        draft.look_again(left)
        return
    late = f"the pods were not ready within {format_span(limit)}: {unready.message}"
    if draft.status.job is None and unready.reason in _ERRORS_OF_THE_RUN:
        ending.fail(draft, Reason.STARTUP_DEADLINE_EXCEEDED, late)
    else:
        _give_back(draft, observed, late)


def _give_back(draft: Draft, observed: Observed, late: str) -> None:
    timeouts = draft.status.startup_timeouts + 1
    wait = backoff_seconds(timeouts - 1, FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS)
    wait *= random.Random(f"{draft.run.metadata.uid}/{timeouts}").uniform(0.5, 1.5)
    message = f"{late}; they are given back, and the run tries again (time {timeouts + 1})"
    draft.event(Reason.STARTUP_DEADLINE_EXCEEDED, f"{message} in {format_span(wait)}", warning=True)
    draft.phase(Phase.PENDING, message)
    if draft.status.job is None:
        reset_start_time(draft)
    draft.set(
        startup_timeouts=timeouts,
        next_retry_time=format_time(draft.now + timedelta(seconds=wait)),
    )
    give_pods_back(draft, observed, Reason.STARTUP_DEADLINE_EXCEEDED, message)
    draft.look_again(wait)


def give_pods_back(draft: Draft, observed: Observed, reason: Reason, message: str) -> None:
    """Delete the RayCluster, should it be there, and say that the run holds no pods."""
    for kind in (ConditionType.CLUSTER_PROVISIONED, ConditionType.ROLES_READY):
        draft.condition(kind, "False", reason, message)
    draft.no_pods()
    delete_cluster(draft, observed)


def reset_start_time(draft: Draft) -> None:
    """Let the run, and its activeDeadlineSeconds, start again when it gets pods again."""
    draft.set(start_time=None)


def is_queued(draft: Draft) -> bool:
    """Return True while the run waits until it tries again. It owns no pods then."""
    retry = draft.status.next_retry_time
    return (
        draft.status.phase is Phase.PENDING
        and retry is not None
        and (parse_time(retry) > draft.now)
    )


def wait_in_queue(draft: Draft, observed: Observed) -> None:
    """Delete the RayCluster, should it be there still, and wait."""
    assert draft.status.next_retry_time is not None
    delete_cluster(draft, observed)
    draft.look_again((parse_time(draft.status.next_retry_time) - draft.now).total_seconds())
