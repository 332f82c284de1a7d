"""Buckets on their way from the first trainer's node to other nodes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, Mapping
from typing import Any, Protocol

from agenticrun_workers.weights.broadcast_stream import Feed
from agenticrun_workers.weights.node_copy import NodeCopy
from agenticrun_workers.weights.written import Written

IN_FLIGHT = 2
"""Buckets that travel at once: one leaves the object store when it has reached all nodes."""

Feeds = Mapping[str, Feed[Written]]
"""By node: the buckets that have reached it."""


class Mover(Protocol):
    """Brings buckets to nodes."""

    async def move(
        self, written: AsyncIterable[Written], home: NodeCopy, nodes: list[NodeCopy], feeds: Feeds
    ) -> int:
        """Bring what `home` holds to `nodes`, and put each bucket into a node's feed when it is there.

        A node that dies ends its own feed with the error. Returns the bytes that went to all nodes.
        """
        ...


class ObjectStoreMover:
    """Through Ray objects, bucket by bucket."""

    async def move(
        self, written: AsyncIterable[Written], home: NodeCopy, nodes: list[NodeCopy], feeds: Feeds
    ) -> int:
        """See `Mover`."""
        moved = 0
        in_flight: deque[tuple[Written, asyncio.Task[int]]] = deque()
        alive = list(nodes)

        async def land() -> int:
            bucket, task = in_flight.popleft()
            moved = await task
            for node in alive:
                feeds[node.node_id].put(bucket)
            return moved

        async for bucket in written:
            if len(in_flight) == IN_FLIGHT:
                moved += await land()
            in_flight.append((bucket, asyncio.create_task(self._carry(bucket, home, alive, feeds))))
        while in_flight:
            moved += await land()
        return moved

    async def _carry(
        self, written: Written, home: NodeCopy, alive: list[NodeCopy], feeds: Feeds
    ) -> int:
        """One bucket to all nodes that live; those found dead leave `alive`."""
        index, nodes = written.bucket.index, list(alive)
        delta = all(node.can_patch(written) for node in nodes)
        payload = home.handle.read.remote(index, delta)
        answers = await asyncio.gather(
            *(node.handle.receive.remote(index, payload, delta) for node in nodes),
            return_exceptions=True,
        )
        return sum(
            arrived(node, written, answer, alive, feeds, delta=delta)
            for node, answer in zip(nodes, answers, strict=True)
        )


class DiskMover:
    """Through a folder that all nodes reach: nodes read a version when all of it is written.

    Args:
        uri: the run's own folder; versions are folders below, and only the newest is kept.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._made = 0

    async def move(
        self, written: AsyncIterable[Written], home: NodeCopy, nodes: list[NodeCopy], feeds: Feeds
    ) -> int:
        """See `Mover`."""
        if not self._made:
            await home.handle.delete.remote(self.uri)  # what an attempt left that was killed
        folder = f"{self.uri}/sync-{self._made:06d}"
        self._made += 1
        buckets: list[tuple[Written, bool]] = []
        files: list[Any] = []
        async for bucket in written:
            delta = all(node.can_patch(bucket) for node in nodes)
            buckets.append((bucket, delta))
            files.append(home.handle.publish.remote(folder, bucket.bucket.index, delta))
        await home.handle.seal.remote(folder, await asyncio.gather(*files))
        alive = list(nodes)
        answers = await asyncio.gather(
            *(node.handle.fetch.remote(folder) for node in nodes), return_exceptions=True
        )
        moved = 0
        for node, answer in zip(nodes, answers, strict=True):
            for bucket, delta in buckets:
                moved += arrived(node, bucket, answer, alive, feeds, delta=delta)
        for node in alive:
            for bucket, _ in buckets:
                feeds[node.node_id].put(bucket)
        await home.handle.delete.remote(folder)
        return moved


def arrived(
    node: NodeCopy,
    written: Written,
    answer: BaseException | None,
    alive: list[NodeCopy],
    feeds: Feeds,
    *,
    delta: bool,
) -> int:
    """Note what a node says about a bucket that was sent to it. Returns the bytes that it took."""
    if isinstance(answer, BaseException):
        if node in alive:
            alive.remove(node)
            feeds[node.node_id].close(answer)
        return 0
    node.held[written.bucket.index] = written.checksum
    return (written.delta_bytes or 0) if delta else written.nbytes
