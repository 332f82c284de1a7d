"""Records the next steps of a run when `agenticrun trace` asks for them.

A request is a file `traces/<name>.request` in the output folder, with the number of steps. The
driver looks for one before each step, so that it costs nothing in between; it is the same on a
laptop and in a head pod. The answer is `traces/<name>.json.gz` (`reporting/trace_file.py`). While
the driver records, it ends early if the request is withdrawn, or if the run ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from agenticrun_workers.launch import ActorDied, ActorHandle
from agenticrun_workers.reporting.run_folder import RunFolder, TraceRequest
from agenticrun_workers.reporting.trace_file import Alignment, RoundTrip, Trace, TracedProcess
from agenticrun_workers.tracing import DRIVER, Recorder, Recording, Traced, read_clock

log = logging.getLogger(__name__)

ROUND_TRIPS = 5
"""Readings of a clock, of which the fastest counts."""
ANSWER_SECONDS = 30.0
"""Longest wait for a process. A rank answers when its current call ends."""
WATCH_SECONDS = 0.5
"""Time between two looks whether the request is still there."""
MAX_SPANS = 500_000
"""Spans of a trace. Each process gets an equal share, and at most `MAX_SPANS_EACH`."""
MAX_SPANS_EACH = 50_000

T = TypeVar("T")
Actors = Mapping[str, ActorHandle[Traced]]


@dataclass
class _Session:
    """A recording that is on."""

    request: TraceRequest
    first_step: int
    actors: Actors
    clocks: dict[str, list[RoundTrip]]
    notes: list[str]
    watcher: asyncio.Task[None] | None = None


class TraceSession:
    """Records one request after the other.

    Args:
        output: the output folder.
        run: name of the run.
        actors: returns the current actors.
        sample: values of counters of the driver.
    """

    def __init__(
        self,
        output: Path,
        run: str,
        actors: Callable[[], Actors],
        sample: Callable[[], Mapping[str, float]],
    ) -> None:
        self.recorder = Recorder(DRIVER, DRIVER, sample)
        self._folder = RunFolder(output)
        self._run = run
        self._actors = actors
        self._session: _Session | None = None
        self._step = 0
        self._writing: asyncio.Task[None] | None = None
        self._ending = asyncio.Lock()

    async def between_steps(self, step: int) -> None:
        """End the recording if it has its steps, and begin a requested one.

        Never fails: a trace that cannot be recorded does not stop training.

        Args:
            step: number of completed steps.
        """
        self._step = step
        session = self._session
        if session and step - session.first_step >= session.request.steps:
            await self._end(session)
        if self._session is not None or self._writing is not None:
            return  # a request stays in its folder until its file is written
        requests = await self._requests()
        if requests:
            try:
                await self._begin(requests[0])
            except Exception as error:
                await self._fail(requests[0], error)

    async def close(self) -> None:
        """End a recording before its time, and write what there is."""
        if self._session:
            await self._end(self._session)
        await self._written()
        for request in await self._requests():
            request.fail("the run has ended")

    async def _requests(self) -> list[TraceRequest]:
        try:
            return await asyncio.to_thread(self._folder.trace_requests)
        except OSError as error:
            log.error("no trace: requests cannot be read: %s", error)
            return []

    async def _begin(self, request: TraceRequest) -> None:
        actors = dict(self._actors())
        notes: list[str] = []
        # Clocks are read before and after, because they drift apart during the recording.
        clocks = await self._of_all(actors, _clock_of, notes)
        share = min(MAX_SPANS_EACH, MAX_SPANS // (len(actors) + 1))
        # A process whose clock cannot be read cannot be placed in time.
        recorded = {name: actors[name] for name in clocks}
        self.recorder.begin(share)
        await self._of_all(
            recorded, lambda actor: actor.call(lambda traced: traced.begin_trace(share)), notes
        )
        self._session = _Session(request, self._step, recorded, clocks, notes)
        self._session.watcher = asyncio.create_task(self._watch(self._session), name="trace")
        log.info("recording a trace of %d steps from step %d", request.steps, self._step + 1)

    async def _end(self, session: _Session) -> None:
        async with self._ending:
            if self._session is not session:  # the request was withdrawn at the same time
                return
            # The watcher itself may be the one that ends the session.
            if session.watcher is not None and session.watcher is not asyncio.current_task():
                session.watcher.cancel()
            try:
                trace = await self._collect(session)
                # In the background: a large trace takes seconds to write.
                self._writing = asyncio.create_task(self._write(trace, session))
            except Exception as error:
                await self._fail(session.request, error)
            finally:
                self._session = None

    async def _collect(self, session: _Session) -> Trace:
        notes = session.notes
        own = self.recorder.end()  # first: what others do after that is cut off
        assert own is not None, "the driver records from the beginning to the end"
        recordings = await self._of_all(session.actors, _recording_of, notes)
        clocks = await self._of_all(session.actors, _clock_of, [])
        joined = sorted(set(self._actors()) - set(session.actors))
        notes += [f"{name}: joined during the recording" for name in joined]
        here = read_clock()
        processes = [TracedProcess(own)]
        for name, recording in recordings.items():
            if recording is not None:
                aligned = Alignment.of(here, session.clocks[name], clocks.get(name, ()))
                processes.append(TracedProcess(recording, aligned))
        done = self._step - session.first_step
        facts = {"run": self._run, "first_step": session.first_step + 1, "whole_steps": done}
        return Trace(processes, facts, notes)

    async def _write(self, trace: Trace, session: _Session) -> None:
        """Write the file while training continues."""
        began, request = time.perf_counter(), session.request
        try:
            await asyncio.to_thread(trace.write, request.answer)
            request.withdraw()
            log.info("wrote %s in %.1f s", request.answer, time.perf_counter() - began)
        except Exception as error:  # a full disk does not stop training
            await self._fail(request, error)
        finally:
            self._writing = None

    async def _written(self) -> None:
        """Wait for the last file."""
        if self._writing is not None:
            await self._writing

    async def _watch(self, session: _Session) -> None:
        """End the recording when the request is withdrawn."""
        while await asyncio.to_thread(_may_exist, session.request.file):
            await asyncio.sleep(WATCH_SECONDS)
        await self._end(session)

    async def _fail(self, request: TraceRequest, error: Exception) -> None:
        """Say why there is no trace, and end all recordings."""
        log.error("no trace: %s: %s", type(error).__name__, error, exc_info=error)
        self.recorder.end()
        # Recorders that are left on would slow down every later step.
        await self._of_all(dict(self._actors()), _recording_of, [])
        try:
            request.fail(f"{type(error).__name__}: {error}")
        except OSError as unwritable:
            log.error("%s cannot be answered: %s", request.file, unwritable)

    async def _of_all(
        self, actors: Actors, ask: Callable[[ActorHandle[Traced]], Awaitable[T]], notes: list[str]
    ) -> dict[str, T]:
        """Ask all actors at the same time. One that does not answer becomes a note."""

        async def asked(actor: ActorHandle[Traced]) -> T:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await ask(actor)

        answers = await asyncio.gather(*map(asked, actors.values()), return_exceptions=True)
        found: dict[str, T] = {}
        for name, answer in zip(actors, answers, strict=True):
            if isinstance(answer, ActorDied):
                notes.append(f"{name}: died")
            elif isinstance(answer, TimeoutError):
                notes.append(f"{name}: no answer for {ANSWER_SECONDS:.0f} s")
            elif isinstance(answer, BaseException):
                notes.append(f"{name}: {type(answer).__name__}: {answer}")
            else:
                found[name] = answer
        return found


def _may_exist(file: Path) -> bool:
    """Return False if the file is gone: a folder that cannot be read for a moment says nothing."""
    try:
        return file.exists()
    except OSError:
        return True


async def _clock_of(actor: ActorHandle[Traced]) -> list[RoundTrip]:
    trips = []
    for _ in range(ROUND_TRIPS):
        sent = time.perf_counter_ns()
        reading = await actor.call(lambda traced: traced.trace_clock())
        trips.append(RoundTrip(sent, reading, time.perf_counter_ns()))
    return trips


async def _recording_of(actor: ActorHandle[Traced]) -> Recording | None:
    return await actor.call(lambda traced: traced.end_trace())
