"""GroupRun: runs the members of one training group until enough of them can be trained on.

Each member runs independently. One that fails or grows too old starts again at once, unless the
other members suffice (redundancy). The attempt of a member counts its own runs: so its seed does
not depend on how long other members take.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from agenticrun_workers.rollout.env_pool import TrainingBackend
from agenticrun_workers.rollout.groups import (
    EpisodeResult,
    EpisodeTask,
    Group,
    GroupPlan,
    VersionBounds,
    every_trajectory,
)
from agenticrun_workers.types import EpisodeKey, StopReason, Stream


@dataclass
class FinishedGroup:
    """Outcome of a group."""

    group: Group | None = None
    """None if fewer than two (one, for groups of one) trajectories are trainable."""
    surplus: list[EpisodeResult] = field(default_factory=list)
    """Trainable trajectories that are not in `group`."""
    untrainable: list[EpisodeResult] = field(default_factory=list)
    rerolled: int = 0
    """Failed episodes that ran again."""
    aborted_tokens: int = 0
    """Tokens sampled for members that the group did not need, stopped or finished."""


class _Missing(Enum):
    """Why a member is neither running nor kept. It starts if the group needs it."""

    NOT_STARTED = auto()
    FAILED = auto()
    """Its next run is a re-roll."""
    STALE = auto()
    """It was stopped as too old. Its tokens are counted when it is known if it runs again."""
    DROPPED = auto()
    """It had grown too old, and its tokens are counted."""
    UNNEEDED = auto()
    """It was stopped because enough others had finished, and its tokens are counted."""


Drop = Callable[[list[EpisodeResult]], Awaitable[None]]
"""Called with the members of a group that have grown too old."""

_Episode = asyncio.Task[EpisodeResult]


@dataclass(eq=False)
class GroupRun:
    """A training group from its start until it is trained on or given up."""

    number: int
    plan: GroupPlan
    group: Group | None = None
    """Set when enough members have finished."""
    kept: list[EpisodeResult] = field(default_factory=list)
    """Finished episodes that can be trained on, in the order of finishing."""
    requeued: bool = False
    """True once a member has grown too old: batches wait for the group from then on."""
    task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        members = range(self.plan.group_size + self.plan.redundancy)
        self._missing = dict.fromkeys(members, _Missing.NOT_STARTED)
        self._stale: dict[int, EpisodeResult] = {}
        """The result of each member that is `_Missing.STALE`."""
        self._running: dict[_Episode, EpisodeTask] = {}
        self._ended: list[_Episode] = []
        """Ended episodes of `_running`, in the order in which they ended."""
        self._aborted: set[_Episode] = set()
        """Episodes that `play` has stopped because enough others had finished."""
        self._changed = asyncio.Event()
        self._attempts: Counter[int] = Counter()
        self._failures: Counter[int] = Counter()
        self._unneeded: list[EpisodeResult] = []

    @property
    def tag(self) -> str:
        """The environment that it plays."""
        return self.plan.tag(self.number)

    def oldest_version(self, newest: int) -> int:
        """Return the oldest policy version in its finished and running episodes.

        Args:
            newest: version of the engines, with which further episodes would begin.
        """
        running = [task.engine_version for task in self._running.values()]
        return min([*running, *(result.episode_version for result in self.kept)], default=newest)

    def bounds_changed(self) -> None:
        """Let `play` look at once for members that have grown too old."""
        self._changed.set()

    async def play(
        self,
        backend: TrainingBackend,
        bounds: Callable[[], VersionBounds],
        drop: Drop,
        *,
        transcript: bool = False,
    ) -> FinishedGroup:
        """Run the missing members until enough are trainable or no re-roll is left.

        Args:
            backend: runs the episodes.
            bounds: returns the current policy versions.
            drop: called with members that have grown too old, before they run again.
            transcript: return one member as text; another one if that is not kept.
        """
        finished = FinishedGroup()
        self.group = None
        try:
            while True:
                await self._drop_stale(bounds().oldest, drop)
                for member in self._needed():
                    finished.rerolled += self._missing[member] is _Missing.FAILED
                    self._start(member, backend, bounds().newest, transcript=transcript)
                if not self._running:
                    break
                if len(self.kept) >= self.plan.group_size:
                    # Redundant members are no longer needed. They end soon, with the tokens sampled
                    # so far.
                    backend.abort(self.number)
                    self._aborted.update(self._running)
                await self._changed.wait()
                self._changed.clear()
                self._take_ended(finished)
        finally:
            await self._cancel()
        return self._finish(finished)

    def _needed(self) -> list[int]:
        """Return the missing members that must start for the group to become full."""
        needed = self.plan.group_size - len(self.kept) - len(self._running)
        # Redundancy is for slow members of the first round only: re-rolls of failed ones would
        # multiply it.
        if not self._attempts:
            needed += self.plan.redundancy
        return sorted(self._missing)[: max(0, needed)]

    def _start(
        self, member: int, backend: TrainingBackend, engine_version: int, *, transcript: bool
    ) -> None:
        del self._missing[member]
        shown = any(result.transcript for result in self.kept) or any(
            task.transcript for task in self._running.values()
        )
        wanted = transcript and not shown
        task = EpisodeTask(
            EpisodeKey(Stream.TRAIN, self.number, member),
            self.tag,
            self._attempts[member],
            engine_version,
            transcript=wanted,
            frames=wanted and self.plan.frames,
        )
        self._attempts[member] += 1
        episode = asyncio.create_task(backend.run(task), name=f"group-{self.number}-{member}")
        self._running[episode] = task
        episode.add_done_callback(self._note_end)

    def _note_end(self, episode: _Episode) -> None:
        self._ended.append(episode)
        self._changed.set()

    def _take_ended(self, finished: FinishedGroup) -> None:
        ended, self._ended = self._ended, []
        for episode in ended:
            result = episode.result()
            del self._running[episode]
            self._take(result, finished, stopped=episode in self._aborted)
            self._aborted.discard(episode)

    def _take(self, result: EpisodeResult, finished: FinishedGroup, *, stopped: bool) -> None:
        """Sort a finished episode. `stopped`: the group no longer needed it."""
        member = result.key.member
        if result.trainable:
            self.kept.append(result)
            finished.untrainable += [each for each in result.others if not each.trainable]
        # Stopped on our request, because the group was full: neither a failure nor too old.
        elif result.stop_reason is StopReason.ABORTED and stopped:
            self._count_unneeded(result, finished)
        elif result.stop_reason is StopReason.STALE:
            # Not the environment's failure: it may run again as often as needed, without a re-roll.
            self._missing[member] = _Missing.STALE
            self._stale[member] = result
        else:
            finished.untrainable += result.trajectories
            self._failures[member] += 1
            if self._failures[member] <= self.plan.max_rerolls:
                self._missing[member] = _Missing.FAILED

    def _count_unneeded(self, result: EpisodeResult, finished: FinishedGroup) -> None:
        self._missing[result.key.member] = _Missing.UNNEEDED
        self._unneeded.append(result)
        finished.aborted_tokens += result.response_tokens

    async def _drop_stale(self, oldest: int, drop: Drop) -> None:
        """Drop finished members that are older than `oldest`, and stopped ones that run again."""
        stale = [result for result in self.kept if result.episode_version < oldest]
        self.kept = [result for result in self.kept if result not in stale]
        self._missing |= {result.key.member: _Missing.DROPPED for result in stale}
        for member in self._needed():
            if self._missing[member] is _Missing.STALE:
                self._missing[member] = _Missing.DROPPED
                stale.append(self._stale.pop(member))
        if stale:
            self.requeued = True
            await drop(stale)

    async def _cancel(self) -> None:
        for episode in self._running:
            episode.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running.clear()
        self._ended.clear()
        self._aborted.clear()

    def _finish(self, finished: FinishedGroup) -> FinishedGroup:
        for result in self._stale.values():
            self._count_unneeded(result, finished)
        self._stale.clear()
        surplus = self.kept[self.plan.group_size :]
        self.kept = self.kept[: self.plan.group_size]
        finished.surplus = trainable(surplus)
        self._unneeded += finished.surplus
        finished.aborted_tokens += sum(result.response_tokens for result in finished.surplus)
        kept = trainable(self.kept)
        # One member has nothing to be compared with, so its group would teach nothing.
        if len(kept) < min(2, self.plan.group_size):
            finished.surplus += kept
        else:
            finished.group = self.group = Group(
                self.number,
                self.tag,
                tuple(sorted(kept, key=lambda result: result.key)),
                length_bias=_length_bias(kept, self._unneeded),
            )
        return finished


def trainable(episodes: Iterable[EpisodeResult]) -> list[EpisodeResult]:
    """Return all trainable trajectories of these episodes, in order."""
    return [result for result in every_trajectory(episodes) if result.trainable]


def _length_bias(kept: list[EpisodeResult], others: list[EpisodeResult]) -> float:
    """Return the mean sampled tokens of the kept members minus the mean of all members.

    Stopped members count with the tokens that they had sampled.
    """
    if not others:
        return 0.0
    return _mean_tokens(kept) - _mean_tokens([*kept, *others])


def _mean_tokens(results: Iterable[EpisodeResult]) -> float:
    return float(np.mean([result.response_tokens for result in results]))
