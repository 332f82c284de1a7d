"""Colocated engines share the GPUs of neighbouring ranks, and no two engines share one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agenticrun_api import Role
from agenticrun_workers.inference.pool import ColocatedSlot, colocated_slots
from agenticrun_workers.placement import Placement


def rank(number: int, node: str, *gpus: str) -> Placement:
    return Placement(f"trainer-{number}", Role.TRAINER, node, f"pod-{node}", 1, gpus)


def test_an_engine_of_two_gpus_sits_beside_two_ranks_of_its_pod() -> None:
    # Ray places ranks in any order; their numbers are no order of GPUs
    trainers = [rank(0, "a", "1"), rank(1, "b", "0"), rank(2, "a", "0"), rank(3, "b", "1")]
    assert colocated_slots(trainers, 2) == [
        ColocatedSlot("a", ("1", "0")),
        ColocatedSlot("b", ("0", "1")),
    ]


def test_without_gpus_there_is_an_engine_beside_every_rank() -> None:
    assert colocated_slots([rank(0, "a"), rank(1, "a")], 1) == [
        ColocatedSlot("a", ()),
        ColocatedSlot("a", ()),
    ]


@given(pods=st.integers(1, 4), engines=st.integers(1, 4), ranks=st.integers(1, 4))
def test_every_gpu_has_exactly_one_engine(pods: int, engines: int, ranks: int) -> None:
    trainers = [
        rank(0, f"n{pod}", str(gpu)) for pod in range(pods) for gpu in range(engines * ranks)
    ]
    places = colocated_slots(trainers, ranks)
    assert len(places) == pods * engines
    shared = [(place.node_id, gpu) for place in places for gpu in place.gpus]
    assert sorted(shared) == sorted((one.node_id, gpu) for one in trainers for gpu in one.gpus)
