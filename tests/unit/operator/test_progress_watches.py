"""Runs that train are looked at when their reporter has news, on a clock that jumps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from agenticrun_api import Activity, ConditionType, Outcome, Phase
from agenticrun_api.progress import BEAT_SECONDS
from agenticrun_operator import progress_watches
from agenticrun_operator.cluster.head import HOLD_SECONDS, RAY_SECONDS, REPORTER_SECONDS
from agenticrun_operator.errors import HeadUnreachable
from agenticrun_operator.observed import Unreachable
from agenticrun_operator.reconcile_workers import ReconcileWorkers
from agenticrun_operator.workqueue import Item, WorkQueue
from operator_world import NAME, NAMESPACE, Operator, World, condition, training
from virtual_clock import on_virtual_clock

MINUTES = 10


class Watched:
    """A run that trains, and the operator's queue and workers on a clock that jumps."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator
        self.world = operator.world
        self.queue = WorkQueue(asyncio.get_running_loop().time)
        self.leading = asyncio.Event()
        self.leading.set()
        self.looks: list[float] = []
        operator.watch_progress(lambda key: self.queue.add_after(key, 0.0))

    @property
    def time(self) -> float:
        return asyncio.get_running_loop().time()

    async def reconcile(self, item: Item) -> float | None:
        self.looks.append(self.time)
        self.world.make_pods()
        return await self.operator.reconcile(item.changed)

    async def until(self, true: Callable[[], bool]) -> float:
        """Wait until something is true, at most a few minutes. Returns the seconds."""
        began = self.time
        while not true():
            assert self.time < began + 300
            await asyncio.sleep(0.1)
        return self.time - began

    async def shows(self, step: int) -> float:
        """Wait until the status has the step. Returns the seconds."""
        return await self.until(lambda: (self.world.status.step or 0) >= step)

    def drive(self, step: int, **fields: Any) -> None:
        self.world.drive(step, **{"max_steps": 10**6, "seconds_per_step": 60, **fields})


@asynccontextmanager
async def watched(hold_seconds: float = HOLD_SECONDS) -> AsyncIterator[Watched]:
    world = World(hold_seconds=hold_seconds)
    world.apply_run()
    operator = Operator(world)
    await training(operator, 1, max_steps=10**6, seconds_per_step=60)
    run = Watched(operator)
    workers = ReconcileWorkers(run.queue, run.reconcile, run.leading, operator.slots)
    workers.start()
    began = world.now - timedelta(seconds=run.time)

    async def keep_time() -> None:
        while True:
            world.now = began + timedelta(seconds=run.time)
            await asyncio.sleep(0.1)

    clock = asyncio.create_task(keep_time())
    run.queue.add((NAMESPACE, NAME))
    await asyncio.sleep(60)
    run.looks.clear()
    world.requests.clear()
    yield run
    await workers.stop()
    await operator.reconciler.stop()
    clock.cancel()
    assert len(asyncio.all_tasks()) <= 2, "no watch is left"


def on_watched(scenario: Callable[[Watched], Any], hold_seconds: float = HOLD_SECONDS) -> None:
    async def run() -> None:
        async with watched(hold_seconds) as made:
            await scenario(made)

    on_virtual_clock(run())


def test_a_run_without_news_is_looked_at_three_times_a_minute() -> None:
    async def scenario(run: Watched) -> None:
        await asyncio.sleep(60 * MINUTES)
        asked = run.world.requests
        assert 2 * MINUTES <= len(run.looks) <= 4 * MINUTES
        assert asked.count("get job") == len(run.looks)
        # Beside the looks' own: one in the time that it is held.
        held = asked.count("get progress") - len(run.looks)
        assert held <= 60 * MINUTES / HOLD_SECONDS + 1
        assert set(asked) == {"get job", "get progress"}

    on_watched(scenario)


@pytest.mark.parametrize(
    ("step_seconds", "most_looks"), [(1.0, 80), (5.0, 26), (20.0, 10), (60.0, 6)]
)
def test_each_step_is_in_the_status_four_seconds_later(
    step_seconds: float, most_looks: float
) -> None:
    """Each step has a rollout and a training."""

    async def scenario(run: Watched) -> None:
        lags = []
        sequence, step, end = 1, 1, run.time + 60 * MINUTES
        while run.time < end:
            step, sequence = step + 1, sequence + 2
            run.drive(step, sequence=sequence, activity=Activity.ROLLOUT)
            began = run.time
            lags.append(await run.shows(step))
            left = max(0.0, step_seconds - (run.time - began))
            await asyncio.sleep(0.6 * left)
            run.drive(step, sequence=sequence + 1, activity=Activity.TRAINING)
            await asyncio.sleep(0.4 * left)
        assert max(lags) <= 4.0
        assert len(run.looks) / MINUTES <= most_looks

    on_watched(scenario)


def test_a_reporter_that_holds_no_question_is_asked_as_often_as_before() -> None:
    """A worker image of an earlier version answers at once."""

    async def scenario(run: Watched) -> None:
        await asyncio.sleep(60 * MINUTES)
        assert run.world.requests.count("get progress") <= 66 * MINUTES
        assert len(run.looks) <= 4 * MINUTES
        run.drive(2)
        assert await run.shows(2) <= 4

    on_watched(scenario, hold_seconds=0)


@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.FAILED])
def test_a_final_report_is_asked_for_by_a_look(outcome: Outcome) -> None:
    """A reporter keeps it until a question that does not wait has read it."""

    async def scenario(run: Watched) -> None:
        run.world.end_driver(outcome, retryable=False)
        run.world.requests.clear()
        phase = Phase.SUCCEEDED if outcome is Outcome.SUCCEEDED else Phase.FAILED
        assert await run.until(lambda: run.world.status.phase is phase) <= 4
        assert run.world.requests[:2] == ["get job", "get progress"]

    on_watched(scenario)


def killed(world: World) -> None:
    world.end_driver(None)
    fall_silent(world, 3.0)


def fall_silent(world: World, seconds: float = 8.0) -> None:
    for head, report in world.reports.items():
        world.reports[head] = report.model_copy(update={"silent_seconds": seconds})


def cut_off(world: World) -> None:
    world.reporter_down = world.ray_down = True


def freeze(world: World) -> None:
    """Neither the reporter nor Ray answers, until the operator gives up."""

    async def hang(*_: Any, after: Any = None, seconds: float = REPORTER_SECONDS) -> Any:
        await asyncio.sleep(seconds + (BEAT_SECONDS if after else 0.0))
        return Unreachable("TimeoutError")

    world.progress = hang  # type: ignore[method-assign, assignment]
    world.job = partial(hang, seconds=RAY_SECONDS)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("fault", "seconds", "reason"),
    [
        (killed, 5.0, "DriverFailed"),
        (fall_silent, 5.0, "DriverSilent"),
        (cut_off, 5.0, "ProgressUnavailable"),
        (freeze, 10.0, "ProgressUnavailable"),
    ],
)
def test_what_ends_a_watch_is_in_the_status_soon(
    fault: Callable[[World], None], seconds: float, reason: str
) -> None:
    async def scenario(run: Watched) -> None:
        fault(run.world)
        assert (
            await run.until(lambda: condition(run.world, ConditionType.TRAINING).reason == reason)
            <= seconds
        )
        if reason != "DriverFailed":
            looks = len(run.looks)
            await asyncio.sleep(60)
            assert len(run.looks) - looks > 5, "the looks ask themselves, as often as before"

    on_watched(scenario)


def test_a_slow_answer_of_ray_delays_no_news() -> None:
    async def scenario(run: Watched) -> None:
        job = run.world.job

        async def slow(*arguments: Any) -> Any:
            await asyncio.sleep(6)
            return await job(*arguments)

        run.world.job = slow  # type: ignore[method-assign, assignment]
        for step in range(2, 30):
            await asyncio.sleep(7)
            run.drive(step)
            assert await run.shows(step) <= 12

    on_watched(scenario)


def test_a_bug_in_a_watch_costs_one_look_a_minute_at_most() -> None:
    async def scenario(run: Watched) -> None:
        progress = run.world.progress

        async def broken(head: Any, after: Any = None) -> Any:
            if after:
                raise RuntimeError("a bug")
            return await progress(head)

        run.world.progress = broken  # type: ignore[method-assign]
        await asyncio.sleep(60)
        run.looks.clear()
        await asyncio.sleep(600)
        assert len(run.looks) <= 30 * 10 + 10, "it is looked at as often as without a watch"
        run.drive(2)
        assert await run.shows(2) <= 4

    on_watched(scenario)


def test_a_driver_that_is_heard_again_is_watched_again() -> None:
    async def scenario(run: Watched) -> None:
        fall_silent(run.world)
        await asyncio.sleep(30)
        run.drive(2, silent_seconds=0.1)
        assert await run.shows(2) <= 4
        await asyncio.sleep(60)
        run.looks.clear()
        await asyncio.sleep(60)
        assert len(run.looks) <= 4

    on_watched(scenario)


def test_a_change_is_acted_on_at_once_and_asks_the_head() -> None:
    async def scenario(run: Watched) -> None:
        run.world.change_run(("pipeline.maxSteps", 5))
        run.world.requests.clear()
        run.queue.add((NAMESPACE, NAME))
        await asyncio.sleep(0.5)
        assert run.world.requests.count("get job") >= 1
        run.world.change_run(("suspend", True))
        run.queue.add((NAMESPACE, NAME))
        assert await run.until(lambda: run.world.status.phase is Phase.SUSPENDING) <= 1
        assert run.world.stop_requests == 1

    on_watched(scenario)


def test_an_operator_that_no_longer_looks_asks_no_more() -> None:
    """It lost the lease: another one leads."""

    async def scenario(run: Watched) -> None:
        run.leading.clear()
        await asyncio.sleep(2 * progress_watches.UNSEEN_SECONDS)
        run.world.requests.clear()
        await asyncio.sleep(600)
        assert run.world.requests == []
        run.leading.set()
        run.queue.add((NAMESPACE, NAME))
        await asyncio.sleep(10)
        run.drive(2)
        assert await run.shows(2) <= 4, "it leads again"

    on_watched(scenario)


def test_settings_that_the_reporter_refuses_are_sent_again_soon() -> None:
    async def scenario(run: Watched) -> None:
        world, configure = run.world, run.world.configure
        refused: list[float] = []

        async def refuse(*arguments: Any) -> None:
            refused.append(run.time)
            raise HeadUnreachable("status 503")

        world.configure = refuse  # type: ignore[method-assign, assignment]
        world.drive(2, max_steps=10**6, observed_generation=1)
        await run.shows(2)
        world.change_run(("pipeline.maxSteps", 5))
        run.queue.add((NAMESPACE, NAME))
        await run.until(lambda: len(refused) >= 2)
        world.configure = configure  # type: ignore[method-assign]
        began = run.time
        await run.until(lambda: any(each.max_steps == 5 for each in world.configs.values()))
        assert run.time - began <= 6

    on_watched(scenario)
