"""The recorder: what it keeps, and what it leaves out."""

from __future__ import annotations

import asyncio
import time

from agenticrun_workers.tracing import (
    LANES,
    POINTS,
    Recorder,
    Recording,
    Traced,
    count,
    recording,
    span,
    traced,
)

MANY = 1000


def ended(recorder: Recorder) -> Recording:
    found = recorder.end()
    assert found is not None
    return found


def names(found: Recording) -> list[tuple[int, str]]:
    return [(each.lane, each.name) for each in sorted(found.spans, key=lambda s: s.begin)]


def test_nothing_is_recorded_before_the_beginning_and_after_the_end() -> None:
    recorder = Recorder("w", "env worker")
    assert recorder.end() is None
    with recorder.track("a"), span("step"):
        assert not recording()
    recorder.begin(MANY)
    ended(recorder)
    with recorder.track("b"), span("step"):
        count("n", 1)
    recorder.begin(MANY)
    assert (names(ended(recorder)), recorder.on) == ([], False)


def test_spans_are_in_the_lane_of_their_track_and_inside_of_it() -> None:
    recorder = Recorder("w", "env worker")
    recorder.begin(MANY)
    with recorder.track("episode", tag="Lake") as track, span("step", turn=1):
        track.note(stop="completed")
    with recorder.main, span("main"):
        count("n", 2)
    found = ended(recorder)
    assert names(found) == [(1, "episode"), (1, "step"), (0, "main")]
    episode, step = sorted(found.spans[:2], key=lambda each: each.begin)
    assert found.begin <= episode.begin <= step.begin <= step.end <= episode.end <= found.end
    assert (episode.args, step.args) == ({"tag": "Lake", "stop": "completed"}, {"turn": 1})
    assert [value for _, value in found.counters["n"]] == [2]


async def test_coroutines_that_run_at_once_have_lanes_of_their_own() -> None:
    recorder = Recorder("w", "env worker")
    recorder.begin(MANY)

    async def episode(name: str) -> None:
        with recorder.track(name):
            await asyncio.sleep(0)
            with span(f"step of {name}"):
                await asyncio.sleep(0)

    await asyncio.gather(episode("a"), episode("b"))
    await episode("c")
    by_lane = {name: lane for lane, name in names(ended(recorder))}
    assert by_lane["a"] == by_lane["step of a"] == 1
    assert by_lane["b"] == by_lane["step of b"] == 2
    assert by_lane["c"] == 1, "a lane is used again"


def test_tracks_without_a_lane_are_left_out_whole_and_counted() -> None:
    recorder = Recorder("w", "env worker")
    recorder.begin(MANY)
    for number in range(2 * LANES):
        with recorder.track(f"before {number}"):
            pass
    tracks = [recorder.track(str(number)) for number in range(LANES + 3)]
    for track in tracks:
        track.__enter__()
        with span("step"):
            pass
    for track in reversed(tracks):
        track.__exit__(None, None, None)
    found = ended(recorder)
    assert found.left_out_tracks == 3
    assert sum(name == "step" for _, name in names(found)) == LANES


def test_what_is_not_over_at_the_end_ends_there() -> None:
    recorder = Recorder("w", "env worker")
    recorder.begin(MANY)
    with recorder.track("episode"):
        with span("generate"):
            found = ended(recorder)
        recorder.begin(MANY)
        with span("step"):
            pass
        after = ended(recorder)
    assert names(found) == [(1, "episode"), (1, "generate")]
    assert all(each.args == {"unfinished": True} for each in found.spans)
    assert names(after) == [(1, "episode"), (1, "step")]
    episode = next(each for each in after.spans if each.name == "episode")
    assert episode.args == {"began": "before the recording", "unfinished": True}


def test_memory_is_bounded_and_dropped_spans_are_counted() -> None:
    recorder = Recorder("w", "env worker")
    recorder.begin(10)
    for _ in range(15):
        with recorder.span("x"):
            pass
    recorder._buffers.resolution = 0
    for value in range(3 * POINTS):
        recorder.count("n", value)
        recorder._buffers.resolution = 0
    found = ended(recorder)
    assert (len(found.spans), found.dropped_spans) == (10, 5)
    values = [value for _, value in found.counters["n"]]
    assert len(values) <= POINTS
    assert (values[0], values[-1], values) == (0, 3 * POINTS - 1, sorted(values))


def test_a_counter_keeps_the_last_value_of_many_at_once() -> None:
    recorder = Recorder("w", "env worker")
    recorder.begin(MANY)
    for value in range(100):
        recorder.count("n", value)
    assert ended(recorder).counters["n"][-1][1] == 99


async def test_values_are_sampled_while_a_recording_is_on() -> None:
    values = iter(range(1000))
    recorder = Recorder("w", "env worker", lambda: {"n": next(values)})
    await asyncio.sleep(0.15)
    recorder.begin(MANY)
    await asyncio.sleep(0.15)
    found = [value for _, value in ended(recorder).counters["n"]]
    assert (found[0], len(found) >= 2) == (0, True)
    await asyncio.sleep(0.15)
    assert next(values) <= len(found) + 1


def test_calls_of_a_traced_method_are_spans_of_the_actor() -> None:
    class Rank(Traced):
        def __init__(self) -> None:
            self.recorder = Recorder("trainer-0", "trainer")

        @traced
        def score(self, plan: int) -> int:
            with span("fetch"):
                return plan + 1

    rank = Rank()
    assert rank.score(1) == 2
    rank.begin_trace(MANY)
    assert rank.score(plan=2) == 3
    found = rank.end_trace()
    assert found is not None
    assert names(found) == [(0, "score"), (0, "fetch")]
    before, reading = time.perf_counter_ns(), rank.trace_clock()
    assert before <= reading.nanoseconds <= time.perf_counter_ns()
