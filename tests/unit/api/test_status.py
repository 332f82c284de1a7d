"""Status and progress: to YAML and back, and what is refused from a run's own pods."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_api import AgenticRunStatus, ConditionType, InvalidRun, Phase, Progress, Reason
from agenticrun_api.base import clean_text, one_line
from agenticrun_api.load import parse
from agenticrun_api.status import MAX_METRIC_NAME, MAX_METRICS

TIMES = st.datetimes(datetime(1970, 1, 1), datetime(2200, 12, 31)).map(
    lambda time: time.strftime("%Y-%m-%dT%H:%M:%SZ")
)
TEXT = st.text(max_size=256).map(clean_text)
COUNTS = st.integers(0, 10_000)


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


CONDITIONS = st.fixed_dictionaries(
    {
        "type": st.sampled_from([str(kind) for kind in ConditionType]),
        "status": st.sampled_from(["True", "False", "Unknown"]),
        "reason": st.sampled_from([str(reason) for reason in Reason]),
        "message": st.text(max_size=1024).map(clean_text),
        "lastTransitionTime": TIMES,
        "observedGeneration": COUNTS,
    }
)
STATUSES = optional(
    phase=st.sampled_from([str(phase) for phase in Phase]),
    conditions=st.lists(CONDITIONS, max_size=5),
    step=COUNTS,
    progress=TEXT,
    lastStepTime=TIMES,
    metrics=st.lists(
        st.fixed_dictionaries({"name": st.text(max_size=96), "value": st.text(max_size=32)}),
        max_size=MAX_METRICS,
    ),
    roles=st.lists(
        st.fixed_dictionaries(
            {"name": st.just("env"), "desired": COUNTS, "ready": COUNTS, "gpus": COUNTS}
        ),
        max_size=4,
    ),
    job=st.fixed_dictionaries({"attempt": st.integers(1, 2**53), "submissionId": TEXT}),
    checkpoint=st.fixed_dictionaries({"step": COUNTS, "uri": TEXT, "time": TIMES}),
    restarts=COUNTS,
    message=st.text(max_size=4096).map(clean_text),
)


@given(STATUSES)
def test_a_status_survives_yaml_and_back(document: dict[str, Any]) -> None:
    status = parse(AgenticRunStatus, document)
    written = json.loads(json.dumps(status.to_dict()))
    assert parse(AgenticRunStatus, written) == status
    assert {key: written[key] for key in document if key not in ("conditions", "roles", "job")} == {
        key: value for key, value in document.items() if key not in ("conditions", "roles", "job")
    }


def test_only_succeeded_and_failed_are_finished() -> None:
    assert {phase for phase in Phase if phase.finished} == {Phase.SUCCEEDED, Phase.FAILED}


PROGRESS: dict[str, Any] = {
    "runUid": "u-1",
    "submissionId": "lake-u1-1",
    "attempt": 1,
    "sequence": 3,
    "activity": "training",
    "step": 2,
    "maxSteps": 10,
    "policyVersion": 2,
    "time": "2026-01-01T00:00:00Z",
}


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"reward": float("nan")}, "reward"),
        ({"metrics": {"loss": float("inf")}}, "metrics.loss"),
        ({"metrics": {"a" * (MAX_METRIC_NAME + 1): 1.0}}, "metrics."),
        ({"metrics": {'x"} 1\nevil': 1.0}}, "metrics."),
        ({"metrics": {f"m{i}": 1.0 for i in range(MAX_METRICS + 1)}}, "metrics"),
        ({"step": -1}, "step"),
        ({"extra": 1}, "extra"),
        ({"time": "2026-01-01T00:00:00"}, "time"),
        ({"lastStepTime": "9999-01-01T00:00:00Z"}, "lastStepTime"),
        ({"secondsPerStep": -1.0}, "secondsPerStep"),
        ({"sequence": 2**53 + 1}, "sequence"),
        (
            {
                "final": {
                    "outcome": "Great",
                    "reason": "R",
                    "message": "",
                    "retryable": False,
                    "time": "t",
                }
            },
            "final.outcome",
        ),
    ],
)
def test_progress_that_is_out_of_bounds_is_refused(change: dict[str, Any], path: str) -> None:
    parse(Progress, PROGRESS)
    with pytest.raises(InvalidRun) as caught:
        parse(Progress, {**PROGRESS, **change})
    assert caught.value.errors[0].startswith(path)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (
            "día 你好 🤗 👩‍👩‍👧 \U0001d518 𠀀 عَرَبِيّ हिन्दी",
            "día 你好 🤗 👩‍👩‍👧 \U0001d518 𠀀 عَرَبِيّ हिन्दी",
        ),
        ("one\n\ttwo", "one\n\ttwo"),
        ("one\r\ntwo\rthree", "one\ntwo\nthree"),
        ("/data/n\udce9", "/data/n\\udce9"),
        ("\ud83e\udd17 \udd17\ud83e", "\U0001f917 \\udd17\\ud83e"),
        ("a\x00b\x07c\x7fd\x85e\ufeff\ufffe", "a\ufffdb\ufffdc\ufffdd\ufffde\ufffd\ufffd"),
        ("\x1b[1;31mred\x1b[0m \x9b2Jgone", "red gone"),
        ("\x1b]0;title\x07a\x1b]52;c;cm0gLXJm\x1b\\b", "ab"),
        ("\x1b]0;no end\nb", "\ufffd]0;no end\nb"),
        ("half an escape\x1b", "half an escape\ufffd"),
        ("half a colour\x1b[31", "half a colour\ufffd[31"),
    ],
)
def test_a_text_from_outside_is_cleaned(text: str, clean: str) -> None:
    assert clean_text(text) == clean
    assert clean_text(clean) == clean


@given(st.text(st.characters(), max_size=300))
def test_a_clean_text_can_be_stored_and_shown(text: str) -> None:
    clean = clean_text(text)
    clean.encode()
    assert clean_text(clean) == clean
    assert all(
        character.isprintable() or ord(character) > 159
        for character in clean.replace("\n", "").replace("\t", "")
    )


def test_one_line_is_cut_by_characters() -> None:
    assert one_line(" a\n b\t🤗🤗🤗\udce9", 6) == "a b 🤗🤗"


@pytest.mark.parametrize("message", ["a\x00b", "a\ud800b", "a\x1bb"])
def test_what_a_driver_reports_is_cleaned_on_the_way_in(message: str) -> None:
    report = {"outcome": "Failed", "reason": message, "message": message, "retryable": False}
    snapshot = parse(
        Progress,
        {
            **PROGRESS,
            "message": message,
            "checkpoint": {"step": 1, "uri": message, "time": PROGRESS["time"]},
            "final": {**report, "time": PROGRESS["time"]},
        },
    )
    assert snapshot.final
    assert snapshot.checkpoint
    texts = {snapshot.message, snapshot.final.message, snapshot.final.reason}
    assert texts | {snapshot.checkpoint.uri} == {clean_text(message)}
