"""Bytes of tokens are the text of an answer when they are joined, for each kind of vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from agenticrun_workers.agents.outside.token_bytes import token_bytes
from agenticrun_workers.models.tokenizer import build_task_tokenizer, words_of
from byte_level import byte_level_tokenizer

TEXT = "é🙂x天"
OF_TEXT = [[195], [169], [240], [159], [153], [130], [120], [229], [164], [169]]


def with_byte_fallback() -> PreTrainedTokenizerFast:
    """Return a tokenizer as Llama 2, Mistral and Gemma have: words, and a token for each byte."""
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["\N{LOWER ONE EIGHTH BLOCK}", *"abcx"]
    vocabulary = {name: number for number, name in enumerate(names)}
    core = Tokenizer(BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")


def pieces(tokenizer: Any, tokens: Sequence[int]) -> list[bytes]:
    return token_bytes(tokenizer, tokens, tokenizer.decode)


def test_tokens_of_a_byte_level_vocabulary_have_their_own_bytes() -> None:
    tokenizer = byte_level_tokenizer("abc", "{{ '' }}")
    tokens = tokenizer.encode(f"{TEXT}<|im_end|>")
    assert [list(piece) for piece in pieces(tokenizer, tokens)] == [*OF_TEXT, [*b"<|im_end|>"]]


def test_merged_tokens_may_end_inside_a_character() -> None:
    tokenizer = byte_level_tokenizer("天地天地 x 大大", "{{ '' }}")
    for text in ("天地 大", "x 天大地 地"):
        tokens = tokenizer.encode(text)
        found = pieces(tokenizer, tokens)
        assert len(found) == len(tokens) < len(text.encode())
        assert b"".join(found).decode() == text


@pytest.mark.parametrize("text", [TEXT, "ab c", " ab", "天 a"])
def test_tokens_for_single_bytes_have_them(text: str) -> None:
    tokenizer = with_byte_fallback()
    tokens = tokenizer.encode(text)
    found = pieces(tokenizer, tokens)
    assert b"".join(found).decode() == tokenizer.decode(tokens)
    if text == TEXT:
        assert [list(piece) for piece in found if piece] == OF_TEXT


def test_half_a_character_at_the_end_keeps_its_bytes() -> None:
    tokenizer = byte_level_tokenizer("abc", "{{ '' }}")
    assert [list(piece) for piece in pieces(tokenizer, tokenizer.encode("x天")[:3])] == [
        [120],
        [229],
        [164],
    ]


def test_words_have_the_bytes_of_their_text() -> None:
    tokenizer = build_task_tokenizer(words_of("left, 天"), 64)
    tokens = tokenizer.encode("left, 天", add_special_tokens=False)
    assert b"".join(pieces(tokenizer, tokens)).decode() == "left, 天"


def test_a_decoder_that_puts_spaces_between_words_is_followed() -> None:
    core = Tokenizer(models.WordLevel({"a": 0, "天": 1, "?": 2}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    assert pieces(tokenizer, [0, 1, 0]) == [b"a", " 天".encode(), b" a"]


def test_no_tokens_have_no_bytes() -> None:
    assert pieces(byte_level_tokenizer("abc", "{{ '' }}"), []) == []
