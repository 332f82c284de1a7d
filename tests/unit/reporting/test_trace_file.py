"""The file of a trace: its format, the clocks of its processes, and reasons to be idle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.reporting.trace_file import (
    Alignment,
    RoundTrip,
    Trace,
    TracedProcess,
    nested_rows,
    rate,
)
from agenticrun_workers.tracing import (
    ASLEEP,
    DRIVER,
    ENGINE,
    ENV_WORKER,
    EPISODES_IN_FLIGHT,
    EPISODES_RUNNING,
    REQUESTS_IN_FLIGHT,
    TOKENS,
    ClockReading,
    Recording,
    Span,
)
from traces import check_events, check_nesting, durations, processes, read_trace

MS = 1_000_000
DRIVER_HOST = ClockReading(0, "here")


def span(name: str, begin: float, end: float, lane: int = 0, **args: Any) -> Span:
    """Return a span; times are milliseconds."""
    return Span(lane, name, round(begin * MS), round(end * MS), args)


def points(*changes: tuple[float, float]) -> list[tuple[int, float]]:
    """Return a counter; times are milliseconds."""
    return [(round(time * MS), value) for time, value in changes]


def recording(
    name: str,
    kind: str,
    spans: Sequence[Span] = (),
    counters: dict[str, list[tuple[int, float]]] | None = None,
    **more: Any,
) -> Recording:
    """Return a recording of 100 ms."""
    return Recording(name, kind, 0, 100 * MS, list(spans), counters or {}, **more)


THE_DRIVER = recording(
    DRIVER,
    DRIVER,
    [span("step", 0, 100), span("sync", 0, 10), span("rollout", 10, 60), span("train", 60, 100)],
    {EPISODES_RUNNING: points((0, 0), (10, 4), (60, 0))},
)


def trace(*others: Recording) -> Trace:
    """Return a trace of processes with one clock."""
    return Trace([TracedProcess(each) for each in (*others, THE_DRIVER)], {"run": "lake"})


def test_the_phases_of_the_driver_are_its_time() -> None:
    assert trace().summary()["shares"] == {"driver": {"rollout": 0.5, "train": 0.4, "sync": 0.1}}


def test_an_engine_is_idle_for_weights_for_the_gate_for_environments_or_asleep() -> None:
    engine = recording(
        "engine-0",
        ENGINE,
        [span("idle: weights", 0, 10, version=3), span("a request", 12, 30, lane=1)],
        {
            REQUESTS_IN_FLIGHT: points((0, 0), (12, 2), (30, 0), (40, 1), (60, 0)),
            ASLEEP: points((0, 0), (90, 1)),
        },
    )
    found = trace(engine)
    assert found.summary()["shares"]["engine"] == {
        "computing": 0.38,
        "idle: gate": 0.3,
        "idle: env": 0.12,
        "idle: weights": 0.1,
        "idle: asleep": 0.1,
    }
    events = list(found.events())
    check_events(events)
    spent = durations(events, processes(events)["engine-0"])
    assert (spent["idle: env"], spent["a request"]) == (12_000, 18_000)


def test_a_rank_is_idle_because_of_the_phase_of_the_driver() -> None:
    rank = recording(
        "trainer-0",
        "trainer",
        [span("export_weights", 2, 8), span("train_actor", 60, 90), span("forward", 61, 70)],
    )
    assert trace(rank).summary()["shares"]["trainer"] == {
        "idle: rollout": 0.5,
        "train_actor": 0.3,
        "idle: train": 0.1,
        "export_weights": 0.06,
        "idle: sync": 0.04,
    }


def test_an_env_worker_plays_or_waits_for_the_gate() -> None:
    worker = recording("w-0", ENV_WORKER, counters={EPISODES_IN_FLIGHT: points((10, 8), (55, 0))})
    assert trace(worker).summary()["shares"]["env worker"] == {"idle: gate": 0.55, "playing": 0.45}


def test_what_is_left_out_is_in_the_summary_and_in_the_name_of_the_process() -> None:
    worker = recording("w-0", ENV_WORKER, left_out_tracks=7, dropped_spans=9)
    found = Trace([TracedProcess(worker), TracedProcess(THE_DRIVER)], notes=["engine-1: died"])
    assert found.summary()["incomplete"] == [
        "engine-1: died",
        "w-0: 7 episodes without lane",
        "w-0: 9 spans beyond the limit",
    ]
    names = [e["args"]["name"] for e in found.events() if e["name"] == "process_name"]
    assert names == ["driver", "w-0 (7 episodes without lane, 9 spans beyond the limit)"]


def test_the_file_can_be_read_and_has_the_driver_first(tmp_path: Path) -> None:
    engines = [recording(f"engine-{number}", ENGINE) for number in (10, 9)]
    trace(*engines).write(tmp_path / "trace.json.gz")
    document = read_trace(tmp_path / "trace.json.gz")
    assert list(processes(document["traceEvents"])) == ["driver", "engine-9", "engine-10"]
    assert document["otherData"]["run"] == "lake"
    assert list(tmp_path.iterdir()) == [tmp_path / "trace.json.gz"]


def test_tokens_become_a_rate() -> None:
    sums = [(0, 100.0), (500 * MS, 200.0), (1000 * MS, 200.0), (1250 * MS, 300.0)]
    assert rate(sums) == [(0, 200.0), (500 * MS, 0.0), (1000 * MS, 400.0), (1250 * MS, 0.0)]
    engine = recording("engine-0", ENGINE, counters={TOKENS: points((0, 0), (50, 10))})
    counters = {event["name"] for event in trace(engine).events() if event["ph"] == "C"}
    assert counters == {"tokens per second", EPISODES_RUNNING}


moments = st.integers(0, 100 * MS)
any_spans = st.lists(
    st.tuples(st.integers(0, 2), moments, moments).map(
        lambda t: Span(t[0], f"span {t[0]}", min(t[1:]), max(t[1:]), {})
    ),
    max_size=30,
)


@given(any_spans)
def test_spans_that_overlap_in_any_way_are_spread_over_rows(spans: list[Span]) -> None:
    rows = nested_rows(spans)
    assert sorted(map(id, (each for row in rows for each in row))) == sorted(map(id, spans))
    for row in rows:
        check_nesting([(each.begin, each.end) for each in row])


@given(any_spans, st.lists(st.tuples(moments, st.integers(0, 1)), max_size=20).map(sorted))
def test_any_recordings_make_a_trace_that_a_viewer_can_draw(
    spans: list[Span], changes: list[tuple[int, float]]
) -> None:
    """The shares of each kind of process add up to 1."""
    load = {REQUESTS_IN_FLIGHT: changes, EPISODES_IN_FLIGHT: changes, ASLEEP: changes[::2]}
    kinds = {"engine-0": ENGINE, "w-0": ENV_WORKER, "trainer-0": "trainer"}
    found = trace(*(recording(name, kind, spans, load) for name, kind in kinds.items()))
    check_events(found.events())
    for shares in found.summary()["shares"].values():
        assert sum(shares.values()) == pytest.approx(1, abs=0.01)


@given(
    st.integers(-(10**15), 10**15),
    st.integers(-50, 50),
    st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), min_size=2, max_size=6),
    st.integers(10**9, 10**12),
)
def test_clocks_are_aligned_within_the_error_that_is_said(
    ahead: int, drift_ppm: int, ways: list[tuple[int, int]], apart: int
) -> None:
    """Whatever the two ways of a round trip take, and however fast the other clock runs."""

    def other_clock(moment: int) -> int:
        return moment + ahead + moment * drift_ppm // 1_000_000

    def trips(at: int) -> list[RoundTrip]:
        return [
            RoundTrip(at, ClockReading(other_clock(at + there), "elsewhere"), at + there + back)
            for there, back in ways
        ]

    aligned = Alignment.of(DRIVER_HOST, trips(0), trips(apart))
    for moment in (0, apart // 2, apart):
        assert abs(aligned.to_driver(other_clock(moment)) - moment) <= aligned.error + 1000


def test_processes_of_one_host_have_one_clock() -> None:
    trip = RoundTrip(1000, ClockReading(1, "here"), 9000)
    aligned = Alignment.of(DRIVER_HOST, [trip])
    assert (aligned.to_driver(5), aligned.error) == (5, 0)
    elsewhere = RoundTrip(1000, ClockReading(1, ""), 9000)
    assert Alignment.of(ClockReading(0, ""), [elsewhere]).to_driver(1) == 5000
