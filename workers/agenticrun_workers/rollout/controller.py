"""RolloutController: starts groups and assembles training batches. Runs in the driver.

Staleness. A token of policy version t can be trained on up to step t + staleness.max. Once a batch
is taken, the env workers stop members that would miss that step, and finished groups drop theirs.
Only these members run again, at once (`group_run`) and under the same group number: no data item is
lost. Batches do not wait for a slow group the first time. The second time they do: else episodes
that are slower than the trainer would never be trained on, and short ones would be preferred.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from agenticrun_workers.agents.chat import MODEL_WORDS
from agenticrun_workers.errors import RolloutFailed
from agenticrun_workers.rollout.env_pool import TrainingBackend
from agenticrun_workers.rollout.eviction import EnvBreaker
from agenticrun_workers.rollout.gate import StalenessGate
from agenticrun_workers.rollout.group_run import FinishedGroup, GroupRun, trainable
from agenticrun_workers.rollout.groups import (
    EpisodeResult,
    Group,
    GroupPlan,
    VersionBounds,
    failures,
)
from agenticrun_workers.rollout.log_once import LogOnce
from agenticrun_workers.tracing import GROUPS_READY, count

log = logging.getLogger(__name__)

MAX_DROPPED_SHARE = 4
"""Dropped groups per group of a batch before the run fails, not counting evicted environments.

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
    stale_episodes: list[EpisodeResult] = field(default_factory=list)
    """Members that ran again because they had grown too old: stopped, or finished and discarded."""
    filtered: int = 0
    """Groups rejected by `groupFilter`."""
    aborted_tokens: int = 0
    """Tokens sampled by surplus members of redundant groups, stopped or finished."""
    length_bias: float = 0.0
    """Mean sampled tokens of the kept members minus the mean of all started ones.

    0 without redundancy.
    """
    untrainable: list[EpisodeResult] = field(default_factory=list)
    """All untrainable episodes."""

    @property
    def stale(self) -> int:
        """Number of groups of which members grew too old."""
        return len({result.key.group for result in self.stale_episodes})


@dataclass(frozen=True)
class Batch:
    """Groups of one training step, oldest first."""

    groups: tuple[Group, ...]
    counts: RolloutCounts
    queue_depth: int
    """Finished groups that are left for the next batch."""
    evicted: Mapping[str, str] = field(default_factory=dict)
    """Environments that are left out because they fail, and the last error of each."""

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
    requeued_groups: tuple[int, ...] = ()
    """Pending groups that have grown too old and run again: batches wait for them."""


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
        backend: TrainingBackend,
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
        self._bounds = VersionBounds()
        self._pending = [
            GroupRun(number, plan, requeued=number in position.requeued_groups)
            for number in sorted(position.pending_groups)
        ]
        self._running: dict[int, GroupRun] = {}
        self._ready: list[GroupRun] = []
        self._changed = asyncio.Event()
        self._counts = RolloutCounts()
        self._dropped: Counter[str] = Counter()
        """Dropped groups for this batch by environment, without evicted environments."""
        self._breaker = EnvBreaker(plan.tags if plan.evicts else ())
        self._failure: BaseException | None = None
        self._warn = LogOnce(log.warning)

    @property
    def position(self) -> RolloutPosition:
        """The position to save. Groups that are not yet in a batch run again after a resume."""
        unfinished = sorted(
            (*self._pending, *self._running.values(), *self._ready), key=lambda run: run.number
        )
        return RolloutPosition(
            self._next_group,
            tuple(run.number for run in unfinished),
            tuple(run.number for run in unfinished if run.requeued),
        )

    def advance(self, version: int, engine_version: int) -> None:
        """Start the groups that the gate now allows.

        Args:
            version: completed training steps.
            engine_version: policy version that the engines have.
        """
        self._gate.version, self._gate.engine_version = version, engine_version
        self._breaker.next_step()
        self._set_bounds(version)
        self._begin()

    async def batch(self) -> Batch:
        """Return finished groups that are within the staleness limit, oldest first.

        Raises:
            TooManyDropped: nearly all groups fail.
            TooManyRejected: the group filter rejects nearly all groups.
            RolloutFailed: the backend can no longer run groups.
        """
        size = self._gate.groups_per_batch
        while True:
            self._requeue_stale()
            if self._batch_ready():
                break
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        groups = [run.group for run in self._ready[:size] if run.group is not None]
        self._ready = self._ready[size:]
        counts, self._counts = self._counts, RolloutCounts()
        self._dropped.clear()
        counts.length_bias = float(np.mean([group.length_bias for group in groups]))
        # This batch makes the next version, so the oldest version that the next batch may contain
        # rises, too.
        self._set_bounds(self._gate.version + 1)
        self._requeue_stale()
        count(GROUPS_READY, len(self._ready))
        return Batch(tuple(groups), counts, len(self._ready), dict(self._breaker.evicted))

    def _batch_ready(self) -> bool:
        """Sort the ready groups by age. Return True if the oldest ones may be taken as a batch.

        Groups with members that ran again must still fit into the batches of their last steps.
        """
        size, newest = self._gate.groups_per_batch, self._bounds.newest
        # Oldest first, so that fewer groups become too old. Among equals, groups that already had
        # to run again.
        self._ready.sort(key=lambda r: (r.oldest_version(newest), not r.requeued, r.number))
        if len(self._ready) < size:
            return False
        unfinished = [*self._running.values(), *self._pending]
        waited_for = [run for run in (*self._ready[size:], *unfinished) if run.requeued]
        last_steps = sorted(run.oldest_version(newest) + self._max_age for run in waited_for)
        # Taking a batch now leaves the others one step less: each must still get a place in a batch
        # before its last step.
        fits = all(
            place <= (last_step - self._gate.version) * size
            for place, last_step in enumerate(last_steps, start=1)
        )
        # Waiting cannot help if nothing runs: pending groups begin as others end.
        nothing_to_wait_for = not self._running  # pending groups begin as others end
        return fits or nothing_to_wait_for or not any(run.requeued for run in unfinished)

    def _set_bounds(self, next_batch: int) -> None:
        """Tell the backend which tokens the next batch can still have.

        Args:
            next_batch: policy version that will be trained on it.
        """
        self._bounds = VersionBounds(next_batch - self._max_age, self._gate.engine_version)
        self._backend.set_bounds(self._bounds)
        for run in self._running.values():
            run.bounds_changed()

    def _requeue_stale(self) -> None:
        """Let ready groups run again of which a member has grown too old."""
        stale = [
            run
            for run in self._ready
            if run.oldest_version(self._bounds.newest) < self._bounds.oldest
        ]
        if not stale:
            return
        self._ready = [run for run in self._ready if run not in stale]
        self._pending = sorted([*self._pending, *stale], key=lambda run: run.number)
        for run in stale:
            run.requeued = True
            self._gate.reject()
        self._begin()

    async def stop(self) -> None:
        """Cancel all running groups."""
        tasks = [run.task for run in self._running.values() if run.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self) -> None:
        for _ in range(self._gate.capacity):
            if self._pending:
                run = self._pending.pop(0)
            else:
                # Numbers of an evicted environment are skipped, not renumbered: seeds and data set
                # items follow the number.
                while self._breaker.leaves_out(self._plan.tag(self._next_group)):
                    self._next_group += 1
                run = GroupRun(self._next_group, self._plan)
                self._next_group += 1
            self._gate.begin()
            self._running[run.number] = run
            run.task = asyncio.create_task(self._run(run), name=f"group-{run.number}")

    async def _run(self, run: GroupRun) -> None:
        transcript = run.number % self._gate.groups_per_batch < self._plan.transcripts
        try:
            finished = await run.play(
                self._backend, lambda: self._bounds, self._drop, transcript=transcript
            )
            await self._record_group(run, finished)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # `batch` raises it
            self._failure = error
        else:
            del self._running[run.number]
            if self._failure is None:
                self._begin()
        self._changed.set()

    async def _drop(self, stale: list[EpisodeResult]) -> None:
        """Count and discard members of a group that have grown too old."""
        self._counts.stale_episodes += stale
        await self._discard(trainable(stale))

    async def _record_group(self, run: GroupRun, finished: FinishedGroup) -> None:
        """Count a finished group. It becomes ready, or another group may start in its place."""
        self._counts.rerolled += finished.rerolled
        self._counts.aborted_tokens += finished.aborted_tokens
        self._counts.untrainable += finished.untrainable
        for message in failures("", finished.untrainable):
            self._warn(message)
        group, chosen = finished.group, self._plan.filter
        if group is not None:
            self._breaker.succeeded(group.tag)
        elif finished.untrainable:
            last = finished.untrainable[-1]
            self._breaker.failed(last.tag, f"{last.stop_reason}: {last.error}")
        refused = group is not None and chosen is not None and chosen.refuses(group.scores)
        await self._discard([*finished.surplus, *(group.results if group and refused else ())])
        if group is None or refused:
            # It will not be in a batch, so another group may start in its place.
            self._gate.cancel()
            self._counts.dropped += group is None
            self._dropped[run.tag] += group is None
            self._counts.filtered += refused
            self._check_bounds(finished.untrainable)
        else:
            self._gate.accept()
            self._ready.append(run)
            count(GROUPS_READY, len(self._ready))

    def _check_bounds(self, untrainable: list[EpisodeResult]) -> None:
        counts, chosen = self._counts, self._plan.filter
        for evicted in self._breaker.evicted:
            del self._dropped[evicted]
        dropped = self._dropped.total()
        if dropped > MAX_DROPPED_SHARE * self._gate.groups_per_batch and untrainable:
            last = untrainable[-1]
            # The error says itself what a tiny model's vocabulary lacks.
            advice = (
                ". "
                if MODEL_WORDS in last.error
                else ": fix the environment or its judge, or raise stepTimeoutSeconds. "
            )
            raise TooManyDropped(
                f"{dropped} groups were dropped for one batch{advice}"
                f"The last episode of {last.tag!r} ended with {last.stop_reason}: {last.error}"
            )
        if chosen is not None and counts.filtered > chosen.max_rejected:
            raise TooManyRejected(
                f"trainEnvs.groupFilter {chosen.name} refused {counts.filtered} groups for one "
                f"batch (maxRejected is {chosen.max_rejected}): the policy gets the same reward "
                "nearly everywhere. Raise trainEnvs.groupSize or maxRejected, sample hotter, "
                "choose levels of another difficulty, or remove the filter"
            )
