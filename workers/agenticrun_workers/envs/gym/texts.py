"""gymnasium's spaces as text: observations that can be written, actions that have names."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

LARGEST_BOX = 64
"""Maximum number of values in an observation that are written out."""

MOST_COMBINATIONS = 1_000
"""Maximum number of actions of a MultiDiscrete space that are listed."""

COLOURED = re.compile(r"(?:\x1b\[[\d;]*m)+([^\x1b]*)(?:\x1b\[0m)+")


def write(space: Any, value: Any, decimals: int) -> str:
    """Return an observation as text; see `parts`.

    Raises `ValueError` for a space that has no text form.
    """
    return ", ".join(
        f"{name}: {text}" if name else text for name, text in parts(space, value, decimals)
    )


def parts(space: Any, value: Any, decimals: int) -> list[tuple[str, str]]:
    """Return the components of an observation as (name, text).

    There is one, or those of a Tuple, Dict, MultiDiscrete, MultiBinary or Box. Only components of a
    Dict have names. Raises `ValueError` for a space that has no text form.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Text):
        return [("", str(value))]
    if isinstance(space, spaces.Discrete):
        return [("", str(int(value)))]
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        return [("", str(int(number))) for number in np.asarray(value).flat]
    if isinstance(space, spaces.Box) and int(np.prod(space.shape)) <= LARGEST_BOX:
        whole = np.issubdtype(space.dtype, np.integer)
        return [
            ("", str(int(number)) if whole else f"{float(number):.{decimals}f}")
            for number in np.asarray(value).flat
        ]
    if isinstance(space, spaces.Tuple):
        return [
            ("", write(part, inner, decimals))
            for part, inner in zip(space.spaces, value, strict=True)
        ]
    if isinstance(space, spaces.Dict):
        return [(name, write(part, value[name], decimals)) for name, part in space.spaces.items()]
    raise ValueError(
        f"the observation space {space} has no text form: it has to be Discrete, MultiDiscrete, "
        "MultiBinary, Text, a Box of at most "
        f"{LARGEST_BOX} numbers, or a Tuple or Dict of these; put a gymnasium.ObservationWrapper "
        "around the environment"
    )


def plain(ansi: str) -> str:
    """Return a terminal drawing without its colours.

    A coloured x becomes `<x>`; lines like "(Down)" are dropped.
    """
    text = COLOURED.sub(lambda match: f"<{match[1]}>", ansi)
    return "\n".join(
        line for line in text.strip("\n").split("\n") if not re.fullmatch(r" *\(.*\)", line)
    ).rstrip()


class ActionWords:
    """Words for the actions of a Discrete or a one-dimensional MultiDiscrete space.

    Args:
        space: the action space.
        words: names in the order of the actions, or a list of them per component of a
            MultiDiscrete. None: numbers.

    Raises:
        ValueError: it is another space, or the names do not fit.
    """

    def __init__(self, space: Any, words: Sequence[Any] | None) -> None:
        from gymnasium import spaces

        self._single = isinstance(space, spaces.Discrete)
        if self._single:
            first, sizes = [int(space.start)], [int(space.n)]
            given: Sequence[Any] | None = None if words is None else [words]
        elif isinstance(space, spaces.MultiDiscrete) and len(space.shape) == 1:
            first, sizes = [int(start) for start in space.start], [int(size) for size in space.nvec]
            given = words
        else:
            raise ValueError(
                f"the action space {space} has no words: it has to be Discrete or a "
                "one-dimensional MultiDiscrete; "
                "put a gymnasium.ActionWrapper with a few choices around the environment"
            )
        names = given or [
            [str(start + number) for number in range(size)]
            for start, size in zip(first, sizes, strict=True)
        ]
        if (
            not all(isinstance(group, list | tuple) for group in names)
            or [len(set(map(_folded, group))) for group in names] != sizes
        ):
            raise ValueError(f"actions must be {_wanted(sizes)}, all different, not {words}")
        if not self._single and any(re.search(r"[\s,]", word) for group in names for word in group):
            raise ValueError(
                f"actions of a MultiDiscrete space must be words without spaces and commas, not "
                f"{words}"
            )
        self._first = first
        self._names: list[list[str]] = [list(group) for group in names]
        self._numbers = [
            {_folded(word): number for number, word in enumerate(group)} for group in names
        ]

    def action(self, text: str) -> int | np.ndarray[Any, np.dtype[np.int64]] | None:
        """Return the action of an answer, or None."""
        answers = (
            [text.strip()]
            if self._single
            else [word for word in re.split(r"[\s,]+", text.strip()) if word]
        )
        if len(answers) != len(self._numbers):
            return None
        found = [
            numbers.get(_folded(answer))
            for numbers, answer in zip(self._numbers, answers, strict=True)
        ]
        chosen = [
            start + number
            for start, number in zip(self._first, found, strict=True)
            if number is not None
        ]
        if len(chosen) != len(found):
            return None
        return chosen[0] if self._single else np.array(chosen, np.int64)

    def all(self) -> list[str]:
        """Return every answer, or only the first of very many."""
        return [
            " ".join(words)
            for words in itertools.islice(itertools.product(*self._names), MOST_COMBINATIONS)
        ]

    def question(self) -> str:
        """Return how to answer, in words."""
        if self._single:
            return f"Answer with one of: {', '.join(self._names[0])}."
        return (
            " ".join(
                [
                    "Answer with one word of each:",
                    *(f"({', '.join(group)})" for group in self._names),
                ]
            )
            + "."
        )


def template_names(texts: Sequence[tuple[str, str]]) -> Mapping[str, str]:
    """Return the components of a Dict observation by name."""
    return {name: text for name, text in texts if name}


def _folded(word: Any) -> str:
    return str(word).lower()


def _wanted(sizes: Sequence[int]) -> str:
    return (
        f"{sizes[0]} words"
        if len(sizes) == 1
        else f"{len(sizes)} lists of {', '.join(map(str, sizes))} words"
    )
