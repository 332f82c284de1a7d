"""GPUs that engines and trainers use in turn."""

from __future__ import annotations

from typing import Protocol


class SleepingEngines(Protocol):
    """Engines that can free their devices."""

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class OffloadingTrainers(Protocol):
    """Trainers that can free their devices."""

    async def offload(self) -> None: ...

    async def onload(self) -> None: ...


class SharedDevices:
    """GPUs that engines and trainers use in turn (`spec.placement: Colocated`).

    One side has all memory of the devices while the other sleeps or is in host memory; the
    trainers have them first. A weight sync hands the devices over too: trainers write all weights
    into shared memory and leave, then the engines wake and read them. So the devices never hold
    both models, nor a model and an engine's cache.
    """

    def __init__(self, trainers: OffloadingTrainers, engines: SleepingEngines) -> None:
        self._trainers = trainers
        self._engines = engines
        self._engines_have_them = False
        self.handovers = 0
        """Number of times that the devices have changed hands."""

    async def to_engines(self) -> None:
        """Let the engines sample; the trainers cannot compute after this."""
        if not self._engines_have_them:
            # In this order: the devices cannot hold both.
            await self._trainers.offload()
            await self._engines.wake()
            self._hand_over(to_engines=True)

    async def to_trainers(self) -> None:
        """Let the trainers compute; requests that engines still work on are given up."""
        if self._engines_have_them:
            await self._engines.sleep()
            await self._trainers.onload()
            self._hand_over(to_engines=False)

    def _hand_over(self, *, to_engines: bool) -> None:
        self._engines_have_them = to_engines
        self.handovers += 1
