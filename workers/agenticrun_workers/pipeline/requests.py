"""What a running attempt has been asked for: by a signal, by Ctrl-C, or through the reporter."""

from __future__ import annotations

import asyncio

from agenticrun_api import Commands


class StopRequested(Exception):
    """Raised inside the loop where the run may stop."""


class Requests:
    """Stop and checkpoint requests."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self._checkpoints_seen: int | None = None
        self._checkpoint_wanted = False

    def apply(self, commands: Commands) -> None:
        """Take the reporter's answer. Its first one only tells how many checkpoints earlier attempts were asked for."""
        if commands.stop:
            self.stop.set()
        if self._checkpoints_seen is not None and commands.checkpoint > self._checkpoints_seen:
            self._checkpoint_wanted = True
        self._checkpoints_seen = commands.checkpoint

    def take_checkpoint(self) -> bool:
        """Whether a checkpoint has been asked for since the last call."""
        wanted, self._checkpoint_wanted = self._checkpoint_wanted, False
        return wanted

    def check_stop(self) -> None:
        """Raise `StopRequested` if so."""
        if self.stop.is_set():
            raise StopRequested
