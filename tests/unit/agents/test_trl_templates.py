"""The chat templates of TRL's wheel: every text family passes all checks, token by token."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from agenticrun_workers.agents import ChatFormat, ChatTemplateError
from agenticrun_workers.agents.chat_checks import CALL, RESULT, SYSTEM, TOOL, check_chat
from agenticrun_workers.findings import Verdict
from template_tokenizers import template_tokenizer, templates

FAMILIES = {
    "deepseek": ("deepseek_r1_distill", "deepseekv3"),
    "gemma4": ("diffusion_gemma", "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"),
    "glm": ("glm4moe",),
    "gpt_oss": ("gptoss",),
    "hermes": ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"),
    "lfm2": ("lfm2", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl", "lfm2_v2"),
    "llama3": ("llama3_1", "llama3_2"),
    "muse": ("muse_glimmer",),
    "qwen_xml": (
        "nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra",
        "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8",
    ),
    "text": ("cohere", "cohere2", "gemma", "gemma3", "llama3", "phi3", "phi3_5", "qwen2_5_vl"),
}  # fmt: skip
IMAGES = ("idefics3", "llava_next", "smolvlm")
"""Templates that only take messages with parts of images."""
CALLS_TOOLS = sorted(
    {name for names in FAMILIES.values() for name in names}
    - {*FAMILIES["text"], *FAMILIES["deepseek"], "lfm2"}
)
REPLACES_THE_BEGINNING = {*FAMILIES["deepseek"], *FAMILIES["qwen_xml"]} - {"qwen3_8"}
"""Their earlier answers begin otherwise than the prompt of an answer: without its `<think>`."""
PLAIN = sorted({name for names in FAMILIES.values() for name in names} - REPLACES_THE_BEGINNING)


def made(name: str) -> PreTrainedTokenizerFast:
    return template_tokenizer(name, templates()[name])


def test_every_template_of_the_wheel_is_tried() -> None:
    assert sorted(templates()) == sorted(
        [*IMAGES, *(name for names in FAMILIES.values() for name in names)]
    )


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family, names in FAMILIES.items() for name in names]
)
def test_a_template_of_a_family_passes_all_checks(family: str, name: str) -> None:
    chat = ChatFormat(made(name))
    assert chat.family.name == family
    report = check_chat(chat)
    assert report.of(Verdict.FAILED) == {}
    expected = Verdict.OK if name in CALLS_TOOLS else Verdict.NOT_CHECKED
    assert report.findings["tool calls"].verdict is (
        Verdict.WARNING if name == "lfm2" else expected
    )


@pytest.mark.parametrize("name", IMAGES)
def test_a_template_of_images_is_refused(name: str) -> None:
    with pytest.raises(ChatTemplateError, match=f"the chat template of {name} "):
        ChatFormat(made(name))


@pytest.mark.parametrize("name", PLAIN)
def test_three_turns_are_token_by_token_what_the_template_renders(name: str) -> None:
    tokenizer = made(name)
    chat = ChatFormat(tokenizer)
    users = ["Hi.", "1 + 1?\nQuick!", 'A "quote" and {json: 1}.']
    messages = [SYSTEM]
    pieces = [chat.first("INSTRUCTION", users[0])]
    for user, following in pairwise(users):
        before = [*messages, {"role": "user", "content": user}]
        messages = [*before, {"role": "assistant", "content": f"To {user}"}]
        whole = chat.render([*messages, {"role": "user", "content": following}], prompt=True)
        answer = whole.removeprefix(chat.render(before, prompt=True))
        answer = answer[: answer.index(f"To {user}") + len(f"To {user}")]
        answer_T = np.append(chat.encode(answer), np.int32(chat.end_of_turn))
        assert chat.ended(answer_T)
        shown_end = chat.after_answer([{"role": "user", "content": following}]).lstrip()
        if not shown_end.startswith(chat.shown_token(chat.end_of_turn)):  # gpt-oss ends otherwise
            answer_T = np.append(chat.encode(answer), chat.encode(shown_end)[:1])
        pieces += [answer_T, chat.next(following, ended=True)]
    messages.append({"role": "user", "content": users[-1]})
    rendered = chat.encode(chat.render(messages, prompt=True))
    assert np.concatenate(pieces).tolist() == rendered.tolist()


@pytest.mark.parametrize("name", CALLS_TOOLS)
@pytest.mark.parametrize("ended", [True, False])
def test_a_tools_result_follows_the_call_as_the_template_renders_it(name: str, ended: bool) -> None:
    chat = ChatFormat(made(name))
    user = {"role": "user", "content": "Hi."}
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    whole = chat.render([user, called, RESULT], prompt=True, tools=[TOOL])
    piece = chat.after_answer([RESULT], [CALL], [TOOL])
    before = whole.removesuffix(piece)
    end = chat.encode(piece.lstrip())[:1]
    assert int(end[0]) in chat.stop_tokens
    answer_T = np.concatenate([chat.encode("call"), end if ended else end[:0]])
    bridged = chat.bridge(answer_T, [RESULT], calls=[CALL], tools=[TOOL])
    if ended:
        assert (before + chat.shown(end) + chat.shown(bridged)) == before + piece.lstrip()
    else:
        assert before + chat.shown(bridged) == whole


@pytest.mark.parametrize(
    "function",
    [
        {},
        {"parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        {
            "description": "Looks up.",
            "parameters": {
                "type": "object",
                "$defs": {"Level": {"type": "integer", "enum": [1, 2]}},
                "properties": {
                    "level": {"$ref": "#/$defs/Level"},
                    "maybe": {"anyOf": [{"$ref": "#/$defs/Level"}, {"type": "null"}]},
                    "either": {"type": ["string", "null"], "default": None},
                    "items": {"type": "array", "items": {"$ref": "#/$defs/Level"}},
                    "any": {},
                },
            },
        },
    ],
)
@pytest.mark.parametrize("name", CALLS_TOOLS)
def test_a_tool_may_have_any_schema_or_none(name: str, function: dict[str, Any]) -> None:
    chat = ChatFormat(made(name))
    tools = [{"type": "function", "function": {"name": "find_it", **function}}]
    assert chat.shows_tools(tools)
    text = chat.render([{"role": "user", "content": "Hi."}], prompt=True, tools=tools)
    assert "find_it" in text
