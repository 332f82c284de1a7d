"""Items of a data set as supervised samples.

The tokens are the chat template's own, and only the answers have a loss.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agenticrun_api import Pipeline
from agenticrun_api.training import WarmupDataset
from agenticrun_workers.agents import ChatFormat
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.models.tokenizer import build_task_tokenizer
from agenticrun_workers.rollout.datasets import Demonstrations
from agenticrun_workers.rollout.groups import EpisodeResult
from agenticrun_workers.trainer.samples import supervised_samples
from agenticrun_workers.types import EpisodeKey, StopReason, Stream, Trajectory

TOKENIZER = build_task_tokenizer(
    ["hot", "cold", "up", "down", "?", " ", "opposite", *"0123456789"], 1000
)
CHAT = ChatFormat(TOKENIZER)


def demonstrations(
    folder: Path, rows: list[dict[str, Any]], *, sequence_length: int = 100, **options: Any
) -> Demonstrations:
    path = folder / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = WarmupDataset.model_validate(
        {"path": str(path), "shuffle": False, "valSplit": "train", **options}
    )
    return Demonstrations(spec, seed=0, sequence_length=sequence_length)


def shown(found: Demonstrations, number: int = 0) -> Trajectory:
    return found.trajectory(EpisodeKey(Stream.WARMUP, number, 0), "A", CHAT)


def rendered(messages: list[dict[str, str]]) -> list[int]:
    tokens: list[int] = TOKENIZER.apply_chat_template(messages, tokenize=True)["input_ids"]
    return tokens


MESSAGES = [
    {"role": "system", "content": "opposite"},
    {"role": "user", "content": "up?"},
    {"role": "assistant", "content": "down"},
    {"role": "user", "content": "hot?"},
]


@pytest.mark.parametrize(
    ("prompt", "messages"), [("hot?", [{"role": "user", "content": "hot?"}]), (MESSAGES, MESSAGES)]
)
def test_prompt_and_answer_are_what_the_chat_template_renders(
    tmp_path: Path, prompt: Any, messages: list[dict[str, str]]
) -> None:
    trajectory = shown(demonstrations(tmp_path, [{"prompt": prompt, "answer": "cold"}]))
    assert trajectory.tokens_T.tolist() == rendered(
        [*messages, {"role": "assistant", "content": "cold"}]
    )
    assert EpisodeResult.of(trajectory).trainable


def test_the_loss_is_on_the_answer_and_its_end_of_turn_alone(tmp_path: Path) -> None:
    (sample,) = supervised_samples(
        shown(demonstrations(tmp_path, [{"prompt": MESSAGES, "answer": "cold"}]))
    )
    weighed = sample.tokens_T[sample.weight_T > 0]
    assert TOKENIZER.convert_ids_to_tokens(weighed.tolist()) == ["cold", "<|end|>"]


def test_columns_of_any_name_and_answers_that_are_numbers(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "promptColumn": "q",
        "answerColumn": "solution",
        "columns": {"q": "question"},
    }
    trajectory = shown(demonstrations(tmp_path, [{"question": "up?", "solution": 42}], **options))
    assert CHAT.text(trajectory.turns[0].response_T) == "42"


def test_items_come_in_epochs_by_their_number(tmp_path: Path) -> None:
    found = demonstrations(tmp_path, [{"prompt": "?", "answer": str(n)} for n in range(3)])
    assert [CHAT.text(shown(found, n).turns[0].response_T) for n in range(5)] == [
        "0",
        "1",
        "2",
        "0",
        "1",
    ]


def test_an_item_that_is_too_long_is_left_out_not_cut(tmp_path: Path) -> None:
    found = demonstrations(tmp_path, [{"prompt": "hot?", "answer": "cold cold"}], sequence_length=6)
    trajectory = shown(found)
    assert (trajectory.stop_reason, trajectory.turns) == (StopReason.CONTEXT_OVERFLOW, ())
    assert trajectory.error == "item 0 of the warm-up has 9 tokens, and sequenceLength is 6"
    assert not EpisodeResult.of(trajectory).trainable


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "hot?", "answer": None}, "answer is NoneType, not text"),
        ({"prompt": 1.5, "answer": "cold"}, "prompt is float, not text"),
        ({"prompt": "warm?", "answer": "cold"}, "item 0 of the warm-up"),
        ({"prompt": MESSAGES[:3], "answer": "cold"}, "must end with a message to the policy"),
        ({"prompt": [{"role": "user", "text": "hot?"}], "answer": "cold"}, "KeyError: 'content'"),
    ],
)
def test_an_item_that_cannot_be_shown_says_why(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    trajectory = shown(demonstrations(tmp_path, [row]))
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert message in trajectory.error


@pytest.mark.parametrize(
    ("option", "field"), [("promptColumn", "promptColumn"), ("answerColumn", "answerColumn")]
)
def test_a_column_that_is_not_there_is_refused(tmp_path: Path, option: str, field: str) -> None:
    options: dict[str, Any] = {option: "reply"}
    with pytest.raises(InvalidConfig, match="no column 'reply'; it has answer, prompt") as caught:
        demonstrations(tmp_path, [{"prompt": "hot?", "answer": "cold"}], **options)
    assert caught.value.path == f"spec.pipeline.warmup.dataset.{field}"


def test_only_a_warm_up_from_a_data_set_has_demonstrations() -> None:
    config = {
        "maxSteps": 1,
        "rolloutBatchSize": 2,
        "evalSteps": 0,
        "warmup": {"steps": 1},
        "envs": [{"tag": "A", "type": "x"}],
        "trainEnvs": {"groups": 1, "groupSize": 2, "tags": ["A"]},
    }
    assert Demonstrations.of(Pipeline.model_validate(config)) is None
    config["warmup"] = {"steps": 1, "source": "Dataset", "dataset": {"path": "/nowhere.jsonl"}}
    with pytest.raises(
        InvalidConfig, match=r"spec\.pipeline\.warmup\.dataset\.path: no file or folder"
    ):
        Demonstrations.of(Pipeline.model_validate(config))
