"""The staleness gate: how many groups may begin now, so that training never meets a policy that is too old.

Unit: groups (rl-semantics, "Staleness gate"). With G groups in a batch, v completed training steps and a limit of eta:

    capacity = min(max_concurrent - running, floor((eta + v + 1) * G) - (accepted + running))

`max = 0` is the synchronous algorithm: exactly the groups of the next batch may be under way. The gate bounds what is begun,
not its age: a batch checks the age of what it takes once more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class StalenessGate:
    """Counts groups. Every begun group ends in `accept` or `cancel`; an accepted one that is not trained on in `reject`."""

    groups_per_batch: int
    max_concurrent: int
    max_staleness: float
    version: int = 0
    """Completed training steps (v)."""
    running: int = 0
    accepted: int = 0
    """Groups accepted since the run began, those of earlier batches included."""

    @classmethod
    def resumed(
        cls, groups_per_batch: int, max_concurrent: int, max_staleness: float, version: int
    ) -> StalenessGate:
        """The gate of a run that has completed `version` steps and has nothing under way."""
        return cls(
            groups_per_batch,
            max_concurrent,
            max_staleness,
            version,
            accepted=version * groups_per_batch,
        )

    @property
    def capacity(self) -> int:
        """Groups that may begin now, never negative."""
        allowed = math.floor((self.max_staleness + self.version + 1) * self.groups_per_batch)
        return max(
            0, min(self.max_concurrent - self.running, allowed - self.accepted - self.running)
        )

    def begin(self) -> None:
        self.running += 1

    def accept(self) -> None:
        self.running -= 1
        self.accepted += 1

    def cancel(self) -> None:
        """A running group was lost or dropped: another one may begin."""
        self.running -= 1

    def reject(self) -> None:
        """An accepted group is not trained on (too old, or its bytes are lost): another one may begin."""
        self.accepted -= 1
