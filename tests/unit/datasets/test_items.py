"""Which item an episode is about: epochs, hold-out, and a cursor that needs no state."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_api import Pipeline
from agenticrun_api.environments import DatasetSpec
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.rollout.datasets import Dataset, EpisodeItems, hold_out, place_among_tag
from agenticrun_workers.rollout.groups import tag_cycle
from agenticrun_workers.types import Stream

FIELD = "spec.pipeline.envs[0].dataset"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def write(folder: Path, count: int, name: str = "items") -> str:
    path = folder / f"{name}-{count}.jsonl"
    path.write_text(
        "".join(
            json.dumps({"number": number, "text": f"item {number}"}) + "\n"
            for number in range(count)
        )
    )
    return str(path)


def numbers(dataset: Dataset, stream: Stream, places: range) -> list[int]:
    return [dataset.item(stream, place)["number"] for place in places]


def test_each_epoch_plays_every_item_once_in_an_order_of_its_own(folder: Path) -> None:
    dataset = Dataset(DatasetSpec(path=write(folder, 20), val_share=0.2), seed=1, field=FIELD)
    epochs = [
        numbers(dataset, Stream.TRAIN, range(16 * epoch, 16 * (epoch + 1))) for epoch in range(3)
    ]
    assert [len(set(epoch)) for epoch in epochs] == [16, 16, 16]
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]


def test_without_shuffle_items_come_in_file_order_in_every_epoch(folder: Path) -> None:
    dataset = Dataset(DatasetSpec(path=write(folder, 10), shuffle=False), seed=1, field=FIELD)
    once = numbers(dataset, Stream.TRAIN, range(9))
    assert once == sorted(once)
    assert numbers(dataset, Stream.TRAIN, range(9, 18)) == once


@given(asked=st.lists(st.integers(0, 200), max_size=12), seed=st.integers(0, 2**31 - 1))
def test_an_item_depends_on_its_number_and_not_on_what_was_asked_before(
    folder: Path, asked: list[int], seed: int
) -> None:
    spec = DatasetSpec(path=write(folder, 20))
    used = Dataset(spec, seed, FIELD)
    for number in asked:
        used.item(Stream.TRAIN, number)
    for number in asked:
        assert used.item(Stream.TRAIN, number) == Dataset(spec, seed, FIELD).item(
            Stream.TRAIN, number
        )


def test_seeds_differ_in_order_and_agree_on_what_is_held_out(folder: Path) -> None:
    spec = DatasetSpec(path=write(folder, 50), val_share=0.3)
    one, two = (Dataset(spec, seed, FIELD) for seed in (1, 2))
    assert numbers(one, Stream.TRAIN, range(35)) != numbers(two, Stream.TRAIN, range(35))
    assert numbers(one, Stream.VALIDATION, range(15)) == numbers(two, Stream.VALIDATION, range(15))


def test_validation_goes_through_the_held_out_items_in_file_order_again_and_again(
    folder: Path,
) -> None:
    dataset = Dataset(DatasetSpec(path=write(folder, 20), val_share=0.25), seed=1, field=FIELD)
    once = numbers(dataset, Stream.VALIDATION, range(5))
    assert once == sorted(set(once))
    assert numbers(dataset, Stream.VALIDATION, range(5, 10)) == once
    assert not set(once) & set(numbers(dataset, Stream.TRAIN, range(15)))


def test_a_warm_up_from_the_same_file_never_sees_what_is_held_out(folder: Path) -> None:
    dataset = Dataset(DatasetSpec(path=write(folder, 20)), seed=1, field=FIELD)
    assert set(numbers(dataset, Stream.WARMUP, range(18))) == set(
        numbers(dataset, Stream.TRAIN, range(18))
    )


@given(count=st.integers(2, 300), share=st.floats(0.001, 0.999))
def test_holding_out_splits_the_rows_into_two_parts_in_order(count: int, share: float) -> None:
    train, held = hold_out(np.arange(count), share, FIELD)
    assert sorted([*train, *held]) == list(range(count))
    assert list(train) == sorted(train)
    assert list(held) == sorted(held)
    assert len(held) == min(max(1, round(share * count)), count - 1)


@given(
    shares=st.dictionaries(st.sampled_from("ABCD"), st.integers(1, 5), min_size=1),
    group=st.integers(0, 60),
)
def test_groups_of_a_tag_are_numbered_without_gaps(shares: dict[str, int], group: int) -> None:
    cycle = tag_cycle(shares)
    tags = [cycle[number % len(cycle)] for number in range(group + 1)]
    assert place_among_tag(cycle, group) == sum(tag == tags[group] for tag in tags[:group])


def pipeline(*paths: str | None, **changes: Any) -> Pipeline:
    tags = "ABC"[: len(paths)]
    return Pipeline.model_validate(
        {
            "maxSteps": 1,
            "rolloutBatchSize": 2,
            "evalSteps": 0,
            "envs": [
                {"tag": t, "type": "x"} | ({"dataset": {"path": p}} if p else {})
                for t, p in zip(tags, paths, strict=True)
            ],
            "trainEnvs": {"groups": len(paths), "groupSize": 2, "tags": list(tags)},
        }
        | changes
    )


def test_items_are_held_out_only_for_environments_that_are_validated(folder: Path) -> None:
    paths, val = (write(folder, 10, "a"), write(folder, 10, "b")), {"groups": 1, "tags": ["B"]}
    for changes, sizes in (({}, [10, 10]), ({"valEnvs": val, "valBatchSize": 2}, [10, 9])):
        items = EpisodeItems(pipeline(*paths, **changes))
        played = [
            {items.of(tag, Stream.TRAIN, group)["number"] for group in range(n, 40, 2)}  # type: ignore[index]
            for n, tag in enumerate("AB")
        ]
        assert [len(numbers) for numbers in played] == sizes


def test_two_tags_each_play_all_of_their_own_items(folder: Path) -> None:
    items = EpisodeItems(pipeline(write(folder, 10, "a"), write(folder, 10, "b")))
    cycle = ("A", "B")
    played: dict[str, Counter[int]] = {"A": Counter(), "B": Counter()}
    for group in range(40):
        tag = cycle[group % 2]
        item = items.of(tag, Stream.TRAIN, group)
        assert item is not None
        played[tag][item["number"]] += 1
    assert {tag: sorted(set(counts.values())) for tag, counts in played.items()} == {
        "A": [2],
        "B": [2],
    }


def test_an_environment_without_a_data_set_has_no_items(folder: Path) -> None:
    assert EpisodeItems(pipeline(None)).of("A", Stream.TRAIN, 0) is None


def test_a_data_set_that_cannot_be_used_is_named_by_its_field(folder: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"no file or folder") as caught:
        EpisodeItems(pipeline(write(folder, 10), str(folder / "missing.jsonl")))
    assert caught.value.path == "spec.pipeline.envs[1].dataset.path"
