"""Which way weights take."""

from __future__ import annotations

import pytest

from agenticrun_workers.weights.transports import Transport, UnusableTransport, choose_transport


@pytest.mark.parametrize(
    ("asked", "nodes", "chosen"),
    [
        ("Auto", ["home"], Transport.SHARED_MEMORY),
        ("Auto", ["home", "away"], Transport.OBJECT_STORE),
        ("Auto", [], Transport.SHARED_MEMORY),
        ("SharedMemory", ["home"], Transport.SHARED_MEMORY),
        ("ObjectStore", ["home"], Transport.OBJECT_STORE),
        ("Disk", ["away"], Transport.DISK),
        ("Broadcast", ["home", "away"], Transport.BROADCAST),
    ],
)
def test_auto_takes_shared_memory_where_all_engines_are_at_home(
    asked: str, nodes: list[str], chosen: Transport
) -> None:
    assert choose_transport(asked, "home", nodes) is chosen


def test_shared_memory_does_not_reach_another_node() -> None:
    with pytest.raises(UnusableTransport, match="1 engines are on other nodes"):
        choose_transport("SharedMemory", "home", ["home", "away"])
