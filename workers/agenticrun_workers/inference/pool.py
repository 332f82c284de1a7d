"""EnginePool: keeps engines alive and up to date."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import ray.exceptions

from agenticrun_workers.errors import RolloutFailed
from agenticrun_workers.weights.sync import Receiver, SyncReport, WeightSync

if TYPE_CHECKING:
    from agenticrun_workers.inference import EngineStats

log = logging.getLogger(__name__)

MAX_DEATHS = 5
"""Engines that may die in a row without one weight update between them."""


class EnginePool:
    """`count` engines with the current weights. One that dies is replaced, and gets the weights before it serves.

    Args:
        spawn: makes an engine actor that is started, with the model's first weights, for the seat of this number: a replacement gets
            the seat of the engine that it replaces.
        on_change: told the engines by id whenever they change.
    """

    def __init__(
        self,
        spawn: Callable[[str, int], Awaitable[Any]],
        count: int,
        on_change: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        self._spawn = spawn
        self._count = count
        self._on_change = on_change
        self._made = 0
        self._deaths = 0
        self._weights: WeightSync | None = None
        self._changing = asyncio.Lock()
        """Held by a weight update, and while a new engine gets the weights."""
        self._awake = asyncio.Event()
        self._awake.set()
        self._replacing: set[asyncio.Task[None]] = set()
        self._receivers: dict[str, Receiver] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self.engines: dict[str, Any] = {}
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when engines cannot be kept alive."""

    async def start(self) -> None:
        """Bring all engines up. Raises what `spawn` raises."""
        await asyncio.gather(*(self._add(seat) for seat in range(self._count)))

    async def sleep(self) -> None:
        """All engines leave their devices to the trainers. One that dies meanwhile is replaced after `wake`."""
        self._awake.clear()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        await self._tell_all("sleep")

    async def wake(self) -> None:
        """All engines take their devices back; they serve after a weight update."""
        await self._tell_all("wake")
        self._awake.set()

    async def update_weights(
        self,
        weights: WeightSync,
        version: int,
        handover: Callable[[], Awaitable[None]] | None = None,
    ) -> SyncReport:
        """Give every engine the trainers' weights, and count them as `version`. Engines that fail on it are replaced.

        Args:
            handover: see `WeightSync.update`.

        Raises:
            InvalidConfig: they cannot get there as the run says.
        """
        async with self._changing:
            self._weights = weights
            receivers = dict(self._receivers)
            report = await weights.update(receivers, version, handover)
        for engine_id, error in report.failed.items():
            log.warning("%s did not take version %d: %s", engine_id, version, error)
            ray.kill(receivers[engine_id].handle)
        if len(report.failed) < len(receivers):
            self._deaths = 0
        return report

    async def stats(self) -> dict[str, EngineStats]:
        """What each engine that lives says about its load, by its id."""
        engines = dict(self.engines)
        answers = await asyncio.gather(
            *(engine.stats.remote() for engine in engines.values()), return_exceptions=True
        )
        return {
            name: answer
            for name, answer in zip(engines, answers, strict=True)
            if not isinstance(answer, BaseException)
        }

    async def stop(self) -> None:
        """Stop watching. The actors end with the Ray session."""
        self.failure.cancel()
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)

    async def _tell_all(self, method: str) -> None:
        """Engines that cannot do it are replaced."""
        engines = dict(self.engines)
        calls = (getattr(engine, method).remote() for engine in engines.values())
        for engine_id, answer in zip(
            engines, await asyncio.gather(*calls, return_exceptions=True), strict=True
        ):
            if isinstance(answer, ray.exceptions.RayError):
                log.warning("%s did not %s: %s", engine_id, method, answer)
                ray.kill(engines[engine_id])
            elif isinstance(answer, BaseException):
                raise answer

    async def _add(self, seat: int) -> None:
        engine_id = f"engine-{self._made}"
        self._made += 1
        handle = await self._spawn(engine_id, seat)
        receiver = Receiver(handle, (await handle.placement.remote()).node_id)
        async with self._changing:
            if self._weights is not None and self._weights.version is not None:
                await self._weights.join(receiver)
            self._receivers[engine_id] = receiver
        self.engines[engine_id] = handle
        watcher = asyncio.create_task(self._watch(engine_id, handle, seat), name=engine_id)
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        await self._on_change(dict(self.engines))

    async def _watch(self, engine_id: str, handle: Any, seat: int) -> None:
        try:
            await handle.until_death.remote()
        except ray.exceptions.RayError as error:
            log.warning("%s is gone (%s): it is replaced", engine_id, error)
        ray.kill(handle)
        del self.engines[engine_id], self._receivers[engine_id]
        self._deaths += 1
        await self._on_change(dict(self.engines))
        try:
            if self._deaths >= MAX_DEATHS:
                raise RolloutFailed(f"{self._deaths} engines died in a row")
            while not self._awake.is_set():
                await self._awake.wait()
            replacing = asyncio.create_task(self._add(seat), name=f"replace-{engine_id}")
            self._replacing.add(replacing)
            replacing.add_done_callback(self._replacing.discard)
            await replacing
        except Exception as error:  # whatever keeps a new engine from starting ends the attempt
            if not self.failure.done():
                self.failure.set_exception(error)
