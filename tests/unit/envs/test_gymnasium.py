"""The gymnasium adapter: the same episodes as gymnasium's own, in words."""

from __future__ import annotations

import re
from typing import Any

import gymnasium
import numpy as np
import pytest
import yaml
from gymnasium import spaces
from gymnasium.envs.toy_text.taxi import TaxiEnv
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.agents import Episode
from agenticrun_workers.envs import EnvCalls, EnvConfigError, make_env
from agenticrun_workers.envs.gym import (
    TAXI_STANDS,
    ActionWords,
    GymnasiumEnv,
    plain,
    taxi_fields,
    write,
)
from agenticrun_workers.seeds import VALIDATION_SEEDS
from agenticrun_workers.types import EpisodeKey, Stream
from pages import ROOT, blocks


class Room(gymnasium.Env[Any, Any]):
    """Shows what it is told to show, and remembers what was done."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(
        self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], shown: Any
    ) -> None:
        self.observation_space, self.action_space, self.shown = (
            observation_space,
            action_space,
            shown,
        )
        self.done: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.shown, {"seed": seed}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.done.append(action)
        return self.shown, 0.5, False, False, {}


gymnasium.register("Room-v0", lambda **kwargs: Room(**kwargs))


class Torques(gymnasium.ActionWrapper[Any, Any, Any]):
    """Three torques for Pendulum, whose own actions have no words: what docs/gymnasium.md tells."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.action_space = spaces.Discrete(3)

    def action(self, action: Any) -> Any:
        return np.array([(-2.0, 0.0, 2.0)[action]], np.float32)


gymnasium.register("TorquePendulum-v0", lambda **_: Torques(gymnasium.make("Pendulum-v1")))


class DictRoom(gymnasium.Env[Any, Any]):
    """Observations as in MiniGrid: a Dict of a small image, a direction and a mission.

    Its generator is numpy's older one, which takes seeds of 32 bits.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012
    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (3, 3), np.uint8),
            "direction": spaces.Discrete(4),
            "mission": spaces.Text(20, charset=frozenset("abcdefghijklmnopqrstuvwxyz ")),
        }
    )
    action_space = spaces.Discrete(7)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.draws = np.random.RandomState(seed)
        return self._shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._shown(), float(self.draws.rand()), bool(self.draws.rand() < 0.1), False, {}

    def _shown(self) -> dict[str, Any]:
        image = self.draws.randint(0, 11, (3, 3)).astype(np.uint8)
        return {"image": image, "direction": self.draws.randint(4), "mission": "get to the goal"}


gymnasium.register("DictRoom-v0", lambda **_: DictRoom())


def room(
    observation_space: spaces.Space[Any],
    shown: Any,
    action_space: spaces.Space[Any] | None = None,
    **config: Any,
) -> GymnasiumEnv:
    kwargs = {
        "observation_space": observation_space,
        "action_space": action_space or spaces.Discrete(2),
        "shown": shown,
    }
    return GymnasiumEnv(id="Room-v0", kwargs=kwargs, **config)


@pytest.mark.parametrize(
    "id",
    [
        "CliffWalking-v1",
        "CliffWalkingSlippery-v1",
        "Taxi-v4",
        "FrozenLake-v1",
        "FrozenLake8x8-v1",
        "Blackjack-v1",
        "MountainCar-v0",
        "CartPole-v1",
        "Acrobot-v1",
        "TorquePendulum-v0",
        "DictRoom-v0",
        pytest.param(
            "LunarLander-v3",
            # SWIG's module cannot be imported where this warning is an error.
            marks=pytest.mark.filterwarnings("ignore:builtin type [sS]wig:DeprecationWarning"),
        ),
        "minigrid:MiniGrid-DoorKey-5x5-v0",
    ],
)
def test_episodes_are_gymnasiums(id: str) -> None:
    kwargs: dict[str, Any] = {"agent_view_size": 3} if "MiniGrid" in id else {}
    env, theirs = GymnasiumEnv(id=id, kwargs=kwargs), gymnasium.make(id, **kwargs)
    words = env._words.all()
    for seed in range(5):
        env.reset(seed, Stream.TRAIN)
        theirs.reset(seed=seed)
        for action in np.random.default_rng(seed).integers(len(words), size=30):
            result = env.step(words[action])
            _, reward, terminated, truncated, _ = theirs.step(int(action))
            assert (result.reward, result.terminated, result.truncated) == (
                reward,
                terminated,
                truncated,
            )
            if terminated or truncated:
                break


def test_a_dict_and_a_box_are_written_in_full() -> None:
    room, hill = GymnasiumEnv(id="DictRoom-v0"), GymnasiumEnv(id="MountainCar-v0")
    text = room.reset(3, Stream.TRAIN)
    assert "mission: get to the goal" in text
    assert "direction: " in text
    assert len(re.findall(r"\d+", text.partition("image: ")[2])) >= 9
    assert re.fullmatch(r"-0\.\d\d, 0\.00", hill.reset(3, Stream.TRAIN))


def test_minigrid_shows_direction_view_and_mission_and_says_when_the_view_is_too_large() -> None:
    (config,) = (
        env["config"]
        for block in blocks(ROOT / "docs/gymnasium.md", "yaml")
        for env in yaml.safe_load(block).get("spec", {}).get("pipeline", {}).get("envs", [])
        if "MiniGrid" in env["config"]["id"]
    )
    env = GymnasiumEnv(**config)
    text = env.reset(1, Stream.TRAIN)
    assert re.fullmatch(r"Direction: \d\. View: (\d+, ){26}\d+\. Mission: .+", text)
    assert env.step("forward").metrics["action_is_valid"] == 1.0
    with pytest.raises(ValueError, match="a Box of at most 64 numbers"):
        GymnasiumEnv(id=config["id"])


@pytest.mark.parametrize("stream", list(Stream))
async def test_the_seeds_of_a_run_suit_generators_of_32_bits(stream: Stream) -> None:
    """NumPy's RandomState refuses seeds from 2**32 on."""
    env = make_env("gymnasium", {"id": "DictRoom-v0"})
    for group in range(50):
        episode = Episode.seeded(42, EpisodeKey(stream, group, 0), "room")
        start = await EnvCalls().reset(env, episode.env_seed, stream)
        assert "mission: get to the goal" in start.observation


def test_cliff_walking_reads_like_its_drawing_and_reaching_the_goal_is_a_success() -> None:
    env = make_env("gymnasium", {"id": "CliffWalking-v1"})
    assert isinstance(env, GymnasiumEnv)
    assert env.reset(0, Stream.TRAIN).splitlines()[-1] == "x  C  C  C  C  C  C  C  C  C  C  T"
    assert "up, right, down, left" in env.instruction
    env.step("UP")
    for _ in range(11):
        env.step("right")
    end = env.step("down")
    assert (end.terminated, end.reward, end.metrics["success"]) == (True, -1, 1.0)


def test_falling_off_the_cliff_is_no_success() -> None:
    env = GymnasiumEnv(id="CliffWalking-v1")
    env.reset(0, Stream.TRAIN)
    result = env.step("right")
    assert (
        result.reward,
        result.terminated,
        result.metrics["success"],
        result.metrics["action_is_effective"],
    ) == (-100, False, 0.0, 0.0)


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4), st.integers(0, 3))
def test_taxis_state_is_said_in_words(
    row: int, column: int, passenger: int, destination: int
) -> None:
    taxi = gymnasium.make("Taxi-v4").unwrapped
    assert isinstance(taxi, TaxiEnv)
    fields = taxi_fields(taxi.encode(row, column, passenger, destination))
    assert (fields["row"], fields["column"], fields["destination"]) == (
        str(row),
        str(column),
        TAXI_STANDS[destination],
    )
    assert fields["passenger"] == (
        "in the taxi" if passenger == 4 else f"at {TAXI_STANDS[passenger]}"
    )


def test_taxis_stands_are_where_it_draws_them() -> None:
    taxi = gymnasium.make("Taxi-v4").unwrapped
    assert isinstance(taxi, TaxiEnv)
    assert [
        f"{letter} at row {row}, column {column}"
        for letter, (row, column) in zip("RGYB", taxi.locs, strict=True)
    ] == list(TAXI_STANDS)


def test_taxis_valid_actions_are_those_of_its_mask() -> None:
    env = GymnasiumEnv(id="Taxi-v4")
    for seed in range(5):
        env.reset(seed, Stream.TRAIN)
        assert env.valid_actions() == [
            word for word, possible in zip(env._words.all(), env._mask, strict=True) if possible
        ]
        assert 0 < len(env.valid_actions()) < 6


def test_a_won_game_of_blackjack_is_a_success() -> None:
    env = GymnasiumEnv(id="Blackjack-v1")
    wins = 0
    for seed in range(200):
        assert env.reset(seed, Stream.TRAIN).startswith("Your cards sum to ")
        end = env.step("stick")
        assert end.terminated
        assert end.metrics["success"] == float(end.reward > 0)
        wins += end.reward > 0
    assert 40 < wins < 120


def test_an_answer_that_is_no_action_is_a_normal_step() -> None:
    env = GymnasiumEnv(id="FrozenLake-v1", kwargs={"is_slippery": False})
    board = env.reset(0, Stream.TRAIN)
    assert board == "<S>FFF\nFHFH\nFFFH\nHFFG"
    result = env.step("jump")
    assert (
        result.observation,
        result.reward,
        result.terminated,
        result.metrics["action_is_valid"],
    ) == (board, 0.0, False, 0.0)
    assert env.step(" Down ").observation == "SFFF\n<F>HFH\nFFFH\nHFFG"


def test_the_step_limit_truncates() -> None:
    env = GymnasiumEnv(id="CliffWalking-v1", kwargs={"max_episode_steps": 2})
    env.reset(0, Stream.TRAIN)
    assert [
        (result.terminated, result.truncated) for result in (env.step("up"), env.step("up"))
    ] == [(False, False), (False, True)]


def test_seeds_of_training_and_validation_never_meet() -> None:
    env = room(spaces.Discrete(3), 1)
    seen = []
    for split in (Stream.TRAIN, Stream.VALIDATION):
        for seed in (0, 5, 2**62, 2**64 - 1):
            env.reset(seed, split)
            seen.append(env._env.unwrapped.np_random_seed)
    assert all(seed < VALIDATION_SEEDS for seed in seen[:4])
    assert all(VALIDATION_SEEDS <= seed < 2 * VALIDATION_SEEDS for seed in seen[4:])


@pytest.mark.parametrize(
    ("space", "value", "text"),
    [
        (spaces.Discrete(3), np.int64(2), "2"),
        (spaces.MultiDiscrete([3, 4]), np.array([1, 3]), "1, 3"),
        (spaces.MultiBinary(3), np.array([1, 0, 1]), "1, 0, 1"),
        (spaces.Box(-1, 1, (2, 2)), np.array([[0.5, -0.25], [1, 0]]), "0.50, -0.25, 1.00, 0.00"),
        (spaces.Box(0, 9, (2,), np.int32), np.array([3, 4]), "3, 4"),
        (
            spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 1, (1,)))),
            (1, np.array([0.125])),
            "1, 0.12",
        ),
        (
            spaces.Dict({"x": spaces.Discrete(3), "y": spaces.MultiDiscrete([2, 2])}),
            {"x": 2, "y": np.array([0, 1])},
            "x: 2, y: 0, 1",
        ),
        (spaces.Text(9), "a dog", "a dog"),
    ],
)
def test_observations_are_written_by_their_space(
    space: spaces.Space[Any], value: Any, text: str
) -> None:
    assert write(space, value, decimals=2) == text
    assert room(space, value).reset(0, Stream.TRAIN) == text


def test_templates_name_the_parts_of_an_observation() -> None:
    pair = spaces.Tuple((spaces.Discrete(30), spaces.Discrete(5)))
    assert (
        room(pair, (7, 3), observation="sum {0} of {1} [{observation}]").reset(0, Stream.TRAIN)
        == "sum 7 of 3 [7, 3]"
    )
    named = spaces.Dict({"x": spaces.Discrete(9)})
    assert room(named, {"x": 4}, observation="x is {x}").reset(0, Stream.TRAIN) == "x is 4"


@pytest.mark.parametrize(
    ("space", "words", "answer", "action"),
    [
        (spaces.Discrete(3, start=5), None, "6", 6),
        (spaces.Discrete(3, start=5), None, "0", None),
        (spaces.Discrete(2), ["go on", "stop"], "Go On", 0),
        (spaces.Discrete(2), ["go on", "stop"], "0", None),
        (spaces.MultiDiscrete([2, 3]), None, "1 2", [1, 2]),
        (spaces.MultiDiscrete([2, 3]), None, "1, 2", [1, 2]),
        (spaces.MultiDiscrete([2, 3]), None, "2 0", None),
        (spaces.MultiDiscrete([2, 3]), None, "1", None),
        (spaces.MultiDiscrete([2, 2]), [["left", "right"], ["slow", "fast"]], "right slow", [1, 0]),
        (spaces.MultiDiscrete([2, 2]), [["left", "right"], ["slow", "fast"]], "slow right", None),
    ],
)
def test_answers_become_actions(
    space: spaces.Space[Any], words: Any, answer: str, action: Any
) -> None:
    env = room(spaces.Discrete(1), 0, space, actions=words)
    env.reset(0, Stream.TRAIN)
    assert env.step(answer).metrics["action_is_valid"] == float(action is not None)
    done = env._env.unwrapped.done
    assert [np.asarray(one).tolist() for one in done] == ([] if action is None else [action])


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_every_listed_action_is_one_of_the_space_and_each_is_listed_once(sizes: list[int]) -> None:
    space = spaces.MultiDiscrete(sizes)
    words = ActionWords(space, None)
    actions = [words.action(text) for text in words.all()]
    assert all(space.contains(action) for action in actions)
    assert len({tuple(action) for action in actions}) == int(np.prod(sizes))  # type: ignore[arg-type]


def test_colours_of_drawings_become_brackets() -> None:
    assert (
        plain("  (Down)\n|\x1b[34;1mR\x1b[0m: |\x1b[35m\x1b[43mY\x1b[0m\x1b[0m|\n\n")
        == "|<R>: |<Y>|"
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"id": "Nowhere-v0"}, "id: gymnasium cannot make 'Nowhere-v0'"),
        ({"id": "CliffWalking-v9"}, "id: .*v9"),
        ({"id": "no_such_package:Env-v0"}, "no_such_package"),
        ({"id": "FrozenLake-v1", "kwargs": {"nonsense": 1}}, "kwargs: .*nonsense"),
        ({"id": "Taxi-v4", "actions": ["north", "south"]}, "actions must be 6 words"),
        ({"id": "Taxi-v4", "actions": ["a", "b", "c", "d", "e", "A"]}, "all different"),
        ({"id": "Taxi-v4", "observation": "{taxi}"}, "no placeholder taxi .known: 0, ansi, column"),
        ({"id": "Taxi-v4", "observation": "{0"}, "is not a valid template"),
        ({"id": "Blackjack-v1", "observation": "{ansi}"}, "which Blackjack-v1 cannot draw"),
        ({"id": "Taxi-v4", "success": "always"}, "success must be reward or end"),
        ({"id": "Taxi-v4", "slippery": True}, "no config key 'slippery'"),
        ({"id": "Pendulum-v1"}, "the action space .* has no words.*ActionWrapper"),
    ],
)
def test_bad_configs_are_refused_with_what_to_do(config: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvConfigError, match=message):
        make_env("gymnasium", config)


@pytest.mark.parametrize("space", [spaces.Box(0, 1, (9, 9)), spaces.Sequence(spaces.Discrete(2))])
def test_observations_that_are_no_text_are_refused(space: spaces.Space[Any]) -> None:
    with pytest.raises(ValueError, match="ObservationWrapper"):
        room(space, space.sample())


def test_action_words_with_spaces_are_refused_where_answers_have_several() -> None:
    with pytest.raises(ValueError, match="without spaces"):
        room(spaces.Discrete(1), 0, spaces.MultiDiscrete([2]), actions=[["go on", "stop"]])


@pytest.mark.parametrize("id", ["CliffWalking-v1", "Taxi-v4", "FrozenLake-v1", "Blackjack-v1"])
def test_every_text_is_made_of_the_vocabulary(id: str) -> None:
    env = GymnasiumEnv(id=id)
    words = set(env.vocabulary())
    text = env.reset(1, Stream.TRAIN)
    assert set(text) <= words
    assert set(env.valid_actions()) <= words
