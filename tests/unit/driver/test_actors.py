"""The driver's watch over its actors."""

from __future__ import annotations

import asyncio

import pytest

from agenticrun_workers.driver.actors import _until_death
from agenticrun_workers.launch import ActorUnavailable
from agenticrun_workers.launch.liveness import FROZEN_POLLS, POLL_SECONDS
from rollout_fakes import Remote
from virtual_clock import on_virtual_clock

LIMIT = FROZEN_POLLS * POLL_SECONDS


def test_a_store_may_take_any_time_to_start_and_is_given_up_when_it_freezes_later() -> None:
    started, froze = 10 * LIMIT, 20 * LIMIT

    class Store:
        async def health(self) -> None:
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(started - now if now < started else POLL_SECONDS)
            if asyncio.get_running_loop().time() >= froze:
                await asyncio.Event().wait()

    async def watch() -> float:
        store = Remote(Store())
        with pytest.raises(ActorUnavailable, match="has not answered for 60 s"):
            await _until_death(store)
        assert store.killed
        return asyncio.get_running_loop().time()

    assert froze < on_virtual_clock(watch()) <= froze + LIMIT + POLL_SECONDS
