"""WeightSync: the policy's weights from the trainers to the engines, versioned and checked.

    trainer rank 0 --writes--> its node's shared memory --mapped by--> engines of that node
                                       |
                                       +--ObjectStore or Disk--> shared memory of other nodes --mapped by--> their engines

How they flow through files is `FileSync`, and by a collective `Broadcasting`. The weights never pass through the driver, which only
tells who may read what.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agenticrun_api.training import WeightSync as Spec
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.weights.broadcasting import Broadcasting
from agenticrun_workers.weights.buckets import Bucket
from agenticrun_workers.weights.file_sync import FileSync, Receiver, Sent, Spawn
from agenticrun_workers.weights.merge_plan import Expansion
from agenticrun_workers.weights.transport import Transport, UnusableTransport, choose
from agenticrun_workers.weights.transports import DiskMover, Mover, ObjectStoreMover
from agenticrun_workers.weights.written import CorruptBucket

__all__ = ["Receiver", "SyncReport", "WeightSync"]

log = logging.getLogger(__name__)

SpawnExpanding = Callable[[str, str, tuple[Bucket, ...], Expansion], Any]
"""As `Spawn`, of an actor that makes whole weights of adapters."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """How a sync went."""

    transport: Transport
    nbytes: int
    """Brought to the nodes of the receivers: whole buckets, or what changed in them."""
    changed_share: float
    """Elements that differ from the last sync, of what travels; 1 where nobody looked."""
    failed: Mapping[str, BaseException]
    """Receivers that did not take the weights, and why: they have died, or must not serve."""
    adapters: bool = False
    """Adapters travelled, and nodes made whole weights of them."""


class WeightSync:
    """Syncs and joins must not overlap: the caller sees to that.

    Args:
        run: a name that is the run's alone, for folders.
        trainers: the policy's ranks.
        home: the node of the first of them.
        spawn: makes the `NodeWeights` actor of a node.
        spawn_expanding: makes the `AdapterNode` of a node, in a run that trains adapters alone.
    """

    def __init__(
        self,
        spec: Spec,
        run: str,
        trainers: Sequence[Any],
        home: str,
        spawn: Spawn,
        spawn_expanding: SpawnExpanding | None = None,
    ) -> None:
        self._spec = spec
        self._run = run
        self._trainers = trainers
        self._home = home
        self._spawn_expanding = spawn_expanding
        self._whole = FileSync(
            run, trainers, home, spawn, bucket_bytes=spec.bucket_bytes, delta=spec.delta
        )
        self._of_engines: FileSync | None = None
        self._broadcasting: Broadcasting | None = None
        self._object_store = ObjectStoreMover()
        self._disk = DiskMover(f"{spec.uri}/{run}/weights") if spec.uri else None
        self.version: int | None = None
        """The version of the last sync."""

    async def update(
        self,
        receivers: Mapping[str, Receiver],
        version: int,
        handover: Callable[[], Awaitable[None]] | None = None,
    ) -> SyncReport:
        """Give all engines the trainers' weights as they are now. A sync in which a bucket was damaged is done again, once, as a whole.

        Args:
            handover: called when the trainers have written everything and no receiver has taken anything, because they cannot
                compute at the same time. The trainers are then out of reach: nothing is done again.

        Raises:
            InvalidConfig: the transport that was asked for does not reach a receiver, or a receiver's node has other model files.
        """
        transport = self._transport({receiver.node_id for receiver in receivers.values()})
        files = await self._files_of_engines()
        if transport is Transport.BROADCAST:
            return await self._broadcast(receivers, version)
        mover = self._mover(transport)
        sent = await files.send(mover, receivers, version, handover)
        if handover is None and any(
            isinstance(error, CorruptBucket) for error in sent.failed.values()
        ):
            files.forget()
            sent = await files.send(mover, receivers, version)
        _raise_any(sent, InvalidConfig)
        self.version = version
        return SyncReport(transport, sent.nbytes, sent.changed_share, sent.failed, files.adapters)

    async def copy_to(self, receivers: Mapping[str, Receiver]) -> None:
        """Give others than engines the trainers' weights as they are now: whole, by files whatever `transport` says.

        Raises what they raise.
        """
        sent = await self._whole.send(self._object_store, receivers, 0)
        _raise_any(sent, BaseException)
        if await self._files_of_engines() is not self._whole:
            await self._whole.release()

    async def join(self, receiver: Receiver) -> None:
        """Give one engine the version of the last sync, from its node's copy, or the first trainer's. The trainers may be busy.

        A broadcast leaves no copy: after one, the trainers are asked when they are free, and their version is served.
        """
        assert self.version is not None, "there was no sync yet"
        if self._spec.transport == "Broadcast":
            version = await self._trainers[0].policy_version.remote()
            _raise_any(
                await self._whole.send(self._object_store, {"": receiver}, version), BaseException
            )
            return
        files = await self._files_of_engines()
        await files.send_again(
            self._mover(self._transport([receiver.node_id])), receiver, self.version
        )

    async def stop(self) -> None:
        """Free the memory of all nodes, and the folder on disk."""
        for files in {self._whole, self._of_engines or self._whole}:
            await files.stop(self._disk.uri if self._disk else None)

    async def _broadcast(self, receivers: Mapping[str, Receiver], version: int) -> SyncReport:
        shapes = await self._whole.shapes()
        if self._broadcasting is None:
            self._broadcasting = Broadcasting(self._trainers, shapes)
        failed = await self._broadcasting.update(receivers, version)
        self.version = version
        size = sum(shape.nbytes for shape in shapes)
        return SyncReport(Transport.BROADCAST, size * (len(receivers) - len(failed)), 1.0, failed)

    async def _files_of_engines(self) -> FileSync:
        """What engines get: adapters alone where nodes can make whole weights of them, else whole weights. Decided once."""
        if self._of_engines is None:
            self._of_engines = await self._adapters() or self._whole
        return self._of_engines

    async def _adapters(self) -> FileSync | None:
        spawn = self._spawn_expanding
        if spawn is None:
            return None
        found: Expansion | str = (
            "a broadcast goes into the engines themselves, which know of no adapters"
        )
        if self._spec.transport != "Broadcast":
            found, *_ = await asyncio.gather(
                *(trainer.expansion.remote() for trainer in self._trainers)
            )
        if isinstance(found, str):
            log.warning(
                "engines get whole weights with the adapters merged, not the adapters alone: %s",
                found,
            )
            return None
        expansion = found
        return FileSync(
            self._run,
            self._trainers,
            self._home,
            lambda node_id, run, buckets: spawn(node_id, run, buckets, expansion),
            bucket_bytes=self._spec.bucket_bytes,
            delta=self._spec.delta,
            adapters=True,
        )

    def _transport(self, places: set[str] | list[str]) -> Transport:
        try:
            return choose(self._spec.transport, self._home, places)
        except UnusableTransport as error:
            raise InvalidConfig("spec.pipeline.weightSync.transport", str(error)) from error

    def _mover(self, transport: Transport) -> Mover:
        if transport is Transport.DISK:
            assert self._disk is not None, "transport Disk has a uri"
            return self._disk
        return self._object_store


def _raise_any(sent: Sent, kind: type[BaseException]) -> None:
    """An error of this kind that a receiver ended with."""
    for error in sent.failed.values():
        if isinstance(error, kind):
            raise error
