"""The staleness gate: what it may let begin, in any order of events."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agenticrun_workers.rollout.controller import (
    RolloutController,
    StalenessGate,
)
from agenticrun_workers.rollout.groups import EpisodeResult, GroupPlan
from agenticrun_workers.types import RolloutPosition
from rollout_fakes import FakeBackend


class GateMachine(RuleBasedStateMachine):
    """Begin all that the gate allows, finish and train in any order.

    No episode ever meets a policy that is too old.
    """

    @initialize(
        size=st.integers(1, 6),
        concurrent=st.integers(1, 20),
        staleness=st.floats(0, 4),
        frequency=st.integers(1, 5),
    )
    def start(self, size: int, concurrent: int, staleness: float, frequency: int) -> None:
        self.gate = StalenessGate(size, concurrent, staleness)
        self.frequency = min(frequency, math.floor(staleness) + 1)
        """Steps between weight syncs; the API refuses more than staleness + 1."""
        self.version = self.engine_version = 0
        self.running: list[int] = []
        """Engine version at the start of each group."""
        self.ready: list[int] = []

    @property
    def accepted(self) -> int:
        return self.version * self.gate.groups_per_batch + len(self.ready)

    @property
    def capacity(self) -> int:
        return self.gate.capacity(
            self.engine_version, running=len(self.running), accepted=self.accepted
        )

    @precondition(lambda self: self.capacity > 0)
    @rule()
    def begin(self) -> None:
        self.running.append(self.engine_version)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), good=st.booleans())
    def end(self, data: st.DataObject, good: bool) -> None:
        version = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if good:
            self.ready.append(version)

    @precondition(lambda self: self.ready)
    @rule()
    def reject(self) -> None:
        self.ready.pop(0)

    @precondition(lambda self: len(self.ready) >= self.gate.groups_per_batch)
    @rule()
    def train(self) -> None:
        batch = self.ready[: self.gate.groups_per_batch]
        self.ready = self.ready[self.gate.groups_per_batch :]
        if batch == sorted(batch):  # none has overtaken another
            oldest = self.version - min(batch)
            assert oldest <= math.ceil(self.gate.max_staleness)
        self.version += 1
        if self.version % self.frequency == 0:
            self.engine_version = self.version

    @invariant()
    def never_more_than_allowed(self) -> None:
        if not hasattr(self, "gate"):
            return
        assert len(self.running) <= self.gate.max_concurrent
        lead = self.gate.max_staleness + self.engine_version + 1
        begun = self.accepted + len(self.running)
        assert begun <= math.floor(lead * self.gate.groups_per_batch)

    @invariant()
    def never_stuck(self) -> None:
        """With nothing under way and no full batch, something may begin."""
        if (
            hasattr(self, "gate")
            and not self.running
            and len(self.ready) < self.gate.groups_per_batch
        ):
            assert self.capacity > 0


TestGate = GateMachine.TestCase


def test_without_staleness_exactly_one_batch_may_begin_per_version() -> None:
    gate = StalenessGate(groups_per_batch=4, max_concurrent=100, max_staleness=0)
    assert gate.capacity(0, running=0, accepted=0) == 4
    assert gate.capacity(0, running=3, accepted=1) == 0
    assert gate.capacity(0, running=0, accepted=4) == 0
    assert gate.capacity(1, running=0, accepted=4) == 4


@pytest.mark.parametrize(("staleness", "capacity"), [(0, 4), (0.5, 6), (1, 8), (2, 12)])
def test_staleness_lets_whole_batches_or_parts_of_one_begin_ahead(
    staleness: float, capacity: int
) -> None:
    assert StalenessGate(4, 100, staleness).capacity(0, running=0, accepted=0) == capacity


async def test_as_many_groups_begin_after_a_resume_as_in_a_run_that_never_stopped() -> None:
    backend = FakeBackend()

    async def discard(results: list[EpisodeResult]) -> None: ...

    def controller(position: RolloutPosition) -> RolloutController:
        gate, plan = StalenessGate(4, 100, 1.5), GroupPlan(("A",), 2)
        return RolloutController(backend, gate, plan, discard=discard, position=position)

    steady, resumed = controller(RolloutPosition()), controller(RolloutPosition(next_group=12))
    for backend.version in range(3):
        steady.advance(backend.version, backend.version)
        await asyncio.wait_for(steady.batch(), 60)
    for each in (steady, resumed):
        each.advance(3, 3)
        await each.stop()
    assert steady.position.next_group == resumed.position.next_group == 4 * (3 + 2.5)
