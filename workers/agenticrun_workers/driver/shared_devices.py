"""Engines and trainers that take turns on the same GPUs (`spec.placement: Colocated`)."""

from __future__ import annotations

from typing import Protocol


class Sleepers(Protocol):
    """Engines that can leave their devices."""

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class Movers(Protocol):
    """Trainers that can."""

    async def offload(self) -> None: ...

    async def onload(self) -> None: ...


class SharedDevices:
    """One side has all memory of the devices, the other is asleep or in host memory. It begins with the trainers.

    A weight sync is a handover too: trainers write all weights into shared memory, leave, and only then the engines wake and read
    them. At no time have both models to fit, nor a model and an engine's cache.
    """

    def __init__(self, trainers: Movers, engines: Sleepers) -> None:
        self._trainers = trainers
        self._engines = engines
        self._engines_have_them = False
        self.handovers = 0
        """How often the devices have changed hands."""

    async def to_engines(self) -> None:
        """From here on engines sample, and trainers cannot compute."""
        if not self._engines_have_them:
            await self._trainers.offload()
            await self._engines.wake()
            self._hand_over(to_engines=True)

    async def to_trainers(self) -> None:
        """From here on trainers compute. Requests still under way are given up."""
        if self._engines_have_them:
            await self._engines.sleep()
            await self._trainers.onload()
            self._hand_over(to_engines=False)

    def _hand_over(self, *, to_engines: bool) -> None:
        self._engines_have_them = to_engines
        self.handovers += 1
