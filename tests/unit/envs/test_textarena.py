"""The function that answers for the other players of a game, with a library of our own."""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType
from typing import Any

import pytest

from agenticrun_workers.envs import make_env
from agenticrun_workers.envs.env import EnvConfigError
from agenticrun_workers.types import Stream


class Kind(Enum):
    PLAYER_ACTION = 1
    GAME_ADMIN = 2
    GAME_MESSAGE = 3


class Turns:
    """A game in which the players answer in turn. It keeps what they have said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def reset(self, num_players: int, seed: int) -> None:
        self.said = []

    def get_observation(self) -> tuple[int, list[Any]]:
        return len(self.said) % 2, [(-1, "Your turn.", Kind.GAME_MESSAGE)]

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self.said.append(action)
        return False, {}


GAME = Turns()


async def later(shown: str) -> str:
    return "1"


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = ModuleType("textarena")
    library.GAME_ID, library.ObservationType = -1, Kind
    library.Wrapper, library.make = type("Wrapper", (), {}), lambda id: GAME
    players: Any = ModuleType("players")
    players.one, players.nothing, players.later = str.upper, print, later
    players.number, players.text = len, "1"
    monkeypatch.setitem(sys.modules, "textarena", library)
    monkeypatch.setitem(sys.modules, "players", players)


def made(opponent: str) -> Any:
    return make_env("textarena", {"id": "x", "players": 2, "opponent": f"players:{opponent}"})


def test_a_function_answers_for_the_other_player() -> None:
    env = made("one")
    env.reset(1, Stream.TRAIN)
    env.step("a")
    assert GAME.said == ["a", "YOUR TURN."]


@pytest.mark.parametrize("opponent", ["later", "text"])
def test_an_opponent_that_is_no_plain_function_is_refused_at_once(opponent: str) -> None:
    with pytest.raises(EnvConfigError, match=f"players:{opponent} must be a function"):
        made(opponent)


@pytest.mark.parametrize(("opponent", "answer"), [("nothing", "None"), ("number", "10")])
def test_an_answer_that_is_no_text_is_an_error_and_not_played(opponent: str, answer: str) -> None:
    env = made(opponent)
    env.reset(1, Stream.TRAIN)
    with pytest.raises(TypeError, match=f"must be a text, not {answer}"):
        env.step("a")
