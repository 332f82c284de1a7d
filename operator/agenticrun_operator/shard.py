"""A part of all runs, which has operators and a Lease of its own."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from agenticrun_api import names
from agenticrun_operator.resources import CLAIM_KIND, Manifest


@dataclass(frozen=True)
class Shard:
    """One of `count` parts of all runs. A run's uid, which never changes, tells its part."""

    number: int
    count: int

    def has(self, run_uid: str) -> bool:
        """Return True if the run with this uid belongs to this part."""
        return zlib.crc32(run_uid.encode()) % self.count == self.number

    def sees(self, kind: str, item: Manifest) -> bool:
        """Return True unless a run, or an object with a run's labels, is of another part."""
        if kind == CLAIM_KIND:  # it outlives its run, and keeps the run's uid
            return True
        metadata = item["metadata"]
        labels = metadata.get("labels") or {}
        uid = metadata.get("uid") if kind == names.KIND else labels.get(names.LABEL_RUN_UID)
        # An object that has lost the label may be anyone's.
        return uid is None or self.has(uid)


ALL_RUNS = Shard(0, 1)
