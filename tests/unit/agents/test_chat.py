"""Pieces of a conversation, joined, are what the chat template renders for the whole of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from agenticrun_workers.agents import ChatFormat, ChatTemplateError
from agenticrun_workers.agents.chat import KEPT_LENGTH
from agenticrun_workers.models.tokenizer import build_task_tokenizer
from byte_level import byte_level_tokenizer

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Qwen's: the end of turn is followed by a line break."""

CORPUS = "system\nuser\nassistant\nGo Left and Right, then answer: Down.\nP_O_ ____ ___G\n"


def task_tokenizer() -> PreTrainedTokenizerFast:
    return build_task_tokenizer([*"P_OG\n ", "Left", "Right", "Go"], 1000)


TOKENIZERS = {
    "byte-level BPE with ChatML": byte_level_tokenizer(CORPUS, CHATML),
    "task tokenizer": task_tokenizer(),
}
TEXT = st.lists(
    st.sampled_from(["P", "_", "O", "G", "\n", "Left", "Right", "Go", " "]), max_size=6
).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(system=TEXT, exchanges=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), last=TEXT)
def test_joined_pieces_equal_the_rendered_conversation(
    name: str, system: str, exchanges: list[tuple[str, str]], last: str
) -> None:
    tokenizer: PreTrainedTokenizerBase = TOKENIZERS[name]
    chat = ChatFormat(tokenizer)
    messages = [{"role": "system", "content": system}] if system else []
    pieces = []
    for number, (user, answer) in enumerate(exchanges):
        pieces.append(chat.first(system, user) if number == 0 else chat.next(user, ended=True))
        pieces.append(chat.answer(answer))
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    pieces.append(chat.next(last, ended=True))
    messages.append({"role": "user", "content": last})
    rendered = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)[
        "input_ids"
    ]
    assert np.concatenate(pieces).tolist() == rendered


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_answer_cut_before_its_end_gets_the_end_of_turn_in_the_next_prompt(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    chat = ChatFormat(tokenizer)
    cut = chat.answer("Left")[:-1]
    joined = np.concatenate([chat.first("", "P"), cut, chat.next("G", ended=False)]).tolist()
    messages = [
        {"role": "user", "content": "P"},
        {"role": "assistant", "content": "Left"},
        {"role": "user", "content": "G"},
    ]
    assert (
        joined == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    )


@pytest.mark.parametrize(
    ("name", "token"), [("byte-level BPE with ChatML", "<|im_end|>"), ("task tokenizer", "<|end|>")]
)
def test_the_end_of_turn_is_found_in_the_template(name: str, token: str) -> None:
    assert ChatFormat(TOKENIZERS[name]).end_of_turn == TOKENIZERS[name].convert_tokens_to_ids(token)


def test_the_text_of_an_answer_has_no_end_of_turn() -> None:
    chat = ChatFormat(task_tokenizer())
    assert chat.text(chat.answer("Left")) == "Left"
    assert chat.text(chat.answer("Left")[:-1]) == "Left"


def test_the_end_of_sequence_stops_an_answer_too_where_it_is_another_token() -> None:
    tokenizer = byte_level_tokenizer(CORPUS, CHATML)
    tokenizer.eos_token = "<|endoftext|>"
    chat = ChatFormat(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert set(chat.stop_tokens) == {chat.end_of_turn, end}
    assert chat.text(np.append(chat.answer("Left")[:-1], end)) == "Left"


def test_a_template_that_hides_answers_is_refused() -> None:
    tokenizer = task_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|><|end|>' }}{% endfor %}"
    )
    with pytest.raises(ChatTemplateError, match="as it was given"):
        ChatFormat(tokenizer)


def test_a_template_without_an_end_of_turn_is_refused() -> None:
    tokenizer = task_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}"
    with pytest.raises(ChatTemplateError, match="no special token"):
        ChatFormat(tokenizer)


def test_only_short_prompts_are_kept() -> None:
    chat = ChatFormat(task_tokenizer())
    for length, kept in ((KEPT_LENGTH, True), (KEPT_LENGTH + 1, False)):
        once, again = (chat.next("P" * length, ended=True) for _ in range(2))
        assert once.tolist() == again.tolist()
        assert (once is again) is kept
