"""Demonstrations: items of the warm-up data set as trajectories in the policy's chat template."""

from __future__ import annotations

from typing import Any

import numpy as np

from agenticrun_api import Pipeline
from agenticrun_api.training import WarmupDataset
from agenticrun_workers.agents import ChatFormat
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.rollout.datasets import Dataset
from agenticrun_workers.types import EpisodeKey, IntArray, StopReason, Trajectory, Turn

FIELD = "spec.pipeline.warmup.dataset"


class DemonstrationError(Exception):
    """An item without a usable prompt or answer."""


class Demonstrations:
    """The items of `spec` in the order of `pipeline.seed`.

    Raises `InvalidConfig` for an unusable data set.

    Args:
        sequence_length: longer items are skipped: a cut answer would teach to stop early.
        validates: see `Dataset`. The same items are held out as from a data set of episodes, so
            that the warm-up never teaches what is validated.
    """

    def __init__(
        self, spec: WarmupDataset, seed: int, sequence_length: int, *, validates: bool = True
    ) -> None:
        self._items = Dataset(spec, seed, FIELD, validates=validates)
        self._spec = spec
        self._sequence_length = sequence_length
        for field, column in (
            ("promptColumn", spec.prompt_column),
            ("answerColumn", spec.answer_column),
        ):
            if column not in self._items.columns:
                known = ", ".join(sorted(self._items.columns))
                raise InvalidConfig(
                    f"{FIELD}.{field}", f"{spec.path} has no column {column!r}; it has {known}"
                )

    @classmethod
    def of(cls, pipeline: Pipeline) -> Demonstrations | None:
        """Return the demonstrations of `pipeline.warmup`, or None if it uses no data set."""
        if pipeline.warmup is None or pipeline.warmup.dataset is None:
            return None
        return cls(
            pipeline.warmup.dataset,
            pipeline.seed,
            pipeline.sequence_length,
            validates=pipeline.val_envs is not None,
        )

    def trajectory(self, key: EpisodeKey, tag: str, chat: ChatFormat) -> Trajectory:
        """Return item number `key.group` as one turn: prompt, and answer with its end of turn.

        An unusable item ends with env_error, a too long one with context_overflow.
        """
        item = self._items.item(key.stream, key.group)
        try:
            prompt_T = _prompt(item[self._spec.prompt_column], chat)
            answer_T = chat.answer(_text(item[self._spec.answer_column], self._spec.answer_column))
        except (
            Exception
        ) as error:  # tokenizers raise plain Exception, chat templates errors of jinja
            message = f"item {key.group} of the warm-up: {type(error).__name__}: {error}"
            return Trajectory(key, tag, (), StopReason.ENV_ERROR, error=message)
        tokens = len(prompt_T) + len(answer_T)
        if tokens > self._sequence_length:
            message = (
                f"item {key.group} of the warm-up has {tokens} tokens, "
                f"and sequenceLength is {self._sequence_length}"
            )
            return Trajectory(key, tag, (), StopReason.CONTEXT_OVERFLOW, error=message)
        size = len(answer_T)
        turn = Turn(
            prompt_T, answer_T, np.zeros(size, np.float32), np.zeros(size, np.int32), reward=0.0
        )
        return Trajectory(key, tag, (turn,), StopReason.COMPLETED)


def _prompt(value: Any, chat: ChatFormat) -> IntArray:
    """Return the prompt tokens of a text (one user message) or of chat messages."""
    if not isinstance(value, list):
        return chat.first("", _text(value, "prompt"))
    messages = [
        {"role": _text(message["role"], "role"), "content": _text(message["content"], "content")}
        for message in value
    ]
    if not messages or messages[-1]["role"] == "assistant":
        raise DemonstrationError(
            "the chat messages of a prompt must end with a message to the policy"
        )
    return chat.conversation(messages)


def _text(value: Any, name: str) -> str:
    if isinstance(value, int):
        return str(value)  # CSV and JSON files hold answers that look like numbers
    if not isinstance(value, str):
        raise DemonstrationError(f"{name} is {type(value).__name__}, not text")
    return value
