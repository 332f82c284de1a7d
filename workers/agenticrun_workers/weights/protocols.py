"""The methods that a weight sync calls on the actors at its ends."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from typing import Any, Protocol

from agenticrun_workers.weights.buckets import Bucket, MergePlan, TensorSpec, WrittenBucket

Answer = Coroutine[Any, Any, None] | None
"""Returned by engines, which are asynchronous, and by ranks, which are not."""


class WeightExporter(Protocol):
    """A rank of the policy. `TrainerActor` explains the methods."""

    def merge_plan(self) -> MergePlan | str | None: ...

    def tensor_specs(self, adapters: bool = False) -> list[TensorSpec]: ...

    def open_buckets(
        self, buckets: tuple[Bucket, ...], folder: str, deltas: bool, adapters: bool = False
    ) -> None: ...

    def close_whole_buckets(self) -> None: ...

    def export_weights(self, adapters: bool = False) -> Iterator[WrittenBucket]: ...

    def assist_export(self, adapters: bool = False) -> None: ...

    def rendezvous(self) -> tuple[str, int]: ...

    def host_broadcast(self, host: str, port: int, world: int) -> None: ...

    def broadcast_weights(self) -> None: ...


class WeightReceiver(Protocol):
    """An actor that loads weights from files: an engine, or a rank of the reference."""

    def begin_update(self, version: int, /) -> Answer: ...

    def take_bucket(self, path: str, checksum: int, /) -> Answer: ...

    def finish_update(self) -> Answer: ...


class EngineReceiver(WeightReceiver, Protocol):
    """An engine. It can also take part in a broadcast; `EngineActor` explains the methods."""

    async def broadcast_ranks(self) -> int: ...

    async def join_broadcast(self, host: str, port: int, first_rank: int, world: int) -> None: ...

    async def update_from_broadcast(self, shapes: tuple[TensorSpec, ...], version: int) -> None: ...
