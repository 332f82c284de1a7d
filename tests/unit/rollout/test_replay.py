"""Recording behind a controller, and replaying without one, on stores that need no Ray."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agenticrun_api import Pipeline
from agenticrun_workers.errors import InvalidConfig, RolloutFailed
from agenticrun_workers.rollout.controller import (
    Batch,
    Group,
    RolloutCounts,
)
from agenticrun_workers.rollout.groups import EpisodeResult
from agenticrun_workers.rollout.recording import (
    Recording,
    RecordingRollout,
    ReplayRollout,
    fetch,
    record_or_replay,
)
from agenticrun_workers.rollout.trajectory_store import TrajectoryStore
from agenticrun_workers.types import (
    EpisodeKey,
    RolloutPosition,
    StopReason,
    Stream,
    Trajectory,
    Turn,
)
from rollout_fakes import Remote


def stores(count: int = 2) -> list[Any]:
    return [Remote(TrajectoryStore()) for _ in range(count)]


def played(group: int, member: int) -> Trajectory:
    rng = np.random.default_rng([group, member])
    length = int(rng.integers(1, 5))
    turn = Turn(
        prompt_T=rng.integers(0, 50, 3).astype(np.int32),
        response_T=rng.integers(0, 50, length).astype(np.int32),
        logprobs_T=rng.normal(size=length).astype(np.float32),
        versions_T=np.zeros(length, np.int32),
        reward=float(rng.normal()),
        state=rng.bytes(32),
    )
    return Trajectory(
        EpisodeKey(Stream.TRAIN, group, member),
        "AB"[group % 2],
        (turn,),
        StopReason.COMPLETED,
        metrics={"success": 1.0},
    )


class Controller:
    """Serves two groups of two per batch; group numbers go on."""

    def __init__(self, stores: list[Any], next_group: int = 0) -> None:
        self._stores = stores
        self.position = RolloutPosition(next_group, pending_groups=(77,))
        self.stopped = False
        self.versions: list[int] = []

    def advance(self, version: int, engine_version: int) -> None:
        assert engine_version == version
        self.versions.append(version)

    async def batch(self) -> Batch:
        first = self.position.next_group
        self.position = RolloutPosition(first + 2, pending_groups=(77,))
        return Batch(
            (await self._group(first), await self._group(first + 1)),
            RolloutCounts(rerolled=1),
            queue_depth=3,
        )

    async def _group(self, number: int) -> Group:
        members = [played(number, member) for member in (0, 1)]
        store = number % len(self._stores)
        await self._stores[store].call(lambda actor: actor.put(members))
        return Group(
            number,
            members[0].tag,
            tuple(EpisodeResult.of(t, attempt=1, store=store) for t in members),
        )

    async def stop(self) -> None:
        self.stopped = True


def pipeline(*, max_steps: int = 3, batch: int = 4, **record: str) -> Pipeline:
    return Pipeline.model_validate(
        {
            "maxSteps": max_steps,
            "rolloutBatchSize": batch,
            "evalSteps": 0,
            "envs": [{"tag": "A", "type": "frozen_lake"}, {"tag": "B", "type": "frozen_lake"}],
            "trainEnvs": {"groups": 2, "groupSize": 2, "tags": ["A", "B"]},
            "record": record or None,
        }
    )


async def record(uri: str, steps: int, step: int = 0) -> list[Batch]:
    """Record so many steps after `step`, and the batches that were served."""
    there = stores()
    controller = Controller(there, next_group=2 * step)
    rollout = await record_or_replay(pipeline(to=uri), controller, there, step)  # type: ignore[arg-type]
    served = []
    for version in range(step, step + steps):
        rollout.advance(version, version)
        served.append(await rollout.batch())
    await rollout.stop()
    assert controller.stopped
    return served


def scalars(batch: Batch) -> list[Any]:
    return [
        (
            r.key,
            r.tag,
            r.attempt,
            r.rewards_K.tolist(),
            r.tokens,
            r.oldest_version,
            r.states_K,
            r.metrics,
        )
        for r in batch.results
    ]


async def test_a_replay_serves_the_recorded_batches_and_their_tokens(tmp_path: Path) -> None:
    recorded = await record(str(tmp_path), 3)
    there = stores(3)
    controller = Controller(there)
    replay = await record_or_replay(pipeline(replay=str(tmp_path)), controller, there, 0)  # type: ignore[arg-type]
    for version, expected in enumerate(recorded):
        replay.advance(version, version)
        found = await replay.batch()
        assert scalars(found) == scalars(expected)
        assert [group.tag for group in found.groups] == ["A", "B"]
        tokens = [trajectory.tokens_T.tolist() for trajectory in await fetch(there, found.results)]
        assert tokens == [
            played(r.key.group, r.key.member).tokens_T.tolist() for r in expected.results
        ]
    assert controller.versions == []
    assert replay.position == RolloutPosition(next_group=6)


async def test_a_replay_goes_on_at_the_step_of_its_checkpoint(tmp_path: Path) -> None:
    recorded = await record(str(tmp_path), 3)
    replay = await ReplayRollout.open(pipeline(), str(tmp_path), stores(), 2, RolloutPosition(4))
    replay.advance(2, 2)
    assert scalars(await replay.batch()) == scalars(recorded[2])


async def test_a_recording_that_is_too_short_is_refused_before_training(tmp_path: Path) -> None:
    await record(str(tmp_path), 3)
    with pytest.raises(
        InvalidConfig,
        match=r"step 4 is not recorded: .* holds 3 steps \(1 to 3\), and maxSteps is 5",
    ) as caught:
        await ReplayRollout.open(
            pipeline(max_steps=5), str(tmp_path), stores(), 0, RolloutPosition()
        )
    assert caught.value.path == "spec.pipeline.record.replay"


async def test_a_recording_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="holds no steps"):
        await ReplayRollout.open(
            pipeline(), str(tmp_path / "nothing"), stores(), 0, RolloutPosition()
        )


async def test_batches_of_another_size_are_refused(tmp_path: Path) -> None:
    await record(str(tmp_path), 3)
    replay = await ReplayRollout.open(
        pipeline(batch=8), str(tmp_path), stores(), 0, RolloutPosition()
    )
    with pytest.raises(
        InvalidConfig, match="step 1 of the recording has 2 groups, and a batch here has 4"
    ) as caught:
        await replay.batch()
    assert caught.value.path == "spec.pipeline.rolloutBatchSize"


async def test_a_step_damaged_after_the_start_is_told(tmp_path: Path) -> None:
    await record(str(tmp_path), 3)
    replay = await ReplayRollout.open(pipeline(), str(tmp_path), stores(), 0, RolloutPosition())
    (tmp_path / "step-000001.npz").write_bytes(b"nothing")
    with pytest.raises(InvalidConfig, match=r"step-000001\.npz is damaged"):
        await replay.batch()


async def test_a_resumed_run_records_its_own_steps_over_those_of_the_attempt_before(
    tmp_path: Path,
) -> None:
    await record(str(tmp_path), 3)
    resumed = stores()
    await RecordingRollout.begin(Controller(resumed), str(tmp_path), resumed, step=1)  # type: ignore[arg-type]
    assert Recording(str(tmp_path)).steps() == [1]


async def test_recording_changes_nothing_of_what_the_controller_serves(tmp_path: Path) -> None:
    there = stores()
    plain = Controller(there)
    (recorded,) = await record(str(tmp_path), 1)
    expected = await plain.batch()
    assert scalars(recorded) == scalars(expected)
    assert (recorded.counts.rerolled, recorded.queue_depth) == (1, 3)


async def test_a_batch_whose_writing_was_given_up_is_played_again(tmp_path: Path) -> None:
    stuck = [_Stuck(), _Stuck()]
    rollout = RecordingRollout(
        Controller(stores()),  # type: ignore[arg-type]
        Recording(str(tmp_path)),
        [Remote(store) for store in stuck],
    )
    serving = asyncio.create_task(rollout.batch())
    await asyncio.wait_for(stuck[0].asked.wait(), 60)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert rollout.position == RolloutPosition(2, pending_groups=(0, 1, 77))


class _Stuck:
    """A store that never answers."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def get(self, keys: list[EpisodeKey]) -> list[Trajectory]:
        self.asked.set()
        return await asyncio.Event().wait() and []


async def test_a_place_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        InvalidConfig, match=r"cannot be written .*: name a folder, not a file"
    ) as caught:
        await record(str(tmp_path / "file"), 1)
    assert caught.value.path == "spec.pipeline.record.to"


@pytest.mark.parametrize("record", [{"to": "gopher://there"}, {"replay": "gopher://there"}])
async def test_a_url_that_nothing_reads_is_refused(record: dict[str, str]) -> None:
    there = stores()
    with pytest.raises(InvalidConfig, match="gopher") as caught:
        await record_or_replay(pipeline(**record), Controller(there), there, 0)  # type: ignore[arg-type]
    assert caught.value.path == f"spec.pipeline.record.{next(iter(record))}"


async def test_a_disk_that_fills_up_ends_the_attempt_with_the_fields_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object) -> None:
        raise OSError("no space left on device")

    there = stores()
    rollout = await RecordingRollout.begin(Controller(there), str(tmp_path), there, step=0)  # type: ignore[arg-type]
    monkeypatch.setattr(Recording, "write", full)
    with pytest.raises(
        RolloutFailed,
        match=r"spec\.pipeline\.record\.to: .* cannot be written: no space left on device",
    ):
        await rollout.batch()


async def test_without_record_the_controller_is_used_as_it_is() -> None:
    there = stores()
    controller: Any = Controller(there)
    assert (
        await record_or_replay(pipeline().model_copy(update={"record": None}), controller, there, 0)
        is controller
    )
