"""The recording of steps: when it begins and ends, and what it does without a process."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from agenticrun_workers.driver import trace
from agenticrun_workers.driver.trace import TraceSession
from agenticrun_workers.launch import ActorHandle
from agenticrun_workers.reporting.run_folder import RunFolder, TraceRequest
from agenticrun_workers.reporting.trace_file import Alignment, Trace
from agenticrun_workers.tracing import ClockReading, Recorder, Recording, read_clock, span
from rollout_fakes import Remote
from traces import durations, processes, read_trace
from waiting import eventually_in_loop


class Rank:
    """A traced actor, called as `Traced` is."""

    def __init__(self, name: str) -> None:
        self.recorder = Recorder(name, "trainer")
        self.answers = True

    async def trace_clock(self) -> ClockReading:
        return read_clock()

    async def begin_trace(self, max_spans: int) -> None:
        self.recorder.begin(max_spans)

    async def end_trace(self) -> Recording | None:
        if not self.answers:
            await asyncio.Event().wait()
        return self.recorder.end()


class Run:
    """A run with one rank, which trains when `step` is called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank = Rank("trainer-0")
        self.actors: dict[str, ActorHandle[Any]] = {"trainer-0": Remote(self.rank)}
        self.session = TraceSession(folder, "lake", lambda: self.actors, dict)
        self.steps = 0

    def ask(self, name: str, steps: int) -> TraceRequest:
        return RunFolder(self.folder).ask_for_trace(name, steps)

    async def step(self) -> None:
        driver, rank = self.session.recorder, self.rank.recorder
        with driver.main, span("step"), span("train"), rank.span("train_actor"):
            await asyncio.sleep(0.002)
        self.steps += 1
        await self.session.between_steps(self.steps)

    async def written(self, request: TraceRequest) -> dict[str, Any]:
        await eventually_in_loop(request.answer.exists, 30, "the trace")
        await eventually_in_loop(lambda: not request.file.exists(), 30, "the end of the request")
        return read_trace(request.answer)


def steps_of(document: dict[str, Any]) -> tuple[int, int]:
    """Return the first step, and the number of whole ones."""
    facts = document["otherData"]
    return facts["first_step"], facts["whole_steps"]


async def test_the_steps_that_were_asked_for_are_recorded(tmp_path: Path) -> None:
    run = Run(tmp_path)
    await run.session.between_steps(0)
    await run.step()
    request = run.ask("a", 2)
    for _ in range(4):
        await run.step()
    document = await run.written(request)
    assert steps_of(document) == (3, 2), "a request counts from the next step on"
    events = document["traceEvents"]
    names = processes(events)
    assert list(names) == ["driver", "trainer-0"]
    assert sum(e["name"] == "step" for e in events if e["ph"] == "X") == 2
    driver = durations(events, names["driver"])
    assert 0.5 * driver["step"] <= driver["train"] <= driver["step"]
    trained = durations(events, names["trainer-0"])["train_actor"]
    assert trained <= driver["train"] + 2, "the clocks are the same; microseconds are rounded"
    assert not run.session.recorder.on
    assert not run.rank.recorder.on


async def test_requests_are_answered_one_after_the_other(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first, second = run.ask("a", 1), run.ask("b", 2)
    await run.session.between_steps(0)
    while second.file.exists():
        await run.step()
    assert steps_of(await run.written(first)) == (1, 1)
    assert steps_of(await run.written(second))[1] == 2


async def test_a_request_that_is_being_answered_is_not_answered_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow look for requests sees one whose file is written meanwhile."""

    quick = RunFolder.trace_requests

    def slow(folder: RunFolder) -> list[TraceRequest]:
        requests = quick(folder)
        time.sleep(0.2)
        return requests

    monkeypatch.setattr(RunFolder, "trace_requests", slow)
    run = Run(tmp_path)
    request = run.ask("a", 1)
    await run.session.between_steps(0)
    for _ in range(3):
        await run.step()
    assert steps_of(await run.written(request)) == (1, 1)
    assert not run.session.recorder.on, "no second recording"


async def test_no_recording_begins_while_another_is_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(trace, "ANSWER_SECONDS", 0.5)
    run = Run(tmp_path)
    first = run.ask("a", 100)
    await run.session.between_steps(0)
    run.rank.answers = False  # so that the collection takes half a second
    first.withdraw()
    second = run.ask("b", 1)
    await eventually_in_loop(lambda: not run.session.recorder.on, 30, "the end")
    while True:
        await run.step()
        began = run.session.recorder.on
        if first.answer.exists():
            break
        assert not began
    run.rank.answers = True
    while second.file.exists():
        await run.step()
    assert steps_of(await run.written(second))[1] == 1


async def test_a_run_that_ends_earlier_gives_what_there_is(tmp_path: Path) -> None:
    run = Run(tmp_path)
    request, later = run.ask("a", 100), run.ask("b", 1)
    await run.session.between_steps(0)
    await run.step()
    await run.session.close()
    assert steps_of(read_trace(request.answer)) == (1, 1)
    assert not later.file.exists()
    assert later.failure.read_text() == "the run has ended"


async def test_a_request_that_is_withdrawn_gives_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "WATCH_SECONDS", 0.01)
    run = Run(tmp_path)
    request = run.ask("a", 100)
    await run.session.between_steps(0)
    with run.session.recorder.main, span("step"):
        request.withdraw()
        document = await run.written(request)
    (step,) = [e for e in document["traceEvents"] if e["ph"] == "X" and e["name"] == "step"]
    assert step["args"] == {"unfinished": True}


async def test_processes_that_die_join_or_do_not_answer_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "ANSWER_SECONDS", 0.05)
    run = Run(tmp_path)
    run.actors |= {"engine-0": Remote(Rank("engine-0")), "engine-1": Remote(Rank("engine-1"))}
    request = run.ask("a", 1)
    await run.session.between_steps(0)
    run.actors["engine-0"].kill()
    run.rank.answers = False
    run.actors = {**run.actors, "engine-2": Remote(Rank("engine-2"))}
    await run.step()
    document = await run.written(request)
    assert document["otherData"]["incomplete"] == [
        "trainer-0: no answer for 0 s",
        "engine-0: died",
        "engine-2: joined during the recording",
    ]
    assert list(processes(document["traceEvents"])) == ["driver", "engine-1"]


async def test_training_goes_on_when_the_trace_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    run = Run(tmp_path)
    request = run.ask("a", 1)
    await run.session.between_steps(0)
    monkeypatch.setattr(Trace, "write", full)
    with caplog.at_level(logging.ERROR):
        await run.step()
        await eventually_in_loop(lambda: not request.file.exists(), 30, "the end of the request")
    assert request.failure.read_text() == "OSError: no space left on device"
    assert "no space left on device" in caplog.text
    await run.session.close()


@pytest.mark.parametrize("withdrawn", [True, False])
async def test_training_goes_on_when_the_trace_cannot_be_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, withdrawn: bool
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("no clock")

    monkeypatch.setattr(trace, "WATCH_SECONDS", 0.01)
    run = Run(tmp_path)
    request = run.ask("a", 100 if withdrawn else 1)
    await run.session.between_steps(0)
    with monkeypatch.context() as patch:
        patch.setattr(Alignment, "of", broken)
        if withdrawn:
            request.withdraw()
            await eventually_in_loop(lambda: run.session._session is None, 30, "the end")
        await run.step()
    assert request.failure.read_text() == "ZeroDivisionError: no clock"
    later = run.ask("b", 1)
    while later.file.exists():
        await run.step()
    assert steps_of(await run.written(later))[1] == 1


async def test_a_request_that_is_no_number_is_ignored(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.ask("a", 1).file.write_text("many")
    await run.session.between_steps(0)
    assert not run.session.recorder.on
