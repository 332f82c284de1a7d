"""The file of `agenticrun trace`: the recordings of all processes, on the clock of the driver.

Its format is the JSON object of the Trace Event Format, compressed with gzip, which ui.perfetto.dev
and chrome://tracing open. Times are microseconds since the recording began.

- "Global Legacy Events", as Perfetto calls global asynchronous events, and shows above all others:
  a line for each process of the run with what it does, and why it is idle.
- A process of the run is a process of the trace. Its first thread is the same with all details; the
  other ones are its episodes or requests.
"""

from __future__ import annotations

import bisect
import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from agenticrun_workers.tracing import (
    ASLEEP,
    DRIVER,
    ENGINE,
    ENV_WORKER,
    EPISODES_IN_FLIGHT,
    EPISODES_RUNNING,
    KINDS,
    REQUESTS_IN_FLIGHT,
    TOKENS,
    ClockReading,
    Recording,
    Span,
)

Event = dict[str, Any]
Interval = tuple[int, int]
"""Begin and end."""

LANE_NAMES = {ENGINE: "request", ENV_WORKER: "episode"}
TOKENS_PER_SECOND = "tokens per second"
RATE_NANOSECONDS = 500_000_000
"""Shortest time over which a rate is a mean: engines count many tokens at the end of a request."""
RATES = 500
"""Largest number of values of a rate."""


@dataclass(frozen=True)
class RoundTrip:
    """A reading of another process's clock, with the driver's time before and after it."""

    sent: int
    reading: ClockReading
    received: int

    @property
    def offset(self) -> float:
        """The driver's clock minus the other one, if both ways took the same time."""
        return (self.sent + self.received) / 2 - self.reading.nanoseconds

    @property
    def error(self) -> float:
        """Largest error of `offset`: the reading was made somewhere in between."""
        return (self.received - self.sent) / 2


@dataclass(frozen=True)
class Alignment:
    """Converts times of a process into the driver's. Between two measurements it interpolates."""

    begin: int
    begin_offset: float
    end: int
    end_offset: float
    error: float
    """Largest error in nanoseconds, at the two measurements."""

    @classmethod
    def of(
        cls, driver: ClockReading, before: Sequence[RoundTrip], after: Sequence[RoundTrip] = ()
    ) -> Alignment:
        """Return the alignment by the shortest round trips at the beginning and at the end.

        Two processes with one clock need none.
        """
        first = min(before, key=lambda trip: trip.error)
        last = min(after, key=lambda trip: trip.error, default=first)
        begin, end = first.reading.nanoseconds, last.reading.nanoseconds
        if driver.host and driver.host == first.reading.host:
            return cls(begin, 0.0, end, 0.0, 0.0)
        return cls(begin, first.offset, end, last.offset, max(first.error, last.error))

    def to_driver(self, moment: int) -> int:
        """Return the driver's time of a moment on the process's clock."""
        passed = self.end - self.begin
        share = (moment - self.begin) / passed if passed else 0.0
        return moment + round(self.begin_offset + share * (self.end_offset - self.begin_offset))


@dataclass(frozen=True)
class TracedProcess:
    """A recording, and how its clock compares with the driver's; None for the driver itself."""

    recording: Recording
    alignment: Alignment | None = None


@dataclass(frozen=True)
class Trace:
    """The spans and counters of all processes.

    Args:
        processes: recordings; one of them is the driver's.
        facts: what the file says about itself: run, steps.
        notes: processes that could not be recorded, and why.
    """

    processes: Sequence[TracedProcess]
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def write(self, path: Path) -> None:
        """Write the file, one event per line. It appears when it is complete."""
        # Renamed when complete, because the file is the answer to the request.
        aside = path.with_suffix(".tmp")
        with gzip.open(aside, "wt", encoding="utf-8", compresslevel=5) as file:
            file.write('{"displayTimeUnit": "ms", "otherData": ')
            json.dump(self.summary(), file)
            file.write(',\n"traceEvents": [')
            for number, event in enumerate(self.events()):
                file.write(",\n" if number else "\n")
                file.write(json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")
        aside.replace(path)

    def events(self) -> Iterator[Event]:
        """Yield the events."""
        for pid, process in enumerate(self._aligned, start=1):
            yield from process.events(pid, self._driver)

    def summary(self) -> dict[str, Any]:
        """Return what the processes of each kind did, as shares of their time, and what is missing.

        The shares of a kind add up to 1. Those of the driver are of its phases.
        """
        shares: dict[str, dict[str, float]] = {}
        for kind in KINDS:
            spent: dict[str, float] = defaultdict(float)
            for process in self._aligned:
                if process.kind == kind:
                    for span in process.activity(self._driver):
                        spent[span.name] += span.end - span.begin
            if whole := sum(spent.values()):
                ordered = sorted(spent.items(), key=lambda item: -item[1])
                shares[kind] = {name: round(time / whole, 4) for name, time in ordered}
        return {
            **self.facts,
            "seconds": round(self._driver.duration / 1e9, 3),
            "shares": shares,
            "clock_error_ms": {p.name: round(p.error / 1e6, 3) for p in self._aligned if p.error},
            "incomplete": [*self.notes, *(note for p in self._aligned for note in p.left_out)],
        }

    @property
    def _driver(self) -> _Process:
        return next(process for process in self._aligned if process.kind == DRIVER)

    @cached_property
    def _aligned(self) -> list[_Process]:
        driver = next(p.recording for p in self.processes if p.recording.kind == DRIVER)
        aligned = [_Process(process, driver) for process in self.processes]
        # engine-10 comes after engine-9.
        return sorted(aligned, key=lambda p: (KINDS.index(p.kind), len(p.name), p.name))


class _Process:
    """A process on the driver's clock, from the beginning of the recording: in nanoseconds."""

    def __init__(self, process: TracedProcess, driver: Recording) -> None:
        recording, alignment = process.recording, process.alignment
        self.name, self.kind = recording.name, recording.kind
        self.error = alignment.error if alignment else 0.0
        self.duration = driver.end - driver.begin

        def moment(nanoseconds: int) -> int:
            on_driver = alignment.to_driver(nanoseconds) if alignment else nanoseconds
            # Clock errors must not put a span outside of the recording.
            return min(max(on_driver - driver.begin, 0), self.duration)

        self.begin, self.end = moment(recording.begin), moment(recording.end)
        self.spans = [
            Span(each.lane, each.name, moment(each.begin), moment(each.end), each.args)
            for each in recording.spans
        ]
        self.counters = {
            name: [(moment(time), value) for time, value in points]
            for name, points in recording.counters.items()
        }
        self.left_out = [
            f"{self.name}: {count} {what}"
            for count, what in (
                (recording.left_out_tracks, f"{LANE_NAMES.get(self.kind, 'track')}s without lane"),
                (recording.dropped_spans, "spans beyond the limit"),
            )
            if count
        ]

    def activity(self, driver: _Process) -> list[Span]:
        """Return what the process does in its whole time, one thing after the other.

        Args:
            driver: knows why a process is idle.
        """
        whole = (self.begin, self.end)
        if self.kind == DRIVER:
            return _filled(self._phases, whole, lambda _: [], otherwise="between phases")
        top = outermost(self._lane(0))
        if self.kind in (ENGINE, ENV_WORKER):
            return _filled(top, whole, lambda gap: self._load(gap, driver))
        return _filled(top, whole, driver._idle_reasons)

    @cached_property
    def _phases(self) -> list[Span]:
        """The phases of the driver: what is directly inside of a step, or outside of any."""
        return outermost(span for span in self._lane(0) if span.name != "step")

    def _idle_reasons(self, gap: Interval) -> list[tuple[str, Interval]]:
        """Return why a rank is idle: the phase that the driver is in."""
        return [
            (f"idle: {span.name}", (max(span.begin, gap[0]), min(span.end, gap[1])))
            for span in self._phases
            if span.begin < gap[1] and span.end > gap[0]
        ]

    def _load(self, gap: Interval, driver: _Process) -> list[tuple[str, Interval]]:
        """Return when an engine or an env worker had work, and why it had none."""
        engine = self.kind == ENGINE
        busy = self._positive(REQUESTS_IN_FLIGHT if engine else EPISODES_IN_FLIGHT)
        episodes = driver._positive(EPISODES_RUNNING)
        found: list[tuple[str, Interval]] = []
        for asleep, awake in _split(gap, self._positive(ASLEEP)):
            # Asleep comes first: an engine that sleeps may still hold requests.
            if asleep:
                found.append(("idle: asleep", awake))
                continue
            for works, part in _split(awake, busy):
                if works:
                    found.append(("computing" if engine else "playing", part))
                    continue
                found += [
                    ("idle: env" if engine and played else "idle: gate", piece)
                    for played, piece in _split(part, episodes)
                ]
        return found

    def _positive(self, counter: str) -> list[Interval]:
        """Return when a counter was above 0."""
        return positive(self.counters.get(counter, []), self.end)

    def _lane(self, lane: int) -> list[Span]:
        return [span for span in self.spans if span.lane == lane]

    def events(self, pid: int, driver: _Process) -> Iterator[Event]:
        """Yield the events of the process."""
        remarks = [f"clock ±{self.error / 1e6:.1f} ms"] if self.error else []
        remarks += [note.removeprefix(f"{self.name}: ") for note in self.left_out]
        title = self.name + (f" ({', '.join(remarks)})" if remarks else "")
        yield _metadata("process_name", pid, 0, name=title)
        yield _metadata("process_sort_index", pid, 0, sort_index=pid)
        own = self._lane(0)
        outer = set(map(id, outermost(own)))
        base = own
        activity = self.activity(driver)
        yield from self._line(pid, activity)
        if self.kind != DRIVER:
            base = [*activity, *(span for span in own if id(span) not in outer)]
        lanes: dict[int, list[Span]] = defaultdict(list)
        for span in self.spans:
            if span.lane:
                lanes[span.lane].append(span)
        rows = 0
        for lane, spans in [(0, base), *sorted(lanes.items())]:
            for row in nested_rows(spans):
                tid = 1000 * pid + rows if rows else pid  # viewers take pid for the main thread
                rows += 1
                name = f"{LANE_NAMES.get(self.kind, 'track')} lane {lane}" if lane else self.kind
                yield _metadata("thread_name", pid, tid, name=name)
                yield _metadata("thread_sort_index", pid, tid, sort_index=tid)
                for span in row:
                    yield {
                        "ph": "X",
                        "name": span.name,
                        "cat": self.kind,
                        "pid": pid,
                        "tid": tid,
                        "ts": span.begin // 1000,
                        "dur": span.end // 1000 - span.begin // 1000,
                        **({"args": dict(span.args)} if span.args else {}),
                    }
        for name, points in self.counters.items():
            shown, label = points, name
            # Shown as activity already.
            if name == ASLEEP:
                continue
            if name == TOKENS:
                shown, label = rate(points), TOKENS_PER_SECOND
            for time, value in shown:
                yield {
                    "ph": "C",
                    "name": label,
                    "pid": pid,
                    "tid": pid,
                    "ts": time // 1000,
                    "args": {label: round(value, 3)},
                }

    def _line(self, pid: int, activity: Sequence[Span]) -> Iterator[Event]:
        """Yield the line of the process among those of all processes."""
        shown = {"cat": "activity", "id2": {"global": str(pid)}, "pid": pid, "tid": pid}
        yield {"ph": "b", "name": self.name, "ts": self.begin // 1000, **shown}
        for span in activity:
            yield {"ph": "b", "name": span.name, "ts": span.begin // 1000, **shown}
            yield {"ph": "e", "name": span.name, "ts": span.end // 1000, **shown}
        yield {"ph": "e", "name": self.name, "ts": self.end // 1000, **shown}


def _metadata(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def outermost(spans: Iterable[Span]) -> list[Span]:
    """Return the spans that are in no other one, in order."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        if not found or span.begin >= found[-1].end:
            found.append(span)
    return found


def nested_rows(spans: Iterable[Span]) -> list[list[Span]]:
    """Spread spans over as few rows as needed so that two of a row never overlap partly.

    Viewers draw complete events (`X`) of one thread as a stack: each inside of another, or apart.
    Coroutines of one episode may overlap in any way.
    """
    rows: list[list[Span]] = []
    open_ends: list[list[int]] = []
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        for ends in open_ends:
            while ends and ends[-1] <= span.begin:
                ends.pop()
        fits = (n for n, ends in enumerate(open_ends) if not ends or span.end <= ends[-1])
        number = next(fits, len(rows))
        if number == len(rows):
            rows.append([])
            open_ends.append([])
        rows[number].append(span)
        open_ends[number].append(span.end)
    return rows


def rate(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return increments per second of a sum that only grows, as means over equal times.

    Args:
        points: nanoseconds and sum, in order.
    """
    if len(points) < 2:
        return []
    first, last = points[0][0], points[-1][0]
    window = max(RATE_NANOSECONDS, (last - first) // RATES)
    times = [time for time, _ in points]

    def total(time: int) -> float:
        """Interpolate the sum."""
        after = min(bisect.bisect_right(times, time), len(points) - 1)
        (t0, v0), (t1, v1) = points[after - 1], points[after]
        return v0 + (v1 - v0) * min(1.0, (time - t0) / (t1 - t0)) if t1 > t0 else v1

    found = []
    for begin in range(first, last, window):
        end = min(begin + window, last)
        found.append((begin, 1e9 * (total(end) - total(begin)) / (end - begin)))
    return [*found, (last, 0.0)]


def positive(points: Sequence[tuple[int, float]], end: int) -> list[Interval]:
    """Return when a counter was above 0.

    Args:
        points: time and value of each change, in order.
        end: of the last value.
    """
    found: list[Interval] = []
    ends = [*(time for time, _ in points[1:]), end]
    for (begin, value), until in zip(points, ends, strict=False):
        if value > 0 and until > begin:
            first = found.pop()[0] if found and found[-1][1] == begin else begin
            found.append((first, until))
    return found


def _split(gap: Interval, inside: Sequence[Interval]) -> Iterator[tuple[bool, Interval]]:
    """Yield the parts of an interval inside and outside of others.

    Args:
        inside: in order, and apart from each other.
    """
    now = gap[0]
    first = bisect.bisect_right(inside, now, key=lambda interval: interval[1])
    for begin, end in islice(inside, first, None):
        if begin >= gap[1]:
            break
        if begin > now:
            yield False, (now, begin)
        yield True, (max(begin, now), min(end, gap[1]))
        now = min(end, gap[1])
    if now < gap[1]:
        yield False, (now, gap[1])


def _filled(
    spans: Sequence[Span],
    whole: Interval,
    reasons: Callable[[Interval], list[tuple[str, Interval]]],
    otherwise: str = "idle: other",
) -> list[Span]:
    """Return spans with the gaps between them filled.

    Args:
        spans: in order, and apart from each other.
        whole: the time to fill.
        reasons: names parts of a gap.
        otherwise: the name of what is left.
    """
    found: list[Span] = []
    now = whole[0]
    for span in [*spans, Span(0, "", whole[1], whole[1], {})]:
        if span.begin > now:
            named = reasons((now, span.begin))
            rest = _split((now, span.begin), sorted(part for _, part in named))
            named += [(otherwise, part) for covered, part in rest if not covered]
            filled = sorted(named, key=lambda each: each[1])
            found += [Span(0, name, *part, {}) for name, part in filled]
        now = max(now, span.end)
        found.append(span)
    return found[:-1]
