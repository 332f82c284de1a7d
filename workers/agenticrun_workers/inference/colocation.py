"""Which GPUs a colocated engine shares, and with whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agenticrun_workers.placement import Placement


@dataclass(frozen=True, slots=True)
class SharedPlace:
    """Where an engine lives beside trainers."""

    node_id: str
    gpus: tuple[str, ...]
    """Of the ranks that it takes turns with; none on machines without."""


def shared_places(trainers: Sequence[Placement], ranks_per_engine: int) -> list[SharedPlace]:
    """One place for every so many ranks of a pod. The ranks of a pod are its node's, in the order of `trainers`."""
    by_node: dict[str, list[Placement]] = {}
    for placement in trainers:
        by_node.setdefault(placement.node_id, []).append(placement)
    return [
        SharedPlace(
            node_id,
            tuple(gpu for rank in ranks[first : first + ranks_per_engine] for gpu in rank.gpus),
        )
        for node_id, ranks in by_node.items()
        for first in range(0, len(ranks) - ranks_per_engine + 1, ranks_per_engine)
    ]
