"""`pipeline.record`: the rollout controller with a recorder behind it, and a rollout that only reads a recording.

Both offer what the training loop asks of a rollout controller: advance, batch, position, stop.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import replace
from itertools import groupby
from typing import Any

from agenticrun_api import Pipeline
from agenticrun_workers.errors import InvalidConfig, RolloutFailed
from agenticrun_workers.rollout.controller import (
    Batch,
    RolloutController,
    RolloutCounts,
    RolloutPosition,
)
from agenticrun_workers.rollout.groups import EpisodeResult, Group
from agenticrun_workers.rollout.recording import RecordedStep, Recording, RecordingError
from agenticrun_workers.serialization import pack, unpack
from agenticrun_workers.storage import UnusableStorage
from agenticrun_workers.types import EpisodeKey, Trajectory

RECORD_FIELD, REPLAY_FIELD = "spec.pipeline.record.to", "spec.pipeline.record.replay"


class RecordingRollout:
    """Writes each batch of `inner`, whose trajectories lie in `stores`, before it is trained on."""

    def __init__(self, inner: RolloutController, recording: Recording, stores: list[Any]) -> None:
        self._inner = inner
        self._recording = recording
        self._stores = stores
        self._version = 0
        self._unwritten: tuple[Group, ...] = ()

    @classmethod
    async def begin(
        cls, inner: RolloutController, uri: str, stores: list[Any], step: int
    ) -> RecordingRollout:
        """Go on recording after `step` completed training steps; what the folder holds of later ones is removed.

        Raises `InvalidConfig` if nothing can be written there.
        """
        try:
            recording = Recording(uri)
            await asyncio.to_thread(recording.begin, step)
        except UnusableStorage as error:
            raise InvalidConfig(RECORD_FIELD, str(error)) from error
        return cls(inner, recording, stores)

    @property
    def position(self) -> RolloutPosition:
        """The controller's, and a batch whose writing was given up is played again."""
        inner = self._inner.position
        return replace(
            inner, again=tuple(sorted({*inner.again, *(group.group for group in self._unwritten)}))
        )

    def advance(self, version: int) -> None:
        self._version = version
        self._inner.advance(version)

    async def batch(self) -> Batch:
        """The controller's next batch, on disk. Raises `RolloutFailed` if it cannot be written."""
        batch = await self._inner.batch()
        self._unwritten = batch.groups
        trajectories = await fetch(self._stores, batch.results)
        recorded = RecordedStep(
            tuple(trajectories), tuple(result.attempt for result in batch.results)
        )
        try:
            await asyncio.to_thread(self._recording.write, self._version + 1, recorded)
        except OSError as error:
            raise RolloutFailed(
                f"{RECORD_FIELD}: {self._recording.uri} cannot be written: {error}"
            ) from error
        self._unwritten = ()
        return batch

    async def stop(self) -> None:
        await self._inner.stop()


class ReplayRollout:
    """Serves the batches of a recording: training step v trains on the recording's step v. Nothing is sampled or played."""

    def __init__(
        self,
        recording: Recording,
        stores: list[Any],
        groups_per_batch: int,
        position: RolloutPosition,
    ) -> None:
        self._recording = recording
        self._stores = stores
        self._groups_per_batch = groups_per_batch
        self._version = 0
        self.position = position
        """After the groups that were served: where a run that plays itself would go on."""

    @classmethod
    async def open(
        cls, pipeline: Pipeline, uri: str, stores: list[Any], step: int, position: RolloutPosition
    ) -> ReplayRollout:
        """Go on after `step` completed training steps. Raises `InvalidConfig` unless all steps up to maxSteps are recorded."""
        try:
            recording = Recording(uri)
        except UnusableStorage as error:
            raise InvalidConfig(REPLAY_FIELD, str(error)) from error
        there = set(await asyncio.to_thread(recording.steps))
        missing = [
            number for number in range(step + 1, pipeline.max_steps + 1) if number not in there
        ]
        if missing:
            found = await asyncio.to_thread(recording.describe)
            raise InvalidConfig(
                REPLAY_FIELD,
                f"step {missing[0]} is not recorded: {found}, and maxSteps is {pipeline.max_steps}",
            )
        return cls(
            recording,
            stores,
            pipeline.rollout_batch_size // pipeline.train_envs.group_size,
            position,
        )

    def advance(self, version: int) -> None:
        self._version = version

    async def batch(self) -> Batch:
        """The batch that the recorded run trained on in this step; its trajectories are put into the stores."""
        try:
            recorded = await asyncio.to_thread(self._recording.read, self._version + 1)
        except RecordingError as error:
            raise InvalidConfig(REPLAY_FIELD, str(error)) from error
        groups = groups_of(recorded, stores=len(self._stores))
        if len(groups) != self._groups_per_batch:
            message = f"step {self._version + 1} of the recording has {len(groups)} groups, and a batch here has {self._groups_per_batch}"
            raise InvalidConfig("spec.pipeline.rolloutBatchSize", message)
        by_store: dict[int, list[Trajectory]] = defaultdict(list)
        for trajectory in recorded.trajectories:
            by_store[_store(trajectory.key, len(self._stores))].append(trajectory)
        await asyncio.gather(
            *(self._stores[store].put.remote(pack(kept)) for store, kept in by_store.items())
        )
        self.position = RolloutPosition(max(group.group for group in groups) + 1)
        return Batch(groups, RolloutCounts(), queue_depth=0)

    async def stop(self) -> None:
        """Nothing is under way."""


async def record_or_replay(
    pipeline: Pipeline, controller: RolloutController, stores: list[Any], step: int
) -> RolloutController | RecordingRollout | ReplayRollout:
    """The rollout that `pipeline.record` asks for, after `step` completed training steps."""
    record = pipeline.record
    if record is not None and record.to is not None:
        return await RecordingRollout.begin(controller, record.to, stores, step)
    if record is not None and record.replay is not None:
        return await ReplayRollout.open(pipeline, record.replay, stores, step, controller.position)
    return controller


async def fetch(stores: list[Any], results: list[EpisodeResult]) -> list[Trajectory]:
    """The trajectories of these results, in their order."""
    by_store: dict[int, list[EpisodeKey]] = defaultdict(list)
    for result in results:
        by_store[result.store].append(result.key)
    parts = await asyncio.gather(
        *(stores[store].get.remote(keys) for store, keys in by_store.items())
    )
    found = {trajectory.key: trajectory for part in parts for trajectory in unpack(part)}
    return [found[result.key] for result in results]


def groups_of(recorded: RecordedStep, stores: int) -> tuple[Group, ...]:
    """The groups of a recorded batch, with the stores that their trajectories go to."""
    pairs = zip(recorded.trajectories, recorded.attempts, strict=True)
    results = [
        EpisodeResult.of(t, attempt=attempt, store=_store(t.key, stores)) for t, attempt in pairs
    ]
    members = [tuple(found) for _, found in groupby(results, lambda result: result.key.group)]
    return tuple(Group(found[0].key.group, found[0].tag, found) for found in members)


def _store(key: EpisodeKey, stores: int) -> int:
    return key.group % stores
