"""Test the environment: run `pytest test_treasure.py` in this folder."""

from treasure import Treasure

from agenticrun_workers.envs.checking import check_env


def test_it_keeps_the_promises_of_the_protocol() -> None:
    check_env("treasure:Treasure", {"highest": 31}).assert_ok(warnings=False)


def test_halving_finds_the_treasure() -> None:
    env, low, high = Treasure(highest=15), 1, 15
    env.reset(seed=3, split="train")
    for _ in range(4):
        middle = (low + high) // 2
        result = env.step(str(middle))
        low, high = (middle + 1, high) if result.observation == "higher" else (low, middle - 1)
        if result.terminated:
            break
    assert result.reward == 1.0
