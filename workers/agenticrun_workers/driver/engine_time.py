"""Use of the engines between two measurements, and the reasons why they were idle."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from agenticrun_workers.driver.metrics import Metrics

if TYPE_CHECKING:
    from agenticrun_workers.inference import EngineStats


REMEMBERED = 4
"""Unresponsive engines to remember per expected engine, since a slow one may still answer."""


class MeasuredEngines(Protocol):
    """The engines; `EnginePool` explains each member."""

    @property
    def count(self) -> int: ...

    @property
    def ejected_seconds(self) -> float: ...

    async def stats(self) -> Mapping[str, EngineStats]: ...


class Episodes(Protocol):
    """The episodes for which the engines compute."""

    @property
    def idle_seconds(self) -> float:
        """Time so far without an episode in flight."""
        ...


@dataclass
class _Part:
    """The counts since the last call of `metrics`."""

    began: float
    read_at: float
    """Time of the last reading."""
    idle_then: float
    """Seconds without an episode in flight until the beginning."""
    ejected_then: float
    there: float = 0.0
    """Seconds times seats, with an engine."""
    busy: float = 0.0
    """The same, with an engine that computes."""
    used: float = 0.0
    """The same, with a request."""
    sync_idle: float = 0.0
    sync_without_episodes: float = 0.0
    aborted_tokens: int = 0


class EngineTime:
    """Measures the engines' time, from one call of `metrics` to the next.

    `rollout/utilization` and the shares `rollout/idle/...` add up to 1:

        few_requests  seats that are free while the engine computes others
        weights       no request in computation during a weight sync
        gate          no episode in flight: the trainers compute, or the staleness gate is closed
        env           episodes in flight, but no request: environments, agents or judges work
        lost          no engine: it died, did not answer or was too slow, or one was starting

    The whole is the seats of as many engines as are wanted, there or not. An engine counts between
    two readings that it answered, and a new one for as long as it computed.

    Args:
        engines: the engines.
        episodes: says when no episode needed them.
    """

    def __init__(self, engines: MeasuredEngines, episodes: Episodes) -> None:
        self._engines = engines
        self._episodes = episodes
        self._seats = 0
        """Seats of the wanted engines at the last call of `metrics`."""
        self._newest: dict[str, tuple[float, EngineStats]] = {}
        """The last answer of each engine, and when it came; of engines that are gone, too."""
        self._most_wanted = 0
        self._old_seats: list[int] = []
        """Seats of engines that were forgotten, the largest first; as many as were ever wanted."""
        self._reported: dict[str, tuple[float, EngineStats]] = {}
        """The same at the last call of `metrics`."""
        self._part = self._new_part(time.perf_counter())

    def _new_part(self, now: float) -> _Part:
        return _Part(now, now, self._episodes.idle_seconds, self._engines.ejected_seconds)

    async def _read(self) -> Mapping[str, EngineStats]:
        """Count the time since the last reading."""
        now = time.perf_counter()  # unresponsive engines are waited for, after the others
        answers = await self._engines.stats()
        for engine, stats in answers.items():
            if known := self._newest.get(engine):
                then, before = known
                there = now - max(then, self._part.began)
            else:
                # A new engine, or one that restarted: its counters began at zero.
                before = _at_its_start(stats)
                since = now - self._part.read_at
                # It may have started at any time since the last reading, but computed at least this
                # long.
                there = min(stats.busy_seconds, since) if self._newest else since
            self._part.there += stats.seats * there
            self._part.busy += stats.seats * min(stats.busy_seconds - before.busy_seconds, there)
            self._part.used += min(stats.seat_seconds - before.seat_seconds, stats.seats * there)
            self._part.aborted_tokens += stats.aborted_tokens - before.aborted_tokens
        self._newest |= {engine: (now, stats) for engine, stats in answers.items()}
        self._part.read_at = now
        return answers

    def _wanted_seats(self) -> int:
        """Return the seats of the largest engines so far, as many as are wanted."""
        newest = [stats.seats for _, stats in self._newest.values()]
        return sum(sorted([*newest, *self._old_seats], reverse=True)[: self._engines.count])

    def _forget_silent(self) -> None:
        """Forget engines that have been silent for longest: they are gone for good."""
        self._most_wanted = max(self._most_wanted, self._engines.count)
        silent = sorted(
            (then, engine)
            for engine, (then, _) in self._newest.items()
            if then < self._part.read_at
        )
        # Slow ones may still answer, and their counters would otherwise count twice.
        too_many = len(silent) - REMEMBERED * self._most_wanted
        for _, engine in silent[: max(too_many, 0)]:
            self._old_seats.append(self._newest.pop(engine)[1].seats)
        self._old_seats = sorted(self._old_seats, reverse=True)[: self._most_wanted]

    @asynccontextmanager
    async def syncing(self) -> AsyncIterator[None]:
        """Count the time inside the `with` block as a weight sync."""
        await self._read()
        without, idle = self._episodes.idle_seconds, self._part.there - self._part.busy
        yield
        await self._read()
        self._part.sync_idle += self._part.there - self._part.busy - idle
        self._part.sync_without_episodes += self._episodes.idle_seconds - without

    async def metrics(self) -> Metrics:
        """Return the metrics of the time since the last call, or since the beginning."""
        answers = await self._read()
        now, seconds = self._part.read_at, self._part.read_at - self._part.began
        before = {engine: stats for engine, (_, stats) in self._reported.items()}
        since = {engine: now - then for engine, (then, _) in self._reported.items()}
        found = engine_metrics(
            before, answers, {engine: since.get(engine, seconds) for engine in answers}
        )
        seats_before, self._seats = self._seats, self._wanted_seats()
        # Some of the leaving engines may have computed until a moment ago. `whole` is 0 if no
        # engine is wanted, or no time has passed.
        if whole := max(seats_before, self._seats) * seconds:
            there, busy = min(self._part.there / whole, 1.0), self._part.busy / whole
            # Readings of several clocks: rounding must not push the sum over 1.
            weights = min(self._part.sync_idle / whole, there - busy)
            without = (
                self._episodes.idle_seconds
                - self._part.idle_then
                - self._part.sync_without_episodes
            )
            gate = min(without / seconds * there, there - busy - weights)
            ejected = self._engines.ejected_seconds - self._part.ejected_then
            ejected *= 1 - without / seconds  # without episodes, all engines wait for the gate
            ejected = min(
                ejected / (max(self._engines.count, 1) * seconds), there - busy - weights - gate
            )
            found |= {
                "rollout/utilization": self._part.used / whole,
                "rollout/idle/few_requests": busy - self._part.used / whole,
                "rollout/idle/weights": weights,
                "rollout/idle/gate": gate,
                "rollout/idle/env": there - busy - weights - gate - ejected,
                "rollout/idle/lost": 1.0 - there + ejected,
            }
        found["rollout/aborted_tokens"] = float(self._part.aborted_tokens)
        self._forget_silent()
        self._reported = dict(self._newest)
        self._part = self._new_part(now)
        return found


def _at_its_start(stats: EngineStats) -> EngineStats:
    """Return the statistics of an engine that had done nothing yet."""
    return replace(
        stats,
        generated_tokens=0,
        aborted_tokens=0,
        busy_seconds=0.0,
        seat_seconds=0.0,
        kv_used=0.0,
        kv_polls=0,
    )


def engine_metrics(
    before: Mapping[str, EngineStats],
    after: Mapping[str, EngineStats],
    seconds: Mapping[str, float],
) -> Metrics:
    """Return speed, queue and caches of the engines between two measurements.

    An engine that started in between counts from its start.

    Args:
        seconds: time between the measurements of each engine.
    """
    metrics: Metrics = {}
    busy: list[float] = []
    kv_used: list[float] = []
    for engine, now in after.items():
        then = before.get(engine) or _at_its_start(now)
        metrics[f"engine/{engine}/tokens_per_second"] = (
            now.generated_tokens - then.generated_tokens
        ) / seconds[engine]
        metrics[f"engine/{engine}/queue"] = float(now.waiting)
        busy.append((now.busy_seconds - then.busy_seconds) / seconds[engine])
        if polls := now.kv_polls - then.kv_polls:
            kv_used.append((now.kv_used - then.kv_used) / polls)
            metrics[f"engine/{engine}/kv_usage"] = kv_used[-1]
    if after:
        metrics["rollout/engine_busy"] = float(np.mean(busy))
    return metrics | ({"rollout/kv_usage": float(np.mean(kv_used))} if kv_used else {})
