"""One weight sync, from the trainers to the engines: the driver's side.

    trainer rank 0 --export--> buckets of its node --transport--> buckets of other nodes
                                       |                                   |
                                 (merge LoRA)                        (merge LoRA)
                                       |                                   |
                                  weight files                        weight files
                                       |                                   |
                               engines mapping them                engines mapping them

`WeightSync.update` is one sync: it chooses the transport, and `FileSync.publish` runs the picture
above. The weights never pass through the driver, which only tells each process what it may read.
Transport Broadcast goes another way: see `broadcast.py`.

Everything streams. While the trainer writes a bucket, those before it travel and are loaded. The
next sync overwrites the files, so it starts only when every receiver is done with this one. Where
adapters alone travel, each node merges them into whole weights when all of them have arrived.

An engine samples nothing while it loads. So it begins as late as it can without ending later: see
`load_starts.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from agenticrun_api.training import WeightSync as Spec
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.launch import ActorDied, ActorHandle
from agenticrun_workers.weights.broadcast import BroadcastSync
from agenticrun_workers.weights.buckets import (
    Bucket,
    CorruptBucket,
    MergePlan,
    TensorSpec,
    WeightFile,
    WrittenBucket,
    buckets_of,
)
from agenticrun_workers.weights.load_starts import LoadStarts, LoadTimes
from agenticrun_workers.weights.node import AdapterNode, NodeWeights
from agenticrun_workers.weights.protocols import (
    EngineReceiver,
    WeightExporter,
    WeightReceiver,
)
from agenticrun_workers.weights.transports import (
    ArrivalStreams,
    DiskTransport,
    NodeHandle,
    ObjectStoreTransport,
    Receiver,
    ReplayStream,
    Transport,
    UnusableTransport,
    WeightTransport,
    choose_transport,
)

__all__ = ["Receiver", "SyncReport", "WeightSync"]

log = logging.getLogger(__name__)

STOP_SECONDS = 300.0
"""Time to delete the versions on disk at the end of a run."""

SpawnNode = Callable[[str, str, tuple[Bucket, ...]], ActorHandle[NodeWeights]]
"""Makes the `NodeWeights` actor of a node, from the node's id, the run and the buckets."""

SpawnAdapterNode = Callable[[str, str, tuple[Bucket, ...], MergePlan], ActorHandle[AdapterNode]]
"""Makes the `AdapterNode` actor of a node."""

Merge = Callable[[str, list[int]], AsyncIterator[WeightFile]]
"""Merges the adapters of a node, given its id and the checksums of their buckets."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """The outcome of a sync."""

    transport: Transport
    nbytes: int
    """Sent to the nodes of the receivers: whole buckets, or deltas."""
    changed_share: float
    """Elements that differ from the last sync, of those exported; 1 where deltas are off."""
    failed: Mapping[str, BaseException]
    """Receivers that did not load the weights, and why: they are dead, or must not serve."""
    adapters: bool = False
    """True if adapters travelled, and nodes merged them into whole weights."""
    pause_seconds: float | None = None
    """Longest time for which an engine did not sample; None for a broadcast, which pauses all."""


class WeightSync:
    """Loads the policy's weights into engines, versioned and checked by checksums.

    Calls must not overlap: the caller sees to that.

    Args:
        run: a name that only this run has, for folders.
        trainers: the policy's ranks.
        home: the node of the first rank.
        spawn: makes the actor of a node.
        spawn_adapter_node: the same, for a run that trains only adapters.
    """

    def __init__(
        self,
        spec: Spec,
        run: str,
        trainers: Sequence[ActorHandle[WeightExporter]],
        home: str,
        spawn: SpawnNode,
        spawn_adapter_node: SpawnAdapterNode | None = None,
    ) -> None:
        self._spec = spec
        self._run = run
        self._trainers = trainers
        self._home = home
        self._spawn_adapter_node = spawn_adapter_node
        self._whole = FileSync(
            run, trainers, home, spawn, bucket_bytes=spec.bucket_bytes, delta=spec.delta
        )
        self._engine_files: FileSync | None = None
        self._broadcast: BroadcastSync | None = None
        self._object_store = ObjectStoreTransport()
        self._disk = DiskTransport(f"{spec.uri}/{run}/weights") if spec.uri else None
        self.version: int | None = None
        """The version of the last sync."""

    async def update(
        self,
        receivers: Mapping[str, Receiver[EngineReceiver]],
        version: int,
        handover: Callable[[], Awaitable[None]] | None = None,
    ) -> SyncReport:
        """Load the trainers' current weights into all engines.

        A sync in which a bucket was damaged is repeated once, with whole buckets.

        Args:
            handover: called when the trainers have written everything and no receiver has loaded
                anything, because both cannot use the devices at the same time. The trainers are
                out of reach afterwards, so that nothing can be repeated.

        Raises:
            InvalidConfig: the transport in the spec does not reach a receiver, the shared memory of
                a node is too small, or the node of a receiver has other model files than the
                trainers.
        """
        transport = self._transport({receiver.node_id for receiver in receivers.values()})
        files = await self._files_for_engines()
        if transport is Transport.BROADCAST:
            return await self._update_by_broadcast(receivers, version)
        by = self._weight_transport(transport)
        report = await files.publish(by, receivers, version, handover)
        # After a handover the trainers are off their devices and cannot export again.
        if handover is None and any(
            isinstance(error, CorruptBucket) for error in report.failed.values()
        ):
            # A delta on damaged contents would be damaged, too.
            files.forget_contents()
            report = await files.publish(by, receivers, version)
        _raise_failure(report, InvalidConfig)
        self.version = version
        return SyncReport(
            transport,
            report.nbytes,
            report.changed_share,
            report.failed,
            files.adapters,
            report.pause_seconds,
        )

    async def copy_to(self, receivers: Mapping[str, Receiver[WeightReceiver]]) -> None:
        """Load the trainers' current weights into receivers that are no engines.

        They get whole weights by files, whatever transport engines use.

        Raises:
            BaseException: the first error of a receiver.
        """
        report = await self._whole.publish(self._object_store, receivers, None)
        _raise_failure(report, BaseException)
        # With adapters, whole weights are needed only here: their memory is freed until then.
        # Without adapters these buckets are those of the engines, and the next delta needs them.
        if await self._files_for_engines() is not self._whole:
            await self._whole.release()

    async def join(self, name: str, receiver: Receiver[WeightReceiver]) -> None:
        """Load the version of the last sync into one engine, while the trainers may be busy.

        The weights come from the engine's node, or from the first trainer's. If no copy is left
        there, this waits for the trainers and loads their version. A broadcast leaves none.
        """
        assert self.version is not None, "there was no sync yet"
        files: FileSync = self._whole
        by: WeightTransport = self._object_store
        if self._spec.transport != "Broadcast":
            files = await self._files_for_engines()
            by = self._weight_transport(self._transport({receiver.node_id}))
            # Trainers that compute would answer only after their step, which may take minutes.
            if await files.republish(by, name, receiver):
                return
        report = await files.publish(by, {name: receiver}, None)
        _raise_failure(report, BaseException)

    async def stop(self) -> None:
        """Free the memory of all nodes, and delete the folder on disk."""
        # A set: without adapters both are the same object.
        for files in {self._whole, self._engine_files or self._whole}:
            await files.stop(self._disk.uri if self._disk else None)

    async def _update_by_broadcast(
        self, receivers: Mapping[str, Receiver[EngineReceiver]], version: int
    ) -> SyncReport:
        tensors = await self._whole.tensor_specs()
        if self._broadcast is None:
            self._broadcast = BroadcastSync(self._trainers, tensors)
        failed = await self._broadcast.update(receivers, version)
        self.version = version
        size = sum(tensor.nbytes for tensor in tensors)
        return SyncReport(Transport.BROADCAST, size * (len(receivers) - len(failed)), 1.0, failed)

    async def _files_for_engines(self) -> FileSync:
        """Return the sync of adapters where nodes can merge them, else of whole weights.

        Decided once.
        """
        if self._engine_files is None:
            self._engine_files = await self._adapter_files() or self._whole
        return self._engine_files

    async def _adapter_files(self) -> FileSync | None:
        spawn = self._spawn_adapter_node
        if spawn is None:
            return None
        plan: MergePlan | str | None = (
            "a broadcast goes into the engines themselves, which know of no adapters"
        )
        if self._spec.transport != "Broadcast":
            # Collective: every rank has to take part, though only rank 0 answers.
            plan, *_ = await asyncio.gather(
                *(trainer.call(lambda rank: rank.merge_plan()) for trainer in self._trainers)
            )
        assert plan is not None, "rank 0 answers"
        if isinstance(plan, str):
            log.warning(
                "engines get whole weights with the adapters merged, not the adapters alone: %s",
                plan,
            )
            return None
        merge_plan = plan
        nodes: dict[str, ActorHandle[AdapterNode]] = {}

        def spawn_node(
            node_id: str, run: str, buckets: tuple[Bucket, ...]
        ) -> ActorHandle[AdapterNode]:
            nodes[node_id] = spawn(node_id, run, buckets, merge_plan)
            return nodes[node_id]

        return FileSync(
            self._run,
            self._trainers,
            self._home,
            spawn_node,
            bucket_bytes=self._spec.bucket_bytes,
            delta=self._spec.delta,
            merge=lambda node_id, checksums: nodes[node_id].stream(
                lambda node: node.merge(checksums)
            ),
        )

    def _transport(self, nodes: set[str]) -> Transport:
        try:
            return choose_transport(self._spec.transport, self._home, nodes)
        except UnusableTransport as error:
            raise InvalidConfig("spec.pipeline.weightSync.transport", str(error)) from error

    def _weight_transport(self, transport: Transport) -> WeightTransport:
        if transport is Transport.DISK:
            assert self._disk is not None, "transport Disk has a uri"
            return self._disk
        return self._object_store


@dataclass(frozen=True, slots=True)
class PublishReport:
    """The outcome of one export; fields as of `SyncReport`."""

    nbytes: int
    changed_share: float
    failed: Mapping[str, BaseException]
    pause_seconds: float


class FileSync:
    """Exports weights into the memory of nodes, and loads them into receivers there.

    Calls must not overlap: the caller sees to that.

    Args:
        run: a name that only this run has, for folders.
        trainers: the policy's ranks.
        home: the node of the first rank.
        spawn: makes the actor of a node.
        merge: makes weight files of the adapters on a node, if adapters travel.
    """

    def __init__(
        self,
        run: str,
        trainers: Sequence[ActorHandle[WeightExporter]],
        home: str,
        spawn: SpawnNode,
        *,
        bucket_bytes: int,
        delta: bool,
        merge: Merge | None = None,
    ) -> None:
        self._run = run
        self._trainers = trainers
        self._home = home
        self._spawn = spawn
        self._bucket_bytes = bucket_bytes
        self._delta = delta
        self._merge = merge
        self.adapters = merge is not None
        self._tensors: list[TensorSpec] | None = None
        self._buckets: tuple[Bucket, ...] | None = None
        self._nodes: dict[str, NodeHandle] = {}
        self._opened: Path | None = None
        """The folder that the trainer writes into."""
        self._written: list[WrittenBucket] = []
        """The buckets of the last export."""
        self._version: int | None = None
        """The policy version of the last export."""
        self._starts = LoadStarts()

    async def tensor_specs(self) -> list[TensorSpec]:
        """Return what the trainers export. They are asked once."""
        if self._tensors is None:
            self._tensors, *_ = await asyncio.gather(
                *(
                    trainer.call(lambda rank: rank.tensor_specs(self.adapters))
                    for trainer in self._trainers
                )
            )
        assert self._tensors is not None
        return self._tensors

    async def publish(
        self,
        transport: WeightTransport,
        receivers: Mapping[str, Receiver[WeightReceiver]],
        version: int | None,
        handover: Callable[[], Awaitable[None]] | None = None,
    ) -> PublishReport:
        """Export the current weights and load them into all receivers.

        Four kinds of tasks run side by side, connected by streams: the export, the transport, one
        per node that prepares weight files, one per receiver that loads them.

        Args:
            version: policy version of the weights; None takes the one that the trainers export.
            handover: see `WeightSync.update`.
        """
        places = {receiver.node_id for receiver in receivers.values()}
        nodes, unreachable = await self._nodes_of(places | {self._home})
        # None until the first bucket comes, which carries the version that the trainers have.
        self._version = version
        home = nodes[self._home]
        away = [node for node in nodes.values() if node is not home]
        arrivals: dict[str, ReplayStream[WrittenBucket]] = {
            node_id: ReplayStream() for node_id in nodes
        }
        files: dict[str, ReplayStream[WeightFile]] = {node_id: ReplayStream() for node_id in places}
        # Receivers of these nodes fail alone; the others get their weights.
        for place, error in unreachable.items():
            files[place].close(error)
        loading: list[asyncio.Task[float]] = []
        # One after the other, a sync would take the sum of export, transport and loading.
        sending = [asyncio.create_task(self._export(home, arrivals[self._home]))]
        if away:
            sending.append(asyncio.create_task(self._transfer(transport, arrivals, home, away)))
        preparing = [
            asyncio.create_task(self._prepare_files(nodes[place], arrivals[place], files[place]))
            for place in places - unreachable.keys()
        ]
        try:
            async with _watched(nodes.values()):
                if handover is not None:
                    # The export needs the trainers' devices, so it must be complete before they are
                    # handed over.
                    await sending[0]
                    await handover()
                loading += [
                    asyncio.create_task(self._load(name, receiver, files[receiver.node_id]))
                    for name, receiver in receivers.items()
                ]
                # An engine that fails must not keep the others from their weights.
                outcomes = await asyncio.gather(*loading, return_exceptions=True)
                # An error of the export has ended the streams, so no receiver is left. It is raised
                # here, as the error of the whole sync.
                exported, *transferred = [await task for task in sending]
                await asyncio.gather(*preparing)
        finally:
            # A task that is left would write into buckets of the next sync.
            for task in (*loading, *sending, *preparing):
                task.cancel()
        failed = {
            name: error
            for name, error in zip(receivers, outcomes, strict=True)
            if isinstance(error, BaseException)
        }
        changed = sum(written.changed for written in self._written)
        elements = sum(written.elements for written in self._written)
        nbytes = sum(transferred) + (exported if self._home in places else 0)
        pauses = [pause for pause in outcomes if not isinstance(pause, BaseException)]
        return PublishReport(nbytes, changed / elements, failed, max(pauses, default=0.0))

    async def republish(
        self, transport: WeightTransport, name: str, receiver: Receiver[WeightReceiver]
    ) -> bool:
        """Load the last export into one receiver, from its node's memory or the first trainer's.

        The trainers may be busy.

        Returns:
            False if both have lost the export, because their actors died.
        """
        home, node = await self._node(self._home), await self._node(receiver.node_id)
        # Only buckets that this node has lost, or has never had, travel.
        missing = [written for written in self._written if not node.holds(written)]
        # The caller lets the trainers export again.
        if not all(map(home.holds, missing)):
            return False
        async with _watched((home, node)):
            if node is not home and missing:
                arrivals = {node.node_id: ReplayStream[WrittenBucket]()}
                await transport.transfer(ReplayStream(missing), home, [node], arrivals)
            files: ReplayStream[WeightFile] = ReplayStream()
            preparing = asyncio.create_task(
                self._prepare_files(node, ReplayStream(self._written), files)
            )
            try:
                await self._load(name, receiver, files)
                await preparing
            finally:
                preparing.cancel()
        return True

    def forget_contents(self) -> None:
        """Assume that nodes hold nothing, so that the next export is sent as a whole."""
        for node in self._nodes.values():
            node.checksums.clear()

    async def stop(self, published: str | None) -> None:
        """Free the memory of all nodes, and delete the versions on disk. Nothing follows."""
        calls = [node.handle.call(lambda actor: actor.release()) for node in self._nodes.values()]
        if published is not None and self._home in self._nodes:
            home = self._nodes[self._home].handle
            calls.append(home.call(lambda actor: actor.delete(published)))
        # A node that is frozen must not hold up the end of the run.
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await asyncio.gather(*calls, return_exceptions=True)

    async def release(self) -> None:
        """Free the memory of all nodes until the next export, and the trainer's mapping of it."""
        nodes, self._nodes, self._opened = list(self._nodes.values()), {}, None
        await self._trainers[0].call(lambda trainer: trainer.close_whole_buckets())
        await asyncio.gather(
            *(node.handle.poll(lambda actor: actor.release()) for node in nodes),
            return_exceptions=True,
        )
        for node in nodes:
            node.handle.kill()

    async def _load(
        self, name: str, receiver: Receiver[WeightReceiver], files: ReplayStream[WeightFile]
    ) -> float:
        """Update one receiver. Returns the seconds for which it did not serve.

        It keeps sampling with its old weights at least until the first file is there.
        """
        # Engines pause as late as possible, see `load_starts`: until then they sample.
        timed = LoadTimes(await self._starts.wait(name, files))
        loading: list[asyncio.Task[None]] = []
        try:
            async for file in files:
                if not loading:
                    version = self._version
                    assert version is not None, "files come after an export"
                    await receiver.handle.call(lambda actor: actor.begin_update(version))
                call = receiver.handle.call(
                    lambda actor: actor.take_bucket(file.path, file.checksum)
                )
                loading.append(asyncio.create_task(timed.loaded(call)))
            await asyncio.gather(*loading)
        finally:
            for task in loading:
                task.cancel()
        await receiver.handle.call(lambda actor: actor.finish_update())
        self._starts.learn(name, files.arrivals, timed)
        return asyncio.get_running_loop().time() - timed.began

    async def _export(self, home: NodeHandle, arrivals: ReplayStream[WrittenBucket]) -> int:
        """Have the trainers write into `home`. Returns the bytes of deltas or whole buckets."""
        first, *others = self._trainers
        buckets, adapters = self._buckets, self.adapters
        assert buckets is not None, "the node's actor has them"
        self._written = []
        changed = 0
        try:
            # A new actor on this node has another folder: the one that is mapped is gone.
            if self._opened != home.folder:
                await first.call(
                    lambda trainer: trainer.open_buckets(
                        buckets, str(home.folder), self._delta, adapters
                    )
                )
                self._opened = home.folder
            # The export is collective: ranks that hold a part of a parameter must send it to the
            # first.
            assisting = [other.call(lambda rank: rank.assist_export(adapters)) for other in others]
            async for written in first.stream(lambda trainer: trainer.export_weights(adapters)):
                changed += written.nbytes if written.delta_bytes is None else written.delta_bytes
                home.checksums[written.bucket.index] = written.checksum
                self._written.append(written)
                # `copy_to` and `join` take whatever the trainers have.
                if self._version is None:
                    self._version = written.policy_version
                arrivals.put(written)
            await asyncio.gather(*assisting)
        except BaseException as error:
            arrivals.close(error)
            raise
        arrivals.close()
        return changed

    async def _transfer(
        self,
        transport: WeightTransport,
        arrivals: ArrivalStreams,
        home: NodeHandle,
        away: list[NodeHandle],
    ) -> int:
        """Send buckets from `home` to the other nodes as they are written."""
        try:
            nbytes = await transport.transfer(arrivals[home.node_id], home, away, arrivals)
        # Readers of the streams would wait forever for what is missing.
        except BaseException as error:
            for node in away:
                arrivals[node.node_id].close(error)
            raise
        for node in away:
            arrivals[node.node_id].close()
        return nbytes

    async def _prepare_files(
        self,
        node: NodeHandle,
        arrivals: ReplayStream[WrittenBucket],
        files: ReplayStream[WeightFile],
    ) -> None:
        """Turn the buckets that arrive at a node into files to load. Errors go to the receivers."""
        try:
            async for file in self._files(node, arrivals):
                files.put(file)
        # Only this node's receivers fail, with this error as the cause.
        except Exception as error:
            files.close(error)
        files.close()

    async def _files(
        self, node: NodeHandle, arrivals: ReplayStream[WrittenBucket]
    ) -> AsyncIterator[WeightFile]:
        if self._merge is None:
            async for written in arrivals:
                yield WeightFile(node.path(written), written.checksum)
            return
        # A weight may need any of the adapters, which are small: all of them come first.
        checksums = [written.checksum async for written in arrivals]
        async for file in self._merge(node.node_id, checksums):
            yield file

    async def _nodes_of(
        self, places: Collection[str]
    ) -> tuple[dict[str, NodeHandle], dict[str, Exception]]:
        """Return the node of each place, and the errors of places that cannot be reached.

        Raises:
            ActorDied: the home node cannot be reached.
        """
        if self._buckets is None:
            self._buckets = buckets_of(await self.tensor_specs(), self._bucket_bytes)
        found = await asyncio.gather(*map(self._node, places), return_exceptions=True)
        nodes: dict[str, NodeHandle] = {}
        unreachable: dict[str, Exception] = {}
        for place, node in zip(places, found, strict=True):
            if isinstance(node, NodeHandle):
                nodes[place] = node
            elif isinstance(node, ActorDied) and place != self._home:
                unreachable[place] = node
            else:
                raise node
        return nodes, unreachable

    async def _node(self, node_id: str) -> NodeHandle:
        """Return the living actor of a node. A new one holds no weights."""
        if self._buckets is None:
            self._buckets = buckets_of(await self.tensor_specs(), self._bucket_bytes)
        known = self._nodes.get(node_id)
        # Asked once per sync: a node's actor may have died since the last one.
        if known is not None and await known.is_alive():
            return known
        handle = self._spawn(node_id, self._run, self._buckets)
        folder = Path(await handle.call(lambda actor: actor.allocate()))
        self._nodes[node_id] = NodeHandle(node_id, handle, folder)
        return self._nodes[node_id]


@asynccontextmanager
async def _watched(nodes: Iterable[NodeHandle]) -> AsyncIterator[None]:
    """Poll these nodes inside the `with` block: calls to a frozen one fail."""
    watching = [asyncio.create_task(node.watch()) for node in nodes]
    try:
        yield
    finally:
        for task in watching:
            task.cancel()


def _raise_failure(report: PublishReport, kind: type[BaseException]) -> None:
    """Raise the first error of this kind that a receiver ended with."""
    for error in report.failed.values():
        if isinstance(error, kind):
            raise error
