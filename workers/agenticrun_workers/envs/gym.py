"""Any environment of gymnasium with few actions, as text in and text out.

Its spaces become text, too: observations that can be written, actions that have names.
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from agenticrun_workers.envs.env import StepResult, register_env
from agenticrun_workers.seeds import VALIDATION_SEEDS
from agenticrun_workers.types import Stream

Success = Literal["reward", "end"]
"""An episode is a success if it terminates: with a positive last reward, or in any way."""


def no_fields(_: Any) -> Mapping[str, str]:
    """Return no fields: the observation says everything."""
    return {}


@dataclass(frozen=True, slots=True)
class Preset:
    """Defaults of the adapter's config. Environments with a preset answer in microseconds."""

    task: str
    actions: tuple[str, ...]
    observation: str
    success: Success = "reward"
    fields: Callable[[Any], Mapping[str, str]] = field(default=no_fields)
    """More placeholders for the observation's template."""


TAXI_STANDS = (
    "R at row 0, column 0",
    "G at row 0, column 4",
    "Y at row 4, column 0",
    "B at row 4, column 3",
)


def taxi_fields(observation: Any) -> Mapping[str, str]:
    """Taxi's state number as places: ((row * 5 + column) * 5 + passenger) * 4 + destination."""
    rest, destination = divmod(int(observation), 4)
    rest, passenger = divmod(rest, 5)
    row, column = divmod(rest, 5)
    place = "in the taxi" if passenger == len(TAXI_STANDS) else f"at {TAXI_STANDS[passenger]}"
    return {
        "row": str(row),
        "column": str(column),
        "passenger": place,
        "destination": TAXI_STANDS[destination],
    }


CLIFF_WALKING = Preset(
    task="Walk from the start x to the target T and keep off the cliff C.",
    actions=("up", "right", "down", "left"),
    observation="{ansi}",
    success="end",
)
FROZEN_LAKE = Preset(
    task="Walk over the frozen lake F to the goal G and keep out of the holes H. "
    "You are where the brackets are.",
    actions=("left", "down", "right", "up"),
    observation="{ansi}",
)
TAXI = Preset(
    task="Drive the taxi to the passenger, pick the passenger up, drive to the destination "
    "and drop the passenger off.",
    actions=("south", "north", "east", "west", "pickup", "dropoff"),
    observation="The taxi is at row {row}, column {column}. The passenger is {passenger}. "
    "The destination is {destination}.\n{ansi}",
    fields=taxi_fields,
)
BLACKJACK = Preset(
    task="Get closer to 21 than the dealer without going over.",
    actions=("stick", "hit"),
    observation="Your cards sum to {0}, the dealer shows {1}, usable aces: {2}.",
)

PRESETS = {
    "CliffWalking": CLIFF_WALKING,
    "CliffWalkingSlippery": CLIFF_WALKING,
    "FrozenLake": FROZEN_LAKE,
    "FrozenLake8x8": FROZEN_LAKE,
    "Taxi": TAXI,
    "Blackjack": BLACKJACK,
}
"""Presets by gymnasium's name without the version."""


def preset_of(id: str) -> Preset | None:
    """Return the preset of an environment's id, which may be any version."""
    return PRESETS.get(id.rpartition("-v")[0] or id)


@register_env("gymnasium")
class GymnasiumEnv:
    """An environment of gymnasium that plays one episode at a time.

    Training and validation never share seeds; their levels may still be equal.

    Args:
        id: as in `gymnasium.make`; `package:Name-v0` imports a package that registers it.
        kwargs: keyword arguments of `gymnasium.make`, such as max_episode_steps.
        actions: a word per action of a Discrete space, a list of words per component of a
            MultiDiscrete one. Default: the preset's words, or numbers.
        observation: template of observations: {observation} (everything), {0}, {1} ... or {name}
            (components), {ansi} (the environment's own drawing). Default: the preset's, or {ansi}
            where it exists, or {observation}.
        instruction: text of the first prompt; the default lists the actions.
        success: `reward` (the episode terminates with a positive last reward) or `end` (it
            terminates).
        decimals: of the numbers of a Box.
    """

    def __init__(
        self,
        *,
        id: str,
        kwargs: Mapping[str, Any] | None = None,
        actions: Sequence[Any] | None = None,
        observation: str | None = None,
        instruction: str | None = None,
        success: Success | None = None,
        decimals: int = 2,
    ) -> None:
        preset = preset_of(id)
        self._env = _make(id, kwargs or {})
        draws = "ansi" in self._env.metadata.get("render_modes", ())
        self._template = observation or (
            preset.observation if preset else "{ansi}" if draws else "{observation}"
        )
        self._uses_ansi = "ansi" in placeholders(self._template)
        if self._uses_ansi:
            if not draws:
                raise ValueError(
                    f"observation {self._template!r} uses ansi, which {id} cannot draw"
                )
            # The way to draw is fixed when an environment is made.
            self._env.close()
            self._env = _make(id, {**(kwargs or {}), "render_mode": "ansi"})
        self._fields = preset.fields if preset else no_fields
        self._decimals = decimals
        self._words = ActionWords(
            self._env.action_space, actions or (preset.actions if preset else None)
        )
        # Now, because a wrong placeholder would fail in every episode.
        self._check_template()
        if success not in (None, "reward", "end"):
            raise ValueError(f"success must be reward or end, not {success!r}")
        self._success = success or (preset.success if preset else "reward")
        task = preset.task if preset else f"You are in {id}."
        self.instruction = (
            f"{task} {self._words.question()}" if instruction is None else instruction
        )
        # Steps of the presets take microseconds, less than the hand-over to a thread.
        self.blocking = preset is None
        self._text = ""
        self._mask: Any = None

    def reset(self, seed: int, split: Stream) -> str:
        """Begin with gymnasium's episode of a seed of this split."""
        observation, info = self._env.reset(
            # Validation has the seeds above: the two never meet.
            seed=seed % VALIDATION_SEEDS + (VALIDATION_SEEDS if split is Stream.VALIDATION else 0)
        )
        self._mask = info.get("action_mask")
        self._text = self._write(observation)
        return self._text

    def step(self, action: str) -> StepResult:
        """Play one answer; see `StepResult`.

        An invalid answer is not played and does not count for gymnasium's step limit.
        """
        number = self._words.action(action)
        # Not passed on: many environments raise an error, and some play another action.
        if number is None:
            return StepResult(self._text, 0.0, False, metrics=_metrics(valid=False))
        observation, reward, terminated, truncated, info = self._env.step(number)
        self._mask = info.get("action_mask")
        before, self._text = self._text, self._write(observation)
        success = bool(terminated) and (self._success == "end" or reward > 0)
        metrics = _metrics(valid=True, effective=before != self._text, success=success)
        return StepResult(self._text, float(reward), bool(terminated), bool(truncated), metrics)

    def valid_actions(self) -> list[str]:
        """Return every action, or the actions that the environment's `action_mask` allows now."""
        words = self._words.all()
        # A mask of another length is about something else than these actions.
        if self._mask is None or len(self._mask) != len(words):
            return words
        return [word for word, possible in zip(words, self._mask, strict=True) if possible] or words

    def vocabulary(self) -> list[str]:
        """Printable characters, the words of the actions, and the pieces of a first observation."""
        pieces = re.findall(r"\s*\S+", self.reset(0, Stream.TRAIN))
        return [*string.printable, *self._words.all(), *pieces, *map(str.strip, pieces)]

    def _write(self, observation: Any) -> str:
        space = self._env.observation_space
        texts = parts(space, observation, self._decimals)
        more = self._fields(observation)
        drawing = {"ansi": plain(self._env.render())} if self._uses_ansi else {}
        whole = {"observation": write(space, observation, self._decimals)}
        return self._template.format(
            *(text for _, text in texts), **template_names(texts), **more, **drawing, **whole
        )

    def _check_template(self) -> None:
        """Raise `ValueError` if the observation has no text form, or lacks a placeholder."""
        space = self._env.observation_space
        # A random observation: the real one exists only after a reset.
        sample = space.sample()
        texts = parts(space, sample, self._decimals)
        more = self._fields(sample)
        known = {*map(str, range(len(texts))), *template_names(texts), *more, "observation", "ansi"}
        unknown = placeholders(self._template) - known
        if unknown:
            raise ValueError(
                f"observation has no placeholder {', '.join(sorted(unknown))} (known: "
                f"{', '.join(sorted(known))})"
            )


def _make(id: str, kwargs: Mapping[str, Any]) -> Any:
    """Make the environment. Raises `ValueError`."""
    import gymnasium  # a third of a second, which only its users should wait for

    try:
        return gymnasium.make(id, disable_env_checker=True, **kwargs)
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(f"id: gymnasium cannot make {id!r}: {error}") from error
    except TypeError as error:
        raise ValueError(f"kwargs: {error}") from error


def placeholders(template: str) -> set[str]:
    """Return the names in braces. Raises `ValueError`."""
    try:
        return {
            re.split(r"[.\[]", name)[0]
            for _, name, _, _ in string.Formatter().parse(template)
            if name is not None
        }
    except ValueError as error:
        raise ValueError(f"observation {template!r} is not a valid template: {error}") from error


def _metrics(valid: bool, effective: bool = False, success: bool = False) -> dict[str, float]:
    return {
        "action_is_valid": float(valid),
        "action_is_effective": float(effective),
        "num_actions": 1.0,
        "success": float(success),
    }


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

    if isinstance(space, spaces.Text) or space.dtype == np.dtype(str):  # MiniGrid's missions
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
