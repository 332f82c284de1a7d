"""Trainer ranks: the actor that holds one, and the group that the driver calls."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from agenticrun_api import Pipeline, Role
from agenticrun_api.spec import InitializeModel
from agenticrun_workers.pipeline.batch_plan import RankJob
from agenticrun_workers.pipeline.model_source import ModelSource
from agenticrun_workers.rollout.env_worker import Texts
from agenticrun_workers.rollout.errors import InvalidConfig
from agenticrun_workers.rollout.placement import Placement, here
from agenticrun_workers.rollout.wire import pack, unpack
from agenticrun_workers.types import EpisodeKey, FloatArray, Trajectory

if TYPE_CHECKING:
    from agenticrun_workers.training import Sample

Metrics = dict[str, float]

LAST_OF_STEP = ("actor/lr", "actor/skipped_steps")
LARGEST_OF_STEP = ("actor/ratio_max",)
"""How metrics of several optimizer steps become one: the last, the largest, else the mean."""


class TrainerActor:
    """One rank. torch is imported here and not at the top, because the driver imports this module."""

    def __init__(self, rank: int, world_size: int, pipeline: Pipeline) -> None:
        self._rank = rank
        self._world_size = world_size
        self._pipeline = pipeline
        self._stores: list[Any] = []

    def placement(self) -> Placement:
        return here(f"trainer-{self._rank}", Role.TRAINER)

    def rendezvous(self) -> tuple[str, int]:
        """An address of this node that is free now, for the ranks to meet."""
        with socket.socket() as free:
            free.bind(("", 0))
            return str(ray.util.get_node_ip_address()), free.getsockname()[1]  # type: ignore[no-untyped-call]

    def make_model(self, model: InitializeModel, texts: Texts) -> dict[str, bytes]:
        """The files of `spec.model.initialize`. Raises `InvalidConfig`."""
        from agenticrun_workers.pipeline.strategies import make_model_files

        return make_model_files(model, texts, self._pipeline.sequence_length)

    def setup(self, source: ModelSource, rendezvous: tuple[str, int], threads: int) -> None:
        """Join the other ranks and load the model on so many torch threads. Raises `InvalidConfig`."""
        import torch

        from agenticrun_workers.models import ModelLoadError
        from agenticrun_workers.pipeline.strategies import build_strategy, loss_spec

        torch.set_num_threads(threads)
        if self._world_size > 1:
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = rendezvous[0], str(rendezvous[1])
            torch.distributed.init_process_group("gloo", rank=self._rank, world_size=self._world_size)
        try:
            self._strategy = build_strategy(self._pipeline, source)
        except ModelLoadError as error:
            raise InvalidConfig("spec.model.path", str(error)) from error
        self._loss = loss_spec(self._pipeline)

    def set_stores(self, stores: list[Any]) -> None:
        """Where trajectories lie; `TrainItem.store` counts into this list."""
        self._stores = stores

    def warm_up(self, keys: list[tuple[EpisodeKey, int]]) -> Metrics:
        """One supervised step on these (key, store). Collective."""
        from agenticrun_workers.training.samples import supervised_sample

        weight = self._pipeline.warmup.observation_weight if self._pipeline.warmup else 0.0
        return dict(self._strategy.supervised_step([supervised_sample(t, weight) for t in self._fetch(keys)]))

    def train(self, packed: bytes) -> Metrics:
        """All optimizer steps of one training step (a packed `RankJob`). Collective; the metrics are equal on every rank."""
        job: RankJob = unpack(packed)
        trajectories = self._fetch([(item.key, item.store) for item in job.items])
        samples = [self._sample(t, item.advantages) for t, item in zip(trajectories, job.items, strict=True)]
        old = self._strategy.compute_log_probs(samples) if len(job.mini_batches) > 1 else None
        steps = [
            self._strategy.train_step([samples[i] for i in chosen], self._loss, old and [old[i] for i in chosen])
            for chosen in job.mini_batches
        ]
        self._strategy.policy_version = job.version
        return combine([dict(step) for step in steps])

    def export_weights(self) -> dict[str, np.ndarray] | None:
        """All parameters on rank 0, None elsewhere. Collective."""
        weights = dict(self._strategy.export_weights())
        return weights if self._rank == 0 else None

    def save(self, folder: Path) -> None:
        """This rank's part of a checkpoint. Collective."""
        self._strategy.save(folder)

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint. Raises `InvalidConfig` for one of another model. Collective."""
        from agenticrun_workers.training import CheckpointMismatch

        try:
            self._strategy.load(folder)
        except CheckpointMismatch as error:
            raise InvalidConfig("spec.checkpoint.resume", f"{folder}: {error}") from error

    def _fetch(self, keys: Sequence[tuple[EpisodeKey, int]]) -> list[Trajectory]:
        by_store: dict[int, list[EpisodeKey]] = defaultdict(list)
        for key, store in keys:
            by_store[store].append(key)
        found = ray.get([self._stores[store].get.remote(wanted) for store, wanted in by_store.items()])
        trajectories = {trajectory.key: trajectory for part in found for trajectory in unpack(part)}
        return [trajectories[key] for key, _ in keys]

    @staticmethod
    def _sample(trajectory: Trajectory, advantages: FloatArray) -> Sample:
        from agenticrun_workers.training.samples import policy_sample

        advantages_T = np.zeros(trajectory.num_tokens)
        advantages_T[trajectory.response_mask_T] = advantages
        return policy_sample(trajectory, advantages_T)


class TrainerGroup:
    """All ranks, called together. A rank that dies fails the call, and with it the attempt."""

    def __init__(self, actors: list[Any]) -> None:
        self._actors = actors

    @property
    def ranks(self) -> int:
        return len(self._actors)

    async def warm_up(self, keys: list[list[tuple[EpisodeKey, int]]]) -> Metrics:
        """A supervised step; one list of (key, store) per rank."""
        return await self._first("warm_up", keys)

    async def train(self, jobs: list[RankJob]) -> Metrics:
        """A training step; one job per rank."""
        return await self._first("train", [pack(job) for job in jobs])

    def export_weights(self) -> Any:
        """A Ray reference to the weights. They never pass through the driver."""
        first, *_ = [actor.export_weights.remote() for actor in self._actors]
        return first

    async def save(self, folder: Path) -> None:
        await asyncio.gather(*(actor.save.remote(folder) for actor in self._actors))

    async def load(self, folder: Path) -> None:
        await asyncio.gather(*(actor.load.remote(folder) for actor in self._actors))

    async def _first(self, method: str, arguments: Sequence[Any]) -> Metrics:
        calls = [getattr(actor, method).remote(a) for actor, a in zip(self._actors, arguments, strict=True)]
        answers: list[Metrics] = await asyncio.gather(*calls)
        return answers[0]


def combine(steps: list[Metrics]) -> Metrics:
    """The metrics of several optimizer steps as one."""
    combined: Metrics = {}
    for name in steps[0]:
        values = [step[name] for step in steps]
        if name in LAST_OF_STEP:
            combined[name] = values[-1]
        else:
            combined[name] = max(values) if name in LARGEST_OF_STEP else float(np.mean(values))
    return combined
