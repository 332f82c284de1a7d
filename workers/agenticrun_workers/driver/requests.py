"""What a running attempt has been asked for: by a signal, by Ctrl-C, or through the reporter."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from agenticrun_api import Commands

T = TypeVar("T")


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

    async def unless_stopped(
        self, work: Coroutine[Any, Any, T], failures: Sequence[asyncio.Future[None]] = ()
    ) -> T:
        """The result of `work`. It is cancelled when a stop is asked for (`StopRequested`) or one of `failures` fails.

        Work that is done gives its result, also when a stop has just been asked for: what a batch has taken would be lost.
        """
        if self.stop.is_set():
            work.close()
            raise StopRequested
        task = asyncio.create_task(work)
        stop = asyncio.create_task(self.stop.wait())
        try:
            waiting: list[asyncio.Future[Any]] = [task, stop, *failures]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for failure in failures:
                if failure.done():
                    failure.result()
            if not task.done():
                self.check_stop()
            return await task
        finally:
            for pending in (task, stop):
                pending.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)
