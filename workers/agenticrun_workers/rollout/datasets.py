"""Data sets of episodes and of the warm-up, addressed by group number instead of a cursor.

The item of a group is a function of (seed, stream, tag, group number) only. A checkpoint keeps the
controller's position in group numbers, so a resumed run uses exactly the items of an uninterrupted
one, and a group that runs again gets the same item.

    k = how many groups of this tag have a smaller number than `group`
    item = order[k mod n]
    order = permutation of epoch k div n, drawn from (seed, stream, epoch)

k runs through 0, 1, 2 ... without gaps, so each epoch uses each of the n items exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agenticrun_api import Pipeline
from agenticrun_api.environments import DatasetSpec
from agenticrun_api.training import WarmupDataset
from agenticrun_workers.agents import ChatFormat
from agenticrun_workers.envs import Row
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.rollout.dataset_files import read_splits
from agenticrun_workers.rollout.groups import tag_cycle
from agenticrun_workers.seeds import derive
from agenticrun_workers.types import EpisodeKey, IntArray, StopReason, Stream, Trajectory, Turn

Item = Mapping[str, Any]
"""One row: values by column."""

RowNumbers = NDArray[np.int64]

HOLDOUT_SEED = 0
"""Fixed, so that runs of different seeds are compared on the same held-out items."""


class Dataset:
    """The items of one `DatasetSpec`.

    Args:
        seed: pipeline.seed, for the order of each epoch.
        field: path of the spec, for messages.
        validates: False if the run never validates on these items, so that none are held out.

    Raises:
        InvalidConfig: a path, split or column does not exist, or a split has no items.
    """

    def __init__(self, spec: DatasetSpec, seed: int, field: str, *, validates: bool = True) -> None:
        self._seed = seed
        self._shuffle = spec.shuffle
        self._renamed = spec.columns
        splits = read_splits(spec, field)
        rows = {name: np.arange(len(split)) for name, split in splits.items()}
        train, validation = _choose_rows(spec, rows, field, validates)
        self._train = (splits[spec.split], train)
        self._validation = (splits[spec.val_split or spec.split], validation)
        for split in (self._train[0], self._validation[0]):
            names = split.column_names
            for new, old in spec.columns.items():
                if old not in names:
                    raise InvalidConfig(
                        f"{field}.columns.{new}",
                        f"{spec.path} has no column {old!r}; it has {', '.join(names)}",
                    )
                if new in names and new not in spec.columns.values():
                    raise InvalidConfig(
                        f"{field}.columns.{new}",
                        f"{spec.path} has a column {new!r} of its own: rename that one too",
                    )
        self.columns = {
            *spec.columns,
            *(set(self._train[0].column_names) - set(spec.columns.values())),
        }
        """Column names of each item."""
        # Of the last few epochs: groups of two epochs may run at the same time.
        self._order = lru_cache(maxsize=4)(self._draw_order)

    def size(self, stream: Stream) -> int:
        """Items of one epoch."""
        return len(self._rows(stream))

    def item(self, stream: Stream, number: int) -> Item:
        """Return an item of the stream's endless sequence of epochs.

        Validation uses file order.
        """
        epoch, place = divmod(number, self.size(stream))
        rows = self._rows(stream)
        row = (
            rows[self._order(stream, epoch)[place]]
            # Validation keeps the order of the file, so that results can be compared item by item.
            if self._shuffle and stream is not Stream.VALIDATION
            else rows[place]
        )
        split = (self._validation if stream is Stream.VALIDATION else self._train)[0]
        values: dict[str, Any] = split[int(row)]
        kept = {name: value for name, value in values.items() if name not in self._renamed.values()}
        return Row(kept | {new: values[old] for new, old in self._renamed.items()})

    def _rows(self, stream: Stream) -> RowNumbers:
        return (self._validation if stream is Stream.VALIDATION else self._train)[1]

    def _draw_order(self, stream: Stream, epoch: int) -> RowNumbers:
        return np.random.default_rng(derive(self._seed, "items", stream.value, epoch)).permutation(
            self.size(stream)
        )


class EpisodeItems:
    """The data set items of a run's episodes. Raises `InvalidConfig` for an unusable data set."""

    def __init__(self, pipeline: Pipeline) -> None:
        train = tag_cycle(pipeline.train_envs.shares())
        validation = tag_cycle(pipeline.val_envs.shares()) if pipeline.val_envs else train
        self._cycles = {Stream.TRAIN: train, Stream.WARMUP: train, Stream.VALIDATION: validation}
        validated = pipeline.val_envs.tags if pipeline.val_envs else ()
        self._datasets = {
            env.tag: Dataset(
                env.dataset,
                pipeline.seed,
                f"spec.pipeline.envs[{index}].dataset",
                validates=env.tag in validated,
            )
            for index, env in enumerate(pipeline.envs)
            if env.dataset is not None
        }

    def of(self, tag: str, stream: Stream, group: int) -> Item | None:
        """Return the item of a group, or None if its environment has no data set."""
        dataset = self._datasets.get(tag)
        return (
            dataset.item(stream, place_among_tag(self._cycles[stream], group)) if dataset else None
        )


def place_among_tag(cycle: tuple[str, ...], group: int) -> int:
    """Return how many earlier groups have this group's tag; group g has cycle[g % len(cycle)]."""
    rounds, place = divmod(group, len(cycle))
    tag = cycle[place]
    return rounds * cycle.count(tag) + cycle[:place].count(tag)


def _choose_rows(
    spec: DatasetSpec, rows: Mapping[str, RowNumbers], field: str, validates: bool
) -> tuple[RowNumbers, RowNumbers]:
    """Return the rows to train on and the rows to validate on, each in file order."""
    for name, key in ((spec.split, "split"), (spec.val_split, "valSplit")):
        if name is not None and name not in rows:
            raise InvalidConfig(
                f"{field}.{key}", f"{spec.path} has no split {name!r}; it has {', '.join(rows)}"
            )
        if name is not None and not len(rows[name]):
            raise InvalidConfig(f"{field}.{key}", f"split {name!r} of {spec.path} has no items")
    if spec.val_split is not None:
        return rows[spec.split], rows[spec.val_split]
    if not validates or not spec.val_share:
        return rows[spec.split], rows[spec.split][:0]
    return hold_out(rows[spec.split], spec.val_share, field)


def hold_out(rows: RowNumbers, share: float, field: str) -> tuple[RowNumbers, RowNumbers]:
    """Split rows [n] into training and held-out rows, at least one of each, in file order."""
    if len(rows) < 2:
        raise InvalidConfig(
            f"{field}.valShare", "one item cannot be both trained on and held out: set valSplit"
        )
    # At least one of each, whatever the share.
    count = min(max(1, round(share * len(rows))), len(rows) - 1)
    held = np.zeros(len(rows), np.bool_)
    held[np.random.default_rng(derive(HOLDOUT_SEED, "hold-out")).permutation(len(rows))[:count]] = (
        True
    )
    return rows[~held], rows[held]


WARMUP_FIELD = "spec.pipeline.warmup.dataset"


class DemonstrationError(Exception):
    """An item without a usable prompt or answer."""


class Demonstrations:
    """Items of the warm-up data set as trajectories in the policy's chat template.

    They have the order of `pipeline.seed`. Raises `InvalidConfig` for an unusable data set.

    Args:
        sequence_length: longer items are skipped: a cut answer would teach to stop early.
        validates: see `Dataset`. The same items are held out as from a data set of episodes, so
            that the warm-up never teaches what is validated.
    """

    def __init__(
        self, spec: WarmupDataset, seed: int, sequence_length: int, *, validates: bool = True
    ) -> None:
        self._items = Dataset(spec, seed, WARMUP_FIELD, validates=validates)
        self._spec = spec
        self._sequence_length = sequence_length
        for field, column in (
            ("promptColumn", spec.prompt_column),
            ("answerColumn", spec.answer_column),
        ):
            if column not in self._items.columns:
                known = ", ".join(sorted(self._items.columns))
                raise InvalidConfig(
                    f"{WARMUP_FIELD}.{field}",
                    f"{spec.path} has no column {column!r}; it has {known}",
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
        # A cut answer would teach the policy to stop early.
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
