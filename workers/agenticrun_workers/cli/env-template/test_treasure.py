"""Test the environment: run `pytest test_treasure.py` in this folder."""

from treasure import Treasure

from agenticrun_workers.envs.checking import check_env


def test_it_keeps_the_promises_of_the_protocol() -> None:
    check_env("treasure:Treasure", {"highest": 31}).assert_ok(warnings=False)


def test_halving_finds_the_treasure() -> None:
    env = Treasure(highest=15)
    observation = env.reset(seed=3, split="train")
    for _ in range(4):
        low, high = map(int, observation.removeprefix("from ").split(" to "))
        result = env.step(str((low + high) // 2))
        observation = result.observation
        if result.terminated:
            break
    assert result.reward == 1.0
