"""One user at a time, across processes."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from devcluster.console import say


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds a lock on `path`, which stays as an empty file, waiting for whoever has it; a killed holder frees it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another devcluster command ({path})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
