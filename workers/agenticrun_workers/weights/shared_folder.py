"""A folder in shared memory that does not outlive its process, however that ends."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "agenticrun-"
LONGEST_NAME = 200
"""A file's name has at most 255 bytes."""

_WATCH = 'exec 3<&0; (read -r _ <&3; rm -rf -- "$1") >/dev/null 2>&1 &'
"""Waits for the end of its input, which comes when the last process that holds the pipe's other end is gone."""


class SharedFolder:
    """A new folder whose name carries `name` (the run's).

    A shell that waits for this process's end deletes it, also after kill -9. The shell is nobody's child, because Ray ends the
    children of a worker together with it.
    """

    def __init__(self, name: str) -> None:
        self.path = Path(
            tempfile.mkdtemp(prefix=f"{PREFIX}{name[:LONGEST_NAME]}-", dir=SHARED_MEMORY)
        )
        command = ["/bin/sh", "-c", _WATCH, "agenticrun-weights", str(self.path)]
        shell = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        assert shell.stdin is not None
        self._lifeline = shell.stdin
        shell.wait()

    def delete(self) -> None:
        """Now. Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lifeline.close()
