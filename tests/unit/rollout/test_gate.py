"""The staleness gate: what it may let begin, in any order of events."""

from __future__ import annotations

import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agenticrun_workers.rollout.gate import StalenessGate


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
        self.running: list[int] = []
        self.ready: list[int] = []

    @precondition(lambda self: self.gate.capacity > 0)
    @rule()
    def begin(self) -> None:
        self.gate.begin()
        self.running.append(self.gate.engine_version)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), good=st.booleans())
    def end(self, data: st.DataObject, good: bool) -> None:
        version = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if good:
            self.gate.accept()
            self.ready.append(version)
        else:
            self.gate.cancel()

    @precondition(lambda self: self.ready)
    @rule()
    def reject(self) -> None:
        self.ready.pop(0)
        self.gate.reject()

    @precondition(lambda self: len(self.ready) >= self.gate.groups_per_batch)
    @rule()
    def train(self) -> None:
        batch = self.ready[: self.gate.groups_per_batch]
        self.ready = self.ready[self.gate.groups_per_batch :]
        if batch == sorted(batch):  # none has overtaken another
            oldest = self.gate.version - min(batch)
            assert oldest <= math.ceil(self.gate.max_staleness)
        self.gate.version += 1
        if self.gate.version % self.frequency == 0:
            self.gate.engine_version = self.gate.version

    @invariant()
    def never_more_than_allowed(self) -> None:
        if not hasattr(self, "gate"):
            return
        gate = self.gate
        assert gate.running == len(self.running) <= gate.max_concurrent
        assert gate.accepted == gate.version * gate.groups_per_batch + len(self.ready)
        begun = gate.accepted + gate.running
        lead = gate.max_staleness + gate.engine_version + 1
        assert begun <= math.floor(lead * gate.groups_per_batch)

    @invariant()
    def never_stuck(self) -> None:
        """With nothing under way and no full batch, something may begin."""
        if (
            hasattr(self, "gate")
            and not self.running
            and len(self.ready) < self.gate.groups_per_batch
        ):
            assert self.gate.capacity > 0


TestGate = GateMachine.TestCase


def test_without_staleness_exactly_one_batch_may_begin_per_version() -> None:
    gate = StalenessGate(groups_per_batch=4, max_concurrent=100, max_staleness=0)
    assert gate.capacity == 4
    for _ in range(4):
        gate.begin()
        gate.accept()
    assert gate.capacity == 0
    gate.version = gate.engine_version = 1
    assert gate.capacity == 4


@pytest.mark.parametrize(("staleness", "capacity"), [(0, 4), (0.5, 6), (1, 8), (2, 12)])
def test_staleness_lets_whole_batches_or_parts_of_one_begin_ahead(
    staleness: float, capacity: int
) -> None:
    assert StalenessGate(4, 100, staleness).capacity == capacity


def test_a_resumed_gate_is_that_of_a_run_that_never_stopped() -> None:
    gate = StalenessGate(4, 100, 1)
    for version in range(3):
        gate.version = gate.engine_version = version
        for _ in range(4):
            gate.begin()
            gate.accept()
    gate.version = gate.engine_version = 3
    assert StalenessGate.resumed(4, 100, 1, 3) == gate
