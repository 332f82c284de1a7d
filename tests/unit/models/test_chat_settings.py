"""`spec.model.chatTemplate`, `chatTemplateArgs` and `chatFormat`, and ends of generation_config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from huggingface_hub.errors import GatedRepoError
from transformers import AutoTokenizer

from agenticrun_api.spec import ModelSpec
from agenticrun_workers.agents import ChatFormat
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.models import tokenizer
from agenticrun_workers.models.source import ChatSource, ModelSource, TokenizerSource
from agenticrun_workers.models.tokenizer import load_tokenizer
from byte_level import byte_level_tokenizer

CORPUS = "system\nuser\nassistant\n"
THINKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}"
    "{% if style is defined %}{{ style.tone + (style.steps | join('-')) }}"
    "{% if style.none is none %}{{ '!' }}{% endif %}{% endif %}{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level_tokenizer(CORPUS, THINKS).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def prompt(folder: Path, **chat: Any) -> str:
    its = ChatFormat(load_tokenizer(TokenizerSource(str(folder), chat=ChatSource(**chat))))
    return its.shown(its.first("", "Hi")).partition("assistant\n")[2]


def test_thinking_can_be_turned_off(folder: Path) -> None:
    assert prompt(folder) == "<think>\n"
    assert prompt(folder, args={"enable_thinking": False}) == "<think>\n\n</think>\n\n"
    assert prompt(folder, args={"enable_thinking": True}) == "<think>\n"


def test_arguments_may_be_any_json(folder: Path) -> None:
    style = {"tone": 'a "quoted" \\ line\n', "steps": [1, 2.5], "none": None}
    assert prompt(folder, args={"style": style}) == "<think>\n" + 'a "quoted" \\ line\n1-2.5!'


def test_an_argument_that_the_template_does_not_read_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidConfig, match="does not read it: it has enable_thinking") as refused:
        prompt(folder, args={"enableThinking": False})
    assert refused.value.path == "spec.model.chatTemplateArgs.enableThinking"


def test_a_saved_tokenizer_renders_as_the_run_does(folder: Path, tmp_path: Path) -> None:
    source = TokenizerSource(str(folder), chat=ChatSource(args={"enable_thinking": False}))
    load_tokenizer(source).save_pretrained(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    text = saved.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<think>\n\n</think>\n\n")


OWN = "{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}Own:"


@pytest.mark.parametrize("by", ["text", "file", "code"])
def test_a_run_may_bring_a_template(
    by: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(OWN)
    given = {"text": OWN, "file": str(file), "code": "own.jinja"}[by]
    if by == "code":
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    model = ModelSpec.model_validate({"path": str(folder), "chatTemplate": given})
    its = ChatFormat(load_tokenizer(ModelSource.of(model).tokenizer()))
    assert its.shown(its.first("", "Hi")) == "Hi<|im_end|>Own:"


def test_a_template_that_is_neither_text_nor_a_file_is_refused(folder: Path) -> None:
    model = ModelSpec.model_validate({"path": str(folder), "chatTemplate": "none.jinja"})
    with pytest.raises(InvalidConfig, match=r"spec\.model\.chatTemplate: 'none\.jinja' is no file"):
        ModelSource.of(model)


@pytest.mark.parametrize(("written", "ends"), [([2, 0], (2, 0)), (2, (2,)), (None, ())])
def test_ends_of_answers_come_from_the_generation_config(
    folder: Path, written: object, ends: tuple[int, ...]
) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": written}))
    its = ChatFormat(load_tokenizer(TokenizerSource(str(folder))))
    assert set(its.stop_tokens) == {its.end_of_turn, *ends}


def test_a_generation_config_that_cannot_be_read_is_refused(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(InvalidConfig, match="generation_config"):
        load_tokenizer(TokenizerSource(str(folder)))


def test_a_gated_model_of_the_cache_needs_no_generation_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gated(*_: object, **__: object) -> str:
        raise GatedRepoError("accept the terms first", response=MagicMock())

    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", gated)
    cached = byte_level_tokenizer(CORPUS, THINKS)
    monkeypatch.setattr(tokenizer, "_from_path", lambda *_: cached)
    its = ChatFormat(load_tokenizer(TokenizerSource("someone/gated")))
    assert its.stop_tokens == (its.end_of_turn,)


def test_the_format_of_calls_can_be_named(folder: Path) -> None:
    source = TokenizerSource(str(folder), chat=ChatSource(format="qwen_xml"))
    assert ChatFormat(load_tokenizer(source)).family.name == "qwen_xml"


@pytest.mark.parametrize("earlier", ["Keep", "Template"])
def test_the_spec_says_if_the_reasoning_of_earlier_turns_is_dropped(
    earlier: str, folder: Path
) -> None:
    model = ModelSpec.model_validate({"path": str(folder), "earlierReasoning": earlier})
    its = ChatFormat(load_tokenizer(ModelSource.of(model).tokenizer()))
    assert its.drops_between_turns is (earlier == "Template")
