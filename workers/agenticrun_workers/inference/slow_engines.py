"""SlowEngines finds engines that are far slower than the others of their run.

Load balancers call it outlier ejection. An engine is ejected for a time: it receives no new
requests, and its running requests move to other engines. Then it is tried again, and ejected for
twice as long if it is still slow. So an engine that stays slow costs little, and one that recovers
is used again.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from agenticrun_workers.inference.engine import STEP_SECONDS, EngineError, EngineStats
from agenticrun_workers.launch.liveness import POLL_SECONDS

TIMES_SLOWER = 8.0
"""Engines of one run are equal: one that waits for a neighbour is two or three times slower."""
WINDOW_POLLS = 6
"""Polls with requests over which speed is measured: half a minute."""
MIN_BUSY_SECONDS = 1.0
"""Shortest time with requests between two polls that says anything about speed."""
IDLE_POLLS = 12
"""Polls in a row without requests after which the speed before them is forgotten."""
PROMPT_TOKENS = 8
"""Tokens of a prompt that count as one sampled token: few, so that no long prompt makes it slow."""
FIRST_EJECTION_POLLS = 12
"""A minute."""
MAX_EJECTION_POLLS = 192
"""16 minutes."""
STUCK_WINDOWS = 3
"""Windows in a row without a token, the first of them `STEP_SECONDS` ago or earlier, that make an
engine count as stuck."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second."""

    request: float
    """For each request."""
    total: float
    """For all requests of the engine together."""


@dataclass(frozen=True, slots=True)
class _Work:
    """Work of an engine between two polls."""

    sampled: int
    prompts: int
    """Tokens of prompts. A server may count one twice, or count one that it had in its cache."""
    seat_seconds: float
    busy_seconds: float


@dataclass(slots=True)
class _Record:
    """Record of one engine."""

    newest: EngineStats | None = None
    works: deque[_Work] = field(default_factory=lambda: deque(maxlen=WINDOW_POLLS))
    idle_polls: int = 0
    """In a row."""
    polls_left: int = 0
    """Until the engine is tried again; 0 = it is not ejected."""
    ejections: int = 0
    """In a row."""
    empty_windows: int = 0
    """Windows in a row that led to an ejection and in which it had not computed a token."""
    empty_polls: int = 0
    """Polls since the first of them began."""

    def take(self, stats: EngineStats) -> bool:
        """Add the work since the last poll. Return False if it says nothing about speed."""
        before, self.newest = self.newest, stats
        if before is None or before.computed_tokens is None or stats.computed_tokens is None:
            return False
        busy_seconds = stats.busy_seconds - before.busy_seconds
        seat_seconds = stats.seat_seconds - before.seat_seconds
        if busy_seconds < MIN_BUSY_SECONDS or seat_seconds <= 0:
            # After a short break the measurements still hold; after a long one they are out of
            # date.
            self.idle_polls += 1
            if self.idle_polls >= IDLE_POLLS:
                self.works.clear()
            return False
        self.idle_polls = 0
        if stats.prefilling or before.prefilling:  # nothing is counted before the step ends
            return False
        sampled = stats.generated_tokens - before.generated_tokens
        computed = stats.computed_tokens - before.computed_tokens
        self.works.append(_Work(sampled, max(computed - sampled, 0), seat_seconds, busy_seconds))
        return True

    def speed(self, *, prompts: bool) -> Speed | None:
        """Return the speed over the last `WINDOW_POLLS`; None: not that many since the ejection.

        Args:
            prompts: count every `PROMPT_TOKENS`-th token of prompts, too.
        """
        if self.polls_left or len(self.works) < WINDOW_POLLS:
            return None
        tokens = float(sum(work.sampled for work in self.works))
        if prompts:
            tokens += sum(work.prompts for work in self.works) / PROMPT_TOKENS
        return Speed(
            tokens / sum(work.seat_seconds for work in self.works),
            tokens / sum(work.busy_seconds for work in self.works),
        )


class SlowEngines:
    """Ejects engines that are `TIMES_SLOWER` than the others, at most half of them at a time.

    Such an engine is slower in two ways: each of its requests gets fewer tokens per second, and all
    together do. One alone would be no sign. An engine with a full batch is slow for each request,
    and one with a single request computes little. The benefit of the doubt is with the engine: its
    own prompts count as work, those of the others do not.

    Time is counted in polls (`liveness.POLL_SECONDS`) of the engine itself.
    """

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    @property
    def ejected(self) -> set[str]:
        """Engines that get no requests now."""
        return {engine_id for engine_id, record in self._records.items() if record.polls_left}

    def forget(self, engine_id: str) -> None:
        """Forget an engine that is gone. If more than half are ejected now, one is tried again."""
        self._records.pop(engine_id, None)
        # At most half of the engines are ejected, so the limit falls when one leaves.
        while len(self.ejected) > len(self._records) // 2:
            soonest = min(self.ejected, key=lambda name: self._records[name].polls_left)
            self._records[soonest].polls_left = 0
            self._records[soonest].works.clear()

    def poll(self, engine_id: str, stats: EngineStats) -> str:
        """Take the statistics of the next poll of an engine.

        Returns:
            Message if the engine is ejected, or tried again, from now on; else empty.

        Raises:
            EngineError: the engine is stuck.
        """
        record = self._records.setdefault(engine_id, _Record())
        took = record.take(stats)
        record.empty_polls += record.empty_windows > 0
        if record.polls_left:
            record.polls_left -= 1
            # What an ejected engine computes is the rest of old requests: it is judged by new ones.
            record.works.clear()
            return "" if record.polls_left else f"{engine_id} gets requests again"
        speed = record.speed(prompts=True)
        others = self._speed_of_others(engine_id)
        if not took or speed is None or others is None:
            return ""
        if (
            speed.request * TIMES_SLOWER >= others.request
            or speed.total * TIMES_SLOWER >= others.total
        ):
            # It keeps up again: the next ejection is short, like a first one.
            record.ejections = record.empty_windows = 0
            return ""
        # If most engines are slow, the cause lies elsewhere and ejection would only lose capacity.
        if len(self.ejected) + 1 > len(self._records) // 2:
            return ""
        if speed.total:
            record.empty_windows = 0
        else:
            if not record.empty_windows:
                record.empty_polls = WINDOW_POLLS
            record.empty_windows += 1
            seconds = record.empty_polls * POLL_SECONDS
            if record.empty_windows >= STUCK_WINDOWS and seconds >= STEP_SECONDS:
                raise EngineError(
                    f"the engine answers polls, but was tried {record.empty_windows} times in "
                    f"{seconds:.0f} s and computed nothing, while others did: it is stuck; look at "
                    "its log, and at the kernel's (dmesg: Xid, a fault of a GPU)"
                )
        # Doubled each time, so that an engine that stays slow costs few tries.
        record.polls_left = min(FIRST_EJECTION_POLLS * 2**record.ejections, MAX_EJECTION_POLLS)
        record.ejections += 1
        return (
            f"{engine_id} samples {speed.request:.3g} tokens/s for each request, and others "
            f"{others.request:.3g}: its {stats.running + stats.waiting} requests continue "
            f"elsewhere, and it gets no others for {record.polls_left * POLL_SECONDS:.0f} s"
        )

    def _speed_of_others(self, engine_id: str) -> Speed | None:
        """Return the medians of the engines that are not ejected; None if there are none."""
        records = (record for other, record in self._records.items() if other != engine_id)
        speeds = [speed for record in records if (speed := record.speed(prompts=False)) is not None]
        if not speeds:
            return None
        return Speed(
            statistics.median(speed.request for speed in speeds),
            statistics.median(speed.total for speed in speeds),
        )
