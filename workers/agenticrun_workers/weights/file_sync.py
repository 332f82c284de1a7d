"""FileSync: one export of the trainers, by files in the memory of nodes, to those who take weights.

    trainer rank 0 --export--> buckets of its node --mover--> buckets of other nodes
                                       |                            |
                                   (expand)                     (expand)
                                       |                            |
                                     parts --> receivers          parts --> receivers

Everything flows: while the trainer writes a bucket, those before it travel and are taken. Files are overwritten in the next sync, and
only when every receiver is done with this one. Where adapters alone travel, each node makes whole weights of them when they all are there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from agenticrun_workers.weights.broadcast_stream import Feed
from agenticrun_workers.weights.buckets import Bucket, Shape, buckets_of
from agenticrun_workers.weights.node_copy import NodeCopy
from agenticrun_workers.weights.transports import Mover
from agenticrun_workers.weights.written import Part, Written

Spawn = Callable[[str, str, tuple[Bucket, ...]], Any]
"""Makes the actor that holds a run's buckets in the memory of a node, from the node's id, the run and the buckets."""


@dataclass(frozen=True, slots=True)
class Receiver:
    """An actor that takes weights: an engine, or a rank of the reference."""

    handle: Any
    node_id: str


@dataclass(frozen=True, slots=True)
class Sent:
    """How an export went."""

    nbytes: int
    """Brought to the nodes of the receivers: whole buckets, or what changed in them."""
    changed_share: float
    """Elements that differ from the last time; 1 where nobody looked."""
    failed: Mapping[str, BaseException]
    """Receivers that did not take it, and why: they have died, or must not serve."""


class FileSync:
    """Calls must not overlap: the caller sees to that.

    Args:
        run: a name that is the run's alone, for folders.
        trainers: the policy's ranks.
        home: the node of the first of them.
        spawn: makes an `AdapterNode` where `adapters` travel, else a `NodeWeights`.
    """

    def __init__(
        self,
        run: str,
        trainers: Sequence[Any],
        home: str,
        spawn: Spawn,
        *,
        bucket_bytes: int,
        delta: bool,
        adapters: bool = False,
    ) -> None:
        self._run = run
        self._trainers = trainers
        self._home = home
        self._spawn = spawn
        self._bucket_bytes = bucket_bytes
        self._delta = delta
        self.adapters = adapters
        self._which = {"adapters": True} if adapters else {}
        """What the trainers are asked for."""
        self._shapes: list[Shape] | None = None
        self._buckets: tuple[Bucket, ...] | None = None
        self._nodes: dict[str, NodeCopy] = {}
        self._opened: Path | None = None
        """The folder that the trainer writes into."""
        self._written: list[Written] = []
        """The buckets of the last export."""

    async def shapes(self) -> list[Shape]:
        """What the trainers export. They are asked once."""
        if self._shapes is None:
            self._shapes, *_ = await asyncio.gather(
                *(trainer.weight_shapes.remote(**self._which) for trainer in self._trainers)
            )
        assert self._shapes is not None
        return self._shapes

    async def send(
        self,
        mover: Mover,
        receivers: Mapping[str, Receiver],
        version: int,
        handover: Callable[[], Awaitable[None]] | None = None,
    ) -> Sent:
        """Export, and give it to all receivers. `handover` is called when everything is written and no receiver has taken anything."""
        places = {receiver.node_id for receiver in receivers.values()}
        nodes = {node_id: await self._node(node_id) for node_id in places | {self._home}}
        home = nodes[self._home]
        away = [node for node in nodes.values() if node is not home]
        arrived: dict[str, Feed[Written]] = {node_id: Feed() for node_id in nodes}
        ready: dict[str, Feed[Part]] = {node_id: Feed() for node_id in places}
        takes: list[asyncio.Task[None]] = []
        work = [asyncio.create_task(self._export(home, arrived[self._home]))]
        if away:
            work.append(asyncio.create_task(self._move(mover, arrived, home, away)))
        making = [
            asyncio.create_task(self._make_ready(nodes[place], arrived[place], ready[place]))
            for place in places
        ]
        try:
            if handover is not None:
                await work[0]
                await handover()
            takes += [
                asyncio.create_task(give(receiver, ready[receiver.node_id], version))
                for receiver in receivers.values()
            ]
            outcomes = await asyncio.gather(*takes, return_exceptions=True)
            moved = [await task for task in work]
            await asyncio.gather(*making)
        finally:
            for task in (*takes, *work, *making):
                task.cancel()
        failed = {
            name: error
            for name, error in zip(receivers, outcomes, strict=True)
            if isinstance(error, BaseException)
        }
        changed = sum(written.changed for written in self._written) / sum(
            written.elements for written in self._written
        )
        return Sent(sum(moved[1:]) + (moved[0] if self._home in places else 0), changed, failed)

    async def send_again(self, mover: Mover, receiver: Receiver, version: int) -> None:
        """Give one receiver what was exported last, from its node's memory, or the first trainer's. The trainers may be busy."""
        home, node = await self._node(self._home), await self._node(receiver.node_id)
        missing = [
            written
            for written in self._written
            if node.held.get(written.bucket.index) != written.checksum
        ]
        if node is not home and missing:
            await mover.move(filled(missing), home, [node], {node.node_id: Feed()})
        ready: Feed[Part] = Feed()
        making = asyncio.create_task(self._make_ready(node, filled(self._written), ready))
        try:
            await give(receiver, ready, version)
            await making
        finally:
            making.cancel()

    def forget(self) -> None:
        """Believe of no node that it holds anything."""
        for node in self._nodes.values():
            node.held.clear()

    async def stop(self, published: str | None) -> None:
        """Free the memory of all nodes, and delete what a mover has published there. Nothing is sent any more."""
        calls = [node.handle.release.remote() for node in self._nodes.values()]
        if published is not None and self._home in self._nodes:
            calls.append(self._nodes[self._home].handle.delete.remote(published))
        await asyncio.gather(*calls, return_exceptions=True)

    async def release(self) -> None:
        """Free the memory of all nodes, and the trainer's view of it: whole weights are not sent for long. Another export begins anew."""
        nodes, self._nodes, self._opened = list(self._nodes.values()), {}, None
        await self._trainers[0].close_whole_buckets.remote()
        await asyncio.gather(
            *(node.handle.release.remote() for node in nodes), return_exceptions=True
        )
        for node in nodes:
            ray.kill(node.handle)

    async def _export(self, home: NodeCopy, feed: Feed[Written]) -> int:
        """Let the trainers write into `home`. Returns the bytes of what changed, or of the whole."""
        first, *others = self._trainers
        self._written = []
        changed = 0
        try:
            if self._opened != home.folder:
                await first.open_buckets.remote(
                    self._buckets, str(home.folder), self._delta, **self._which
                )
                self._opened = home.folder
            assisting = [other.assist_export.remote(**self._which) for other in others]
            async for item in first.export_weights.options(num_returns="streaming").remote(
                **self._which
            ):
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

    async def _move(
        self, mover: Mover, feeds: Mapping[str, Feed[Written]], home: NodeCopy, away: list[NodeCopy]
    ) -> int:
        """From `home` to the other nodes, as the buckets are written."""
        try:
            moved = await mover.move(feeds[home.node_id], home, away, feeds)
        except BaseException as error:
            for node in away:
                feeds[node.node_id].close(error)
            raise
        for node in away:
            feeds[node.node_id].close()
        return moved

    async def _make_ready(self, node: NodeCopy, arrived: Feed[Written], ready: Feed[Part]) -> None:
        """What receivers of a node can take, of what arrives there. An error goes to the receivers."""
        try:
            async for part in self._parts(node, arrived):
                ready.put(part)
        except Exception as error:
            ready.close(error)
        ready.close()

    async def _parts(self, node: NodeCopy, arrived: Feed[Written]) -> AsyncIterator[Part]:
        if not self.adapters:
            async for written in arrived:
                yield Part(node.path(written), written.checksum)
            return
        checksums = [written.checksum async for written in arrived]
        async for item in node.handle.expand.options(num_returns="streaming").remote(checksums):
            yield await item

    async def _node(self, node_id: str) -> NodeCopy:
        """The living actor of a node; a new one holds nothing."""
        if self._buckets is None:
            self._buckets = buckets_of(await self.shapes(), self._bucket_bytes)
        known = self._nodes.get(node_id)
        if known is not None and await known.lives():
            return known
        handle = self._spawn(node_id, self._run, self._buckets)
        self._nodes[node_id] = NodeCopy(node_id, handle, Path(await handle.folder.remote()))
        return self._nodes[node_id]


async def give(receiver: Receiver, parts: Feed[Part], version: int) -> None:
    """One receiver's update. It begins with the first part: until then the receiver goes on with what it has."""
    takes: list[Any] = []
    async for part in parts:
        if not takes:
            await receiver.handle.begin_update.remote(version)
        takes.append(receiver.handle.take_bucket.remote(part.path, part.checksum))
    await asyncio.gather(*takes)
    await receiver.handle.finish_update.remote()


def filled(written: Sequence[Written]) -> Feed[Written]:
    """A feed of these alone."""
    feed: Feed[Written] = Feed()
    for one in written:
        feed.put(one)
    feed.close()
    return feed
