"""Files, folders and their mistakes. Nothing here may touch the network."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import datasets as hf
import pytest

from agenticrun_api.environments import DatasetSpec
from agenticrun_workers.errors import InvalidConfig, RolloutFailed
from agenticrun_workers.rollout.datasets import Dataset
from agenticrun_workers.types import Stream

ROWS = [{"q": f"question {number}", "a": str(number)} for number in range(6)]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise AssertionError("a local data set reached for the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def write_lines(path: Path, rows: list[dict[str, str]] = ROWS) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_csv(path: Path) -> str:
    path.write_text("q,a\n" + "".join(f"{row['q']},{row['a']}\n" for row in ROWS))
    return str(path)


def open_dataset(path: str, **options: Any) -> Dataset:
    return Dataset(
        DatasetSpec.model_validate({"path": path, "shuffle": False, **options}),
        seed=0,
        field="dataset",
    )


def questions(dataset: Dataset) -> set[str]:
    return {
        dataset.item(stream, n)["q"]
        for stream in (Stream.TRAIN, Stream.VALIDATION)
        for n in range(dataset.size(stream))
    }


def test_jsonl_csv_parquet_and_saved_folders_hold_the_same_items(tmp_path: Path) -> None:
    table = hf.Dataset.from_list(ROWS)
    table.to_parquet(tmp_path / "items.parquet")
    table.save_to_disk(str(tmp_path / "saved"))
    hf.DatasetDict(train=table).save_to_disk(str(tmp_path / "splits"))
    paths = [write_lines(tmp_path / "items.jsonl"), write_csv(tmp_path / "items.csv")]
    paths += [str(tmp_path / name) for name in ("items.parquet", "saved", "splits")]
    assert [questions(open_dataset(path)) for path in paths] == [{row["q"] for row in ROWS}] * 5


def test_a_glob_joins_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    for part in (2, 0, 1):
        write_lines(tmp_path / f"part-{part}.jsonl", ROWS[2 * part : 2 * part + 2])
    dataset = open_dataset(str(tmp_path / "part-*.jsonl"), valSplit="train")
    assert [dataset.item(Stream.TRAIN, n)["q"] for n in range(6)] == [row["q"] for row in ROWS]


def test_a_relative_path_is_found_beside_the_users_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "items.jsonl")
    monkeypatch.setenv("PYTHONPATH", f"/nowhere:{tmp_path}")
    assert open_dataset("items.jsonl").size(Stream.TRAIN) == 5


def test_chat_messages_and_numbers_keep_their_types(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "hi"}], "level": 3, "share": 0.5}
    (tmp_path / "items.jsonl").write_text((json.dumps(row) + "\n") * 2)
    assert open_dataset(str(tmp_path / "items.jsonl")).item(Stream.TRAIN, 0) == row


def test_a_validation_split_of_its_own_is_played_whole_and_nothing_is_held_out(
    tmp_path: Path,
) -> None:
    splits = {"train": hf.Dataset.from_list(ROWS[:4]), "test": hf.Dataset.from_list(ROWS[4:])}
    hf.DatasetDict(**splits).save_to_disk(str(tmp_path / "splits"))
    dataset = open_dataset(str(tmp_path / "splits"), valSplit="test")
    assert (dataset.size(Stream.TRAIN), dataset.size(Stream.VALIDATION)) == (4, 2)
    assert dataset.item(Stream.VALIDATION, 0)["q"] == "question 4"


def test_columns_are_renamed_copied_and_swapped(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "items.jsonl")
    renamed = open_dataset(path, columns={"prompt": "q"}, valSplit="train")
    assert renamed.item(Stream.TRAIN, 1) == {"prompt": "question 1", "a": "1"}
    assert renamed.columns == {"prompt", "a"}
    assert open_dataset(path, columns={"q": "a", "a": "q"}, valSplit="train").item(
        Stream.TRAIN, 1
    ) == {"q": "1", "a": "question 1"}
    copied = open_dataset(path, columns={"x": "a", "y": "a"}, valSplit="train")
    assert copied.item(Stream.TRAIN, 1) == {"q": "question 1", "x": "1", "y": "1"}


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"split": "test"}, "dataset.split", "no split 'test'; it has train"),
        ({"valSplit": "validation"}, "dataset.valSplit", "no split 'validation'; it has train"),
        (
            {"columns": {"prompt": "question"}},
            "dataset.columns.prompt",
            "no column 'question'; it has q, a",
        ),
        ({"columns": {"a": "q"}}, "dataset.columns.a", "has a column 'a' of its own"),
    ],
)
def test_what_is_missing_is_named_with_what_there_is(
    tmp_path: Path, options: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(InvalidConfig, match=message) as caught:
        open_dataset(write_lines(tmp_path / "items.jsonl"), **options)
    assert caught.value.path == field


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("items.jsonl", "", "is empty"),
        ("items.jsonl", "{nope\n", "cannot be read: JSON parse error"),
        ("items.txt", "hello", "one kind of .jsonl, .json, .csv, .parquet"),
    ],
)
def test_unreadable_files_say_why(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidConfig, match=message) as caught:
        open_dataset(str(tmp_path / name))
    assert caught.value.path == "dataset.path"


def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    for path in (str(tmp_path / "nothing"), "data/nothing.jsonl", "./nothing", "nothing-*.csv"):
        with pytest.raises(InvalidConfig, match="no file or folder"):
            open_dataset(path)


def test_a_plain_folder_says_how_to_name_its_files(tmp_path: Path) -> None:
    write_lines(tmp_path / "items.jsonl")
    with pytest.raises(
        InvalidConfig, match=r"name plain files with a glob, for example .*/\*\.jsonl"
    ):
        open_dataset(str(tmp_path))


def test_a_split_without_items_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = hf.DatasetDict(train=hf.Dataset.from_list(ROWS[:0]), test=hf.Dataset.from_list(ROWS))
    monkeypatch.setattr(hf, "load_dataset", lambda name: splits)
    with pytest.raises(InvalidConfig, match="split 'train' of someone/items has no items"):
        open_dataset("someone/items")


def test_one_item_cannot_be_held_out(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "items.jsonl", ROWS[:1])
    with pytest.raises(InvalidConfig, match="set valSplit"):
        open_dataset(path)
    assert open_dataset(path, valSplit="train").size(Stream.TRAIN) == 1


def test_a_hub_that_does_not_answer_is_another_attempts_business(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(name: str) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(hf, "load_dataset", unreachable)
    with pytest.raises(RolloutFailed, match="the hub does not answer: no route"):
        open_dataset("someone/items")


def test_a_name_that_the_hub_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> None:
        raise hf.exceptions.DatasetNotFoundError(f"{name} is nowhere")

    monkeypatch.setattr(hf, "load_dataset", unknown)
    with pytest.raises(InvalidConfig, match="nor on the hub"):
        open_dataset("someone/items")
