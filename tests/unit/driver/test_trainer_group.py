"""Calls to all ranks together, on fakes of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from agenticrun_workers.driver.trainer_group import TrainerGroup
from agenticrun_workers.errors import ScheduleEnded
from agenticrun_workers.launch import ActorHandle, ActorOptions
from agenticrun_workers.launch.in_process import InProcessLauncher
from tiny_runs import tiny_run


class Rank:
    """A rank of policy and critic. `stretched` is what its schedules were told."""

    def __init__(self, rates: dict[str, float]) -> None:
        self.rates = rates
        self.stretched: dict[str, int] = {}
        self.writes: dict[str, str | OSError] = {}

    def save(self, part: str, folder: str) -> None:
        self.writes[part] = folder

    def end_write(self, part: str, error: OSError | None) -> None:
        self.writes[part] = error or "durable"

    def is_durable(self, part: str) -> bool:
        write = self.writes[part]
        if isinstance(write, OSError):
            raise write
        return write == "durable"

    def rate_falls_from(self, part: str) -> float:
        return self.rates[part]

    def told(self) -> dict[str, int]:
        return self.stretched

    def stretch_schedule(self, part: str, steps_left: int) -> None:
        self.stretched[part] = steps_left


@pytest.fixture
def launcher() -> Iterator[InProcessLauncher]:
    with closing(InProcessLauncher()) as launcher:
        yield launcher


def group(
    launcher: InProcessLauncher, rates: dict[str, float]
) -> tuple[TrainerGroup, list[ActorHandle[Rank]]]:
    """Return two ranks of a policy and a critic whose learning rates are these."""
    pipeline = tiny_run(algorithm={"name": "gae"}, critic={}, criticWarmup=2).spec.pipeline
    ranks = [launcher.start(ActorOptions(), Rank, rates) for _ in range(2)]
    trainers: Any = ranks
    weights: Any = None
    return TrainerGroup(launcher, pipeline, trainers, [0, 1], [], [], weights), ranks


async def told(ranks: list[ActorHandle[Rank]]) -> list[dict[str, int]]:
    return [await rank.call(lambda actor: actor.told()) for rank in ranks]


async def test_all_ranks_stretch_the_schedule_of_each_model(launcher: InProcessLauncher) -> None:
    trainers, ranks = group(launcher, {"actor_train": 1e-6, "critic": 1e-5})
    await trainers.stretch_schedules(1, 7)  # two optimizer steps each
    assert await told(ranks) == [{"actor_train": 10, "critic": 12}] * 2


@pytest.mark.parametrize(("rate", "warns"), [(2.9e-4, True), (3.1e-4, False)])
async def test_a_schedule_that_is_stretched_when_it_has_nearly_ended_is_warned_about(
    launcher: InProcessLauncher, rate: float, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    trainers, _ = group(launcher, {"actor_train": rate, "critic": 1.0})  # its peak is 0.003
    await trainers.stretch_schedules(3, 7)
    assert ("actor_train: maxSteps has changed to 7" in caplog.text) == warns
    assert ("fallen to 0.00029, 9.7 % of its peak" in caplog.text) == warns
    assert "critic" not in caplog.text


async def test_no_schedule_is_stretched_where_one_has_ended(launcher: InProcessLauncher) -> None:
    trainers, ranks = group(launcher, {"actor_train": 1e-6, "critic": 0.0})
    with pytest.raises(ScheduleEnded, match="critic: "):
        await trainers.stretch_schedules(3, 7)
    assert await told(ranks) == [{}, {}]


async def test_fewer_steps_than_were_made_are_no_news_to_a_schedule_that_has_ended(
    launcher: InProcessLauncher,
) -> None:
    trainers, ranks = group(launcher, {"actor_train": 0.0, "critic": 0.0})
    await trainers.stretch_schedules(7, 3)
    assert (await told(ranks))[0]["critic"] < 0


async def test_a_module_is_durable_when_all_its_ranks_have_written_it(
    launcher: InProcessLauncher,
) -> None:
    trainers, ranks = group(launcher, {})
    durable = {name: await save(f"/step-1/{name}") for name, save in trainers.savers.items()}
    assert [*durable] == ["actor_train", "critic"]
    assert not await durable["critic"]()
    for rank in ranks:
        assert not await durable["critic"]()
        await rank.call(lambda actor: actor.end_write("critic", None))
    assert await durable["critic"]()
    assert not await durable["actor_train"]()
    for rank, error in zip(ranks, (None, OSError(28, "full")), strict=True):
        await rank.call(lambda actor: actor.end_write("actor_train", error))
    with pytest.raises(OSError, match="full"):
        await durable["actor_train"]()
