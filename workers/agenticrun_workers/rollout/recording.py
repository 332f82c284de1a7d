"""Recordings: the batch of each training step on disk, written by one run and trained on by another.

    <uri>/step-000001.npz     what step 1 trained on

A file is complete or not there. It is read without pickle, so that a recording from a stranger is only numbers and text.
Tokens are kept as they were sampled, with their log-probs and versions.

Arrays of a file, for N trajectories with K turns in all, P prompt and R response tokens:

    header uint8 [bytes of JSON]; turns_N; prompt_lengths_K, response_lengths_K, rewards_K float64, valid_K bool,
    states_K uint8 [K, 32]; prompts_P int32; responses_R int32, logprobs_R float32, versions_R int32
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agenticrun_workers.storage import Folder
from agenticrun_workers.types import STATE_BYTES, EpisodeKey, StopReason, Stream, Trajectory, Turn

FORMAT = 2
_NAME = re.compile(r"step-(\d{6,})\.npz")


class RecordingError(Exception):
    """A recording is missing, damaged, or written by something else. The message names the file."""


@dataclass(frozen=True)
class RecordedStep:
    """The trajectories of one training step, by group and member."""

    trajectories: tuple[Trajectory, ...]
    attempts: tuple[int, ...]
    """Which re-roll each trajectory was."""


class Recording:
    """The files of one recording, in a folder or at an fsspec URL. Its methods block: call them in a thread.

    Raises `UnusableStorage` for a URL that this process cannot use.
    """

    def __init__(self, uri: str) -> None:
        self._folder = Folder(uri)
        self.uri = self._folder.uri

    def steps(self) -> list[int]:
        """Steps that are there, in order; none if there is no such folder."""
        return sorted(
            int(match[1]) for match in map(_NAME.fullmatch, self._folder.sizes()) if match
        )

    def begin(self, done: int) -> None:
        """Make ready to write after `done` steps: later ones belong to an attempt that took another way, and are removed.

        Raises `UnusableStorage` if nothing can be written here.
        """
        self._folder.require_writable()
        for step in self.steps():
            if step > done:
                self._folder.remove(_name(step))

    def write(self, step: int, recorded: RecordedStep) -> None:
        """Put a step into its place; one that is there is replaced."""
        self._folder.write(_name(step), encode(recorded))

    def read(self, step: int) -> RecordedStep:
        """A step. Raises `RecordingError` if it is not there or cannot be read."""
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
        """Which steps there are, for messages."""
        steps = self.steps()
        return f"{self.uri} holds " + (
            f"{len(steps)} steps ({steps[0]} to {steps[-1]})" if steps else "no steps"
        )


def _name(step: int) -> str:
    return f"step-{step:06d}.npz"


def encode(recorded: RecordedStep) -> bytes:
    """The bytes of a step's file."""
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
        prompts_P=_joined([turn.prompt_T for turn in turns], np.int32),
        responses_R=_joined([turn.response_T for turn in turns], np.int32),
        logprobs_R=_joined([turn.logprobs_T for turn in turns], np.float32),
        versions_R=_joined([turn.versions_T for turn in turns], np.int32),
    )
    return buffer.getvalue()


def decode(content: bytes) -> RecordedStep:
    """The inverse of `encode`."""
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        arrays: dict[str, NDArray[Any]] = dict(archive)
    header = json.loads(arrays["header"].tobytes())
    if header["format"] != FORMAT:
        raise ValueError(
            f"format {header['format']} is not {FORMAT}, the one that this version reads"
        )
    said = [
        list(chain.from_iterable(entry[name] for entry in header["trajectories"]))
        for name in ("actions", "engines")
    ]
    turns = _turns(arrays, *said)
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


def _joined(parts: list[Any], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)
