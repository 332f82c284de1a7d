"""Staleness under adversarial timing: no token is too old, no group number is lost, none starves.

Episodes, training, weight syncs and resumes take random times on a virtual clock.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter

import pytest

from agenticrun_workers.rollout.controller import (
    Batch,
    RolloutController,
    StalenessGate,
)
from agenticrun_workers.rollout.groups import EpisodeResult, EpisodeTask, GroupPlan, VersionBounds
from agenticrun_workers.types import EpisodeKey, RolloutPosition, StopReason
from rollout_fakes import result
from virtual_clock import on_virtual_clock

COMBINATIONS = [
    (staleness, frequency)
    for staleness in (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
    for frequency in (1, 2, 3)
    if frequency - 1 <= staleness  # the API refuses the others
]


class Seconds:
    """Random durations. Some groups are much slower than a training step, in every try."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def of_episode(self, group: int, member: int) -> float:
        slow = random.Random(f"{self._seed} {group}").random() < 0.2
        rng = random.Random(f"{self._seed} {group} {member}")
        return rng.uniform(0.1, 2.0) + slow * rng.uniform(5.0, 30.0)

    def of_training(self, version: int) -> float:
        return random.Random(f"{self._seed} train {version}").choice((0.0, 0.1, 1.0, 5.0))


class World:
    """Engines, env workers and a trajectory store of a run, and what it was trained on."""

    def __init__(self, seed: int, failures: float = 0.05) -> None:
        self.rng = random.Random(seed)
        self.failures = failures
        self.seconds = Seconds(seed)
        self.engine_version = 0
        self.tokens: dict[tuple[EpisodeKey, int], list[int]] = {}
        """Policy version of each token, by episode and attempt."""
        self.stored: dict[EpisodeKey, int] = {}
        """Attempt of each episode in the store."""
        self.ages: list[int] = []
        """Ages of all tokens that were trained on, from the engines' own records."""
        self.numbers: list[int] = []
        """Numbers of the groups that were trained on."""
        self.stale = 0

    def train(self, batch: Batch, version: int) -> None:
        for episode in batch.results:
            assert self.stored.pop(episode.key) == episode.attempt
            self.ages += [
                version - sampled for sampled in self.tokens[episode.key, episode.attempt]
            ]
        self.numbers += [group.number for group in batch.groups]
        self.stale += batch.counts.stale

    async def discard(self, results: list[EpisodeResult]) -> None:
        await asyncio.sleep(self.rng.choice((0.0, 0.5)))
        for episode in results:
            self.stored.pop(episode.key, None)


class Backend:
    """Episodes that sample one token after the other, each with the version of that moment.

    An order to stop an episode takes a while, and may come too late.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._bounds = VersionBounds()
        self._aborted: set[tuple[EpisodeKey, int]] = set()
        self._running: set[tuple[EpisodeKey, int]] = set()

    def set_bounds(self, bounds: VersionBounds) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(self._world.rng.choice((0.0, 0.3)), self._hear, bounds)

    def _hear(self, bounds: VersionBounds) -> None:
        self._bounds = self._bounds.later(bounds)

    def abort(self, group: int) -> None:
        running = {(key, attempt) for key, attempt in self._running if key.group == group}
        loop = asyncio.get_running_loop()
        loop.call_later(self._world.rng.choice((0.0, 0.3)), self._aborted.update, running)

    async def run(self, task: EpisodeTask) -> EpisodeResult:
        world, key = self._world, task.key
        versions = world.tokens[key, task.attempt] = []
        pause = world.seconds.of_episode(key.group, key.member) / 8
        stop = StopReason.COMPLETED
        self._running.add((key, task.attempt))
        for _ in range(4):
            await asyncio.sleep(pause)
            versions.append(world.engine_version)
            await asyncio.sleep(pause)
            if (key, task.attempt) in self._aborted:
                stop = StopReason.ABORTED
                break
            if versions[0] < self._bounds.oldest:
                stop = StopReason.STALE
                break
        self._running.discard((key, task.attempt))
        if stop.trainable and world.rng.random() < world.failures:
            stop = StopReason.ENV_ERROR
        if stop.trainable:
            world.stored[key] = task.attempt
        return result(
            key.group,
            key.member,
            stop=stop,
            version=min(versions),
            attempt=task.attempt,
            tag=task.tag,
        )


async def train(
    world: World,
    staleness: float,
    frequency: int,
    *,
    size: int,
    attempts: list[int],
    concurrent: int,
    redundancy: int = 0,
) -> RolloutPosition:
    """Train some steps in each attempt, and resume from its checkpoint in the next one."""
    begin, position = 0, RolloutPosition()
    for steps in attempts:
        world.stored.clear()
        controller = RolloutController(
            Backend(world),
            StalenessGate(size, concurrent, staleness),
            GroupPlan(("A",), 2, redundancy, max_rerolls=20),
            discard=world.discard,
            position=position,
        )
        world.engine_version = begin
        for version in range(begin, begin + steps):
            if version % frequency == 0:
                world.engine_version = version
            controller.advance(version, world.engine_version)
            batch = await asyncio.wait_for(controller.batch(), 1e5)
            assert len(batch.groups) == size
            world.train(batch, version)
            await asyncio.sleep(world.seconds.of_training(version))
        begin, position = begin + steps, controller.position
        await controller.stop()
    return position


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("staleness", "frequency"), COMBINATIONS)
def test_no_token_is_too_old_and_every_group_is_trained_on_once_also_through_resumes(
    staleness: float, frequency: int, seed: int
) -> None:
    world = World(seed)
    attempts = [world.rng.randint(1, 8) for _ in range(6)]
    size, concurrent, redundancy = (1, 2, 2, 4)[seed], (64, 64, 1, 5)[seed], (0, 1, 0, 2)[seed]
    position = on_virtual_clock(
        train(
            world,
            staleness,
            frequency,
            size=size,
            attempts=attempts,
            concurrent=concurrent,
            redundancy=redundancy,
        )
    )
    assert {key.group for key in world.stored} <= {*position.pending_groups}, "nothing is left over"
    assert max(world.ages) <= math.ceil(staleness)
    assert len(world.numbers) == sum(attempts) * size
    numbers = Counter([*world.numbers, *position.pending_groups])
    assert numbers == Counter(range(position.next_group)), "each is trained on once, or waits"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("staleness", "frequency"), COMBINATIONS)
def test_slow_groups_are_trained_on_as_soon_as_two_tries_allow(
    staleness: float, frequency: int, seed: int
) -> None:
    world, size, steps = World(seed), 2, 60
    position = on_virtual_clock(
        train(world, staleness, frequency, size=size, attempts=[steps], concurrent=64)
    )
    patience = 2 * (math.ceil(staleness) + 1) + frequency
    assert min(position.pending_groups, default=steps * size) >= (steps - patience) * size


@pytest.mark.parametrize("seed", range(4))
def test_a_group_grows_too_old_at_most_once(seed: int) -> None:
    world = World(seed, failures=0.0)
    on_virtual_clock(train(world, 1, 1, size=2, attempts=[60], concurrent=64))
    assert world.stale > 0
    assert {attempt for _, attempt in world.tokens} == {0, 1}
