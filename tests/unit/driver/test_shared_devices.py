"""Engines and trainers never have the same devices at the same time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.driver.shared_devices import SharedDevices


class Users:
    """Both sides in one: what they were told, and that they never overlap."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.trainers, self.engines = True, False

    async def offload(self) -> None:
        assert self.trainers
        self.trainers = False
        self.told.append("offload")

    async def onload(self) -> None:
        assert not self.engines
        self.trainers = True
        self.told.append("onload")

    async def sleep(self) -> None:
        assert self.engines
        self.engines = False
        self.told.append("sleep")

    async def wake(self) -> None:
        assert not self.trainers
        self.engines = True
        self.told.append("wake")


async def test_trainers_leave_before_engines_wake_and_engines_sleep_before_trainers_return() -> (
    None
):
    users = Users()
    devices = SharedDevices(users, users)
    await devices.to_engines()
    await devices.to_trainers()
    assert users.told == ["offload", "wake", "sleep", "onload"]
    assert devices.handovers == 2


@given(st.lists(st.booleans(), max_size=20))
async def test_asking_again_changes_nothing(wishes: list[bool]) -> None:
    users = Users()
    devices = SharedDevices(users, users)
    for engines in wishes:
        await (devices.to_engines() if engines else devices.to_trainers())
        assert (users.engines, users.trainers) == (engines, not engines)
    changes = sum(before != after for before, after in zip([False, *wishes], wishes, strict=False))
    assert devices.handovers == changes
