"""What the engines did between two measurements, and why they were idle."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from agenticrun_workers.driver.metrics import Metrics

if TYPE_CHECKING:
    from agenticrun_workers.inference import EngineStats


class EngineTime:
    """Measures the engines' time, from one call of `metrics` to the next.

    `rollout/utilization` and the shares `rollout/idle/...` add up to 1:

        few_requests  seats that are free while the engine computes others
        weights       no request in computation during a weight sync
        gate          no episode in flight: the trainers compute, or the staleness gate is closed
        env           episodes in flight, and no request: environments, agents or judges are at it

    Args:
        stats: reads the engines' statistics.
        idle_seconds: returns the time so far without an episode in flight.
    """

    def __init__(
        self,
        stats: Callable[[], Awaitable[Mapping[str, EngineStats]]],
        idle_seconds: Callable[[], float],
    ) -> None:
        self._stats = stats
        self._idle_seconds = idle_seconds
        self._before: Mapping[str, EngineStats] = {}
        self._restart()

    def _restart(self) -> None:
        self._began, self._idle_then = time.perf_counter(), self._idle_seconds()
        self._sync_idle = self._sync_without_episodes = 0.0

    @asynccontextmanager
    async def syncing(self) -> AsyncIterator[None]:
        """Count the time inside the `with` block as a weight sync."""
        before, idle, began = await self._stats(), self._idle_seconds(), time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self._sync_idle += seconds - _busy_seconds(before, await self._stats())
        self._sync_without_episodes += self._idle_seconds() - idle

    async def metrics(self) -> Metrics:
        """Return the metrics of the time since the last call, or since the beginning."""
        now, before = await self._stats(), self._before
        seconds = time.perf_counter() - self._began
        found = engine_metrics(before, now, seconds)
        if now:
            busy = _busy_seconds(before, now) / seconds
            without = self._idle_seconds() - self._idle_then - self._sync_without_episodes
            weights = min(self._sync_idle / seconds, 1.0 - busy)
            gate = min(without / seconds, 1.0 - busy - weights)
            found |= {
                "rollout/idle/few_requests": busy - found["rollout/utilization"],
                "rollout/idle/weights": weights,
                "rollout/idle/gate": gate,
                "rollout/idle/env": 1.0 - busy - weights - gate,
            }
        found["rollout/aborted_tokens"] = restarted_tokens(before, now)
        self._before = now
        self._restart()
        return found


def _busy_seconds(before: Mapping[str, EngineStats], after: Mapping[str, EngineStats]) -> float:
    """Return the time with a request in computation, the mean over the engines' seats."""
    weights = {engine: now.seats for engine, now in after.items()}
    spent = (
        weights[engine]
        * (now.busy_seconds - (before[engine].busy_seconds if engine in before else 0.0))
        for engine, now in after.items()
    )
    return sum(spent) / sum(weights.values()) if weights else 0.0


def engine_metrics(
    before: Mapping[str, EngineStats], after: Mapping[str, EngineStats], seconds: float
) -> Metrics:
    """Return speed, queue and utilization of the engines between two measurements.

    Utilization weighs each engine by its seats.

    An engine that started in between counts from its start.

    Args:
        seconds: time between the measurements.
    """
    metrics: Metrics = {}
    busy: list[float] = []
    kv_used: list[float] = []
    used = seats = 0.0
    for engine, now in after.items():
        then = before.get(engine) or replace(
            now, generated_tokens=0, busy_seconds=0.0, seat_seconds=0.0, kv_used=0.0, kv_polls=0
        )
        metrics[f"engine/{engine}/tokens_per_second"] = (
            now.generated_tokens - then.generated_tokens
        ) / seconds
        metrics[f"engine/{engine}/queue"] = float(now.waiting)
        busy.append((now.busy_seconds - then.busy_seconds) / seconds)
        used += now.seat_seconds - then.seat_seconds
        seats += now.seats
        if polls := now.kv_polls - then.kv_polls:
            kv_used.append((now.kv_used - then.kv_used) / polls)
            metrics[f"engine/{engine}/kv_usage"] = kv_used[-1]
    if after:
        metrics["rollout/utilization"] = used / (seats * seconds)
        metrics["rollout/engine_busy"] = float(np.mean(busy))
    return metrics | ({"rollout/kv_usage": float(np.mean(kv_used))} if kv_used else {})


def restarted_tokens(before: Mapping[str, EngineStats], after: Mapping[str, EngineStats]) -> float:
    """Return the tokens that engines threw away between two measurements for new weights."""
    return float(
        sum(
            now.aborted_tokens - (before[engine].aborted_tokens if engine in before else 0)
            for engine, now in after.items()
        )
    )
