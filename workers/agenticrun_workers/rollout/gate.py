"""The staleness gate limits how many groups may start, which bounds the age of training data.

Unit: groups. With G groups in a batch, a limit of eta, and engines that have policy version e:

    capacity = min(max_concurrent - running, floor((eta + e + 1) * G) - (accepted + running))

With `modelUpdateFrequency` f, e is up to f - 1 versions behind the completed training steps v. A
group that starts now is trained on in step (accepted + running) / G at the earliest, and its first
token has version e: so it is e, not v, that bounds its age.

`max = 0` is the synchronous algorithm: only the groups of the next batch may run. The gate bounds
what starts, not its age: the controller checks the age again when it takes a batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class StalenessGate:
    """Counts groups.

    Each started group ends in `accept` or `cancel`. An accepted group that is not trained on ends
    in `reject`.
    """

    groups_per_batch: int
    max_concurrent: int
    max_staleness: float
    version: int = 0
    """Completed training steps (v)."""
    engine_version: int = 0
    """Policy version that the engines have (e)."""
    running: int = 0
    accepted: int = 0
    """Groups accepted since the run began, including those of earlier batches."""

    @classmethod
    def resumed(
        cls, groups_per_batch: int, max_concurrent: int, max_staleness: float, version: int
    ) -> StalenessGate:
        """Return the gate of a run that has completed `version` steps and runs no group."""
        return cls(
            groups_per_batch,
            max_concurrent,
            max_staleness,
            version,
            version,  # the first thing that a resumed run does is a weight sync
            accepted=version * groups_per_batch,
        )

    @property
    def capacity(self) -> int:
        """Groups that may start now, never negative."""
        allowed = math.floor((self.max_staleness + self.engine_version + 1) * self.groups_per_batch)
        return max(
            0, min(self.max_concurrent - self.running, allowed - self.accepted - self.running)
        )

    def begin(self) -> None:
        self.running += 1

    def accept(self) -> None:
        self.running -= 1
        self.accepted += 1

    def cancel(self) -> None:
        """Count a running group as lost or dropped. Another one may start."""
        self.running -= 1

    def reject(self) -> None:
        """Count an accepted group as not trained on (too old, or lost). Another one may start."""
        self.accepted -= 1
