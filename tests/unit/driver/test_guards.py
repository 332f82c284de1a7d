"""Alarms rise after `patience` steps, fall at once, and survive a resume."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_api.algorithm import Guards
from agenticrun_workers.driver.guards import BLIND_STEPS, GuardTripped, GuardWatch

ENTROPY = Guards(min_entropy=0.5, patience=2)


def entropy(value: float) -> dict[str, float]:
    return {"actor/entropy": value}


def test_an_alarm_rises_after_patience_steps_in_a_row_and_is_told_once() -> None:
    watch = GuardWatch(ENTROPY)
    said = [watch.observe(entropy(value)) for value in (0.4, 0.6, 0.4, 0.3, 0.2)]
    assert [step.metrics["guard/entropy"] for step in said] == [0, 0, 0, 1, 1]
    assert [len(step.messages) for step in said] == [0, 0, 0, 1, 0]
    message = said[3].messages[0]
    assert message.startswith(
        "guard entropy: actor/entropy is 0.3, "
        "below spec.pipeline.guards.minEntropy 0.5 for 2 steps: "
    )


def test_an_alarm_falls_at_the_first_good_step_and_says_so() -> None:
    watch = GuardWatch(ENTROPY)
    for value in (0.1, 0.1):
        watch.observe(entropy(value))
    quiet = watch.observe(entropy(0.9))
    assert quiet.metrics["guard/entropy"] == 0
    assert quiet.messages == ("guard entropy is quiet again: actor/entropy is 0.9",)


def test_the_bound_itself_is_good() -> None:
    watch = GuardWatch(
        Guards(min_entropy=0.5, max_zero_variance_share=0.8, max_logprob_gap=0.1, patience=1)
    )
    at_bounds = {"actor/entropy": 0.5, "group/zero_variance_share": 0.8, "engine/logprob_gap": 0.1}
    assert set(watch.observe(at_bounds).metrics.values()) == {0.0}
    beyond = {"actor/entropy": 0.49, "group/zero_variance_share": 0.81, "engine/logprob_gap": 0.11}
    assert set(watch.observe(beyond).metrics.values()) == {1.0}


def test_a_step_that_measures_nothing_changes_nothing() -> None:
    watch = GuardWatch(ENTROPY)
    said = [watch.observe(metrics) for metrics in (entropy(0.1), {}, entropy(0.1), {})]
    assert [step.metrics["guard/entropy"] for step in said] == [0, 0, 1, 1]


def test_a_guard_that_sees_nothing_for_long_says_so_once() -> None:
    watch = GuardWatch(Guards())
    steps = [watch.observe({}) for _ in range(3 * BLIND_STEPS)]
    (number,) = [number for number, step in enumerate(steps, 1) if step.messages]
    assert number == BLIND_STEPS
    (message,) = steps[number - 1].messages
    assert message.startswith("guard logprob_gap (spec.pipeline.guards.maxLogprobGap) sees nothing")
    watch.observe({"engine/logprob_gap": 0.0})
    again = [watch.observe({}) for _ in range(BLIND_STEPS)]
    assert [bool(step.messages) for step in again] == [False] * (BLIND_STEPS - 1) + [True]


@pytest.mark.parametrize(
    ("spec", "metric"),
    [
        (Guards(min_entropy=0.5, patience=1), "actor/entropy"),
        (Guards(patience=1), "engine/logprob_gap"),
    ],
)
def test_what_is_not_a_number_is_beyond_every_bound(spec: Guards, metric: str) -> None:
    watch = GuardWatch(spec)
    assert 1.0 in watch.observe({metric: math.nan}).metrics.values()


def test_the_worst_engine_raises_the_alarm_and_is_named() -> None:
    watch = GuardWatch(Guards(max_logprob_gap=0.1, patience=1))
    said = watch.observe(
        {
            "engine/engine-0/logprob_gap": 0.01,
            "engine/engine-1/logprob_gap": 0.3,
            "engine/engine-1/queue": 5.0,
        }
    )
    assert said.metrics == {"guard/logprob_gap": 1.0}
    assert "engine/engine-1/logprob_gap is 0.3" in said.messages[0]


def test_guards_that_are_not_asked_for_are_no_metric() -> None:
    assert GuardWatch(Guards()).observe(
        {"actor/entropy": 0.0, "group/zero_variance_share": 1.0}
    ).metrics == {"guard/logprob_gap": 0.0}


def test_report_never_fails_and_fail_does_once_the_alarm_is_up() -> None:
    report, fail = (
        GuardWatch(Guards(min_entropy=0.5, patience=2, action=action))
        for action in ("Report", "Fail")
    )
    for watch in (report, fail):
        watch.observe(entropy(0.1))
        watch.enforce()
        watch.observe(entropy(0.1))
    report.enforce()
    with pytest.raises(GuardTripped, match=r"minEntropy 0\.5 for 2 steps"):
        fail.enforce()


def test_a_resumed_run_that_was_saved_with_its_alarm_up_still_fails() -> None:
    watch = GuardWatch(Guards(min_entropy=0.5, patience=2, action="Fail"), {"entropy": 2})
    with pytest.raises(GuardTripped, match="guard entropy was up when the checkpoint was saved"):
        watch.enforce()


def test_an_alarm_that_is_up_when_settings_change_keeps_its_reason() -> None:
    watch = GuardWatch(Guards(min_entropy=0.5, patience=2))
    for _ in range(2):
        watch.observe(entropy(0.1))
    watch.configure(Guards(min_entropy=0.5, patience=2, action="Fail"))
    watch.observe({})
    with pytest.raises(GuardTripped, match=r"actor/entropy is 0\.1, below .* for 2 steps"):
        watch.enforce()


VALUES = st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=30)


@given(values=VALUES, cut=st.integers(0, 30), patience=st.integers(1, 4))
def test_a_resume_from_the_stored_state_says_what_the_uninterrupted_run_says(
    values: list[float | None], cut: int, patience: int
) -> None:
    spec = Guards(min_entropy=0.5, patience=patience)
    steps = [{} if value is None else entropy(value) for value in values]
    straight = GuardWatch(spec)
    expected = [straight.observe(step) for step in steps]
    first = GuardWatch(spec)
    said = [first.observe(step) for step in steps[:cut]]
    second = GuardWatch(spec, json.loads(json.dumps(first.state)))
    said += [second.observe(step) for step in steps[cut:]]
    assert said == expected


@given(values=st.lists(st.floats(0, 1), max_size=30), patience=st.integers(1, 4))
def test_an_alarm_is_up_exactly_when_the_newest_steps_are_all_bad(
    values: list[float], patience: int
) -> None:
    watch = GuardWatch(Guards(min_entropy=0.5, patience=patience))
    for end in range(1, len(values) + 1):
        newest = values[max(0, end - patience) : end]
        bad = len(newest) == patience and all(value < 0.5 for value in newest)
        assert watch.observe(entropy(values[end - 1])).metrics["guard/entropy"] == float(bad)
