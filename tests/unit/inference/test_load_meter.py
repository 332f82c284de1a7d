"""Use of an engine: its time, its seats, its cache."""

from __future__ import annotations

import time

import pytest

from agenticrun_workers.inference.engine import STREAM_TOKENS, LoadMeter


def test_seats_are_counted_while_requests_run_and_no_more_than_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    meter = LoadMeter(seats=2)
    now = 1.0
    with meter.running():
        now = 2.0  # one request for a second
        with meter.running(), meter.running():
            now = 6.0  # two seats for four seconds; the third request waits
            assert (meter.busy_seconds, meter.seat_seconds) == (5.0, 9.0)
        now = 9.0
    now = 20.0
    assert (meter.busy_seconds, meter.seat_seconds) == (8.0, 12.0)


def test_requests_that_wait_for_new_weights_are_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    meter = LoadMeter(seats=2)
    with meter.running():
        now = 2.0
        with meter.held():
            now = 5.0
        now = 6.0
    assert (meter.busy_seconds, meter.seat_seconds) == (3.0, 3.0)


def test_tokens_that_come_into_the_cache_were_computed_and_those_that_leave_it_stay_so() -> None:
    meter = LoadMeter(seats=1)
    assert meter.computed(100) is None
    for held in (50, 80, 20, 25):
        meter.poll_kv_tokens(held)
    assert meter.computed(100) == 100 + 80 + 5


def test_a_server_sends_about_a_seconds_tokens_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    meter = LoadMeter(seats=2)
    assert meter.stream_interval(0) == STREAM_TOKENS, "the pace is not known yet"
    with meter.running(2):
        now = 10.0
    assert meter.stream_interval(1000) == 50, "two responses, 500 tokens each in ten seconds"
    assert meter.stream_interval(10) == STREAM_TOKENS


def test_polls_of_the_cache_add_up() -> None:
    meter = LoadMeter(seats=1)
    meter.poll_kv(0.5)
    meter.poll_kv(0.25)
    assert (meter.kv_used, meter.kv_polls) == (0.75, 2)
