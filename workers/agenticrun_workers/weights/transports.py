"""Transports of buckets from the first trainer's node to the nodes of other engines.

Engines on the trainer's own node need none: they map the files that the trainer writes. Ray's
object store carries buckets one by one while the trainer is still writing. A shared disk serves
clusters where nodes reach each other only through storage.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from typing_extensions import override

from agenticrun_workers.launch import ActorDied, ActorHandle, Result, liveness
from agenticrun_workers.weights.buckets import WrittenBucket
from agenticrun_workers.weights.node import NodeWeights, PublishedBucket
from agenticrun_workers.weights.protocols import WeightReceiver

NODE_CALLS = 4
"""Calls of a node's actor that run at the same time. One of them is left to polls."""

MAX_IN_FLIGHT = 2
"""Buckets that travel at once. One leaves the object store when it has reached all nodes."""

T = TypeVar("T")
R_co = TypeVar("R_co", bound=WeightReceiver, covariant=True)


class Transport(StrEnum):
    """Values of `spec.pipeline.weightSync.transport`, without Auto."""

    SHARED_MEMORY = "SharedMemory"
    OBJECT_STORE = "ObjectStore"
    DISK = "Disk"
    BROADCAST = "Broadcast"


class UnusableTransport(Exception):
    """The transport in the spec cannot reach the engines."""


def choose_transport(requested: str, home: str, nodes: Collection[str]) -> Transport:
    """Return the transport of a sync from node `home` to engines on `nodes`.

    Raises:
        UnusableTransport: the requested one does not reach them.
    """
    away = sum(node != home for node in nodes)
    if requested == "Auto":
        return Transport.OBJECT_STORE if away else Transport.SHARED_MEMORY
    if requested == Transport.SHARED_MEMORY and away:
        raise UnusableTransport(
            f"{away} engines are on other nodes than the first trainer: "
            "choose Auto, ObjectStore or Disk"
        )
    return Transport(requested)


@dataclass(frozen=True, slots=True)
class Receiver(Generic[R_co]):
    """An actor that loads weights: an engine, or a rank of the reference."""

    handle: ActorHandle[R_co]
    node_id: str


@dataclass
class NodeHandle:
    """The driver's record of a node: its `NodeWeights` or `AdapterNode` actor and its buckets."""

    node_id: str
    handle: ActorHandle[NodeWeights]
    folder: Path
    checksums: dict[int, int] = field(default_factory=dict)
    """Version of each bucket that the node holds."""

    def path(self, written: WrittenBucket) -> str:
        return str(self.folder / written.bucket.file)

    def holds(self, written: WrittenBucket) -> bool:
        """Return True if the node has this version."""
        return self.checksums.get(written.bucket.index) == written.checksum

    def can_patch(self, written: WrittenBucket) -> bool:
        """Return True if the node needs only the delta."""
        return (
            written.delta_bytes is not None
            and self.checksums.get(written.bucket.index) == written.base
        )

    async def is_alive(self) -> bool:
        """Poll the node once. One that does not answer is killed."""
        try:
            await self.handle.poll(lambda node: node.folder())
        except ActorDied:
            return False
        return True

    async def watch(self) -> None:
        """Poll the node until it is dead. Calls to it fail then."""
        while await self.is_alive():
            await asyncio.sleep(liveness.POLL_SECONDS)


class ReplayStream(Generic[T]):
    """A stream of items for any number of readers, each of which sees all items.

    Iterating yields the items so far, then waits for more until `close`.
    """

    def __init__(self, items: Iterable[T] | None = None) -> None:
        """With `items`, make a closed stream of them."""
        self._items: list[T] = list(items or ())
        self.arrivals = [asyncio.get_running_loop().time()] * len(self._items)
        """When each item came."""
        self._error: BaseException | None = None
        self._closed = items is not None
        self._changed = asyncio.Event()

    def put(self, item: T) -> None:
        self._items.append(item)
        self.arrivals.append(asyncio.get_running_loop().time())
        self._wake_readers()

    def close(self, error: BaseException | None = None) -> None:
        """End the stream. Readers raise `error` after the last item. Only the first call counts."""
        if not self._closed:
            self._closed, self._error = True, error
            self._wake_readers()

    async def __aiter__(self) -> AsyncIterator[T]:
        seen = 0
        while True:
            while seen < len(self._items):
                yield self._items[seen]
                seen += 1
            if self._closed:
                break
            await self._changed.wait()
        if self._error is not None:
            raise self._error

    def _wake_readers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


ArrivalStreams = Mapping[str, ReplayStream[WrittenBucket]]
"""By node: the buckets that have arrived there."""


class WeightTransport(Protocol):
    """Brings buckets to nodes."""

    async def transfer(
        self,
        written: AsyncIterable[WrittenBucket],
        home: NodeHandle,
        nodes: list[NodeHandle],
        arrivals: ArrivalStreams,
    ) -> int:
        """Bring buckets of `home` to `nodes`, and put each into a node's stream on arrival.

        The stream of a node that dies ends with the error.

        Returns:
            The bytes that went to all nodes together.
        """
        ...


class ObjectStoreTransport(WeightTransport):
    """Sends buckets through Ray's object store, one by one."""

    @override
    async def transfer(
        self,
        written: AsyncIterable[WrittenBucket],
        home: NodeHandle,
        nodes: list[NodeHandle],
        arrivals: ArrivalStreams,
    ) -> int:
        total = 0
        in_flight: deque[tuple[WrittenBucket, asyncio.Task[int]]] = deque()
        alive = list(nodes)

        async def finish_oldest() -> int:
            # In order, so that nodes see buckets in the order of the export.
            bucket, task = in_flight.popleft()
            nbytes = await task
            for node in alive:
                arrivals[node.node_id].put(bucket)
            return nbytes

        async for bucket in written:
            # Each bucket in flight has a copy in the object store, whose memory is small.
            if len(in_flight) == MAX_IN_FLIGHT:
                total += await finish_oldest()
            in_flight.append(
                (bucket, asyncio.create_task(self._send(bucket, home, alive, arrivals)))
            )
        while in_flight:
            total += await finish_oldest()
        return total

    async def _send(
        self,
        written: WrittenBucket,
        home: NodeHandle,
        alive: list[NodeHandle],
        arrivals: ArrivalStreams,
    ) -> int:
        """Send one bucket to all nodes in `alive`, and remove the dead ones from it."""
        index, nodes = written.bucket.index, list(alive)
        if not nodes:
            return 0
        # One payload for all nodes: a single read of the bucket and one object in the store.
        delta = all(node.can_patch(written) for node in nodes)
        payload = home.handle.call(lambda actor: actor.read(index, delta))
        outcomes = await asyncio.gather(
            *(
                # The reference travels, not the bytes: they go from node to node, past the driver.
                node.handle.call(lambda actor: actor.receive(index, payload.as_argument(), delta))
                for node in nodes
            ),
            # A node that dies ends its own stream only.
            return_exceptions=True,
        )
        return sum(
            _record_arrival(node, written, outcome, alive, arrivals, delta=delta)
            for node, outcome in zip(nodes, outcomes, strict=True)
        )


class DiskTransport(WeightTransport):
    """Publishes buckets in a folder that all nodes reach, and has nodes load complete versions.

    Args:
        uri: the run's own folder. Versions are folders below it; only the newest is kept.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._versions = 0

    @override
    async def transfer(
        self,
        written: AsyncIterable[WrittenBucket],
        home: NodeHandle,
        nodes: list[NodeHandle],
        arrivals: ArrivalStreams,
    ) -> int:
        if not self._versions:
            # Left by an attempt that was killed.
            await home.handle.call(lambda actor: actor.delete(self.uri))
        folder = f"{self.uri}/sync-{self._versions:06d}"
        self._versions += 1
        buckets: list[tuple[WrittenBucket, bool]] = []
        files: list[Result[PublishedBucket]] = []
        async for bucket in written:
            # A version is written once for all nodes, so one that cannot patch makes it whole.
            delta = all(node.can_patch(bucket) for node in nodes)
            buckets.append((bucket, delta))
            index = bucket.bucket.index
            # One call stays free for polls: without an answer the node would count as frozen.
            if len(files) >= NODE_CALLS - 1:
                await files[1 - NODE_CALLS]
            files.append(home.handle.call(lambda actor: actor.publish(folder, index, delta)))
        published = await asyncio.gather(*files)
        # The manifest comes last: a reader that finds it finds all files.
        await home.handle.call(lambda actor: actor.seal(folder, published))
        alive = list(nodes)
        outcomes = await asyncio.gather(
            *(node.handle.call(lambda actor: actor.fetch(folder)) for node in nodes),
            return_exceptions=True,
        )
        total = 0
        for node, outcome in zip(nodes, outcomes, strict=True):
            for bucket, delta in buckets:
                total += _record_arrival(node, bucket, outcome, alive, arrivals, delta=delta)
        for node in alive:
            for bucket, _ in buckets:
                arrivals[node.node_id].put(bucket)
        await home.handle.call(lambda actor: actor.delete(folder))
        return total


def _record_arrival(
    node: NodeHandle,
    written: WrittenBucket,
    outcome: BaseException | None,
    alive: list[NodeHandle],
    arrivals: ArrivalStreams,
    *,
    delta: bool,
) -> int:
    """Record that a node has a bucket, or that it failed. Returns the bytes that it received."""
    if isinstance(outcome, BaseException):
        if node in alive:
            alive.remove(node)
            arrivals[node.node_id].close(outcome)
        return 0
    node.checksums[written.bucket.index] = written.checksum
    return (written.delta_bytes or 0) if delta else written.nbytes
