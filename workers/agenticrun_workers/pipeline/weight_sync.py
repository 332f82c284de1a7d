"""WeightSync: the policy's weights from the trainers to the engines, versioned and checked.

    trainer rank 0 --writes--> its node's shared memory --mapped by--> engines of that node
                                       |
                                       +--ObjectStore or Disk--> shared memory of other nodes --mapped by--> their engines

Buckets flow: while the trainer writes one, those before it travel and are loaded. The weights never pass through the driver, which
only tells who may read what. Files are overwritten in the next sync, and only when every engine is done with this one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agenticrun_api.training import WeightSync as Spec
from agenticrun_workers.pipeline.broadcasting import Broadcasting
from agenticrun_workers.pipeline.feed import Feed
from agenticrun_workers.pipeline.moving import DiskMover, Mover, ObjectStoreMover
from agenticrun_workers.pipeline.node_copy import NodeCopy
from agenticrun_workers.rollout.errors import InvalidConfig
from agenticrun_workers.weight_sync.layout import Bucket, Shape, buckets_of
from agenticrun_workers.weight_sync.transport import Transport, UnusableTransport, choose
from agenticrun_workers.weight_sync.written import CorruptBucket, Written


@dataclass(frozen=True, slots=True)
class Receiver:
    """An actor that takes weights: an engine, or a rank of the reference."""

    handle: Any
    node_id: str


@dataclass(frozen=True, slots=True)
class SyncReport:
    """How a sync went."""

    transport: Transport
    nbytes: int
    """Brought to the nodes of the receivers: whole buckets, or what changed in them."""
    changed_share: float
    """Elements that differ from the last sync; 1 where nobody looked."""
    failed: Mapping[str, BaseException]
    """Receivers that did not take the weights, and why: they have died, or must not serve."""


class WeightSync:
    """Syncs and joins must not overlap: the caller sees to that.

    Args:
        run: a name that is the run's alone, for folders.
        trainers: the policy's ranks.
        home: the node of the first of them.
        spawn: makes the `NodeWeights` actor of a node.
    """

    def __init__(
        self, spec: Spec, run: str, trainers: Sequence[Any], home: str, spawn: Callable[[str, str, tuple[Bucket, ...]], Any]
    ) -> None:
        self._spec = spec
        self._run = run
        self._trainers = trainers
        self._home = home
        self._spawn = spawn
        self._exported: list[Shape] | None = None
        self._buckets: tuple[Bucket, ...] | None = None
        self._broadcasting: Broadcasting | None = None
        self._nodes: dict[str, NodeCopy] = {}
        self._disk = DiskMover(f"{spec.uri}/{run}/weights") if spec.uri else None
        self._opened: Path | None = None
        """The folder that the trainer writes into."""
        self._written: list[Written] = []
        """The buckets of the last sync."""
        self.version: int | None = None
        """The version of the last sync."""

    async def update(
        self, receivers: Mapping[str, Receiver], version: int, handover: Callable[[], Awaitable[None]] | None = None
    ) -> SyncReport:
        """Give all receivers the trainers' weights as they are now. A sync in which a bucket was damaged is done again, once, as a whole.

        Args:
            handover: called when the trainers have written everything and no receiver has taken anything, because they cannot
                compute at the same time. The trainers are then out of reach: nothing is done again.

        Raises:
            InvalidConfig: the transport that was asked for does not reach a receiver.
        """
        transport = self._transport({receiver.node_id for receiver in receivers.values()})
        if transport is Transport.BROADCAST:
            return await self._broadcast(receivers, version)
        report = await self._sync(transport, receivers, version, handover)
        if handover is None and any(isinstance(error, CorruptBucket) for error in report.failed.values()):
            for node in self._nodes.values():
                node.held.clear()
            report = await self._sync(transport, receivers, version, None)
        self.version = version
        return report

    async def copy_to(self, receivers: Mapping[str, Receiver]) -> None:
        """Give others than engines the trainers' weights as they are now, by files whatever `transport` says. Raises what they raise."""
        transport = choose("Auto", self._home, {receiver.node_id for receiver in receivers.values()})
        report = await self._sync(transport, receivers, 0, None)
        for error in report.failed.values():
            raise error

    async def join(self, receiver: Receiver) -> None:
        """Give one receiver the version of the last sync, from its node's copy, or the first trainer's. The trainers may be busy.

        A broadcast leaves no copy: after one, the trainers are asked when they are free, and their version is served.
        """
        assert self.version is not None, "there was no sync yet"
        if self._spec.transport == "Broadcast":
            version = await self._trainers[0].policy_version.remote()
            transport = choose("Auto", self._home, [receiver.node_id])
            for error in (await self._sync(transport, {"": receiver}, version, None)).failed.values():
                raise error
            return
        home, node = await self._node(self._home), await self._node(receiver.node_id)
        feed: Feed[Written] = Feed()
        missing = [written for written in self._written if node.held.get(written.bucket.index) != written.checksum]
        if node is not home and missing:
            exported: Feed[Written] = Feed()
            for written in missing:
                exported.put(written)
            exported.close()
            await self._mover(self._transport([node.node_id])).move(exported, home, [node], {node.node_id: Feed()})
        for written in self._written:
            feed.put(written)
        feed.close()
        await self._give(receiver, node, feed, self.version)

    async def stop(self) -> None:
        """Free the memory of all nodes, and the folder on disk."""
        handles = [node.handle for node in self._nodes.values()]
        releases = [handle.release.remote() for handle in handles]
        if self._disk is not None and self._home in self._nodes:
            releases.append(self._nodes[self._home].handle.delete.remote(self._disk.uri))
        await asyncio.gather(*releases, return_exceptions=True)

    async def _sync(
        self,
        transport: Transport,
        receivers: Mapping[str, Receiver],
        version: int,
        handover: Callable[[], Awaitable[None]] | None,
    ) -> SyncReport:
        """Through files, in whatever memory they travel."""
        places = {receiver.node_id for receiver in receivers.values()}
        nodes = {node_id: await self._node(node_id) for node_id in places | {self._home}}
        home = nodes[self._home]
        away = [node for node in nodes.values() if node is not home]
        feeds: dict[str, Feed[Written]] = {node_id: Feed() for node_id in nodes}
        takes: list[asyncio.Task[None]] = []
        work = [asyncio.create_task(self._export(home, feeds[self._home]))]
        if away:
            work.append(asyncio.create_task(self._move(transport, feeds, home, away)))
        try:
            if handover is not None:
                await work[0]
                await handover()
            takes += [asyncio.create_task(self._give(r, nodes[r.node_id], feeds[r.node_id], version)) for r in receivers.values()]
            outcomes = await asyncio.gather(*takes, return_exceptions=True)
            moved = [await task for task in work]
        finally:
            for task in (*takes, *work):
                task.cancel()
        failed = {name: error for name, error in zip(receivers, outcomes, strict=True) if isinstance(error, BaseException)}
        changed = sum(written.changed for written in self._written) / sum(written.elements for written in self._written)
        return SyncReport(transport, sum(moved[1:]) + (moved[0] if self._home in places else 0), changed, failed)

    async def _broadcast(self, receivers: Mapping[str, Receiver], version: int) -> SyncReport:
        if self._broadcasting is None:
            self._broadcasting = Broadcasting(self._trainers, await self._shapes())
        failed = await self._broadcasting.update(receivers, version)
        self.version = version
        self._written = []
        size = sum(shape.nbytes for shape in await self._shapes())
        return SyncReport(Transport.BROADCAST, size * (len(receivers) - len(failed)), 1.0, failed)

    async def _export(self, home: NodeCopy, feed: Feed[Written]) -> int:
        """Let the trainers write their weights into `home`. Returns the bytes of what changed, or of the whole."""
        first, *others = self._trainers
        self._written = []
        changed = 0
        try:
            if self._opened != home.folder:
                await first.open_buckets.remote(self._buckets, str(home.folder), self._spec.delta)
                self._opened = home.folder
            assisting = [other.assist_export.remote() for other in others]
            async for item in first.export_weights.options(num_returns="streaming").remote():
                written: Written = await item
                changed += written.nbytes if written.delta_bytes is None else written.delta_bytes
                home.held[written.bucket.index] = written.checksum
                self._written.append(written)
                feed.put(written)
            await asyncio.gather(*assisting)
        except BaseException as error:
            feed.close(error)
            raise
        feed.close()
        return changed

    async def _move(self, transport: Transport, feeds: Mapping[str, Feed[Written]], home: NodeCopy, away: list[NodeCopy]) -> int:
        """From `home` to the other nodes, as the buckets are written."""
        try:
            moved = await self._mover(transport).move(feeds[home.node_id], home, away, feeds)
        except BaseException as error:
            for node in away:
                feeds[node.node_id].close(error)
            raise
        for node in away:
            feeds[node.node_id].close()
        return moved

    async def _give(self, receiver: Receiver, node: NodeCopy, feed: Feed[Written], version: int) -> None:
        """One receiver's update, from its node's memory."""
        await receiver.handle.begin_update.remote(version)
        takes = []
        async for written in feed:
            takes.append(receiver.handle.take_bucket.remote(node.path(written), written.checksum))
        await asyncio.gather(*takes)
        await receiver.handle.finish_update.remote()

    async def _node(self, node_id: str) -> NodeCopy:
        """The living `NodeWeights` of a node; a new one holds nothing."""
        if self._buckets is None:
            self._buckets = buckets_of(await self._shapes(), self._spec.bucket_bytes)
        known = self._nodes.get(node_id)
        if known is not None and await known.lives():
            return known
        handle = self._spawn(node_id, self._run, self._buckets)
        self._nodes[node_id] = NodeCopy(node_id, handle, Path(await handle.folder.remote()))
        return self._nodes[node_id]

    async def _shapes(self) -> list[Shape]:
        """What the trainers export. They are asked once."""
        if self._exported is None:
            self._exported, *_ = await asyncio.gather(*(trainer.weight_shapes.remote() for trainer in self._trainers))
        assert self._exported is not None
        return self._exported

    def _transport(self, places: set[str] | list[str]) -> Transport:
        try:
            return choose(self._spec.transport, self._home, places)
        except UnusableTransport as error:
            raise InvalidConfig("spec.pipeline.weightSync.transport", str(error)) from error

    def _mover(self, transport: Transport) -> Mover:
        if transport is Transport.DISK:
            assert self._disk is not None, "transport Disk has a uri"
            return self._disk
        return ObjectStoreMover()
