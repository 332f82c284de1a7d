"""Record and replay: one run writes the batch of each training step, another trains on them.

    <uri>/step-000001.npz     what step 1 trained on

A file is written whole or not at all. It is read without pickle, so an untrusted recording holds
only numbers and text. Tokens keep the log-probs and versions of their sampling.

Arrays of a file, for N trajectories with K turns in all, P prompt and R response tokens:

    header uint8 [bytes of JSON]; turns_N; prompt_lengths_K, response_lengths_K,
    rewards_K float64, valid_K bool, states_K uint8 [K, 32]; prompts_P int32;
    responses_R int32, logprobs_R float32, versions_R int32
"""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agenticrun_api import Pipeline
from agenticrun_workers.algorithms.segments import joined
from agenticrun_workers.errors import InvalidConfig, RolloutFailed
from agenticrun_workers.rollout.controller import (
    Batch,
    Group,
    RolloutController,
    RolloutCounts,
)
from agenticrun_workers.rollout.groups import EpisodeResult
from agenticrun_workers.rollout.trajectory_store import Stores
from agenticrun_workers.storage import Folder, UnusableStorage
from agenticrun_workers.types import (
    STATE_BYTES,
    EpisodeKey,
    RolloutPosition,
    StopReason,
    Stream,
    Trajectory,
    Turn,
)

FORMAT = 2
_NAME = re.compile(r"step-(\d{6,})\.npz")


class RecordingError(Exception):
    """A recording is missing, damaged or of another format. The message names the file."""


@dataclass(frozen=True)
class RecordedStep:
    """The trajectories of one training step, by group and member."""

    trajectories: tuple[Trajectory, ...]
    attempts: tuple[int, ...]
    """Number of the re-roll of each trajectory."""


class Recording:
    """The files of one recording, in a folder or at an fsspec URL.

    Its methods block: call them in a thread.

    Raises:
        UnusableStorage: this process cannot use the URL.
    """

    def __init__(self, uri: str) -> None:
        self._folder = Folder(uri)
        self.uri = self._folder.uri

    def steps(self) -> list[int]:
        """Return the recorded steps in order; none if the folder does not exist."""
        return sorted(
            int(match[1]) for match in map(_NAME.fullmatch, self._folder.sizes()) if match
        )

    def begin(self, done: int) -> None:
        """Prepare to write after `done` steps, and remove later steps of an earlier attempt.

        Raises:
            UnusableStorage: the folder is not writable.
        """
        self._folder.require_writable()
        for step in self.steps():
            if step > done:
                self._folder.remove(_name(step))

    def write(self, step: int, recorded: RecordedStep) -> None:
        """Write a step, replacing an earlier recording of it."""
        self._folder.write(_name(step), encode(recorded))

    def read(self, step: int) -> RecordedStep:
        """Return a step. Raises `RecordingError` if it is missing or damaged."""
        try:
            content = self._folder.read(_name(step))
        except FileNotFoundError as error:
            raise RecordingError(f"there is no step {step}: {self.describe()}") from error
        try:
            return decode(content)
        except Exception as error:  # NumPy and zipfile raise a dozen kinds for a damaged archive
            raise RecordingError(
                f"{self.uri}/{_name(step)} is damaged: {type(error).__name__}: {error}"
            ) from error

    def describe(self) -> str:
        """Describe the recorded steps for messages."""
        steps = self.steps()
        return f"{self.uri} holds " + (
            f"{len(steps)} steps ({steps[0]} to {steps[-1]})" if steps else "no steps"
        )


def _name(step: int) -> str:
    return f"step-{step:06d}.npz"


def encode(recorded: RecordedStep) -> bytes:
    """Return the file content of a step."""
    trajectories = recorded.trajectories
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    header = {
        "format": FORMAT,
        "trajectories": [
            _scalars(t, a) for t, a in zip(trajectories, recorded.attempts, strict=True)
        ],
    }
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        header=np.frombuffer(json.dumps(header).encode(), np.uint8),
        turns_N=np.array([len(trajectory.turns) for trajectory in trajectories], np.int64),
        prompt_lengths_K=np.array([len(turn.prompt_T) for turn in turns], np.int64),
        response_lengths_K=np.array([len(turn.response_T) for turn in turns], np.int64),
        rewards_K=np.array([turn.reward for turn in turns], np.float64),
        valid_K=np.array([turn.valid for turn in turns], np.bool_),
        states_K=np.frombuffer(b"".join(turn.state for turn in turns), np.uint8),
        prompts_P=joined([turn.prompt_T for turn in turns], np.int32),
        responses_R=joined([turn.response_T for turn in turns], np.int32),
        logprobs_R=joined([turn.logprobs_T for turn in turns], np.float32),
        versions_R=joined([turn.versions_T for turn in turns], np.int32),
    )
    return buffer.getvalue()


def decode(content: bytes) -> RecordedStep:
    """Return the step of a file's content."""
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        arrays: dict[str, NDArray[Any]] = dict(archive)
    header = json.loads(arrays["header"].tobytes())
    if header["format"] != FORMAT:
        raise ValueError(
            f"format {header['format']} is not {FORMAT}, the one that this version reads"
        )
    actions, engines = (
        list(chain.from_iterable(entry[name] for entry in header["trajectories"]))
        for name in ("actions", "engines")
    )
    turns = _turns(arrays, actions, engines)
    trajectories = tuple(
        Trajectory(
            key=EpisodeKey(
                Stream(entry["stream"]), entry["group"], entry["member"], entry["branch"]
            ),
            tag=entry["tag"],
            turns=tuple(next(turns) for _ in range(count)),
            stop_reason=StopReason(entry["stop_reason"]),
            stepwise=entry["stepwise"],
            metrics=entry["metrics"],
            error=entry["error"],
            ending_T=np.array(entry["ending"], np.int32),
        )
        for entry, count in zip(header["trajectories"], arrays["turns_N"].tolist(), strict=True)
    )
    return RecordedStep(trajectories, tuple(entry["attempt"] for entry in header["trajectories"]))


def _scalars(trajectory: Trajectory, attempt: int) -> dict[str, Any]:
    return {
        "stream": trajectory.key.stream.value,
        "group": trajectory.key.group,
        "member": trajectory.key.member,
        "branch": trajectory.key.branch,
        "tag": trajectory.tag,
        "stop_reason": trajectory.stop_reason.value,
        "stepwise": trajectory.stepwise,
        "metrics": dict(trajectory.metrics),
        "error": trajectory.error,
        "ending": trajectory.ending_T.tolist(),
        "attempt": attempt,
        "actions": [turn.action for turn in trajectory.turns],
        "engines": [turn.engine for turn in trajectory.turns],
    }


def _turns(
    arrays: dict[str, NDArray[Any]], actions_K: list[str | None], engines_K: list[str]
) -> Iterator[Turn]:
    prompts = np.split(arrays["prompts_P"], np.cumsum(arrays["prompt_lengths_K"])[:-1])
    ends = np.cumsum(arrays["response_lengths_K"])[:-1]
    responses, logprobs, versions = (
        np.split(arrays[name], ends) for name in ("responses_R", "logprobs_R", "versions_R")
    )
    count = len(arrays["rewards_K"])
    states = arrays["states_K"].reshape(count, STATE_BYTES)
    for k in range(count):
        yield Turn(
            prompt_T=prompts[k],
            response_T=responses[k],
            logprobs_T=logprobs[k],
            versions_T=versions[k],
            reward=float(arrays["rewards_K"][k]),
            valid=bool(arrays["valid_K"][k]),
            state=states[k].tobytes(),
            action=actions_K[k],
            engine=engines_K[k],
        )


RECORD_FIELD, REPLAY_FIELD = "spec.pipeline.record.to", "spec.pipeline.record.replay"


class RecordingRollout:
    """Rollout that writes each batch of `inner` to a recording before it is trained on.

    Args:
        inner: controller that makes the batches.
        recording: files to write.
        stores: stores with the trajectories of the batches.
    """

    def __init__(self, inner: RolloutController, recording: Recording, stores: Stores) -> None:
        self._inner = inner
        self._recording = recording
        self._stores = stores
        self._version = 0
        self._unwritten: tuple[Group, ...] = ()

    @classmethod
    async def begin(
        cls, inner: RolloutController, uri: str, stores: Stores, step: int
    ) -> RecordingRollout:
        """Continue recording after `step` training steps. Later recorded steps are removed.

        Raises:
            InvalidConfig: the folder is not writable.
        """
        try:
            recording = Recording(uri)
            await asyncio.to_thread(recording.begin, step)
        except UnusableStorage as error:
            raise InvalidConfig(RECORD_FIELD, str(error)) from error
        return cls(inner, recording, stores)

    @property
    def position(self) -> RolloutPosition:
        """Position of the controller. A batch that is not completely written is also pending."""
        inner = self._inner.position
        return replace(
            inner,
            pending_groups=tuple(
                sorted({*inner.pending_groups, *(group.number for group in self._unwritten)})
            ),
        )

    def advance(self, version: int, engine_version: int) -> None:
        self._version = version
        self._inner.advance(version, engine_version)

    async def batch(self) -> Batch:
        """Return the controller's next batch after writing it. Raises `RolloutFailed`."""
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
    """Rollout that serves recorded batches: training step v uses the recorded step v.

    Nothing is sampled.
    """

    def __init__(
        self,
        recording: Recording,
        stores: Stores,
        groups_per_batch: int,
        position: RolloutPosition,
    ) -> None:
        self._recording = recording
        self._stores = stores
        self._groups_per_batch = groups_per_batch
        self._version = 0
        self.position = position
        """Position after the served groups, where a run without replay would continue."""

    @classmethod
    async def open(
        cls, pipeline: Pipeline, uri: str, stores: Stores, step: int, position: RolloutPosition
    ) -> ReplayRollout:
        """Continue after `step` training steps.

        Raises:
            InvalidConfig: a step up to maxSteps is not recorded.
        """
        try:
            recording = Recording(uri)
        except UnusableStorage as error:
            raise InvalidConfig(REPLAY_FIELD, str(error)) from error
        recorded = set(await asyncio.to_thread(recording.steps))
        missing = [
            number for number in range(step + 1, pipeline.max_steps + 1) if number not in recorded
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
            pipeline.groups_per_batch,
            position,
        )

    def advance(self, version: int, engine_version: int) -> None:  # noqa: ARG002  # no engine works
        self._version = version

    async def batch(self) -> Batch:
        """Return the recorded batch of this step and put its trajectories into the stores."""
        try:
            recorded = await asyncio.to_thread(self._recording.read, self._version + 1)
        except RecordingError as error:
            raise InvalidConfig(REPLAY_FIELD, str(error)) from error
        groups = groups_of(recorded, stores=len(self._stores))
        if len(groups) != self._groups_per_batch:
            message = (
                f"step {self._version + 1} of the recording has {len(groups)} groups, "
                f"and a batch here has {self._groups_per_batch}"
            )
            raise InvalidConfig("spec.pipeline.rolloutBatchSize", message)
        by_store: dict[int, list[Trajectory]] = defaultdict(list)
        for trajectory in recorded.trajectories:
            by_store[_store(trajectory.key, len(self._stores))].append(trajectory)
        await asyncio.gather(
            *(
                self._stores[store].call(lambda actor: actor.put(kept))
                for store, kept in by_store.items()
            )
        )
        self.position = RolloutPosition(max(group.number for group in groups) + 1)
        return Batch(groups, RolloutCounts(), queue_depth=0)

    async def stop(self) -> None:
        """Do nothing: no episode is in progress."""


async def record_or_replay(
    pipeline: Pipeline, controller: RolloutController, stores: Stores, step: int
) -> RolloutController | RecordingRollout | ReplayRollout:
    """Return the rollout that `pipeline.record` selects, after `step` training steps."""
    record = pipeline.record
    if record is not None and record.to is not None:
        return await RecordingRollout.begin(controller, record.to, stores, step)
    if record is not None and record.replay is not None:
        return await ReplayRollout.open(pipeline, record.replay, stores, step, controller.position)
    return controller


async def fetch(stores: Stores, results: list[EpisodeResult]) -> list[Trajectory]:
    """Return the stored trajectories of these results, in order."""
    by_store: dict[int, list[EpisodeKey]] = defaultdict(list)
    for result in results:
        by_store[result.store].append(result.key)
    parts = await asyncio.gather(
        *(stores[store].call(lambda actor: actor.get(keys)) for store, keys in by_store.items())
    )
    found = {trajectory.key: trajectory for part in parts for trajectory in part}
    return [found[result.key] for result in results]


def groups_of(recorded: RecordedStep, stores: int) -> tuple[Group, ...]:
    """Return the groups of a recorded batch, assigned to `stores` stores."""
    pairs = zip(recorded.trajectories, recorded.attempts, strict=True)
    results = [
        EpisodeResult.of(t, attempt=attempt, store=_store(t.key, stores)) for t, attempt in pairs
    ]
    members = [tuple(found) for _, found in groupby(results, lambda result: result.key.group)]
    return tuple(Group(found[0].key.group, found[0].tag, found) for found in members)


def _store(key: EpisodeKey, stores: int) -> int:
    return key.group % stores
