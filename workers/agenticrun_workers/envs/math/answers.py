"""Where an answer stands in a text, and what can be said about two answers without mathematics."""

from __future__ import annotations

import re
from dataclasses import dataclass

BOX = "\\boxed{"
GSM8K = "####"

_INTEGER = re.compile(r"[+-]?\d+")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is said about an answer."""

    right: bool
    readable: bool = True
    """An answer was found in the text."""
    timeout: bool = False
    """The comparison took too long and was ended; the answer counts as wrong."""


def boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...}, with its braces balanced; None without a complete one."""
    begin = text.rfind(BOX)
    if begin < 0:
        return None
    depth, first = 1, begin + len(BOX)
    for place in range(first, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[first:place].strip()
    return None


def stated_answer(text: str) -> str | None:
    r"""The answer that a text marks as such: its last \boxed{...}, or what follows its last ####."""
    inside = boxed(text)
    if inside is not None:
        return inside
    _, mark, after = text.rpartition(GSM8K)
    return after.strip() if mark else None


def reference_answer(text: str) -> str:
    r"""The answer of a data set's solution: GSM8K's after ####, MATH's in \boxed{...}, or the text itself."""
    stated = stated_answer(text)
    return text.strip() if stated is None else stated


def plain_verdict(gold: str, answer: str) -> Verdict | None:
    """Equal texts and whole numbers need no mathematics; None for all others. `gold` is a reference answer."""
    stated = reference_answer(answer)
    if not stated:
        return Verdict(right=False, readable=False)
    if stated == gold:
        return Verdict(right=True)
    one, other = stated.replace(",", ""), gold.replace(",", "")
    if _INTEGER.fullmatch(one) and _INTEGER.fullmatch(other):
        return Verdict(right=int(one) == int(other))
    return None
