"""How weights travel in a sync, by where the engines are."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum


class Transport(StrEnum):
    """Values of `spec.pipeline.weightSync.transport`, Auto aside."""

    SHARED_MEMORY = "SharedMemory"
    OBJECT_STORE = "ObjectStore"
    DISK = "Disk"
    BROADCAST = "Broadcast"


class UnusableTransport(Exception):
    """The transport that was asked for cannot reach the engines."""


def choose(asked: str, home: str, nodes: Collection[str]) -> Transport:
    """The transport of a sync from the node `home` to engines on `nodes`. Raises `UnusableTransport`."""
    away = sum(node != home for node in nodes)
    if asked == "Auto":
        return Transport.OBJECT_STORE if away else Transport.SHARED_MEMORY
    if asked == Transport.SHARED_MEMORY and away:
        raise UnusableTransport(
            f"{away} engines are on other nodes than the first trainer: choose Auto, ObjectStore or Disk"
        )
    return Transport(asked)
