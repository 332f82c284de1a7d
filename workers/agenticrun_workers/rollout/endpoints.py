"""Peers: whom the env workers of a run talk to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Peers:
    """Engines to ask, by id, and stores to fill.

    Calls of an actor overtake each other (Ray promises no order for async actors): the highest `number` counts. 0: nobody yet.
    """

    number: int = 0
    engines: Mapping[str, Any] = field(default_factory=dict)
    stores: Sequence[Any] = ()
