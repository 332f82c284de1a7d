"""What the driver knows about the weights on one node."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray.exceptions

from agenticrun_workers.weights.written import Written


@dataclass
class NodeCopy:
    """The `NodeWeights` or `AdapterNode` actor of a node, and which version of each bucket it holds."""

    node_id: str
    handle: Any
    folder: Path
    held: dict[int, int] = field(default_factory=dict)
    """Checksum by bucket."""

    def path(self, written: Written) -> str:
        return str(self.folder / written.bucket.file)

    def can_patch(self, written: Written) -> bool:
        """Whether what changed is enough for it."""
        return (
            written.delta_bytes is not None and self.held.get(written.bucket.index) == written.base
        )

    async def lives(self) -> bool:
        try:
            await self.handle.folder.remote()
        except ray.exceptions.RayActorError:
            return False
        return True
