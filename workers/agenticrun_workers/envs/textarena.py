"""`type: textarena`: games of TextArena for one player."""

from __future__ import annotations

import random
import re
import string
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from agenticrun_workers.envs.calls import one_line
from agenticrun_workers.envs.env import StepResult, register_env
from agenticrun_workers.envs.remote import checked_package
from agenticrun_workers.seeds import VALIDATION_SEEDS
from agenticrun_workers.types import Stream

_generators = threading.Lock()
"""Held while the generators of `random` and `numpy.random` are those of one game."""


@register_env("textarena")
class TextArena:
    """An environment that plays one episode at a time.

    An observation is what the game says since the last answer; the first one has the rules. The
    games draw from the process's generators, so each instance keeps their state between its calls.

    Args:
        id: as in `textarena.make`, such as GuessTheNumber-v0. Wrappers of observations have no
            effect: the agent keeps the history.
        kwargs: keyword arguments of `textarena.make`, such as max_turns.
        actions: answers of the random policy and of the warm-up by random play.
        instruction: text of the first prompt; the rules are in the first observation.

    Metrics: success (the reward is 1 or more), and the usual ones. The reward of the game comes at
    its end.
    """

    def __init__(
        self,
        *,
        id: str,
        kwargs: Mapping[str, Any] | None = None,
        actions: Sequence[Any] = (),
        instruction: str = "Play the game.",
    ) -> None:
        library = checked_package("textarena", "textarena")
        self._game_says = library.GAME_ID
        self._own_action = library.ObservationType.PLAYER_ACTION
        self._refusal = library.ObservationType.GAME_ADMIN
        try:
            self._game = library.make(id, **(kwargs or {}))
        except Exception as error:  # games read data of nltk, or ask for the key of a judge
            raise ValueError(f"id: TextArena cannot make {id!r}: {one_line(error)}") from error
        self._brackets = False
        while isinstance(self._game, library.Wrapper):
            self._brackets |= type(self._game).__name__ == "ActionFormattingWrapper"
            self._game = self._game.env
        self._actions = list(map(str, actions))
        self.instruction = instruction
        self._states: Any = None
        self._check(id)

    def reset(self, seed: int, split: Stream) -> str:
        """Begin a game."""
        levels = VALIDATION_SEEDS if split is Stream.VALIDATION else 0
        seed = seed % VALIDATION_SEEDS + levels
        with self._own_generators(seed):
            self._game.reset(num_players=1, seed=seed)
            return self._said()[0]

    def step(self, action: str) -> StepResult:
        """Play an answer; see `StepResult`."""
        if not action.strip():
            return StepResult("The answer is empty.", 0.0, False, metrics=_metrics(valid=False))
        if self._brackets and not re.search(r"[\[\]]", action):
            action = f"[{action.strip()}]"
        with self._own_generators():
            done, _ = self._game.step(action)
            text, refused = self._said()
            rewards, infos = self._game.close() if done else ({}, {})
        invalid = refused or bool((infos or {}).get(0, {}).get("invalid_move"))
        reward = float((rewards or {}).get(0, 0.0))
        metrics = _metrics(valid=not invalid, success=bool(done) and reward >= 1)
        reason = str((infos or {}).get(0, {}).get("reason", ""))
        shown = "\n".join(filter(None, [text, reason]))
        return StepResult(shown, reward, bool(done), metrics=metrics)

    def valid_actions(self) -> list[str]:
        """Return the actions of the config; games do not list theirs."""
        return self._actions

    def vocabulary(self) -> list[str]:
        """Return printable characters, the actions, and the words of the rules."""
        words = re.findall(r"\w+", self.reset(0, Stream.TRAIN))
        return [*string.printable, *self._actions, *words]

    def _said(self) -> tuple[str, bool]:
        """Return what the game has said since the last call, and whether it refused a move."""
        _, messages = self._game.get_observation()
        shown = [text for sender, text, kind in messages if kind is not self._own_action]
        refused = any(
            kind is self._refusal and "invalid move" in text.lower() for _, text, kind in messages
        )
        return "\n".join(shown), refused

    def _check(self, id: str) -> None:
        """Raise `ValueError` for a game that cannot begin, before a run and not in each episode."""
        try:
            self.reset(0, Stream.TRAIN)
        except AssertionError as error:
            raise ValueError(f"id: {id} is not a game for one player: {error}") from error
        except Exception as error:  # the same as in `make`
            raise ValueError(f"id: {id} cannot begin: {one_line(error)}") from error

    @contextmanager
    def _own_generators(self, seed: int | None = None) -> Iterator[None]:
        """Give the process's generators the state of this game, or of a seed, and then back."""
        with _generators:
            others = random.getstate(), np.random.get_state()
            try:
                if seed is not None:
                    random.seed(seed)
                    np.random.seed(seed)
                else:
                    random.setstate(self._states[0])
                    np.random.set_state(self._states[1])
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                random.setstate(others[0])
                np.random.set_state(others[1])


def _metrics(valid: bool, success: bool = False) -> dict[str, float]:
    return {
        "action_is_valid": float(valid),
        "num_actions": 1.0,
        "success": float(success),
    }
