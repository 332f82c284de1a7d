"""SlowEngines finds engines that are far slower than the others of their run.

Load balancers call it outlier ejection. An engine is ejected for a time: it gets no requests, and
those that it has go on at other engines. Then it is tried again, and ejected for twice as long if
it is still slow. So an engine that stays slow costs little, and one that recovers is used again.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from agenticrun_workers.inference.engine import PROMPT_TOKENS_PER_SAMPLED, EngineStats
from agenticrun_workers.launch.liveness import POLL_SECONDS

TIMES_SLOWER = 8.0
"""Engines of one run are equal: one that waits for a neighbour is two or three times slower."""
WINDOW_POLLS = 6
"""Polls with requests over which speed is measured: half a minute."""
MIN_BUSY_SECONDS = 1.0
"""Shortest time with requests between two polls that says anything about speed."""
FIRST_EJECTION_POLLS = 12
"""A minute."""
MAX_EJECTION_POLLS = 192
"""A quarter of an hour."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second; of a prompt, every `PROMPT_TOKENS_PER_SAMPLED`-th counts."""

    request: float
    """Of one request."""
    total: float
    """Of all requests of the engine together."""


@dataclass(slots=True)
class _Record:
    """Record of one engine."""

    newest: EngineStats | None = None
    polls: deque[tuple[float, float, float]] = field(
        default_factory=lambda: deque(maxlen=WINDOW_POLLS)
    )
    """Tokens, seconds times requests in computation, and seconds with any, poll by poll."""
    polls_left: int = 0
    """Until the engine is tried again; 0 = it is not ejected."""
    ejections: int = 0
    """In a row."""

    def take(self, stats: EngineStats) -> None:
        """Add the work since the last poll, if there was enough of it."""
        before, self.newest = self.newest, stats
        if before is None or stats.busy_seconds - before.busy_seconds < MIN_BUSY_SECONDS:
            return
        tokens = max(_tokens(stats) - _tokens(before), 0.0)
        seat_seconds = stats.seat_seconds - before.seat_seconds
        self.polls.append((tokens, seat_seconds, stats.busy_seconds - before.busy_seconds))

    def speed(self) -> Speed | None:
        """Return the speed over the last `WINDOW_POLLS`; None: not that many since the ejection."""
        if self.polls_left or len(self.polls) < WINDOW_POLLS:
            return None
        tokens, seat_seconds, busy_seconds = map(sum, zip(*self.polls, strict=True))
        return Speed(tokens / seat_seconds, tokens / busy_seconds)


def _tokens(stats: EngineStats) -> float:
    # A prompt in computation counts as computed. So a long one makes no engine slow.
    prompts = stats.prompt_tokens + stats.prefilling
    return stats.generated_tokens + prompts / PROMPT_TOKENS_PER_SAMPLED


class SlowEngines:
    """Ejects engines that are `TIMES_SLOWER` than the others, at most half of them at a time.

    Such an engine is slower in two ways: each of its requests gets fewer tokens per second, and all
    together do. One alone would be no sign. An engine with a full batch is slow for each request,
    and one with a single request computes little.

    Time is counted in polls (`liveness.POLL_SECONDS`) of the engine itself.
    """

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    @property
    def ejected(self) -> set[str]:
        """Engines that get no requests now."""
        return {engine_id for engine_id, record in self._records.items() if record.polls_left}

    def forget(self, engine_id: str) -> None:
        """Forget an engine that is gone."""
        self._records.pop(engine_id, None)

    def poll(self, engine_id: str, stats: EngineStats) -> str:
        """Take the statistics of the next poll of an engine.

        Returns:
            Message if the engine is ejected, or tried again, from now on; else empty.
        """
        record = self._records.setdefault(engine_id, _Record())
        record.take(stats)
        if record.polls_left:
            record.polls_left -= 1
            record.polls.clear()
            return "" if record.polls_left else f"{engine_id} gets requests again"
        speed = record.speed()
        others = self._speed_of_others(engine_id)
        if speed is None or others is None:
            return ""
        if (
            speed.request * TIMES_SLOWER >= others.request
            or speed.total * TIMES_SLOWER >= others.total
        ):
            record.ejections = 0
            return ""
        if len(self.ejected) + 1 > len(self._records) // 2:
            return ""
        record.polls_left = min(FIRST_EJECTION_POLLS * 2**record.ejections, MAX_EJECTION_POLLS)
        record.ejections += 1
        return (
            f"{engine_id} samples {speed.request:.3g} tokens/s for each request, and others "
            f"{others.request:.3g}: its {stats.running + stats.waiting} requests go on elsewhere, "
            f"and it gets no others for {record.polls_left * POLL_SECONDS:.0f} s"
        )

    def _speed_of_others(self, engine_id: str) -> Speed | None:
        """Return the medians of the engines that are not ejected; None if there are none."""
        records = (record for other, record in self._records.items() if other != engine_id)
        speeds = [speed for record in records if (speed := record.speed()) is not None]
        if not speeds:
            return None
        return Speed(
            statistics.median(speed.request for speed in speeds),
            statistics.median(speed.total for speed in speeds),
        )
