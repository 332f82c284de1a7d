"""A copy of the run's output in object storage, where it outlives the head pod.

The output (metrics.jsonl, TensorBoard's events, samples, driver.log) is written to a folder of the
head pod if the checkpoints go to object storage, which cannot append to files. Changed files are
copied beside the checkpoints every minute and at the end of an attempt. An attempt on a new head
pod first fetches what the last one left, so that it appends to these files.
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

MAX_REFUSED = 3
"""Files that storage refuses before a copy ends: each may take a minute if it is not there."""

FETCHED = ".fetched"
"""A file of the local folder once it has what earlier attempts left.

From a folder without it nothing is copied: its files do not continue the stored ones, and would
replace them.
"""


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
        """Get the files that are not here, each whole or not at all.

        Raises what the file system raises, and OSError if an earlier attempt on this pod failed to.
        """
        sizes = self._target.sizes()
        # Checkpoints are large, and are read where they are needed.
        names = [name for name in sizes if not name.startswith(("step-", ".write-test-"))]
        for name in names:
            path = self._output / name
            # Which of the two is newer cannot be known: neither is overwritten.
            if path.exists() and not self.fetched:
                raise OSError(f"{name} is here and there, and an earlier attempt did not fetch it")
            if not path.exists():
                # Downloaded beside its place and renamed: a download that breaks off leaves no half
                # file that looks whole.
                path.parent.mkdir(parents=True, exist_ok=True)
                aside = path.with_name(path.name + ".part")
                try:
                    self._target.download(name, aside)
                    aside.replace(path)
                finally:
                    aside.unlink(missing_ok=True)
        self._output.mkdir(parents=True, exist_ok=True)
        # Last: a fetch that broke off must not look complete.
        (self._output / FETCHED).touch()

    @property
    def fetched(self) -> bool:
        """True if this folder has what earlier attempts left."""
        return (self._output / FETCHED).exists()

    def copy(self) -> None:
        """Copy the files that have changed since they were copied last."""
        refused = 0
        try:
            paths = sorted(self._output.rglob("*"))
        except OSError as error:
            self._refused(error)
            return
        for path in paths:
            try:
                # Links lead to Ray's logs, which are not the run's output.
                if path.is_symlink() or not path.is_file() or path.name == FETCHED:
                    continue
                name, state = str(path.relative_to(self._output)), path.stat()
                # A file that grows while it is copied is copied again next time.
                version = (state.st_size, state.st_mtime_ns)
                if self._copied.get(name) != version:
                    self._target.upload(name, path)
                    self._copied[name] = version
            except Exception as error:  # drivers have exceptions of their own
                self._refused(error)
                refused += 1
                # The rest waits for the next copy: storage is probably away.
                if refused == MAX_REFUSED:
                    return
        self._works = not refused

    def _refused(self, error: Exception) -> None:
        if self._works:
            log.warning(
                "cannot copy the output to %s: %s: %s", self._target, type(error).__name__, error
            )
        self._works = False


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
        if not copies.fetched:
            log.warning("the output stays in the head pod: cannot read %s: %s", target, error)
            yield
            return
        # An earlier attempt on this pod has fetched: its files continue the stored ones.
        log.warning("cannot read %s: %s", target, error)

    ended = asyncio.Event()

    async def repeat() -> None:
        last = False
        while not last:
            # Also waits for the end, so that the last copy begins at once.
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
