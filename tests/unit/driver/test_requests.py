"""What becomes of work when a stop is asked for."""

from __future__ import annotations

import asyncio

import pytest

from agenticrun_api import Commands
from agenticrun_workers.driver.progress import Requests, StopRequested


async def test_work_that_ends_together_with_the_request_gives_its_result() -> None:
    requests = Requests()

    async def taken() -> str:
        requests.stop.set()
        return "batch"

    assert await requests.unless_stopped(taken()) == "batch"
    with pytest.raises(StopRequested):
        await requests.unless_stopped(taken())


async def test_work_is_not_begun_after_a_request() -> None:
    requests, begun = Requests(), []

    async def work() -> None:
        begun.append(True)

    requests.stop.set()
    with pytest.raises(StopRequested):
        await requests.unless_stopped(work())
    assert not begun


async def test_work_under_way_is_cancelled() -> None:
    requests, ended = Requests(), []

    async def work() -> None:
        requests.stop.set()
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(True)

    with pytest.raises(StopRequested):
        await requests.unless_stopped(work())
    assert ended
    assert len(asyncio.all_tasks()) == 1


async def test_a_stop_comes_before_a_failure_so_that_the_state_is_saved() -> None:
    requests = Requests()
    failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        requests.apply(Commands(stop=True, leaving_pod="lake-trainer-0"))
        failure.set_exception(RuntimeError("engines on the same node died"))
        await asyncio.sleep(1000)

    with pytest.raises(StopRequested) as stopped:
        await requests.unless_stopped(work(), [failure])
    assert stopped.value.leaving_pod == "lake-trainer-0"


def test_the_first_cause_of_a_stop_stays() -> None:
    requests = Requests()
    requests.apply(Commands(stop=True))
    requests.apply(Commands(stop=True, leaving_pod="lake-head"))
    with pytest.raises(StopRequested) as stopped:
        requests.check_stop()
    assert stopped.value.leaving_pod is None


def test_a_checkpoint_is_asked_for_once() -> None:
    requests = Requests()
    assert not requests.take_checkpoint()
    requests.ask_checkpoint()
    requests.ask_checkpoint()
    assert requests.take_checkpoint()
    assert not requests.take_checkpoint()


async def test_what_cannot_be_kept_alive_comes_before_the_result() -> None:
    failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    failure.set_exception(RuntimeError("engines died"))
    with pytest.raises(RuntimeError, match="engines died"):
        await Requests().unless_stopped(asyncio.sleep(0, "batch"), [failure])
