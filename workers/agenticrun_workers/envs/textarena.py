"""`type: textarena`: games of TextArena, for the policy and other players."""

from __future__ import annotations

import inspect
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
from agenticrun_workers.plugins import imported
from agenticrun_workers.seeds import VALIDATION_SEEDS
from agenticrun_workers.types import Stream

POLICY = 0
"""The policy's number among the players."""
MOST_MOVES = 1000
"""Moves of other players in a row, after which a game counts as one that never asks the policy."""

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
        players: their number, with the policy.
        opponent: `module:function` that answers for the other players, called with what the game
            has said to one of them since its last answer. Default: one of `actions` at random, if
            possible one that the game's last message names.
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
        players: int = 1,
        opponent: str | None = None,
        instruction: str = "Play the game.",
    ) -> None:
        if players > 1 and not (opponent or actions):
            raise ValueError("players: the others need opponent (module:function), or actions")
        if opponent and players < 2:
            raise ValueError("opponent: set players to the number of players")
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
        self._players = players
        self.reusable = players == 1  # games of cards shuffle the deck of the game before
        self._opponent = _function(opponent) if opponent else None
        self._chance = random.Random()
        self._shown = ""
        """The last message to the policy."""
        self.instruction = instruction
        self._states: Any = None
        self._check(id)

    def reset(self, seed: int, split: Stream) -> str:
        """Begin a game."""
        levels = VALIDATION_SEEDS if split is Stream.VALIDATION else 0
        seed = seed % VALIDATION_SEEDS + levels
        with self._own_generators(seed):
            self._game.reset(num_players=self._players, seed=seed)
            self._chance.seed(seed)
            return self._said(done=False)[1]

    def step(self, action: str) -> StepResult:
        """Play an answer; see `StepResult`."""
        if not action.strip():
            return StepResult("The answer is empty.", 0.0, False, metrics=_metrics(valid=False))
        with self._own_generators():
            done, text, refused = self._said(done=self._move(action))
            rewards, infos = self._game.close() if done else ({}, {})
        own = (infos or {}).get(POLICY, {})
        invalid = refused or bool(own.get("invalid_move"))
        reward = float((rewards or {}).get(POLICY, 0.0))
        metrics = _metrics(valid=not invalid, success=done and reward >= 1)
        reason = str(own.get("reason", ""))
        shown = "\n".join(filter(None, [text, reason]))
        return StepResult(shown, reward, done, metrics=metrics)

    def valid_actions(self) -> list[str]:
        """Return the actions of the config; in a game of several players, the ones offered."""
        return self._actions if self._players == 1 else self._offered(self._shown)

    def vocabulary(self) -> list[str]:
        """Return printable characters, the actions, and the words of the rules."""
        words = re.findall(r"\w+", self.reset(0, Stream.TRAIN))
        return [*string.printable, *self._actions, *words]

    def _move(self, action: str) -> bool:
        """Play the answer of a player. Return True if it ends the game."""
        if self._brackets and not re.search(r"[\[\]]", action):
            action = f"[{action.strip()}]"
        return bool(self._game.step(action)[0])

    def _said(self, *, done: bool) -> tuple[bool, str, bool]:
        """Let the others play until it is the policy's turn.

        Returns:
            whether the game has ended, what it has said to the policy since its last turn, and
            whether it refused the policy's move.
        """
        for _ in range(MOST_MOVES):
            player, messages = self._game.get_observation()
            if done and player != POLICY:
                messages = self._game.state.observations[POLICY]
            if done or player == POLICY:
                refused = any(
                    kind is self._refusal and "invalid move" in text.lower()
                    for _, text, kind in messages
                )
                self._shown = _newest(messages)
                return done, self._text(messages, POLICY), refused
            if self._opponent is None:
                answer = self._chance.choice(self._offered(_newest(messages)))
            else:
                answer = self._opponent(self._text(messages, player))
                if not isinstance(answer, str):
                    raise TypeError(f"opponent: the answer must be a text, not {answer!r:.80}")
            done = self._move(answer)
        raise RuntimeError(f"{MOST_MOVES} moves of the other players, and none of the policy")

    def _text(self, messages: Sequence[Any], player: int) -> str:
        """Return messages to a player, without its own answers."""
        shown = []
        for sender, text, kind in messages:
            if kind is not self._own_action:
                shown.append(text)
            elif sender not in (player, self._game_says):
                shown.append(f"[Player {sender}] {text}")
        return "\n".join(shown)

    def _offered(self, shown: str) -> list[str]:
        """Return the actions that a message names, or all if it names none."""
        return [action for action in self._actions if action in shown] or self._actions

    def _check(self, id: str) -> None:
        """Raise `ValueError` for a game that cannot begin, before a run and not in each episode."""
        try:
            self.reset(0, Stream.TRAIN)
        except AssertionError as error:
            raise ValueError(
                f"id: {id} is not a game for players: {self._players}: {error}"
            ) from error
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


def _newest(messages: Sequence[Any]) -> str:
    return str(messages[-1][1]) if messages else ""


def _function(name: str) -> Any:
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"opponent: {name!r} is not module:function")
    found = imported(module, attribute)
    if not callable(found) or inspect.iscoroutinefunction(found):
        raise ValueError(f"opponent: {name} must be a function, and not an async one")
    return found


def _metrics(valid: bool, success: bool = False) -> dict[str, float]:
    return {
        "action_is_valid": float(valid),
        "num_actions": 1.0,
        "success": float(success),
    }
