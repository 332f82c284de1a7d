"""The base of all ranks: placement, process group, checkpoints, and fetching of trajectories.

torch is imported inside methods, because the driver imports these modules.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from agenticrun_api import Pipeline, Role
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.launch import ActorHandle, current_node
from agenticrun_workers.placement import Placement, current_placement
from agenticrun_workers.tracing import Recorder, Traced, span, traced
from agenticrun_workers.types import EpisodeKey, Trajectory
from agenticrun_workers.weights.buckets import Verifier

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from agenticrun_workers.trainer.checkpoint import Snapshot, SnapshotWriter
    from agenticrun_workers.trainer.reference import ReferencePolicy

ACTOR, CRITIC, REFERENCE = "actor_train", "critic", "reference"
"""The models of a run that train or score; also the names of a checkpoint's modules."""

Metrics = dict[str, float]


class WarningLog(logging.Handler):
    """Keeps the text of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning."""
        self.messages.append(record.getMessage())


class Trajectories(Protocol):
    """The part of a `TrajectoryStore` that ranks call."""

    async def get(self, keys: list[EpisodeKey]) -> list[Trajectory]: ...


class RankModel(Protocol):
    """A rank's part of a model. All methods are collective."""

    def snapshot(self) -> Snapshot: ...

    def reserve_snapshot(self) -> Callable[[], None]: ...

    def load(self, folder: str) -> None: ...

    def offload(self) -> None: ...

    def onload(self) -> None: ...


@runtime_checkable
class TrainedModel(RankModel, Protocol):
    """A model with an optimizer: the policy or the critic."""

    @property
    def rate_falls_from(self) -> float: ...

    def stretch_schedule(self, steps_left: int) -> None: ...


class RankActor(Traced):
    """One rank of the models on the pods of `role`."""

    role: Role

    def __init__(self, rank: int, world_size: int, pipeline: Pipeline) -> None:
        self.recorder = Recorder(f"{self.role}-{rank}", self.role.value)
        self._rank = rank
        self._world_size = world_size
        self._pipeline = pipeline
        self._stores: Sequence[ActorHandle[Trajectories]] = ()
        self._listener: socket.socket | None = None
        self._warnings = WarningLog()
        self._writer: SnapshotWriter | None = None
        """None until `setup`."""

    def placement(self) -> Placement:
        """Return where this actor runs."""
        return current_placement(f"{self.role}-{self._rank}", self.role)

    def rendezvous(self) -> tuple[str, int]:
        """Return host and port where the ranks form their process group.

        Call it on the first rank. It listens from now on, so that no other process takes the port.
        """
        host = current_node().address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
        return host, self._listener.getsockname()[1]

    def set_stores(self, stores: Sequence[ActorHandle[Trajectories]]) -> None:
        """Set the stores of trajectories, which a `RankPlan` refers to by index."""
        self._stores = stores

    def close(self) -> None:
        """Undo what `setup` set for the whole process.

        Needed only where the actor is not a process of its own.
        """
        from agenticrun_workers.models.devices import set_deterministic
        from agenticrun_workers.trainer.ranks import leave_ranks

        logging.getLogger("agenticrun_workers").removeHandler(self._warnings)
        if self._writer is not None:
            self._writer.close()
        leave_ranks()
        if self._pipeline.deterministic:
            set_deterministic(False)

    def warnings(self, driver: int) -> list[str]:
        """Return what this process has warned of since `setup` began.

        With Ray its log is a file of its own, which users do not read.

        Args:
            driver: process id of the driver. Nothing is returned to an actor's own process, whose
                log has the warnings.
        """
        return [] if os.getpid() == driver else [*self._warnings.messages]

    def reserve_snapshot(self, part: str) -> None:
        """Allocate the memory that the first save of one model needs, in the background."""
        self._snapshots.reserve(self._part(part))

    @traced
    def save(self, part: str, folder: str) -> None:
        """Copy this rank's shard of one model, and start to write the copy. Collective."""
        self._snapshots.write(part, self._part(part), folder)

    def is_durable(self, part: str) -> bool:
        """Return True once all files of the last `save` of a model are durable.

        Raises:
            Exception: that of the write.
        """
        return self._snapshots.is_durable(part)

    @traced
    def load(self, part: str, folder: str) -> None:
        """Load one model from a checkpoint. Collective.

        Raises:
            InvalidConfig: the checkpoint is of another model.
            DamagedFile: a file is broken.
        """
        from agenticrun_workers.trainer.checkpoint import CheckpointMismatch

        try:
            self._part(part).load(folder)
        except CheckpointMismatch as error:
            raise InvalidConfig("spec.checkpoint.resume", f"{folder}: {error}") from error

    def rate_falls_from(self, part: str) -> float:
        """Return the learning rate from which the schedule of one model falls on."""
        return self._trained(part).rate_falls_from

    def stretch_schedule(self, part: str, steps_left: int) -> None:
        """Let the learning rate of one model reach zero after so many more optimizer steps.

        Raises:
            ScheduleEnded: it is zero already.
        """
        self._trained(part).stretch_schedule(steps_left)

    def _trained(self, name: str) -> TrainedModel:
        part = self._part(name)
        assert isinstance(part, TrainedModel), f"{name} does not train"
        return part

    @property
    def _snapshots(self) -> SnapshotWriter:
        assert self._writer is not None, "setup comes first"
        return self._writer

    def _part(self, name: str) -> RankModel:
        """Return this rank's part of a model."""
        raise NotImplementedError

    def _join(self, rendezvous: tuple[str, int], threads: int) -> None:
        """Form the process group with the other ranks and set the number of torch threads.

        Raises:
            InvalidConfig, MissingGpus: torch does not see the GPUs of this rank.
        """
        import torch

        from agenticrun_workers.models.devices import set_deterministic
        from agenticrun_workers.trainer.checkpoint import SnapshotWriter
        from agenticrun_workers.trainer.ranks import join_ranks

        logging.getLogger("agenticrun_workers").addHandler(self._warnings)
        self._claim_device()
        torch.set_num_threads(threads)
        if self._pipeline.deterministic:
            set_deterministic(True)
        join_ranks(self._rank, self._world_size, rendezvous, self._taken_listener())
        self._writer = SnapshotWriter()

    def _claim_device(self) -> torch.device:
        """Choose the device of this rank. See `claim_device` for the errors."""
        from agenticrun_workers.models.devices import claim_device

        gpus = current_node().gpus
        if gpus:
            # Micro-batches differ in length: without it the memory between their tensors is lost.
            # Not for engines: what they allocate this way cannot be freed for a trainer.
            # Page-locked memory of more than 1 MB is not rounded up to a power of two. Eight
            # threads lock its pages: 7 instead of 2 GB/s on an H200.
            os.environ.setdefault(
                "PYTORCH_CUDA_ALLOC_CONF",
                "expandable_segments:True,pinned_max_round_threshold_mb:1,"
                "pinned_use_cuda_host_register:True,pinned_num_register_threads:8",
            )
        return claim_device(f"{self.role} rank {self._rank}", gpus)

    def _taken_listener(self) -> socket.socket | None:
        """Take the socket of the last `rendezvous`; None on all ranks but the first."""
        listener, self._listener = self._listener, None
        return listener

    def _fetch(self, keys: Sequence[tuple[EpisodeKey, int]]) -> list[Trajectory]:
        by_store: dict[int, list[EpisodeKey]] = defaultdict(list)
        for key, store in keys:
            by_store[store].append(key)
        with span("fetch", trajectories=len(keys)):
            found = [
                self._stores[store].call(lambda kept: kept.get(wanted))
                for store, wanted in by_store.items()
            ]
            trajectories = {
                trajectory.key: trajectory for part in found for trajectory in part.wait()
            }
        return [trajectories[key] for key, _ in keys]


class ReferenceUpdateMixin(RankActor):
    """Lets a rank of the reference receive the policy's weights as engines do.

    `WeightSync` calls these methods; the weights come from the shared memory of the node.
    """

    def __init__(self, rank: int, world_size: int, pipeline: Pipeline) -> None:
        super().__init__(rank, world_size, pipeline)
        self._arrived: list[Path] = []
        """Files of the current update."""

    def begin_update(self, _version: int) -> None:
        """Start an update; its buckets follow."""
        self._arrived.clear()

    def take_bucket(self, path: str, checksum: int) -> None:
        """Take a file with some of the weights.

        Raises:
            CorruptBucket: the file does not match its checksum.
        """
        Verifier().check(Path(path), checksum)
        self._arrived.append(Path(path))

    @traced
    def finish_update(self) -> None:
        """Load the received weights into the reference. Collective."""
        from agenticrun_workers.weights.buckets import SafetensorsReader

        def parameters() -> Iterator[tuple[str, Tensor]]:
            for path in self._arrived:
                yield from SafetensorsReader().parameters(path)

        self._reference_model().load_weights(parameters())

    def _reference_model(self) -> ReferencePolicy:
        """Return this rank's part of the reference."""
        raise NotImplementedError


def combine(steps: list[Metrics]) -> Metrics:
    """Combine the metrics of several optimizer steps, each over the steps that measured it.

    Learning rate and skipped steps: the last value. `_max` and `_min`: the extremes. Else the mean.
    """
    measured: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        for name, value in step.items():
            measured[name].append(value)
    combined: Metrics = {}
    for name, values in measured.items():
        if name.endswith(("/lr", "/skipped_steps")):
            combined[name] = values[-1]
        elif name.endswith("_max"):
            combined[name] = max(values)
        else:
            combined[name] = min(values) if name.endswith("_min") else sum(values) / len(values)
    return combined
