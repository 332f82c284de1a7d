"""Chat templates with the traits of model families: ends, system messages, tools, arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from agenticrun_workers.agents import ChatFormat, ChatTemplateError
from agenticrun_workers.agents.chat_checks import check_chat, require_chat
from agenticrun_workers.findings import Verdict
from agenticrun_workers.types import ChatSettings
from byte_level import byte_level_tokenizer

CORPUS = "system\nuser\nassistant\nGo Left and Right, then answer: Down.\n"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL: dict[str, Any] = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1}},
}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "RESULT 42"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def tokenizer(
    template: str, *specials: str, settings: ChatSettings | None = None
) -> PreTrainedTokenizerFast:
    made = byte_level_tokenizer(CORPUS, template)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *specials]})
    made.eos_token = specials[0] if specials else "<|im_end|>"
    made.chat_settings = settings or ChatSettings(model="tiny")
    return made


def names(chat: ChatFormat, made: PreTrainedTokenizerFast) -> set[str]:
    return set(made.convert_ids_to_tokens(list(chat.stop_tokens)))


SHOWS_TOOLS = "{% if tools %}{{ '<|tools|>' + (tools | tojson) }}{% endif %}"

HARMONY = (
    SHOWS_TOOLS + "{% set last = namespace(call=none) %}{% for m in messages %}"
    "{% if m.role == 'assistant' and m.tool_calls %}"
    "{% set last.call = m.tool_calls[0].function.name %}"
    "{{ '<|start|>assistant to=functions.' + last.call + '<|channel|>commentary json<|message|>'"
    " + (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}"
    "{% elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>'"
    " + m.content + ('<|end|>' if add_generation_prompt or not loop.last else '<|return|>') }}"
    "{% elif m.role == 'tool' %}{% if last.call is none %}{{ raise_exception('no call') }}"
    "{% endif %}{{ '<|start|>functions.' + last.call + '<|message|>' + (m.content | tojson)"
    " + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
"""As that of gpt-oss: the last answer ends otherwise than earlier ones, calls in a third way."""
HARMONY_TOKENS = ("<|return|>", "<|end|>", "<|call|>", "<|start|>", "<|message|>", "<|channel|>")

GLM = (
    SHOWS_TOOLS + "{% for m in messages %}{% if m.role == 'tool' %}{{ '<|observation|>\n' }}"
    "{% else %}{{ '<|' + m.role + '|>\n' }}{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}"
    "{{ '\n<arg_key>' + k + '</arg_key>\n<arg_value>' + (v | string) + '</arg_value>' }}"
    "{% endfor %}{{ '\n</tool_call>' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""As GLM's: the mark of the next role ends a turn."""
GLM_TOKENS = ("<|user|>", "<|assistant|>", "<|system|>", "<|observation|>")

GEMMA4 = (
    SHOWS_TOOLS + "{% set before = namespace(tool=false) %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% set before.tool = true %}{% else %}"
    "{% set before.tool = false %}{{ '<|turn>' + m.role + '\n' }}"
    "{% for c in m.tool_calls or [] %}{{ '<|tool_call>call:' + c.function.name + '{' }}"
    "{% for k, v in c.function.arguments.items() %}"
    "{{ k + ':' + ('<|\"|>' + v + '<|\"|>' if v is string else v | tojson) }}"
    "{{ '' if loop.last else ',' }}{% endfor %}"
    "{{ '}<tool_call|>' }}{% endfor %}"
    "{% if m.tool_calls and loop.nextitem is defined and loop.nextitem.role == 'tool' %}"
    "{{ '<|tool_response>' + loop.nextitem.content + '<tool_response|>' }}"
    "{% else %}{{ m.content + '<turn|>\n' }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not before.tool %}{{ '<|turn>assistant\n' }}{% endif %}"
)
"""As Gemma 4's: a result is shown only after its call, in the same turn."""
GEMMA4_TOKENS = ("<turn|>", "<|turn>", "<|tool_call>", "<tool_call|>", "<|tool_response>")

NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TEXT_ARGUMENTS = (
    SHOWS_TOOLS + "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.name + ' '"
    " + c.function.arguments + '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As DeepSeek's: arguments are JSON text."""


@pytest.mark.parametrize("end", ["<|return|>", "<|end|>"])
def test_an_answer_of_gpt_oss_has_one_end(end: str) -> None:
    made = tokenizer(HARMONY, *HARMONY_TOKENS)
    chat = ChatFormat(made)
    answer_T = np.array(made.encode(f"<|channel|>final<|message|>4.{end}"), np.int32)
    assert chat.ended(answer_T)
    after = "<|start|>user<|message|>Sure?<|end|><|start|>assistant"
    assert chat.shown(chat.next("Sure?", ended=True)) == after
    assert chat.shown(chat.bridge(answer_T, [user("Sure?")])) == after
    assert chat.shown(chat.bridge(answer_T[:-1], [user("Sure?")])) == "<|end|>" + after


def test_gpt_oss_calls_tools() -> None:
    made = tokenizer(HARMONY, *HARMONY_TOKENS)
    chat = ChatFormat(made)
    assert names(chat, made) == {"<|return|>", "<|call|>"}
    answer_T = np.array(made.encode("to=functions.add<|message|>{}<|call|>"), np.int32)
    after = chat.bridge(answer_T, [RESULT], calls=[CALL], tools=TOOLS)
    assert chat.shown(after) == (
        '<|start|>functions.add<|message|>"RESULT 42"<|end|><|start|>assistant'
    )


def test_the_mark_of_the_next_role_ends_a_turn_of_glm() -> None:
    made = tokenizer(GLM, *GLM_TOKENS)
    chat = ChatFormat(made)
    assert names(chat, made) == {"<|user|>", "<|observation|>"}
    said = made.encode("Sum.<|user|>")
    assert chat.shown(chat.bridge(np.array(said), [user("So?")])) == "\nSo?<|assistant|>\n"
    called = np.array(made.encode("<tool_call>add\n</tool_call><|observation|>"))
    after = chat.bridge(called, [RESULT], calls=[CALL], tools=TOOLS)
    assert chat.shown(after) == "\nRESULT 42<|assistant|>\n"
    other = chat.bridge(called, [user("So?")], calls=[CALL], tools=TOOLS)
    assert chat.shown(other) == "<|user|>\nSo?<|assistant|>\n"


def test_a_tools_result_of_gemma4_is_in_the_next_prompt() -> None:
    made = tokenizer(GEMMA4, *GEMMA4_TOKENS)
    chat = ChatFormat(made)
    assert names(chat, made) == {"<turn|>", "<|tool_response>"}
    answer_T = np.array(made.encode("<|tool_call>call:add{a:1}<tool_call|><|tool_response>"))
    after = chat.bridge(answer_T, [RESULT], calls=[CALL], tools=TOOLS)
    assert chat.shown(after) == "RESULT 42<tool_response|>"


def test_a_result_that_the_template_leaves_out_is_an_error_with_model_and_remedy() -> None:
    chat = ChatFormat(tokenizer(GEMMA4, *GEMMA4_TOKENS))
    answer_T = np.array([chat.end_of_turn])
    with pytest.raises(
        ChatTemplateError,
        match=r"spec\.model\.path: the chat template of tiny leaves out a message of role "
        r"tool: 'RESULT 42': leave such messages out, or set spec\.model\.chatTemplate",
    ):
        chat.bridge(answer_T, [RESULT], tools=TOOLS)


def test_a_message_that_the_template_leaves_out_of_a_conversation_is_an_error() -> None:
    hides = NO_SYSTEM.replace("in messages %}", "in messages if m.role != 'tool' %}")
    chat = ChatFormat(tokenizer(hides))
    with pytest.raises(ChatTemplateError, match="leaves out a message of role tool"):
        chat.conversation([user("Hi"), {"role": "assistant", "content": "a"}, RESULT])


@pytest.mark.parametrize("system", ["You are X.", ""])
def test_without_a_system_role_the_instruction_joins_the_first_message(system: str) -> None:
    chat = ChatFormat(tokenizer(NO_SYSTEM))
    first = f"{system}\n\nHi" if system else "Hi"
    assert chat.shown(chat.first(system, "Hi")) == (
        f"<|im_start|>user\n{first}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_arguments_are_text_for_a_template_that_needs_text() -> None:
    chat = ChatFormat(tokenizer(TEXT_ARGUMENTS))
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    text = chat.shown(chat.conversation([user("1 + 1"), called, RESULT], TOOLS))
    assert '<tool_call>add {"a": 1}</tool_call>' in text


def test_ends_of_the_models_generation_config_stop_answers() -> None:
    made = tokenizer(GLM, *GLM_TOKENS, settings=ChatSettings(stop_tokens=(2,)))
    assert names(ChatFormat(made), made) == {"<|user|>", "<|observation|>", "<|endoftext|>"}


def test_a_template_for_images_is_refused_by_the_field() -> None:
    made = tokenizer("{% for m in messages %}{{ m.content[0].text + '' }}{% endfor %}")
    made.chat_settings = ChatSettings(model="tiny", own_template=True)
    with pytest.raises(ChatTemplateError, match=r"spec\.model\.chatTemplate: .* of tiny cannot"):
        ChatFormat(made)


def test_a_piece_between_turns_costs_the_same_in_a_long_conversation() -> None:
    made = tokenizer(GLM, *GLM_TOKENS)
    chat = ChatFormat(made)
    rendered: list[int] = []
    apply = made.apply_chat_template

    def counting(messages: list[Any], **more: Any) -> Any:
        rendered.append(len(messages))
        return apply(messages, **more)

    made.apply_chat_template = counting
    answer_T = np.array([chat.end_of_turn])
    chat.bridge(answer_T, [user("So?")])
    chat.next("So?", ended=True)
    assert max(rendered) == 3


@pytest.mark.parametrize(
    ("template", "tokens"),
    [(HARMONY, HARMONY_TOKENS), (GLM, GLM_TOKENS), (GEMMA4, GEMMA4_TOKENS), (NO_SYSTEM, ())],
)
def test_the_checks_of_a_run_pass(template: str, tokens: tuple[str, ...]) -> None:
    report = check_chat(ChatFormat(tokenizer(template, *tokens)))
    report.assert_ok()
    if tokens:
        assert report.findings["tool calls"].found.startswith("read as written, results shown")


@pytest.mark.parametrize(
    ("template", "check", "found"),
    [
        (
            NO_SYSTEM.replace("m.role + '\n'", "m.role + (loop.index | string) + '\n'"),
            "two turns",
            "does not end",
        ),
        (
            HARMONY.replace("(m.content | tojson)", "''"),
            "tool calls",
            "does not end",
        ),
        (
            TEXT_ARGUMENTS,
            "tool calls",
            "is read as",
        ),
        (
            NO_SYSTEM.replace("m.role + '\n'", "'<|role|>' + m.role + '\n'"),
            "special tokens",
            "writes <|role|>, which the tokenizer splits",
        ),
    ],
)
def test_a_template_that_changes_conversations_is_refused_at_the_start(
    template: str, check: str, found: str
) -> None:
    chat = ChatFormat(tokenizer(template, *(HARMONY_TOKENS if "<|call|>" in template else ())))
    finding = check_chat(chat).findings[check]
    assert finding.verdict is Verdict.FAILED
    assert found in finding.found
    with pytest.raises(ChatTemplateError, match=f"of tiny fails the check of {check}"):
        require_chat(chat)
