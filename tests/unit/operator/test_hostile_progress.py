"""A snapshot comes from a pod where user code runs: its data cannot break the run's status."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from agenticrun_api import Activity, AgenticRunStatus, Outcome, Phase, Progress
from agenticrun_api.load import parse
from operator_world import Operator, World, training

BASE: dict[str, Any] = {
    "sequence": 9,
    "activity": "training",
    "step": 2,
    "maxSteps": 9,
    "policyVersion": 2,
    "time": "2026-01-01T00:00:00Z",
    "lastStepTime": "2026-01-01T00:00:00Z",
    "secondsPerStep": 2.0,
}
CHECKPOINT = {"step": 1, "uri": "/c", "time": "2026-01-01T00:00:00Z"}
FINAL = {
    "outcome": "Failed",
    "reason": "R",
    "message": "m",
    "retryable": False,
    "time": "2026-01-01T00:00:00Z",
}
TIMES = st.one_of(
    st.sampled_from(
        [
            "20260101T000000+00:00",
            "2026-W01-4T00:00:00+00:00",
            "2026-01-01 00:00:00+00:00",
            "2026-01-01T00:00+00:00",
            "2026-01-01T00:00:00,5+00:00",
            "2026-01-01T00:00:00.123456789+05:45",
            "2026-01-01T00:00:00-00:00:01",
            "2026-01-01T24:00:00Z",
            "1970-01-01T00:00:00+14:00",
            "0001-01-01T00:00:00+23:59",
            "2200-12-31T23:59:59-12:00",
            "9999-12-31T23:59:59-12:00",
            "2026-01-01T00:00:00",
        ]
    ),
    st.datetimes(timezones=st.timezones()).map(lambda moment: moment.isoformat()),
    st.text(max_size=45),
)
COUNTS = st.one_of(
    st.integers(-1, 20), st.sampled_from([2**53, 2**53 + 1, 2**63, 2**70, -(2**63) - 1, 10**30])
)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
CHARACTERS = st.characters(exclude_categories=["Cs"])  # JSON of pydantic refuses surrogates
ODD = ["\x00", "\x1b[31mred", "\u009b2J", "\r\n", "🚫", "\U0001d518", "𠀀", "\ufffe", "é"]


def texts(limit: int) -> st.SearchStrategy[str]:
    return st.one_of(
        st.text(CHARACTERS, max_size=limit + 3),
        st.sampled_from(ODD).map(lambda odd: (odd * limit)[:limit]),
    )


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


def varied(base: dict[str, Any], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return optional(**fields).map(lambda changes: {**base, **changes})


SNAPSHOTS = varied(
    BASE,
    version=texts(256),
    sequence=COUNTS,
    activity=st.sampled_from([each.value for each in Activity]),
    step=COUNTS,
    maxSteps=COUNTS,
    policyVersion=COUNTS,
    time=TIMES,
    lastStepTime=TIMES,
    secondsPerStep=NUMBERS,
    silentSeconds=NUMBERS,
    idleSeconds=NUMBERS,
    reward=NUMBERS,
    tokensPerSecond=NUMBERS,
    staleness=NUMBERS,
    metrics=st.dictionaries(texts(96), NUMBERS, max_size=20),
    checkpoint=varied(CHECKPOINT, step=COUNTS, uri=texts(1024), time=TIMES),
    message=texts(1024),
    observedGeneration=COUNTS,
    pools=st.dictionaries(
        st.sampled_from(["env", "inference"]),
        varied(
            {"replicas": 1},
            replicas=COUNTS,
            serving=COUNTS,
            joining=COUNTS,
            leaving=COUNTS,
            vacant=st.lists(texts(256), max_size=3),
            fixed=texts(256),
        ),
    ),
    final=varied(
        FINAL,
        outcome=st.sampled_from([each.value for each in Outcome]),
        reason=texts(64),
        message=texts(4096),
        retryable=st.booleans(),
        time=TIMES,
    ),
)


def told(snapshot: dict[str, Any]) -> World | None:
    """Return the world after the operator has read a snapshot; None if the reporter refuses it."""
    world = World()
    world.apply_run()
    asyncio.run(training(Operator(world)))
    (job,) = world.live_jobs()
    job_of = {
        "runUid": world.run["metadata"]["uid"],
        "submissionId": job.submission_id,
        "attempt": job.attempt,
    }
    try:
        progress = Progress.model_validate_json(
            json.dumps({**job_of, **snapshot}), strict=True, extra="ignore"
        )
    except ValidationError:
        return None
    world.reports[job.incarnation.split("/")[0]] = progress
    world.now = world.now.replace(year=2027)
    asyncio.run(Operator(world).reconcile())
    assert world.invalid_statuses == []
    return world


def with_checkpoint(**fields: Any) -> dict[str, Any]:
    return {**BASE, "checkpoint": {**CHECKPOINT, **fields}}


@given(SNAPSHOTS)
@example(with_checkpoint(time="20260101T000000+00:00"))
@example(with_checkpoint(step=2**70))
@example({**BASE, "final": {**FINAL, "time": "2026-01-01T00:00+00:00"}})
@example({**BASE, "lastStepTime": "2200-12-31T23:59:59Z", "secondsPerStep": 1e300})
@example({**BASE, "step": 2**53, "maxSteps": 2**53, "policyVersion": 2**53})
@example({**BASE, "message": "a\x00b\x1b[31mred"})
def test_every_snapshot_that_is_accepted_gives_a_status_that_the_crd_accepts(
    snapshot: dict[str, Any],
) -> None:
    """The world refuses a status that the apiserver would refuse."""
    world = told(snapshot)
    if world is not None:
        stored = world.run["status"]
        assert stored["lastUpdateTime"].startswith("2027"), "the status was not written"
        assert parse(AgenticRunStatus, stored).to_dict() == stored
        assert _control_characters(stored) == []


def _control_characters(value: Any) -> list[str]:
    """Return the characters of a document that a terminal or a YAML reader would act on."""
    return [
        character
        for character in json.dumps(value, ensure_ascii=False)
        if ord(character) < 32 or 127 <= ord(character) < 160
    ]


@pytest.mark.parametrize(
    "snapshot",
    [
        with_checkpoint(time="20260101T000000+00:00"),
        with_checkpoint(time="2026-W01-4T00:00:00+00:00"),
        with_checkpoint(time="2026-01-01T01:00:00.5+01:00"),
    ],
)
def test_a_time_in_another_notation_is_the_same_time(snapshot: dict[str, Any]) -> None:
    world = told(snapshot)
    assert world is not None
    assert world.run["status"]["checkpoint"]["time"] == "2026-01-01T00:00:00Z"


def test_a_run_is_suspended_whatever_its_pods_report() -> None:
    world = told(with_checkpoint(time="20260101T000000+00:00"))
    assert world is not None
    world.change_run(("suspend", True))
    asyncio.run(Operator(world).settle(2))
    assert (world.status.phase, world.stop_requests) == (Phase.SUSPENDING, 1)


@pytest.mark.parametrize("final", [True, False])
def test_no_text_of_a_snapshot_brings_a_secret_into_status_or_events(final: bool) -> None:
    secret = "hunter2"
    text = f"https://user:{secret}@minio api_key={secret}"
    world = told(
        BASE
        | {"version": text, "message": text, "checkpoint": CHECKPOINT | {"uri": text}}
        | {"pools": {"env": {"replicas": 1, "fixed": text, "vacant": [text]}}}
        | ({"final": FINAL | {"message": text, "reason": f"token={secret}"}} if final else {})
    )
    assert world
    assert world.status.checkpoint
    assert world.status.checkpoint.uri == "https://***@minio api_key=***"
    if final:
        assert world.status.message == "https://***@minio api_key=***"
    shown = json.dumps(world.run["status"]) + str(world.events)
    assert secret not in shown
