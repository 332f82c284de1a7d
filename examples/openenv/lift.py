"""An environment of OpenEnv, and its server: a lift that should go to another floor."""

import random
from typing import Any, Literal

from openenv.core.env_server import Action, Environment, Observation, State, create_app

FLOORS = range(7)


class Move(Action):
    way: Literal["up", "down"]


class Floors(Observation):
    floor: int
    wanted: int


class Lift(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Floors:
        self._state = State(episode_id=episode_id)
        self.floor, self.wanted = random.Random(seed).sample(FLOORS, 2)
        return Floors(floor=self.floor, wanted=self.wanted)

    def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Floors:
        self._state.step_count += 1
        self.floor += 1 if action.way == "up" else -1
        there = self.floor == self.wanted
        return Floors(floor=self.floor, wanted=self.wanted, done=there, reward=float(there))

    @property
    def state(self) -> State:
        return self._state


app = create_app(Lift, Move, Floors, env_name="lift", max_concurrent_envs=64)
