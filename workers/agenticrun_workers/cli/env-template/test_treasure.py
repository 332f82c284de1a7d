"""Test the environment: run `pytest test_treasure.py` in this folder."""

from treasure import Treasure

from agenticrun_workers.envs.checking import check_env


def test_it_keeps_the_promises_of_the_protocol() -> None:
    check_env("treasure:Treasure", {"size": 4}).assert_ok(warnings=False)


def test_following_the_observation_finds_the_treasure() -> None:
    env = Treasure(size=3)
    observation = env.reset(seed=3, split="train")
    for _ in range(6):
        result = env.step(observation.split()[-1])
        observation = result.observation
        if result.terminated:
            break
    assert result.reward == 1.0
