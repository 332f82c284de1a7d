"""The real apiserver stores every status that comes from an accepted progress snapshot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from agenticrun_api import AgenticRunStatus, FinalReport, Progress
from agenticrun_api.status import JobStatus
from runs import run_with
from testcluster import DETACHED_GROUP, Cluster, CommandFailed

DETACHED = f"agenticruns.{DETACHED_GROUP}"
TIMES = (
    "2026-01-01T00:00:00Z",
    "20260101T000000+00:00",
    "2026-W01-4T00:00:00+00:00",
    "2026-01-01 00:00:00+00:00",
    "2026-01-01T00:00+00:00",
    "2026-01-01T00:00:00,5+00:00",
    "2200-12-31T23:59:59+00:00:01",
)
TEXTS = ("🚫" * 1024, "a\x00b\x1b[31mred\x9b", "𠀀\ufffe\ufeff", "/data/n\udce9", "día 你好 🤗")


@pytest.fixture
def stored(detached: Cluster) -> Iterator[Cluster]:
    document = {**run_with(name="hostile"), "apiVersion": f"{DETACHED_GROUP}/v1alpha1"}
    detached.apply(document)
    yield detached
    detached.kubectl("delete", DETACHED, "hostile")


def _write(cluster: Cluster, status: dict[str, Any]) -> None:
    """Write a status as raw UTF-8, which is the strictest form of the text."""
    patch = json.dumps({"status": status}, ensure_ascii=False)
    options = ("--subresource=status", "--type=merge", "-p", patch)
    cluster.kubectl("patch", DETACHED, "hostile", *options)


def _status_of(time: str, text: str, number: int) -> AgenticRunStatus:
    final = {"outcome": "Failed", "reason": text[:64], "message": text, "retryable": False}
    snapshot = Progress.model_validate(
        {
            "runUid": "uid",
            "submissionId": "hostile-1",
            "attempt": 1,
            "sequence": 1,
            "activity": "training",
            "step": number,
            "maxSteps": number,
            "policyVersion": number,
            "time": time,
            "message": text,
            "checkpoint": {"step": number, "uri": text, "time": time},
            "final": {**final, "time": time},
        }
    )
    assert isinstance(snapshot.final, FinalReport)
    job = JobStatus(attempt=1, submission_id="hostile-1", report=snapshot.final)
    return AgenticRunStatus(
        step=snapshot.step,
        max_steps=snapshot.max_steps,
        policy_version=snapshot.policy_version,
        checkpoint=snapshot.checkpoint,
        message=snapshot.message,
        log_tail=text,
        job=job,
    )


def test_what_a_run_reports_is_stored_whole(stored: Cluster) -> None:
    for time in TIMES:
        for text in TEXTS:
            status = _status_of(time, text, 2**53).to_dict()
            _write(stored, status)
            found = stored.get(DETACHED, "hostile")
            assert found is not None
            assert {key: found["status"][key] for key in status} == status


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("checkpoint", "step"), 2**53 + 1),
        (("checkpoint", "time"), "20260101T000000+00:00"),
        (("job", "attempt"), -5),
        (("job", "attempt"), 0),
        (("step",), -1),
        (("restarts",), -1),
    ],
)
def test_a_status_out_of_bounds_is_refused(
    stored: Cluster, path: tuple[str, ...], value: Any
) -> None:
    status = _status_of(TIMES[0], "text", 3).to_dict()
    place = status
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(CommandFailed, match=r"status\." + r"\.".join(path)):
        _write(stored, status)
