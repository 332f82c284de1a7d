"""EnginePool keeps the engines of a run alive and up to date.

`colocated_slots` places engines on the GPUs of trainers.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from agenticrun_workers.errors import InvalidConfig, RolloutFailed
from agenticrun_workers.inference.engine import EngineStartError, EngineStats, UnusableModel
from agenticrun_workers.inference.slow_engines import SlowEngines
from agenticrun_workers.launch import ActorHandle, killed_on_error
from agenticrun_workers.launch.liveness import enough_of
from agenticrun_workers.placement import Placement, in_leaving_order
from agenticrun_workers.weights.sync import Receiver, SyncReport, WeightSync

if TYPE_CHECKING:
    from agenticrun_workers.inference.actor import EngineActor

log = logging.getLogger(__name__)

STATS_SECONDS = 3.0
MAX_DEATHS = 5
"""Number of engines that may die without a successful weight update between them."""


@dataclass(frozen=True, slots=True)
class ColocatedSlot:
    """A node and the GPUs that one engine shares with trainer ranks."""

    node_id: str
    gpus: tuple[str, ...]
    """GPUs of the ranks that the engine alternates with. Empty on machines without GPUs."""


def colocated_slots(trainers: Sequence[Placement], ranks_per_engine: int) -> list[ColocatedSlot]:
    """Return one slot for every `ranks_per_engine` trainer ranks of a pod.

    Args:
        trainers: placements of the trainer ranks. Those of one node share a pod, in this order.
        ranks_per_engine: number of ranks with which an engine shares GPUs.
    """
    by_node: dict[str, list[Placement]] = {}
    for placement in trainers:
        by_node.setdefault(placement.node_id, []).append(placement)
    return [
        ColocatedSlot(
            node_id,
            tuple(gpu for rank in ranks[first : first + ranks_per_engine] for gpu in rank.gpus),
        )
        for node_id, ranks in by_node.items()
        for first in range(0, len(ranks) - ranks_per_engine + 1, ranks_per_engine)
    ]


@dataclass(slots=True, eq=False)
class _Slot:
    """A place for one engine, as long as the pool has it: engines that die here are replaced."""

    number: int
    engine_id: str = ""
    """The engine that serves here; empty while one starts."""
    keeper: asyncio.Task[None] | None = None
    """Starts the engine in this slot, or watches the serving engine."""


class EnginePool:
    """Engines with the current weights.

    An engine that dies is replaced. One that joins, as a replacement or after `resize`, gets the
    weights before it serves. One that is far slower than the others gets no requests for a
    time (`SlowEngines`), but the weights.

    Args:
        spawn: places an engine actor, which may take any time. Arguments: its id and the number
            of its slot. A replacement gets the slot of the engine that it replaces.
        count: number of engines.
        on_change: called with the engines that serve, by id, whenever they change.
        start: starts the engine of an actor on its devices, with the model's first weights.
            Arguments: the actor and the number of its slot. By default the actor has its engine.
    """

    def __init__(
        self,
        spawn: Callable[[str, int], Awaitable[ActorHandle[EngineActor]]],
        count: int,
        on_change: Callable[[dict[str, ActorHandle[EngineActor]]], Awaitable[None]],
        start: Callable[[ActorHandle[EngineActor], int], Awaitable[None]] | None = None,
    ) -> None:
        self._spawn = spawn
        self._start_engine = start
        self._count = count
        self._on_change = on_change
        self._slots: list[_Slot] = []
        self._slots_made = 0
        self._spawned = 0
        self._deaths = 0
        self._weights: WeightSync | None = None
        self._changing = asyncio.Lock()
        """Held during a weight update, while a new engine gets the weights, and while engines
        leave."""
        self._awake = asyncio.Event()
        self._awake.set()
        self._starting = 0
        """Engines that start on their devices."""
        self._none_starts = asyncio.Event()
        self._none_starts.set()
        self._asked: dict[str, asyncio.Task[EngineStats]] = {}
        """Requests for statistics without an answer, by engine."""
        self._receivers: dict[str, Receiver[EngineActor]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._shrinking: asyncio.Task[None] | None = None
        self._slow = SlowEngines()
        self._ejected = 0
        """Engines that were ejected when `_ejected_seconds` was `_counted` last."""
        self._ejected_seconds = 0.0
        self._counted = time.perf_counter()
        self.engines: dict[str, ActorHandle[EngineActor]] = {}
        """Engines that are alive and have the weights."""
        self.retired: set[str] = set()
        """Engines that stopped serving alive: fewer are wanted, or they are too slow."""
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when the engines cannot be kept alive."""

    @property
    def count(self) -> int:
        """Number of engines that are wanted."""
        return self._count

    @property
    def serving(self) -> dict[str, ActorHandle[EngineActor]]:
        """Engines that get requests, by id: all, if only slow ones are left."""
        ejected = self._slow.ejected
        fast = {name: engine for name, engine in self.engines.items() if name not in ejected}
        return fast or dict(self.engines)

    @property
    def ejected_seconds(self) -> float:
        """Time so far that engines were ejected, added up over the engines."""
        self._count_ejected()
        return self._ejected_seconds

    def _count_ejected(self) -> None:
        """Add the time since the last change."""
        now = time.perf_counter()
        self._ejected_seconds += (now - self._counted) * self._ejected
        self._counted, self._ejected = now, len(self._slow.ejected)

    @property
    def joining(self) -> int:
        """Number of engines that start."""
        return sum(not slot.engine_id for slot in self._slots)

    @property
    def leaving(self) -> int:
        """Number of engines that are there and are not wanted."""
        return max(0, len(self._slots) - self._count)

    async def start(self, needed: int | None = None) -> None:
        """Start the engines.

        Args:
            needed: number of engines without which no response can be sampled; the others join
                later. Default: all.

        Raises:
            InvalidConfig: one cannot start with this model or these options.
        """
        slots = [self._new_slot() for _ in range(self._count)]
        starts = [asyncio.create_task(self._add(slot)) for slot in slots]
        try:
            # An error of the first start is a mistake in the run's settings, not a death: no retry
            # helps.
            late = await enough_of(starts, self._count if needed is None else needed)
        except UnusableModel as error:
            raise InvalidConfig("spec.model.path", str(error)) from error
        except EngineStartError as error:
            raise InvalidConfig("spec.pipeline.actorInfer.strategy", str(error)) from error
        for slot, start in zip(slots, starts, strict=True):
            if start in late:
                self._keep(slot, partial(self._serve, slot, start))

    def resize(self, count: int) -> None:
        """Follow another number of engines, in the background.

        More engines serve as soon as each has a pod and the weights. Engines leave between two
        weight updates: they get no new requests, their running requests continue on other engines
        from the tokens sampled so far, and their actors end. Whole nodes become empty first.
        """
        self._count = count
        for _ in range(count - len(self._slots)):
            slot = self._new_slot()
            self._keep(slot, partial(self._serve, slot))
        if self.leaving and (self._shrinking is None or self._shrinking.done()):
            self._shrinking = self._in_background(self._shrink, "shrink")

    async def sleep(self) -> None:
        """Make all engines leave their devices to the trainers.

        An engine that dies while it sleeps is replaced after `wake`. Waits for engines that are
        starting, but not for engines without a pod.
        """
        # First no new start, then wait for the running ones: an engine that starts uses GPU memory
        # that the trainers need.
        self._awake.clear()
        await self._none_starts.wait()
        await self._call_all("sleep", lambda engine: engine.sleep())

    async def wake(self) -> None:
        """Make all engines take their devices back. They serve after the next weight update."""
        await self._call_all("wake", lambda engine: engine.wake())
        self._awake.set()

    async def update_weights(
        self,
        weights: WeightSync,
        version: int,
        handover: Callable[[], Awaitable[None]] | None = None,
    ) -> SyncReport:
        """Load the trainers' weights into every engine. Engines that fail to are replaced.

        They get no more requests: one that still answers has the old weights.

        Args:
            weights: how weights travel from the trainers to the engines.
            version: policy version of the weights.
            handover: see `WeightSync.update`.

        Raises:
            InvalidConfig: the run's transport does not work between these trainers and engines.
        """
        async with self._changing:
            self._weights = weights
            receivers = dict(self._receivers)
            report = await weights.update(receivers, version, handover)
        for engine_id, error in report.failed.items():
            log.warning("%s did not load version %d: %s", engine_id, version, error)
            # It has the old weights, or a mix of both: no response of it may be trained on.
            receivers[engine_id].handle.kill()
        if report.failed:
            for slot in self._slots:
                if slot.engine_id in report.failed:
                    self._forget(slot)
            await self._tell()
        # An engine that loads weights works, so deaths before it were not the model's or the
        # options' fault.
        if len(report.failed) < len(receivers):
            self._deaths = 0
        return report

    async def stats(self) -> dict[str, EngineStats]:
        """Return the statistics of each engine that answers in `STATS_SECONDS`, by its id.

        One that has not answered is asked again, and waited for, when it has. So a frozen engine
        costs that time once until it is killed.
        """
        asked = {
            name: asyncio.create_task(_stats_of(engine), name=f"stats-{name}")
            for name, engine in self.engines.items()
            if name not in self._asked
        }
        if not asked:
            return {}
        # Engines that still owe an answer are not asked again: calls would pile up at a frozen one.
        self._asked |= asked
        for name, task in asked.items():
            task.add_done_callback(functools.partial(self._has_answered, name))
        answered, _ = await asyncio.wait(asked.values(), timeout=STATS_SECONDS)
        return {
            name: task.result()
            for name, task in asked.items()
            if task in answered and not task.cancelled() and task.exception() is None
        }

    def _has_answered(self, name: str, task: asyncio.Task[EngineStats]) -> None:
        del self._asked[name]
        if not task.cancelled():
            # Retrieve the exception to silence asyncio; the engine's watcher reports the death.
            task.exception()

    async def stop(self) -> None:
        """Stop watching the engines. Their actors end with the Ray session."""
        self.failure.cancel()
        tasks: list[asyncio.Task[Any]] = [*self._tasks, *self._asked.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _tell(self) -> None:
        """Tell which engines serve."""
        self._count_ejected()
        serving = self.serving
        self.retired -= serving.keys()
        self.retired |= self.engines.keys() - serving.keys()
        await self._on_change(serving)

    async def _call_all(
        self, name: str, method: Callable[[EngineActor], Coroutine[Any, Any, None]]
    ) -> None:
        """Call a method of every engine. Engines that die in it are replaced."""
        engines = dict(self.engines)
        calls = (engine.call(method) for engine in engines.values())
        for engine_id, answer in zip(
            engines, await asyncio.gather(*calls, return_exceptions=True), strict=True
        ):
            if isinstance(answer, Exception):
                log.warning("%s failed to %s: %s", engine_id, name, answer)
                # An engine that is half asleep or half awake cannot be used, and may hold memory
                # that the trainers need: it is replaced.
                engines[engine_id].kill()
            # Our own cancellation is no failure of an engine.
            elif isinstance(answer, BaseException):
                raise answer

    def _new_slot(self) -> _Slot:
        self._slots.append(_Slot(self._slots_made))
        self._slots_made += 1
        return self._slots[-1]

    def _keep(self, slot: _Slot, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work` for a slot in the background, until the slot is given up."""
        slot.keeper = self._in_background(work, f"keep-{slot.number}")

    def _in_background(
        self, work: Callable[[], Coroutine[Any, Any, None]], name: str
    ) -> asyncio.Task[None]:
        """Run `work` until `stop`. An error in it ends the attempt."""

        async def work_or_fail() -> None:
            try:
                await work()
            except Exception as error:
                if not self.failure.done():
                    self.failure.set_exception(error)

        task = asyncio.create_task(work_or_fail(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _add(self, slot: _Slot) -> None:
        """Start an engine in a slot, and watch it from the moment at which it serves."""
        engine_id = f"engine-{self._spawned}"
        self._spawned += 1
        # Waits until a pod has room; only then does the start count as using the devices.
        handle = await self._spawn(engine_id, slot.number)
        with killed_on_error(handle):
            # `sleep` may clear it again between the wake-up and our turn.
            while not self._awake.is_set():
                await self._awake.wait()
            self._starting += 1
            self._none_starts.clear()
            try:
                if self._start_engine is not None:
                    await self._start_engine(handle, slot.number)
                death = await self._join(engine_id, handle)
            finally:
                self._starting -= 1
                if not self._starting:
                    self._none_starts.set()
        self.engines[engine_id] = handle
        slot.engine_id = engine_id
        self._keep(slot, partial(self._watch, slot, engine_id, death))
        # Last, so that clients never ask an engine that is not being watched.
        await self._tell()

    async def _join(
        self, engine_id: str, handle: ActorHandle[EngineActor]
    ) -> asyncio.Task[Exception]:
        """Give a new engine the weights. Return the task that polls it."""
        # Polled from here on, so that a frozen engine fails the calls below, too.
        death = asyncio.create_task(
            _death_of(handle, partial(self._polled, engine_id)), name=f"poll-{engine_id}"
        )
        try:
            placement = await handle.call(lambda engine: engine.placement())
            receiver = Receiver(handle, placement.node_id)
            # A sync in between would leave this engine with the previous version.
            async with self._changing:
                # Before the first sync it serves nothing and gets the weights with all others.
                if self._weights is not None and self._weights.version is not None:
                    await self._weights.join(engine_id, receiver)
                self._receivers[engine_id] = receiver
        except BaseException:
            death.cancel()
            raise
        return death

    def _polled(self, engine_id: str, stats: EngineStats) -> None:
        """Eject the engine if it is slow, unless it does not serve yet."""
        # An engine that still loads its first weights has no speed to compare.
        if engine_id in self.engines and (said := self._slow.poll(engine_id, stats)):
            log.warning("%s", said)
            self._in_background(self._tell, f"tell-{engine_id}")

    async def _watch(self, slot: _Slot, engine_id: str, death: asyncio.Task[Exception]) -> None:
        """Replace an engine when it dies.

        Raises:
            RolloutFailed: too many engines died in a row.
        """
        try:
            log.warning("%s died and is replaced: %s", engine_id, await death)
        finally:
            death.cancel()
        # Before `_count_death`, which may raise: clients must learn of the death in any case.
        self._forget(slot)
        await self._tell()
        self._count_death(engine_id, death.result())
        await self._serve(slot)

    def _forget(self, slot: _Slot) -> None:
        """Take the engine of a slot out of use, if the slot has one."""
        if slot.engine_id:
            del self.engines[slot.engine_id], self._receivers[slot.engine_id]
            self._slow.forget(slot.engine_id)
            slot.engine_id = ""

    async def _serve(self, slot: _Slot, start: Awaitable[None] | None = None) -> None:
        """Start an engine in a slot. Try again if the first ones die or fail before they serve.

        Others have served with the same settings: whatever its error says, it counts as a death.

        Args:
            slot: the slot.
            start: the start of the first engine, if it has begun.

        Raises:
            RolloutFailed: too many engines died in a row.
        """
        while True:
            try:
                return await (start or self._add(slot))
            except Exception as error:
                log.warning("a new engine cannot serve: %s", error)
                self._count_death("which never served", error)
                start = None

    def _count_death(self, engine: str, death: Exception) -> None:
        self._deaths += 1
        if self._deaths >= MAX_DEATHS:
            raise RolloutFailed(
                f"{self._deaths} engines died in a row. The last one, {engine}: {death}"
            )

    async def _shrink(self) -> None:
        """Let engines leave until there are no more than are wanted."""
        while self.leaving:
            left: list[str] = []
            async with self._changing:  # none of them is loading weights
                for slot in self._first_to_leave()[: self.leaving]:
                    # Removed while the lock is held, so that its keeper cannot join it again.
                    self._slots.remove(slot)
                    if slot.keeper is not None:
                        slot.keeper.cancel()
                    if slot.engine_id:
                        left.append(slot.engine_id)
                handles = [self.engines.pop(engine_id) for engine_id in left]
                for engine_id in left:
                    del self._receivers[engine_id]
                    self._slow.forget(engine_id)
            self.retired.update(left)
            log.info("engines leave, %d stay: %s", self._count, ", ".join(left) or "none served")
            await self._tell()
            # Only after clients know it, so that they move their requests without counting a death.
            for handle in handles:
                handle.kill()

    def _first_to_leave(self) -> list[_Slot]:
        """Return the slots in the order in which they are given up: those without engine first."""
        served = {slot.engine_id: slot for slot in self._slots if slot.engine_id}
        nodes = {engine_id: self._receivers[engine_id].node_id for engine_id in served}
        # An engine that starts has no requests and no cache to lose.
        starting = [slot for slot in self._slots if not slot.engine_id]
        return starting + [served[engine_id] for engine_id in in_leaving_order(nodes)]


async def _stats_of(engine: ActorHandle[EngineActor]) -> EngineStats:
    return await engine.call(lambda actor: actor.stats())


async def _death_of(
    engine: ActorHandle[EngineActor], polled: Callable[[EngineStats], None]
) -> Exception:
    """Poll an engine until it dies, freezes or serves no more. Kill it, and return the error."""
    try:
        while True:
            polled(await engine.poll(lambda actor: actor.health()))
    except Exception as error:
        # The actor may be frozen, or alive with a failed engine: in both cases it must free its
        # GPUs.
        engine.kill()
        return error
