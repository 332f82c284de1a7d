"""The bytes of each token of an answer, for log-probs in the format of OpenAI's API.

A character outside of ASCII often takes several tokens. Decoded alone, each of them is the
replacement character; only together their bytes are the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Text that a tokenizer shows for the first bytes of a character."""

_BYTE = re.compile("<0x([0-9A-F]{2})>")
"""A token for one byte in vocabularies made by SentencePiece."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""A space in these vocabularies."""


def token_bytes(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], shown: Callable[[Sequence[int]], str]
) -> list[bytes]:
    """Return the bytes of each token. Joined, they are the text of all tokens.

    Args:
        tokenizer: of the tokens.
        tokens: of an answer.
        shown: decodes tokens, special ones included.
    """
    kind = _decoder_kind(tokenizer)
    added = tokenizer.added_tokens_decoder
    pieces = [
        shown([token]).encode()
        if token in added
        else _bytes_of(tokenizer.convert_ids_to_tokens(token), kind)
        for token in tokens
    ]
    text = shown(tokens)
    joined = b"".join(pieces).decode(errors="replace")
    if joined == text:
        return pieces
    if joined == f" {text}":  # SentencePiece's decoder drops the space before the first word
        return [pieces[0][1:], *pieces[1:]]
    return _by_prefixes(tokens, shown)


def _decoder_kind(tokenizer: Any) -> str:
    """Return how tokens stand for bytes: ByteLevel, ByteFallback, or "" for whole texts."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return "ByteFallback"  # SentencePiece itself; texts without its marks are the same in both
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    kinds = {state.get("type"), *(part["type"] for part in state.get("decoders", ()))}
    return next((kind for kind in ("ByteLevel", "ByteFallback") if kind in kinds), "")


def _bytes_of(piece: Any, kind: str) -> bytes:
    """Return the bytes of an entry of the vocabulary."""
    if isinstance(piece, bytes):  # of a tokenizer with code of its own
        return piece
    if kind == "ByteLevel":
        alphabet = _alphabet()
        return b"".join(alphabet.get(letter, letter.encode()) for letter in piece)
    if kind == "ByteFallback":
        found = _BYTE.fullmatch(piece)
        return bytes.fromhex(found[1]) if found else piece.replace(_SPACE, " ").encode()
    return str(piece).encode()


@cache
def _alphabet() -> dict[str, bytes]:
    """Return the byte that each letter of byte-level vocabularies stands for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: bytes([byte]) for byte, letter in bytes_to_unicode().items()}


def _by_prefixes(tokens: Sequence[int], shown: Callable[[Sequence[int]], str]) -> list[bytes]:
    """Return what each token adds to the text. A character belongs to the token that ends it."""
    pieces, said = [], ""
    for size in range(1, len(tokens) + 1):
        text = shown(tokens[:size])
        if size < len(tokens):
            text = text.rstrip(UNFINISHED)
        grows = text.startswith(said)
        pieces.append(text[len(said) :].encode() if grows else b"")
        said = text if grows else said
    return pieces
