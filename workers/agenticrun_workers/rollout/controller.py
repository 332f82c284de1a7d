"""RolloutController: starts groups and assembles training batches. Runs in the driver.

`run_group` runs one group to its end, with re-rolls of untrainable members and redundant members.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from agenticrun_workers.errors import RolloutFailed
from agenticrun_workers.rollout.env_pool import RolloutBackend
from agenticrun_workers.rollout.gate import StalenessGate
from agenticrun_workers.rollout.groups import (
    EpisodeResult,
    Group,
    GroupPlan,
    GroupTask,
    every_trajectory,
)
from agenticrun_workers.rollout.log_once import LogOnce
from agenticrun_workers.types import StopReason, Stream


@dataclass
class FinishedGroup:
    """Outcome of a group."""

    group: Group | None = None
    """None if fewer than two (one, for groups of one) trajectories are trainable."""
    surplus: list[EpisodeResult] = field(default_factory=list)
    """Trainable trajectories that are not in `group`."""
    untrainable: list[EpisodeResult] = field(default_factory=list)
    rerolled: int = 0
    """Episodes that ran again."""
    aborted_tokens: int = 0
    """Tokens sampled for redundant members that were stopped."""


async def run_group(
    backend: RolloutBackend, plan: GroupPlan, number: int, *, transcript: bool = False
) -> FinishedGroup:
    """Run group `number` until `plan.group_size` members are trainable or no re-roll is left."""
    finished = FinishedGroup()
    good: list[EpisodeResult] = []
    late: list[EpisodeResult] = []
    members = tuple(range(plan.group_size + plan.redundancy))
    for attempt in range(plan.max_rerolls + 1):
        needed = plan.group_size - len(good)
        told = transcript and attempt == 0
        task = GroupTask(
            Stream.TRAIN,
            number,
            plan.tag(number),
            members,
            attempt,
            transcript=told,
            frames=told and plan.frames,
            stop_after=needed if needed < len(members) else None,
        )
        results = await backend.run(task)
        good += [result for result in results if result.trainable]
        too_late = _too_late(results) if len(good) >= plan.group_size else []
        late += too_late
        failed = [result for result in results if not result.trainable and result not in too_late]
        finished.untrainable += every_trajectory(failed)
        members = tuple(result.key.member for result in failed)
        if len(good) >= plan.group_size or attempt == plan.max_rerolls:
            break
        finished.rerolled += len(members)
    kept, finished.surplus = (
        _trainable(good[: plan.group_size]),
        _trainable(good[plan.group_size :]),
    )
    finished.untrainable += [result for result in every_trajectory(good) if not result.trainable]
    finished.aborted_tokens = sum(result.response_tokens for result in late)
    if len(kept) < min(2, plan.group_size):
        finished.surplus = _trainable(good)
    else:
        in_order = tuple(sorted(kept, key=lambda result: result.key))
        finished.group = Group(
            number,
            plan.tag(number),
            in_order,
            length_bias=_length_bias(kept, [*finished.surplus, *late]),
        )
    return finished


def _trainable(episodes: list[EpisodeResult]) -> list[EpisodeResult]:
    return [result for result in every_trajectory(episodes) if result.trainable]


def _too_late(results: list[EpisodeResult]) -> list[EpisodeResult]:
    """Return the members that were stopped because enough others had finished."""
    return [result for result in results if result.stop_reason is StopReason.ABORTED]


def _length_bias(kept: list[EpisodeResult], others: list[EpisodeResult]) -> float:
    """Return the mean sampled tokens of the kept members minus the mean of all members.

    Stopped members count with the tokens that they had sampled.
    """
    if not others:
        return 0.0
    return _mean_tokens(kept) - _mean_tokens([*kept, *others])


def _mean_tokens(results: Iterable[EpisodeResult]) -> float:
    return float(np.mean([result.response_tokens for result in results]))


log = logging.getLogger(__name__)

MAX_DROPPED_SHARE = 4
"""Dropped groups per group of a batch before the run fails.

Without this bound an environment that always fails would be retried forever.
"""


class TooManyDropped(RolloutFailed):
    """Nearly all groups are dropped, so no batch can be completed."""


class TooManyRejected(RolloutFailed):
    """The group filter rejects nearly all groups, so no batch can be completed."""


@dataclass
class RolloutCounts:
    """Counts since the last batch."""

    rerolled: int = 0
    """Episodes that ran again."""
    dropped: int = 0
    """Groups with fewer than two trainable members (one, for groups of one)."""
    stale: int = 0
    """Finished groups discarded because their policy version was too old."""
    filtered: int = 0
    """Groups rejected by `groupFilter`."""
    aborted_tokens: int = 0
    """Tokens sampled by surplus members of redundant groups."""
    length_bias: float = 0.0
    """Mean sampled tokens of the kept members minus the mean of all started ones.

    0 without redundancy.
    """
    untrainable: list[EpisodeResult] = field(default_factory=list)
    """All untrainable episodes."""


@dataclass(frozen=True)
class Batch:
    """Groups of one training step, oldest first."""

    groups: tuple[Group, ...]
    counts: RolloutCounts
    queue_depth: int
    """Finished groups that are left for the next batch."""

    @property
    def results(self) -> list[EpisodeResult]:
        """All trajectories, by group and member."""
        return [result for group in self.groups for result in group.results]


@dataclass(frozen=True)
class RolloutPosition:
    """Position saved in a checkpoint.

    Groups below `next_group` were started; those in `pending_groups` must run again.
    """

    next_group: int = 0
    pending_groups: tuple[int, ...] = ()


Discard = Callable[[list[EpisodeResult]], Awaitable[None]]


class RolloutController:
    """Starts as many groups as the gate allows and serves batches.

    Args:
        backend: runs groups.
        gate: limits how many groups may start.
        plan: size, tags and filter of the groups.
        discard: called with stored trajectories that will not be trained on.
        position: where to continue.
    """

    def __init__(
        self,
        backend: RolloutBackend,
        gate: StalenessGate,
        plan: GroupPlan,
        *,
        discard: Discard,
        position: RolloutPosition,
    ) -> None:
        self._backend = backend
        self._gate = gate
        self._plan = plan
        self._discard = discard
        self._max_age = math.ceil(gate.max_staleness)
        self._next_group = position.next_group
        self._pending = sorted(position.pending_groups)
        self._running: dict[int, asyncio.Task[None]] = {}
        self._ready: list[Group] = []
        self._changed = asyncio.Event()
        self._counts = RolloutCounts()
        self._failure: BaseException | None = None
        self._warn = LogOnce(log.warning)

    @property
    def position(self) -> RolloutPosition:
        """The position to save. Groups that are not yet in a batch run again after a resume."""
        unfinished = {*self._pending, *self._running, *(group.group for group in self._ready)}
        return RolloutPosition(self._next_group, tuple(sorted(unfinished)))

    def advance(self, version: int, engine_version: int) -> None:
        """Start the groups that the gate now allows.

        Args:
            version: completed training steps.
            engine_version: policy version that the engines have.
        """
        self._gate.version, self._gate.engine_version = version, engine_version
        self._begin()

    async def batch(self) -> Batch:
        """Return the oldest finished groups that are within the staleness limit.

        Raises:
            TooManyDropped: nearly all groups fail.
            TooManyRejected: the group filter rejects nearly all groups.
            RolloutFailed: the backend cannot run groups any more.
        """
        size = self._gate.groups_per_batch
        while True:
            while await self._drop_stale():  # others may have finished meanwhile
                pass
            if len(self._ready) >= size:
                break
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        groups, self._ready = self._ready[:size], self._ready[size:]
        counts, self._counts = self._counts, RolloutCounts()
        counts.length_bias = float(np.mean([group.length_bias for group in groups]))
        return Batch(tuple(groups), counts, len(self._ready))

    async def stop(self) -> None:
        """Cancel all running groups."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self) -> None:
        for _ in range(self._gate.capacity):
            if self._pending:
                number = self._pending.pop(0)
            else:
                number, self._next_group = self._next_group, self._next_group + 1
            self._gate.begin()
            self._running[number] = asyncio.create_task(self._run(number), name=f"group-{number}")

    async def _run(self, number: int) -> None:
        transcript = number % self._gate.groups_per_batch < self._plan.transcripts
        try:
            finished = await run_group(self._backend, self._plan, number, transcript=transcript)
            await self._record_group(finished)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # `batch` raises it
            self._failure = error
        else:
            del self._running[number]
            if self._failure is None:
                self._begin()
        self._changed.set()

    async def _record_group(self, finished: FinishedGroup) -> None:
        """Count a finished group. It becomes ready, or another group may start in its place."""
        self._counts.rerolled += finished.rerolled
        self._counts.aborted_tokens += finished.aborted_tokens
        self._counts.untrainable += finished.untrainable
        for result in finished.untrainable:
            self._warn(f"episodes of {result.tag!r} end with {result.stop_reason}: {result.error}")
        group, chosen = finished.group, self._plan.filter
        refused = group is not None and chosen is not None and chosen.refuses(group.scores)
        await self._discard([*finished.surplus, *(group.results if group and refused else ())])
        if group is None or refused:
            self._gate.cancel()
            self._counts.dropped += group is None
            self._counts.filtered += refused
            self._check_bounds(finished.untrainable)
        else:
            self._gate.accept()
            self._ready.append(group)
            self._ready.sort(key=lambda ready: ready.group)

    async def _drop_stale(self) -> bool:
        """Discard ready groups that exceed the staleness limit. Return True if there were some.

        A fractional limit is rounded up: ages are whole versions.
        """
        too_old = [
            group
            for group in self._ready
            if self._gate.version - group.oldest_version > self._max_age
        ]
        if not too_old:
            return False
        self._ready = [group for group in self._ready if group not in too_old]
        self._counts.stale += len(too_old)
        for group in too_old:
            self._gate.reject()
            await self._discard(list(group.results))
        self._begin()
        return True

    def _check_bounds(self, untrainable: list[EpisodeResult]) -> None:
        counts, chosen = self._counts, self._plan.filter
        if counts.dropped > MAX_DROPPED_SHARE * self._gate.groups_per_batch and untrainable:
            last = untrainable[-1]
            raise TooManyDropped(
                f"{counts.dropped} groups were dropped for one batch: "
                "the environments fail nearly always. "
                f"The last episode of {last.tag!r} ended with {last.stop_reason}: {last.error}"
            )
        if chosen is not None and counts.filtered > chosen.max_rejected:
            raise TooManyRejected(
                f"trainEnvs.groupFilter {chosen.name} refused {counts.filtered} groups for one "
                f"batch (maxRejected is {chosen.max_rejected}): the policy gets the same reward "
                "nearly everywhere. Raise trainEnvs.groupSize or maxRejected, sample hotter, "
                "choose levels of another difficulty, or remove the filter"
            )
