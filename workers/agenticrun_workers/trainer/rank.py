"""RankActor: what every rank of a model has in common: its place, the other ranks, and the trajectories it fetches.

torch is imported inside methods, because the driver imports these modules.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from agenticrun_api import Pipeline, Role
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.placement import Placement, current_placement
from agenticrun_workers.serialization import unpack
from agenticrun_workers.types import EpisodeKey, Trajectory
from agenticrun_workers.weights.buckets import Verifier

if TYPE_CHECKING:
    from torch import Tensor

ACTOR, CRITIC, REFERENCE = "actor_train", "critic", "reference"
"""The models of a run that train or score; also the modules of a checkpoint."""

Metrics = dict[str, float]


class RankActor:
    """One rank of the models that `role`'s pods hold."""

    role: Role

    def __init__(self, rank: int, world_size: int, pipeline: Pipeline) -> None:
        self._rank = rank
        self._world_size = world_size
        self._pipeline = pipeline
        self._stores: list[Any] = []
        self._listener: socket.socket | None = None

    def placement(self) -> Placement:
        return current_placement(f"{self.role}-{self._rank}", self.role)

    def rendezvous(self) -> tuple[str, int]:
        """An address of this node, for the ranks to meet. This one, their first, listens from now on: nobody else gets the port before."""
        host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
        return host, self._listener.getsockname()[1]

    def set_stores(self, stores: list[Any]) -> None:
        """Where trajectories lie; the store numbers of a plan's items count into this list."""
        self._stores = stores

    def save(self, part: str, folder: str) -> None:
        """This rank's shard of one model. Collective."""
        self._part(part).save(folder)

    def load(self, part: str, folder: str) -> None:
        """Go on from a checkpoint. Raises `InvalidConfig` for one of another model, `DamagedFile` for broken files. Collective."""
        from agenticrun_workers.trainer import CheckpointMismatch

        try:
            self._part(part).load(folder)
        except CheckpointMismatch as error:
            raise InvalidConfig("spec.checkpoint.resume", f"{folder}: {error}") from error

    def _part(self, name: str) -> Any:
        """The strategy that holds this model."""
        raise NotImplementedError

    def _join(self, rendezvous: tuple[str, int], threads: int) -> None:
        """Meet the other ranks, on so many torch threads."""
        import torch

        from agenticrun_workers.trainer.ranks import join_ranks

        torch.set_num_threads(threads)
        if self._pipeline.deterministic:
            torch.use_deterministic_algorithms(True)
        join_ranks(self._rank, self._world_size, rendezvous, self._taken_listener())

    def _taken_listener(self) -> socket.socket | None:
        """What listens at the last `rendezvous`, once; None on other ranks than the first."""
        listener, self._listener = self._listener, None
        return listener

    def _fetch(self, keys: Sequence[tuple[EpisodeKey, int]]) -> list[Trajectory]:
        by_store: dict[int, list[EpisodeKey]] = defaultdict(list)
        for key, store in keys:
            by_store[store].append(key)
        found = ray.get(
            [self._stores[store].get.remote(wanted) for store, wanted in by_store.items()]
        )
        trajectories = {trajectory.key: trajectory for part in found for trajectory in unpack(part)}
        return [trajectories[key] for key, _ in keys]


class ReferenceUpdateMixin(RankActor):
    """The calls of `WeightSync` on an actor that holds a rank of the reference."""

    def begin_update(self, _version: int) -> None:
        """Buckets of a policy version follow."""
        self._arrived: list[Path] = []

    def take_bucket(self, path: str, checksum: int) -> None:
        """A file with some of the weights. Raises `CorruptBucket`."""
        Verifier().check(Path(path), checksum)
        self._arrived.append(Path(path))

    def finish_update(self) -> None:
        """The reference becomes the policy with these weights. Collective."""
        self._part(REFERENCE).load_weights(self._parameters())

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        from agenticrun_workers.weights.buckets import SafetensorsReader

        for path in self._arrived:
            yield from SafetensorsReader().parameters(path)


def combine(steps: list[Metrics]) -> Metrics:
    """The metrics of several optimizer steps as one: the last, the largest, the smallest, else the mean."""
    combined: Metrics = {}
    for name in steps[0]:
        values = [step[name] for step in steps]
        if name.endswith(("/lr", "/skipped_steps")):
            combined[name] = values[-1]
        elif name.endswith("_max"):
            combined[name] = max(values)
        else:
            combined[name] = min(values) if name.endswith("_min") else sum(values) / len(values)
    return combined
