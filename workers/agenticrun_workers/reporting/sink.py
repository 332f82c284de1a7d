"""Where progress goes: the reporter on a cluster, the terminal in local mode."""

from __future__ import annotations

from typing import Protocol

from agenticrun_api import Progress


class ProgressSink(Protocol):
    """Takes snapshots. Training never waits for it and never fails because of it."""

    def update(self, progress: Progress) -> None:
        """The newest snapshot. Returns at once; older snapshots that were not delivered are dropped."""
        ...

    def sample(self, transcript: str) -> None:
        """The text of an episode of the newest step, for people."""
        ...

    async def finish(self, progress: Progress) -> None:
        """Deliver the last snapshot, whose `final` is set, and stop. Tries for a while, then gives up silently."""
        ...
