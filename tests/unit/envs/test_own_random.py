"""Grid worlds have their own random numbers: several at once make the same levels as one alone.

ROLL's environments share global random numbers (C10).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from agenticrun_workers.envs import EnvCalls, FrozenLake, Sokoban
from agenticrun_workers.types import Stream

World = Callable[[], FrozenLake | Sokoban]

ANSWERS = ("Down", "Right", "Down", "Up")
WORKERS = [100 * number for number in range(8)]
"""First seed of each."""
EACH = 40

both_worlds = pytest.mark.parametrize(
    "world", [lambda: FrozenLake(is_slippery=True), Sokoban], ids=["frozen_lake", "sokoban"]
)


def episodes(world: World, first: int) -> list[str]:
    env, texts = world(), []
    for seed in range(first, first + EACH):
        texts += [
            env.reset(seed, Stream.TRAIN),
            *(env.step(answer).observation for answer in ANSWERS),
        ]
    return texts


@both_worlds
def test_eight_threads_make_the_levels_that_one_makes(world: World) -> None:
    alone = [episodes(world, first) for first in WORKERS]
    with ThreadPoolExecutor(len(WORKERS)) as pool:
        assert list(pool.map(lambda first: episodes(world, first), WORKERS)) == alone


@both_worlds
async def test_eight_tasks_that_take_turns_make_the_levels_that_one_makes(world: World) -> None:
    """All in flight at once, as an env worker plays them."""
    calls = EnvCalls()

    async def played(first: int) -> list[str]:
        env, texts = world(), []
        for seed in range(first, first + EACH):
            texts.append((await calls.reset(env, seed, Stream.TRAIN)).observation)
            for answer in ANSWERS:
                await asyncio.sleep(0)
                texts.append((await calls.step(env, answer)).observation)
        return texts

    assert await asyncio.gather(*map(played, WORKERS)) == [
        episodes(world, first) for first in WORKERS
    ]


@both_worlds
def test_the_global_random_numbers_are_neither_read_nor_changed(world: World) -> None:
    random.seed(1)
    np.random.seed(1)
    before = (random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist())
    one = episodes(world, 0)
    assert (random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()) == before
    random.seed(2)
    np.random.seed(2)
    assert episodes(world, 0) == one
