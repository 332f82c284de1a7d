"""Which groups run, and what becomes of each: one state machine. Runs in the driver.

    PENDING --> RUNNING --> READY --> SERVED: in a batch
       ^           |          |
       |           v          |
       |        DROPPED       |
       +----------------------+  a member has grown too old

`RolloutController` moves groups between these states, `StalenessGate` limits how many may start,
`EnvBreaker` leaves out environments that fail, and `Group.run` runs the members of one group.

Staleness. A token of policy version t can be trained on up to step t + staleness.max. Once a batch
is taken, the env workers stop members that would miss that step, and finished groups drop theirs.
Only these members run again, at once and under the same group number: no data item is lost.
Batches do not wait for a slow group the first time. The second time they do: else episodes that
are slower than the trainer would never be trained on, and short ones would be preferred.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from agenticrun_api import Pipeline
from agenticrun_workers.agents.chat import MODEL_WORDS
from agenticrun_workers.errors import RolloutFailed
from agenticrun_workers.log_once import LogOnce
from agenticrun_workers.rollout.groups import (
    EpisodeResult,
    EpisodeTask,
    GroupPlan,
    TrainingBackend,
    VersionBounds,
    every_trajectory,
    failures,
)
from agenticrun_workers.tracing import GROUPS_READY, count
from agenticrun_workers.types import EpisodeKey, RolloutPosition, StopReason, Stream

log = logging.getLogger(__name__)

MAX_DROPPED_SHARE = 4
"""Dropped groups per group of a batch before the run fails, not counting evicted environments.

Without this bound an environment that always fails would be retried forever.
"""

MAX_FAILED = 3
"""Groups in a row, each with fewer than two episodes that can be trained on after re-rolls, after
which an environment is evicted."""

Discard = Callable[[list[EpisodeResult]], Awaitable[None]]
"""Called with episodes or stored trajectories that will not be trained on."""

NO_MEMBERS = GroupPlan(tags=(), group_size=0)

_Episode = asyncio.Task[EpisodeResult]


class TooManyDropped(RolloutFailed):
    """Nearly all groups are dropped, so no batch can be completed."""


class TooManyRejected(RolloutFailed):
    """The group filter rejects nearly all groups, so no batch can be completed."""


class GroupState(Enum):
    """State of a group on its way into a batch."""

    PENDING = auto()
    """It waits for its start, or to run members again that have grown too old."""
    RUNNING = auto()
    """Its members run until enough of them can be trained on, or no re-roll is left."""
    READY = auto()
    """Enough members have finished: it waits for its batch."""
    SERVED = auto()
    """It is in a batch."""
    DROPPED = auto()
    """Too few members can be trained on, or the group filter has refused it."""


UNFINISHED = (GroupState.PENDING, GroupState.RUNNING, GroupState.READY)


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


@dataclass(eq=False)
class Group:
    """A training group, from its number to its batch.

    Each member runs independently. One that fails or grows too old starts again at once, unless the
    other members suffice (redundancy). The attempt of a member counts its own runs: so its seed
    does not depend on how long other members take.
    """

    number: int
    tag: str
    """The environment of its episodes."""
    results: tuple[EpisodeResult, ...] = ()
    """Its trainable trajectories, ordered by member; empty until enough members have finished.

    Each has its own score and counts once in the group's statistics.
    """
    length_bias: float = 0.0
    """Mean sampled tokens of these members minus the mean of all started ones (redundancy)."""
    state: GroupState = GroupState.READY
    plan: GroupPlan = NO_MEMBERS
    """Which members run. A group of a recording has none."""
    requeued: bool = False
    """True once a member has grown too old: batches wait for the group from then on."""
    kept: list[EpisodeResult] = field(default_factory=list)
    """Finished episodes that can be trained on, in the order of finishing."""
    surplus: list[EpisodeResult] = field(default_factory=list)
    """Trainable trajectories of the last run that are not in `results`."""
    untrainable: list[EpisodeResult] = field(default_factory=list)
    """The other trajectories of the last run."""
    rerolled: int = 0
    """Failed episodes that ran again in the last run."""
    aborted_tokens: int = 0
    """Tokens that the last run sampled for members that it did not need, stopped or finished."""

    def __post_init__(self) -> None:
        members = range(self.plan.group_size + self.plan.redundancy)
        self._missing = dict.fromkeys(members, _Missing.NOT_STARTED)
        self._stale: dict[int, EpisodeResult] = {}
        """The result of each member that is `_Missing.STALE`."""
        self._running: dict[_Episode, EpisodeTask] = {}
        self._ended: list[_Episode] = []
        """Ended episodes of `_running`, in the order in which they ended."""
        self._aborted: set[_Episode] = set()
        """Episodes that `run` has stopped because enough others had finished."""
        self._bounds = VersionBounds()
        self._changed = asyncio.Event()
        self._attempts: Counter[int] = Counter()
        self._failures: Counter[int] = Counter()
        self._unneeded: list[EpisodeResult] = []

    @classmethod
    def of(cls, plan: GroupPlan, number: int, *, requeued: bool = False) -> Group:
        """Return a group of which no member has started."""
        return cls(number, plan.tag(number), state=GroupState.PENDING, plan=plan, requeued=requeued)

    @property
    def scores(self) -> list[float]:
        """Score of each trajectory."""
        return [result.score for result in self.results]

    @property
    def oldest_version(self) -> int:
        """Oldest policy version in its trajectories."""
        return min(result.oldest_version for result in self.results)

    def oldest_started_version(self, newest: int) -> int:
        """Return the oldest policy version in its finished and running episodes.

        Args:
            newest: version of the engines, with which further episodes would begin.
        """
        running = [task.engine_version for task in self._running.values()]
        return min([*running, *(result.episode_version for result in self.kept)], default=newest)

    def set_bounds(self, bounds: VersionBounds) -> None:
        """Take newer policy versions, and let `run` look at once for members that are too old."""
        self._bounds = bounds
        self._changed.set()

    async def run(
        self,
        backend: TrainingBackend,
        bounds: VersionBounds,
        drop: Discard,
        *,
        transcript: bool = False,
    ) -> None:
        """Run the missing members until enough are trainable or no re-roll is left.

        `results` are empty after this if fewer than two (one, for groups of one) trajectories are
        trainable.

        Args:
            backend: runs the episodes.
            bounds: the current policy versions; `set_bounds` brings later ones.
            drop: called with members that have grown too old, before they run again.
            transcript: return one member as text; another one if that is not kept.
        """
        self._bounds = bounds
        self.results, self.length_bias = (), 0.0
        self.surplus, self.untrainable = [], []
        self.rerolled = self.aborted_tokens = 0
        try:
            while True:
                await self._drop_stale(drop)
                # A copy of the list: `_start` takes members out of what is missing.
                for member in self._needed():
                    self.rerolled += self._missing[member] is _Missing.FAILED
                    self._start(member, backend, transcript=transcript)
                if not self._running:
                    break
                if len(self.kept) >= self.plan.group_size:
                    # Redundant members are no longer needed. They end soon, with the tokens sampled
                    # so far.
                    backend.abort(self.number)
                    self._aborted.update(self._running)
                await self._changed.wait()
                self._changed.clear()
                ended, self._ended = self._ended, []
                for episode in ended:
                    result = episode.result()
                    del self._running[episode]
                    self._take(result, stopped=episode in self._aborted)
                    self._aborted.discard(episode)
        finally:
            await self._cancel()
        self._finish()

    def _needed(self) -> list[int]:
        """Return the missing members that must start for the group to become full."""
        needed = self.plan.group_size - len(self.kept) - len(self._running)
        # Redundancy is for slow members of the first round only: re-rolls of failed ones would
        # multiply it.
        if not self._attempts:
            needed += self.plan.redundancy
        return sorted(self._missing)[: max(0, needed)]

    def _start(self, member: int, backend: TrainingBackend, *, transcript: bool) -> None:
        del self._missing[member]
        # One member is shown. If it fails, the next one that starts is shown instead.
        shown = any(result.transcript for result in self.kept) or any(
            task.transcript for task in self._running.values()
        )
        wanted = transcript and not shown
        task = EpisodeTask(
            EpisodeKey(Stream.TRAIN, self.number, member),
            self.tag,
            # The attempt is part of the seed, so that a member that runs again sees another
            # episode.
            self._attempts[member],
            self._bounds.newest,
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

    def _take(self, result: EpisodeResult, *, stopped: bool) -> None:
        """Sort a finished episode. `stopped`: the group no longer needed it."""
        member = result.key.member
        if result.trainable:
            self.kept.append(result)
            self.untrainable += [each for each in result.others if not each.trainable]
        # Stopped on our request, because the group was full: neither a failure nor too old.
        elif result.stop_reason is StopReason.ABORTED and stopped:
            self._count_unneeded(result)
        elif result.stop_reason is StopReason.STALE:
            # Not the environment's failure: it may run again as often as needed, without a re-roll.
            self._missing[member] = _Missing.STALE
            self._stale[member] = result
        else:
            self.untrainable += result.trajectories
            self._failures[member] += 1
            if self._failures[member] <= self.plan.max_rerolls:
                self._missing[member] = _Missing.FAILED

    def _count_unneeded(self, result: EpisodeResult) -> None:
        self._missing[result.key.member] = _Missing.UNNEEDED
        self._unneeded.append(result)
        self.aborted_tokens += result.response_tokens

    async def _drop_stale(self, drop: Discard) -> None:
        """Drop finished members that have grown too old, and stopped ones that run again."""
        # Before new members start, so that one that must run again is among them.
        stale = [result for result in self.kept if result.episode_version < self._bounds.oldest]
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
        # A group that has run to its end has none left: this is for errors and cancellations.
        for episode in self._running:
            episode.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running.clear()
        self._ended.clear()
        self._aborted.clear()

    def _finish(self) -> None:
        # Stopped as too old, and not needed again because other members sufficed.
        for result in self._stale.values():
            self._count_unneeded(result)
        self._stale.clear()
        surplus = self.kept[self.plan.group_size :]
        self.kept = self.kept[: self.plan.group_size]
        self.surplus = _trainable(surplus)
        self._unneeded += self.surplus
        self.aborted_tokens += sum(result.response_tokens for result in self.surplus)
        kept = _trainable(self.kept)
        # One member has nothing to be compared with, so its group would teach nothing.
        if len(kept) < min(2, self.plan.group_size):
            self.surplus += kept
        else:
            self.results = tuple(sorted(kept, key=lambda result: result.key))
            # Redundant members that were stopped are mostly the long ones, so they count, with the
            # tokens that they had sampled.
            self.length_bias = (
                0.0
                if not self._unneeded
                else _mean_tokens(kept) - _mean_tokens([*kept, *self._unneeded])
            )


@dataclass(frozen=True)
class StalenessGate:
    """Limits how many groups may start, which bounds the age of training data.

    Unit: groups. With G groups in a batch, a limit of eta, and engines that have policy version e:

        capacity = min(max_concurrent - running, floor((eta + e + 1) * G) - (accepted + running))

    With `modelUpdateFrequency` f, e is up to f - 1 versions behind the completed training steps v.
    A group that starts now is trained on in step (accepted + running) / G at the earliest, and its
    first token has version e: so it is e, not v, that bounds its age.

    `max = 0` is the synchronous algorithm: only the groups of the next batch may run. The gate
    bounds what starts, not its age: the controller checks the age again when it takes a batch.
    """

    groups_per_batch: int
    max_concurrent: int
    max_staleness: float

    def capacity(self, engine_version: int, *, running: int, accepted: int) -> int:
        """Return how many groups may start now, never negative.

        Args:
            engine_version: policy version that the engines have (e).
            running: groups that run.
            accepted: groups that are ready, or were in a batch since the run began.
        """
        # Rounded down: a fraction of a group must not push the age over the limit.
        allowed = math.floor((self.max_staleness + engine_version + 1) * self.groups_per_batch)
        return max(0, min(self.max_concurrent - running, allowed - accepted - running))


class EnvBreaker:
    """Circuit breaker for environments: one kind that fails must not slow down the others.

    Without it every group of a failing kind runs its episodes again (`maxRerolls`), waits for their
    timeouts, and is dropped. A kind of which `MAX_FAILED` groups in a row were dropped is evicted:
    its group numbers are left out, and the other kinds fill the batches in their shares. In each
    step one of its groups may try again; if that can be trained on, the kind is back. The last kind
    is never evicted, because there is nothing to train on without it: the run then ends with
    `TooManyDropped`.

    Args:
        tags: of the environments that groups take turns with.
    """

    def __init__(self, tags: Iterable[str]) -> None:
        self._tags = set(tags)
        self._failed: Counter[str] = Counter()
        self._evicted: dict[str, str] = {}
        self._may_try: set[str] = set()

    @property
    def evicted(self) -> Mapping[str, str]:
        """Evicted tags, and the last error of each."""
        return self._evicted

    def next_step(self) -> None:
        """Let one group of each evicted environment try again."""
        self._may_try = set(self._evicted)

    def leaves_out(self, tag: str) -> bool:
        """Return True if the next group must not be of this environment."""
        # An evicted environment gets one try per step, whatever its outcome.
        if tag in self._may_try:
            self._may_try.remove(tag)
            return False
        return tag in self._evicted

    def succeeded(self, tag: str) -> None:
        """Take note of a group that can be trained on."""
        # Only failures in a row evict an environment.
        self._failed[tag] = 0
        if self._evicted.pop(tag, None) is not None:
            log.warning("environment %r works again: its groups are trained on again", tag)

    def failed(self, tag: str, error: str) -> None:
        """Take note of a group that was dropped, with the last error of its episodes."""
        self._failed[tag] += 1
        if tag in self._evicted:
            self._evicted[tag] = error
        elif self._failed[tag] >= MAX_FAILED and len(self._tags) - len(self._evicted) > 1:
            self._evicted[tag] = error
            log.warning(
                "environment %r is evicted: %d groups in a row had too few episodes that can be "
                "trained on. The last error: %s. The run continues with the others, and tries one "
                "of its groups in each step",
                tag,
                self._failed[tag],
                error,
            )


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
        self._version = 0
        """Completed training steps."""
        self._served = 0
        """Groups in batches since the run began, earlier attempts included."""
        self._bounds = VersionBounds()
        self._groups: dict[GroupState, dict[int, Group]] = {state: {} for state in UNFINISHED}
        """The unfinished groups, by state and number."""
        self._groups[GroupState.PENDING] = {
            number: Group.of(plan, number, requeued=number in position.requeued_groups)
            for number in position.pending_groups
        }
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._counts = RolloutCounts()
        self._dropped: Counter[str] = Counter()
        """Dropped groups for this batch by environment, without evicted environments."""
        self._breaker = EnvBreaker(plan.tags if plan.evicts else ())
        self._failure: BaseException | None = None
        self._warn = LogOnce(log.warning)

    @classmethod
    def of(
        cls,
        pipeline: Pipeline,
        backend: TrainingBackend,
        *,
        discard: Discard,
        position: RolloutPosition,
        transcripts: int = 0,
        frames: bool = False,
    ) -> RolloutController:
        """Return the controller of a run.

        Args:
            pipeline: `spec.pipeline`.
            backend: runs groups.
            discard: called with stored trajectories that will not be trained on.
            position: where to continue.
            transcripts: episodes of each batch that are returned as text; with `frames` also as
                GIF.

        Raises:
            InvalidConfig: the group filter is unknown.
        """
        gate = StalenessGate(
            pipeline.groups_per_batch, pipeline.train_envs.groups, pipeline.staleness.max
        )
        plan = GroupPlan.of(pipeline, transcripts=transcripts, frames=frames)
        return cls(backend, gate, plan, discard=discard, position=position)

    @property
    def position(self) -> RolloutPosition:
        """The position to save. Groups that are not yet in a batch run again after a resume."""
        # Ready groups count as unfinished: their tokens are in stores, which do not outlive the
        # attempt.
        unfinished = sorted(self._in(*UNFINISHED), key=lambda group: group.number)
        return RolloutPosition(
            self._next_group,
            tuple(group.number for group in unfinished),
            tuple(group.number for group in unfinished if group.requeued),
        )

    def advance(self, version: int, engine_version: int) -> None:
        """Start the groups that the gate now allows.

        Args:
            version: completed training steps, each with one batch.
            engine_version: policy version that the engines have.
        """
        self._version, self._served = version, version * self._gate.groups_per_batch
        self._breaker.next_step()
        self._set_bounds(version, engine_version)
        self._begin()

    async def batch(self) -> Batch:
        """Return finished groups that are within the staleness limit, oldest first.

        Raises:
            TooManyDropped: nearly all groups fail.
            TooManyRejected: the group filter rejects nearly all groups.
            RolloutFailed: the backend can no longer run groups.
        """
        while True:
            # A group that has just become ready may have a member that is too old by now.
            self._requeue_stale()
            if groups := self._next_batch():
                break
            # After the check for a batch: groups that are complete may still be trained on.
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        for group in groups:
            self._move(group, GroupState.SERVED)
        self._served += len(groups)
        counts, self._counts = self._counts, RolloutCounts()
        self._dropped.clear()
        counts.length_bias = float(np.mean([group.length_bias for group in groups]))
        # This batch makes the next version, so the oldest version that the next batch may contain
        # rises, too.
        self._set_bounds(self._version + 1, self._bounds.newest)
        self._requeue_stale()
        ready = len(self._groups[GroupState.READY])
        count(GROUPS_READY, ready)
        return Batch(tuple(groups), counts, ready, dict(self._breaker.evicted))

    async def stop(self) -> None:
        """Cancel all running groups."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _in(self, *states: GroupState) -> list[Group]:
        return [group for state in states for group in self._groups[state].values()]

    def _move(self, group: Group, state: GroupState) -> None:
        """Change the state of a group: all changes are made here."""
        # A group that is new, or from a recording, is in none of the tables yet.
        self._groups[group.state].pop(group.number, None)
        group.state = state
        if state in UNFINISHED:
            self._groups[state][group.number] = group

    def _next_batch(self) -> list[Group]:
        """Return the groups of the next batch, oldest first; none if it has to wait.

        Groups with members that ran again must still fit into the batches of their last steps.
        """
        size, newest = self._gate.groups_per_batch, self._bounds.newest
        # Oldest first, so that fewer groups become too old. Among equals, groups that already had
        # to run again.
        ready = sorted(
            self._in(GroupState.READY),
            key=lambda group: (
                group.oldest_started_version(newest),
                not group.requeued,
                group.number,
            ),
        )
        if len(ready) < size:
            return []
        unfinished = self._in(GroupState.RUNNING, GroupState.PENDING)
        waited_for = [group for group in (*ready[size:], *unfinished) if group.requeued]
        last_steps = sorted(
            group.oldest_started_version(newest) + self._max_age for group in waited_for
        )
        # Taking a batch now leaves the others one step less: each must still get a place in a batch
        # before its last step.
        fits = all(
            place <= (last_step - self._version) * size
            for place, last_step in enumerate(last_steps, start=1)
        )
        # Waiting cannot help if nothing runs: pending groups begin as others end.
        nothing_to_wait_for = not self._groups[GroupState.RUNNING] or not any(
            group.requeued for group in unfinished
        )
        return ready[:size] if fits or nothing_to_wait_for else []

    def _set_bounds(self, next_batch: int, engine_version: int) -> None:
        """Set which tokens the next batch can still have.

        Args:
            next_batch: policy version that will be trained on it.
            engine_version: policy version that the engines have.
        """
        self._bounds = VersionBounds(next_batch - self._max_age, engine_version)
        self._backend.set_bounds(self._bounds)
        for group in self._in(GroupState.RUNNING):
            group.set_bounds(self._bounds)

    def _requeue_stale(self) -> None:
        """Let ready groups run again of which a member has grown too old."""
        stale = [
            group
            for group in self._in(GroupState.READY)
            if group.oldest_started_version(self._bounds.newest) < self._bounds.oldest
        ]
        for group in stale:
            group.requeued = True
            self._move(group, GroupState.PENDING)
        if stale:
            self._begin()

    def _begin(self) -> None:
        """Start as many groups as the gate allows: pending ones first, in their order."""
        running = len(self._groups[GroupState.RUNNING])
        accepted = self._served + len(self._groups[GroupState.READY])
        # `newest` is what the engines have: with a slow weight sync fewer groups may start.
        capacity = self._gate.capacity(self._bounds.newest, running=running, accepted=accepted)
        for _ in range(capacity):
            if pending := self._groups[GroupState.PENDING]:
                group = pending[min(pending)]
            else:
                # Numbers of an evicted environment are skipped, not renumbered: seeds and data set
                # items follow the number.
                while self._breaker.leaves_out(self._plan.tag(self._next_group)):
                    self._next_group += 1
                group = Group.of(self._plan, self._next_group)
                self._next_group += 1
            self._move(group, GroupState.RUNNING)
            task = asyncio.create_task(self._run(group), name=f"group-{group.number}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, group: Group) -> None:
        transcript = group.number % self._gate.groups_per_batch < self._plan.transcripts
        try:
            await group.run(self._backend, self._bounds, self._drop, transcript=transcript)
            await self._record(group)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # `batch` raises it
            # Kept for the caller, because no one awaits this task.
            self._failure = error
        else:
            if self._failure is None:
                # A group that was dropped has made room for another one.
                self._begin()
        self._changed.set()

    async def _drop(self, stale: list[EpisodeResult]) -> None:
        """Count and discard members of a group that have grown too old."""
        self._counts.stale_episodes += stale
        await self._discard(_trainable(stale))

    async def _record(self, group: Group) -> None:
        """Count a group that has run. It becomes ready, or another one may start in its place."""
        self._counts.rerolled += group.rerolled
        self._counts.aborted_tokens += group.aborted_tokens
        self._counts.untrainable += group.untrainable
        for message in failures("", group.untrainable):
            self._warn(message)
        failed, chosen = not group.results, self._plan.filter
        if not failed:
            self._breaker.succeeded(group.tag)
        # Members that grew too old, or were stopped, say nothing about the environment.
        elif group.untrainable:
            last = group.untrainable[-1]
            self._breaker.failed(last.tag, f"{last.stop_reason}: {last.error}")
        refused = not failed and chosen is not None and chosen.refuses(group.scores)
        # Before the group changes its state, so that no batch can hold what the stores delete.
        await self._discard([*group.surplus, *(group.results if refused else ())])
        if failed or refused:
            self._counts.dropped += failed
            self._dropped[group.tag] += failed
            self._counts.filtered += refused
            self._check_limits(group.untrainable)
            self._move(group, GroupState.DROPPED)
        else:
            self._move(group, GroupState.READY)
            count(GROUPS_READY, len(self._groups[GroupState.READY]))

    def _check_limits(self, untrainable: list[EpisodeResult]) -> None:
        """Raise if too many groups were dropped or refused for one batch."""
        counts, chosen = self._counts, self._plan.filter
        for evicted in self._breaker.evicted:
            # An evicted environment is dealt with: only the others may end the run.
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


def _trainable(episodes: Iterable[EpisodeResult]) -> list[EpisodeResult]:
    """Return all trainable trajectories of these episodes, in order."""
    return [result for result in every_trajectory(episodes) if result.trainable]


def _mean_tokens(results: Iterable[EpisodeResult]) -> float:
    return float(np.mean([result.response_tokens for result in results]))
