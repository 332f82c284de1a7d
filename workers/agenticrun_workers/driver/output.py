"""A copy of the run's output in object storage, where it outlives the head pod.

The output (metrics.jsonl, TensorBoard's events, samples, driver.log) is written to a folder of the
head pod if the checkpoints go to object storage, which cannot append to files. Changed files are
copied beside the checkpoints every minute and at the end of an attempt. An attempt on a new head
pod first fetches what the last one left, so that its files go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from agenticrun_workers.storage import Folder

log = logging.getLogger(__name__)

COPY_SECONDS = 60.0


class OutputCopy:
    """Copies the files of a local folder to a folder of any file system, and back.

    A failing storage does not stop training; it is logged once.

    Args:
        output: the local folder.
        target: where the copies go, beside the folders `step-<N>` of the checkpoints.
    """

    def __init__(self, output: Path, target: Folder) -> None:
        self._output = output
        self._target = target
        self._copied: dict[str, tuple[int, int]] = {}
        """Size and time of change of each file when it was copied last."""
        self._works = True

    def fetch(self) -> None:
        """Get the files that are not here. Raises what the file system raises."""
        for name in self._target.sizes():
            if name.startswith(("step-", ".write-test-")) or (self._output / name).exists():
                continue
            (self._output / name).parent.mkdir(parents=True, exist_ok=True)
            self._target.download(name, self._output / name)

    def copy(self) -> None:
        """Copy the files that have changed since they were copied last."""
        try:
            for path in sorted(self._output.rglob("*")):
                if path.is_symlink() or not path.is_file():
                    continue
                name, state = str(path.relative_to(self._output)), path.stat()
                version = (state.st_size, state.st_mtime_ns)
                if self._copied.get(name) != version:
                    self._target.upload(name, path)
                    self._copied[name] = version
        except Exception as error:  # drivers have exceptions of their own
            if self._works:
                log.warning(
                    "cannot copy the output to %s: %s: %s",
                    self._target,
                    type(error).__name__,
                    error,
                )
            self._works = False
        else:
            self._works = True


@asynccontextmanager
async def copied_output(output: Path, target: Folder) -> AsyncIterator[None]:
    """Copy `output` to `target` while the context lasts, and once more at its end.

    Without knowing what is there, nothing is copied: it would replace the files of earlier
    attempts.
    """
    copies = OutputCopy(output, target)
    try:
        await asyncio.to_thread(copies.fetch)
    except Exception as error:  # drivers have exceptions of their own
        log.warning("the output stays in the head pod: cannot read %s: %s", target, error)
        yield
        return

    ended = asyncio.Event()

    async def repeat() -> None:
        last = False
        while not last:
            with suppress(TimeoutError):
                async with asyncio.timeout(COPY_SECONDS):
                    await ended.wait()
            last = ended.is_set()
            await asyncio.to_thread(copies.copy)

    copying = asyncio.create_task(repeat())
    try:
        yield
    finally:
        ended.set()  # and not `cancel`: a copy under way would be the last to arrive
        await copying
