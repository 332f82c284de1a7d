"""Files, folders and their mistakes. Nothing here may touch the network."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import pickle
import socket
from pathlib import Path
from typing import Any

import datasets as hf
import pyarrow as pa
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


def item_of(path: Path, content: str, **options: Any) -> Any:
    path.write_text(content, encoding="utf-8")
    return open_dataset(str(path), valSplit="train", **options).item(Stream.TRAIN, 0)


VALUES = (
    '"2026-01-04"',
    '"2026-01-04T10:00:00Z"',
    "18446744073709551617",
    "9007199254740993",
    '"007"',
    "1e5",
    "[1, 2.5, null, {}]",
    '{"a": {"b": [true]}}',
    '"\\u2028 \U0001f917"',
    '""',
    "null",
)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", ["items.jsonl", "items.json", "list.json"])
def test_values_of_json_are_those_of_the_file(tmp_path: Path, name: str, value: str) -> None:
    rows = [f'{{"answer": {value}}}', '{"answer": 1.5}']
    content = f"[{','.join(rows)}]" if name == "list.json" else "\n".join(rows)
    item = item_of(tmp_path / name, content)
    assert (item["answer"], type(item["answer"])) == (json.loads(value), type(json.loads(value)))


@pytest.mark.parametrize(
    "text", ["007", "1.10", "1e5", "NA", "None", "null", "TRUE", "", "nan", " a ", "2026-01-04"]
)
def test_fields_of_csv_are_text(tmp_path: Path, text: str) -> None:
    assert item_of(tmp_path / "items.csv", f"q,n\n{text},1\n") == {"q": text, "n": "1"}


def test_fields_of_csv_are_what_the_spec_declares(tmp_path: Path) -> None:
    content = "n,share,good,text\n007,1.10,TRUE,007\n,,,\n"
    types = {"n": "int", "share": "float", "good": "bool"}
    path = tmp_path / "items.csv"
    item = item_of(path, content, types=types)
    assert item == {"n": 7, "share": 1.1, "good": True, "text": "007"}
    assert open_dataset(str(path), valSplit="train", types=types).item(Stream.TRAIN, 1) == {
        "n": None,
        "share": None,
        "good": None,
        "text": "",
    }


def test_csv_fields_may_have_line_breaks_quotes_and_any_unicode(tmp_path: Path) -> None:
    fields = ['two\r\nlines, "quoted"', "\u2028 \x85 \x0c", "\U0001f917"]
    written = io.StringIO(newline="")
    csv.writer(written).writerows([["a", "b", "c"], fields, ["1", "2", "3"]])
    path = tmp_path / "items.csv"
    path.write_bytes(b"\xef\xbb\xbf" + written.getvalue().encode())
    dataset = open_dataset(str(path), valSplit="train")
    assert dataset.size(Stream.TRAIN) == 2
    assert [*dataset.item(Stream.TRAIN, 0).values()] == fields
    assert dataset.item(Stream.TRAIN, 1) == {"a": "1", "b": "2", "c": "3"}


def test_rows_may_lack_columns_and_files_may_have_blank_lines_and_a_byte_order_mark(
    tmp_path: Path,
) -> None:
    rows = b'\xef\xbb\xbf\r\n{"a": 1}\r\n\n{"b": NaN}'
    (tmp_path / "items.jsonl").write_bytes(rows)
    dataset = open_dataset(str(tmp_path / "items.jsonl"), valSplit="train")
    assert dataset.size(Stream.TRAIN) == 2
    assert dataset.item(Stream.TRAIN, 0) == {"a": 1, "b": None}
    assert math.isnan(dataset.item(Stream.TRAIN, 1)["b"])
    assert item_of(tmp_path / "items.csv", "a,b\n\n1\n") == {"a": "1", "b": None}


@pytest.mark.parametrize("name", ["items.jsonl", "items.csv"])
def test_compressed_files_hold_the_same_items(tmp_path: Path, name: str) -> None:
    (write_lines if name.endswith("l") else write_csv)(tmp_path / name)
    content = (tmp_path / name).read_bytes()
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
    (tmp_path / f"{name}.zst").write_bytes(pa.compress(content, codec="zstd", asbytes=True))
    expected = questions(open_dataset(str(tmp_path / name)))
    for suffix in (".gz", ".zst"):
        assert questions(open_dataset(str(tmp_path / f"{name}{suffix}"))) == expected


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    item = item_of(tmp_path / "items.csv", "question;answer\n1+1;2\n")
    with pytest.raises(KeyError) as caught:
        item["question"]
    assert str(caught.value) == "the data set has no column 'question'; it has question;answer"
    assert item.get("question") is None
    again = pickle.loads(pickle.dumps(item))
    assert (again, type(again)) == (item, type(item))


def test_nothing_is_held_out_where_nothing_validates(tmp_path: Path) -> None:
    spec = DatasetSpec(path=write_lines(tmp_path / "items.jsonl"))
    assert Dataset(spec, 0, "dataset", validates=False).size(Stream.TRAIN) == 6
    path = write_lines(tmp_path / "one.jsonl", ROWS[:1])
    assert open_dataset(path, valShare=0).size(Stream.TRAIN) == 1


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
        (
            "items.jsonl",
            '{"a": 1}\n{"a": ',
            "items.jsonl cannot be read: JSON parse error in line 2",
        ),
        ("items.jsonl", '{"a": 1}\n[1]', "cannot be read: line 2 is no object"),
        ("items.jsonl", '\n{"a": "\\ud800"}', "JSON parse error in line 2: .*surrogates"),
        ("items.jsonl", "[" * 100_000, "JSON parse error in line 1: maximum recursion depth"),
        ("items.json", "[1]", "cannot be read: item 1 is no object"),
        ("items.json", '[{"a": 1}', "cannot be read: JSON parse error"),
        ("items.jsonl", '{"a": "é"}', r"items\.jsonl is not UTF-8 \(line 1\)"),
        ("items.csv", "a\n1\né", r"items\.csv is not UTF-8 \(line 3\)"),
        ("items.csv", 'a,b\n1,"2\n', "CSV error in line 2: unexpected end of data"),
        ("items.csv", "a,b\n1,2,3\n", "CSV error in line 2: 3 fields, but 2 columns: a, b"),
        ("items.csv", "a,a\n1,2\n", "line 1: two columns have the same name: a, a"),
        ("items.jsonl.gz", "hello", "items.jsonl.gz cannot be read: Not a gzipped file"),
        ("items.txt", "hello", "one kind of .jsonl, .json, .csv, .parquet"),
        ("items.parquet.gz", "hello", "one kind of .jsonl, .json, .csv, .parquet"),
    ],
)
def test_unreadable_files_say_why(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(InvalidConfig, match=message) as caught:
        open_dataset(str(tmp_path / name))
    assert caught.value.path == "dataset.path"


@pytest.mark.parametrize(
    ("name", "content", "field", "message"),
    [
        ("items.csv", "n\n7_0\n", "dataset.path", "line 2: column n has '7_0', which is no int"),
        ("items.csv", "m\n7\n", "dataset.types.n", "no column 'n'; it has m"),
        ("items.jsonl", '{"n": 7}', "dataset.types", "types are those of CSV fields"),
    ],
)
def test_types_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, content: str, field: str, message: str
) -> None:
    with pytest.raises(InvalidConfig, match=message) as caught:
        item_of(tmp_path / name, content, types={"n": "int"})
    assert caught.value.path == field


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
