"""RolloutController: decides which groups begin, which count, and which make the next batch. Runs in the driver."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from agenticrun_workers.rollout.env_pool import Players
from agenticrun_workers.rollout.gate import StalenessGate
from agenticrun_workers.rollout.groups import EpisodeResult, Group, GroupTask
from agenticrun_workers.types import Stream

MAX_REROLLS = 2
"""How often an episode that cannot be trained on is played again."""

MAX_DROPPED_SHARE = 4
"""Groups that may be dropped for each one of a batch before the run fails: an environment that always fails must not spin."""


class TooManyDropped(Exception):
    """Nearly all groups are dropped, so that no batch comes together."""


@dataclass
class RolloutCounts:
    """What happened since the last batch."""

    rerolled: int = 0
    """Episodes played again."""
    dropped: int = 0
    """Groups given up: fewer than two (one, for groups of one) members could be trained on."""
    stale: int = 0
    """Finished groups thrown away because their policy was too old."""
    filtered: int = 0
    """Groups refused by `groupFilter`."""
    aborted_tokens: int = 0
    """Tokens sampled by surplus members of redundant groups."""
    length_bias: float = 0.0
    """Mean tokens of the members that were kept minus that of all that finished; 0 without redundancy."""
    untrainable: list[EpisodeResult] = field(default_factory=list)
    """Every episode that could not be trained on."""


@dataclass(frozen=True)
class Batch:
    """Groups of one training step, oldest first."""

    groups: tuple[Group, ...]
    counts: RolloutCounts
    queue_depth: int
    """Finished groups that wait for the next batch."""

    @property
    def results(self) -> list[EpisodeResult]:
        """All trajectories, by group and member."""
        return [result for group in self.groups for result in group.results]


@dataclass(frozen=True)
class RolloutPosition:
    """What a checkpoint keeps: groups below `next_group` were begun, those in `again` must be played again."""

    next_group: int = 0
    again: tuple[int, ...] = ()


Discard = Callable[[list[EpisodeResult]], Awaitable[None]]


class RolloutController:
    """Keeps the gate full and serves batches.

    Args:
        players: plays groups.
        gate: says how many may begin.
        tags: the cycle in which groups take tags (`groups.tag_cycle`).
        group_size: members of a group.
        discard: called with trajectories that will not be trained on and lie in a store.
        position: where to go on.
    """

    def __init__(
        self,
        players: Players,
        gate: StalenessGate,
        *,
        tags: tuple[str, ...],
        group_size: int,
        discard: Discard,
        position: RolloutPosition,
    ) -> None:
        self._players = players
        self._gate = gate
        self._tags = tags
        self._group_size = group_size
        self._discard = discard
        self._next_group = position.next_group
        self._again = sorted(position.again)
        self._running: dict[int, asyncio.Task[None]] = {}
        self._ready: list[Group] = []
        self._changed = asyncio.Event()
        self._counts = RolloutCounts()
        self._failure: BaseException | None = None

    @property
    def position(self) -> RolloutPosition:
        """Everything begun and not yet in a batch is played again after a resume."""
        unfinished = {*self._again, *self._running, *(group.group for group in self._ready)}
        return RolloutPosition(self._next_group, tuple(sorted(unfinished)))

    def advance(self, version: int) -> None:
        """The engines have the weights of `version` completed steps: begin what the gate now allows."""
        self._gate.version = version
        self._begin()

    async def batch(self) -> Batch:
        """The next batch: the oldest finished groups that are young enough. Raises `TooManyDropped`, or what `play` raises."""
        size = self._gate.groups_per_batch
        while True:
            await self._drop_stale()
            if len(self._ready) >= size:
                break
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        groups, self._ready = self._ready[:size], self._ready[size:]
        counts, self._counts = self._counts, RolloutCounts()
        return Batch(tuple(groups), counts, len(self._ready))

    async def stop(self) -> None:
        """Give up what is under way."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self) -> None:
        for _ in range(self._gate.capacity):
            if self._again:
                number = self._again.pop(0)
            else:
                number, self._next_group = self._next_group, self._next_group + 1
            self._gate.begin()
            self._running[number] = asyncio.create_task(self._run(number), name=f"group-{number}")

    async def _run(self, number: int) -> None:
        try:
            group = await self._play(number)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # handed to whoever waits for a batch
            self._failure = error
            self._changed.set()
            return
        del self._running[number]
        if group is None:
            self._gate.cancel()
            self._counts.dropped += 1
            if self._counts.dropped > MAX_DROPPED_SHARE * self._gate.groups_per_batch:
                self._failure = TooManyDropped(self._why_dropped())
        else:
            self._gate.accept()
            self._ready.append(group)
            self._ready.sort(key=lambda ready: ready.group)
        if self._failure is None:
            self._begin()
        self._changed.set()

    async def _play(self, number: int) -> Group | None:
        """Play a group, untrainable members again; None if too few remain."""
        tag = self._tags[number % len(self._tags)]
        shown = number % self._gate.groups_per_batch == 0
        good: list[EpisodeResult] = []
        members = tuple(range(self._group_size))
        for attempt in range(MAX_REROLLS + 1):
            task = GroupTask(Stream.TRAIN, number, tag, members, attempt, transcript=shown and attempt == 0)
            results = await self._players.play(task)
            good += [result for result in results if result.trainable]
            bad = [result for result in results if not result.trainable]
            self._counts.untrainable += bad
            members = tuple(result.key.member for result in bad)
            if not members:
                break
            if attempt < MAX_REROLLS:
                self._counts.rerolled += len(members)
        if len(good) < min(2, self._group_size):
            await self._discard(good)
            return None
        return Group(number, tag, tuple(sorted(good, key=lambda result: result.key)))

    async def _drop_stale(self) -> None:
        too_old = [group for group in self._ready if self._gate.version - group.oldest_version > self._gate.max_staleness]
        if not too_old:
            return
        self._ready = [group for group in self._ready if group not in too_old]
        self._counts.stale += len(too_old)
        for group in too_old:
            self._gate.reject()
            await self._discard(list(group.results))
        self._begin()

    def _why_dropped(self) -> str:
        last = self._counts.untrainable[-1]
        return (
            f"{self._counts.dropped} groups were dropped for one batch: the environments fail nearly always. "
            f"The last episode of {last.tag!r} ended with {last.stop_reason}: {last.error}"
        )
