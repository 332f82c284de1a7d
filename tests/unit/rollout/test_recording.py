"""A recording gives back exactly what was recorded, or says clearly why it cannot."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from agenticrun_workers.rollout.recording import (
    RecordedStep,
    Recording,
    RecordingError,
    decode,
    encode,
)
from agenticrun_workers.storage import Folder
from agenticrun_workers.types import STATE_BYTES, EpisodeKey, StopReason, Stream, Trajectory, Turn

TOKENS = hnp.arrays(np.int32, st.integers(0, 6), elements=st.integers(0, 2**31 - 1))
FINITE = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    response_T = draw(TOKENS)
    size = len(response_T)
    return Turn(
        prompt_T=draw(TOKENS),
        response_T=response_T,
        logprobs_T=draw(hnp.arrays(np.float32, size, elements=st.floats(-100, 0, width=32))),
        versions_T=draw(hnp.arrays(np.int32, size, elements=st.integers(0, 100))),
        reward=draw(FINITE),
        valid=draw(st.booleans()),
        state=draw(st.binary(min_size=STATE_BYTES, max_size=STATE_BYTES)),
        action=draw(st.none() | st.text(max_size=5)),
        engine=draw(st.text(max_size=5)),
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    return Trajectory(
        key=EpisodeKey(
            draw(st.sampled_from(Stream)),
            draw(st.integers(0, 10**12)),
            draw(st.integers(0, 4096)),
            draw(st.integers(0, 9)),
        ),
        tag=draw(st.text(max_size=8)),
        turns=tuple(draw(st.lists(turns(), max_size=3))),
        stop_reason=draw(st.sampled_from(StopReason)),
        stepwise=draw(st.booleans()),
        metrics=draw(st.dictionaries(st.text(max_size=8), FINITE, max_size=3)),
        error=draw(st.text(max_size=8)),
    )


def step(*played: Trajectory) -> RecordedStep:
    return RecordedStep(played, tuple(range(len(played))))


def simple(reward: float = 1.0) -> Trajectory:
    turn = Turn(
        np.arange(3, dtype=np.int32),
        np.arange(2, dtype=np.int32),
        np.zeros(2, np.float32),
        np.ones(2, np.int32),
        reward,
    )
    return Trajectory(EpisodeKey(Stream.TRAIN, 0, 0), "A", (turn,), StopReason.COMPLETED)


def assert_same(found: RecordedStep, expected: RecordedStep) -> None:
    assert found.attempts == expected.attempts
    assert len(found.trajectories) == len(expected.trajectories)
    for one, other in zip(found.trajectories, expected.trajectories, strict=True):
        for name in (field.name for field in fields(Trajectory) if field.name != "turns"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
        assert len(one.turns) == len(other.turns)
        for a, b in zip(one.turns, other.turns, strict=True):
            for name in (field.name for field in fields(Turn)):
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name), strict=True)


@given(played=st.lists(trajectories(), max_size=4))
def test_every_trajectory_comes_back_bit_for_bit(played: list[Trajectory]) -> None:
    assert_same(decode(encode(step(*played))), step(*played))


@given(played=st.lists(trajectories(), max_size=3))
def test_equal_batches_make_equal_files(played: list[Trajectory]) -> None:
    assert encode(step(*played)) == encode(step(*played))


def folder_uri(tmp_path: Path) -> str:
    return str(tmp_path / "recording")


def file_uri(tmp_path: Path) -> str:
    return f"file://{tmp_path}/recording"


def memory_uri(tmp_path: Path) -> str:
    return f"memory://{uuid4()}"


@pytest.mark.parametrize("uri", [folder_uri, file_uri, memory_uri])
def test_steps_are_written_read_listed_and_replaced(
    tmp_path: Path, uri: Callable[[Path], str]
) -> None:
    recording = Recording(uri(tmp_path))
    assert recording.steps() == []
    for number in (2, 1, 10):
        recording.write(number, step(simple(float(number))))
    recording.write(2, step(simple(20.0)))
    assert recording.steps() == [1, 2, 10]
    assert [recording.read(number).trajectories[0].score for number in (1, 2, 10)] == [
        1.0,
        20.0,
        10.0,
    ]


def test_what_another_attempt_wrote_later_is_removed(tmp_path: Path) -> None:
    recording = Recording(folder_uri(tmp_path))
    for number in (1, 2, 3):
        recording.write(number, step(simple()))
    recording.begin(1)
    assert recording.steps() == [1]


def test_a_file_is_complete_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording(folder_uri(tmp_path))
    recording.write(1, step(simple(1.0)))

    def die(*_arguments: object) -> None:
        raise OSError("the machine is gone")

    monkeypatch.setattr(Folder, "rename", die)
    for number in (1, 2):
        with pytest.raises(OSError, match="the machine is gone"):
            recording.write(number, step(simple(2.0)))
    assert recording.steps() == [1]
    assert recording.read(1).trajectories[0].score == 1.0


def test_a_step_that_is_not_there_is_told_with_what_is(tmp_path: Path) -> None:
    recording = Recording(folder_uri(tmp_path))
    for number in (1, 2):
        recording.write(number, step(simple()))
    with pytest.raises(
        RecordingError, match=r"there is no step 3: .*recording holds 2 steps \(1 to 2\)"
    ):
        recording.read(3)
    with pytest.raises(RecordingError, match="holds no steps"):
        Recording(str(tmp_path / "nothing")).read(1)


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]


def _of_another_format(content: bytes) -> bytes:
    with np.load(io.BytesIO(content)) as archive:
        arrays = dict(archive)
    header = json.loads(arrays["header"].tobytes()) | {"format": 99}
    buffer = io.BytesIO()
    np.savez(buffer, **(arrays | {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)}))
    return buffer.getvalue()


def _pickled(content: bytes) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, header=np.array([{"format": 2}], object))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut, "damaged"),
        (_flip, "damaged"),
        (_of_another_format, "format 99"),
        (_pickled, "allow_pickle"),
    ],
)
def test_a_damaged_file_is_told(
    tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    recording = Recording(folder_uri(tmp_path))
    recording.write(1, step(*[simple(float(n)) for n in range(50)]))
    path = tmp_path / "recording" / "step-000001.npz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RecordingError, match=message):
        recording.read(1)
