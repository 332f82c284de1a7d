"""Records what one process of a run does, for `agenticrun trace`.

    with recorder.track("12.3 Lake", tag="Lake"):    # an episode or a request: a lane of its own
        with span("generate", turn=2):               # anywhere below it, in the same context
            ...
    with recorder.main, span("train_actor"):         # the lane of the process itself
        ...
    count("groups ready", 3)

While nothing is recorded, `span` and `count` cost one look-up and one `if`. A recording is bounded:
`LANES` tracks at a time (later ones are left out whole, and counted), a limit of spans, and
`POINTS` points per counter (then every other one goes, and the resolution is halved).

`driver/trace.py` collects the recordings of all processes, `reporting/trace_file.py` makes a file
of them.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from functools import cache, wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

LANES = 32
"""Tracks of a process that are recorded at the same time."""
POINTS = 8192
"""Points of a counter."""
RESOLUTION = 2_000_000
"""Nanoseconds between two points of a counter, at first. In between, the last value counts."""
SAMPLE_SECONDS = 0.1
"""Time between two samples of values that a process reads instead of counting."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

DRIVER, ENGINE, ENV_WORKER = "driver", "engine", "env worker"
KINDS = (DRIVER, "trainer", "reference", "critic", ENGINE, ENV_WORKER)
"""Kinds of processes, in the order in which a page shows them."""

EPISODES_RUNNING, GROUPS_READY = "episodes running", "groups ready"
EPISODES_IN_FLIGHT, REQUESTS_IN_FLIGHT = "episodes in flight", "requests in flight"
TOKENS, ASLEEP = "tokens", "asleep"
"""Counters. `tokens` is the sum of all so far."""
WEIGHTS = "idle: weights"
"""Span of an engine that loads weights: all requests wait."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ClockReading:
    """A process's clock at one moment."""

    nanoseconds: int
    """Reading of `time.perf_counter_ns`: on Linux one clock for all processes of a host."""
    host: str
    """Identity of that clock; empty if unknown."""


class Span(NamedTuple):
    """Something that took time, in nanoseconds of its process's clock.

    A tuple: 50,000 of them are pickled in half the time of data classes.
    """

    lane: int
    """0: the process itself; above: a track."""
    name: str
    begin: int
    end: int
    args: Mapping[str, Any]


@dataclass(frozen=True)
class Recording:
    """The spans and counters of a process between `Recorder.begin` and `Recorder.end`."""

    name: str
    kind: str
    begin: int
    end: int
    spans: list[Span]
    counters: dict[str, list[tuple[int, float]]]
    """Time and value of each change, by name."""
    left_out_tracks: int = 0
    """Episodes or requests for which there was no lane."""
    dropped_spans: int = 0
    """Spans beyond the limit: the last ones."""


@dataclass(eq=False, slots=True)
class _Open:
    lane: int
    name: str
    begin: int
    args: dict[str, Any]


@dataclass
class _Buffers:
    """One recording in memory."""

    max_spans: int
    begin: int = field(default_factory=time.perf_counter_ns)
    spans: list[Span] = field(default_factory=list)
    open: dict[object, _Open] = field(default_factory=dict)
    free: list[int] = field(default_factory=lambda: list(range(1, LANES + 1)))
    counters: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    resolution: int = RESOLUTION
    left_out: int = 0
    dropped: int = 0


class Recorder:
    """Recorder of one process, or of one actor where several share a process.

    Args:
        name: unique in the run, such as engine-0.
        kind: one of `KINDS`.
        sample: returns values of counters; called every `SAMPLE_SECONDS`. Needs an event loop.
    """

    def __init__(
        self, name: str, kind: str, sample: Callable[[], Mapping[str, float]] | None = None
    ) -> None:
        self.name = name
        self.kind = kind
        self.on = False
        self.number = 0
        """Number of recordings so far."""
        self.main = MainTrack(self)
        self._sample = sample
        self._sampler: asyncio.Task[None] | None = None
        self._buffers = _Buffers(0)
        """The recording that goes into memory now, or went there last."""

    def begin(self, max_spans: int) -> None:
        """Begin to record, even if an earlier recording has not ended."""
        # A recording whose end was lost, with the driver that asked for it.
        self._stop_sampling()
        self.number += 1
        self._buffers = _Buffers(max_spans)
        self.on = True
        _recording.add(self)
        if self._sample is not None:
            self._take_sample()
            self._sampler = asyncio.create_task(self._sample_forever(), name="trace-samples")

    def end(self) -> Recording | None:
        """Return what was recorded; None if nothing was to be. What is not over ends now."""
        if not self.on:
            return None
        self._stop_sampling()
        if self._sample is not None:
            self._take_sample()
        # `close` changes the mapping.
        for key, span_ in list(self._buffers.open.items()):
            span_.args["unfinished"] = True
            self.close(key)
        self.on = False
        _recording.discard(self)
        return Recording(
            self.name,
            self.kind,
            self._buffers.begin,
            time.perf_counter_ns(),
            self._buffers.spans,
            self._buffers.counters,
            self._buffers.left_out,
            self._buffers.dropped,
        )

    def track(self, name: str, **args: Any) -> Track:
        """Return the context manager of an episode or a request."""
        return Track(self, name, args)

    def span(self, name: str, **args: Any) -> AbstractContextManager[None]:
        """Record the `with` block in the lane of the process, in whatever context it runs."""
        return self.span_in(0, name, args) if self.on else _NO_SPAN

    def count(self, name: str, value: float) -> None:
        """Record that a counter has this value from now on. Call it only while `on`."""
        now = time.perf_counter_ns()
        points = self._buffers.counters.setdefault(name, [])
        # Within the resolution, the newest value replaces the last one and keeps its time.
        if points and now - points[-1][0] < self._buffers.resolution:
            points[-1] = (points[-1][0], value)
            return
        if points and points[-1][1] == value:
            return
        points.append((now, value))
        if len(points) > POINTS:
            # Drop every other point, and record half as many from here on: memory is bounded, and
            # the whole time stays visible.
            del points[1:-1:2]
            self._buffers.resolution *= 2

    def span_in(self, lane: int, name: str, args: dict[str, Any]) -> AbstractContextManager[None]:
        """Record the `with` block in a lane. Call it only while `on`."""
        opened = _OpenSpan(self)
        self.open(opened, lane, name, args)
        return opened

    def open(self, key: object, lane: int, name: str, args: dict[str, Any]) -> None:
        """Begin a span, which `close` ends."""
        self._buffers.open[key] = _Open(lane, name, time.perf_counter_ns(), args)

    def close(self, key: object) -> int | None:
        """End a span and return its lane. A span of an earlier recording is ignored."""
        # After `end`, spans still close in code that is under way.
        span_ = self._buffers.open.pop(key, None) if self.on else None
        if span_ is None:
            return None
        if len(self._buffers.spans) < self._buffers.max_spans:
            now = time.perf_counter_ns()
            self._buffers.spans.append(Span(span_.lane, span_.name, span_.begin, now, span_.args))
        else:
            self._buffers.dropped += 1
        return span_.lane

    def annotate(self, key: object, args: Mapping[str, Any]) -> None:
        """Add arguments to a span that is open."""
        if key in self._buffers.open:
            self._buffers.open[key].args.update(args)

    def take_lane(self) -> int | None:
        """Return a free lane for a track; None if there is none, which is counted."""
        if self._buffers.free:
            # The lowest, so that lanes at the top of a page are filled first.
            return heapq.heappop(self._buffers.free)
        self._buffers.left_out += 1
        return None

    def free_lane(self, lane: int) -> None:
        """Give a lane to later tracks."""
        heapq.heappush(self._buffers.free, lane)

    def _take_sample(self) -> None:
        assert self._sample is not None
        for name, value in self._sample().items():
            self.count(name, value)

    async def _sample_forever(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            self._take_sample()

    def _stop_sampling(self) -> None:
        if self._sampler is not None:
            self._sampler.cancel()
            self._sampler = None


class Track:
    """A lane for one episode or request, and the place of `span` in its context.

    A track that began before the recording gets a lane with its first span in it.
    """

    __slots__ = ("_lane", "_number", "_token", "args", "name", "recorder")

    def __init__(self, recorder: Recorder, name: str, args: dict[str, Any]) -> None:
        self.recorder = recorder
        self.name = name
        self.args = args
        self._number = 0
        self._lane: int | None = None
        self._token: Token[Track | MainTrack | None] | None = None

    def __enter__(self) -> Track:
        self._token = _current.set(self)
        if self.recorder.on:
            self.lane()
        else:
            # Known to be older than any recording.
            self._number = -1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._token is not None:
            _current.reset(self._token)
        # The lane belongs to a recording: that of an earlier one must not be freed in this one.
        if self.recorder.on and self._number == self.recorder.number and self._lane is not None:
            self.recorder.close(self)
            self.recorder.free_lane(self._lane)

    def lane(self) -> int | None:
        """Return the lane in the recording that is on; None if the track is left out of it."""
        recorder = self.recorder
        if self._number != recorder.number:
            # 0 for a track that was entered while this recording was on.
            late = {"began": "before the recording"} if self._number else {}
            self._number, self._lane = recorder.number, recorder.take_lane()
            if self._lane is not None:
                recorder.open(self, self._lane, self.name, {**self.args, **late})
        return self._lane

    def note(self, **args: Any) -> None:
        """Add what is known only now."""
        recorder = self.recorder
        if recorder.on and self._number == recorder.number and self._lane is not None:
            recorder.annotate(self, args)


class MainTrack:
    """The lane of a process itself: its spans are what the process does."""

    __slots__ = ("_tokens", "recorder")

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._tokens: list[Token[Track | MainTrack | None]] = []

    def __enter__(self) -> None:
        self._tokens.append(_current.set(self))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _current.reset(self._tokens.pop())

    def lane(self) -> int:
        """Return the lane."""
        return 0


class _OpenSpan:
    __slots__ = ("_recorder",)

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._recorder.close(self)


class _NoSpan:
    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass


_NO_SPAN = _NoSpan()
_recording: set[Recorder] = set()
"""Recorders of this process that are on: without one, nothing else is looked up."""
_current: ContextVar[Track | MainTrack | None] = ContextVar("track", default=None)


def recording() -> bool:
    """Return True if a `span` of this context would be recorded."""
    track = _current.get()
    return track is not None and track.recorder.on


def span(name: str, **args: Any) -> AbstractContextManager[None]:
    """Record the `with` block in the track of this context."""
    # The usual case: while nothing is recorded, a span costs one look at a set.
    if not _recording:
        return _NO_SPAN
    track = _current.get()
    if track is None or not track.recorder.on:
        return _NO_SPAN
    lane = track.lane()
    if lane is None:
        return _NO_SPAN
    return track.recorder.span_in(lane, name, args)


def count(name: str, value: float) -> None:
    """Record that a counter of this context's process has this value from now on."""
    if not _recording:
        return
    track = _current.get()
    if track is not None and track.recorder.on:
        track.recorder.count(name, value)


class Traced:
    """An actor that can be recorded. `recorder` is set when the actor is made."""

    recorder: Recorder

    def trace_clock(self) -> ClockReading:
        """Return the clock of the recorder."""
        return read_clock()

    def begin_trace(self, max_spans: int) -> None:
        self.recorder.begin(max_spans)

    def end_trace(self) -> Recording | None:
        return self.recorder.end()


A = TypeVar("A", bound=Traced)


def traced(method: Callable[Concatenate[A, P], T]) -> Callable[Concatenate[A, P], T]:
    """Record each call of a method as a span of its actor. Not for coroutines and generators."""
    name = method.__name__

    @wraps(method)
    def recorded(self: A, *args: P.args, **kwargs: P.kwargs) -> T:
        if not self.recorder.on:
            return method(self, *args, **kwargs)
        with self.recorder.main, span(name):
            return method(self, *args, **kwargs)

    return cast(Callable[Concatenate[A, P], T], recorded)


def read_clock() -> ClockReading:
    """Return this process's clock."""
    return ClockReading(time.perf_counter_ns(), _host())


@cache
def _host() -> str:
    with suppress(OSError):
        return BOOT_ID.read_text().strip()
    return ""
