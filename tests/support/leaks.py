"""Find what a test leaves behind: asyncio tasks, threads, open files and Ray references."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from waiting import eventually_in_loop

EXECUTOR = "asyncio_"
"""Names of the threads of the event loop's own executor, which it keeps until it is closed."""


def _open_files() -> Counter[str]:
    """Kinds and paths of this process's open files, without the numbers of sockets and pipes."""
    files = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            files.append(os.readlink(descriptor).partition(":[")[0])
    return Counter(files)


def _left(
    tasks: set[object], threads: set[int | None], files: Counter[str], references: int
) -> list[str]:
    gc.collect()
    left = [repr(task) for task in asyncio.all_tasks() if task not in tasks]
    left += [
        repr(each)
        for each in threading.enumerate()
        if each.ident not in threads and not each.name.startswith(EXECUTOR)
    ]
    if more := _open_files() - files:
        left.append(f"more open files: {dict(more)}")
    if (held := _references()) > references:
        left.append(f"{held - references} more Ray references")
    return left


def _references() -> int:
    if not ray.is_initialized():
        return 0
    worker: Any = ray._private.worker.global_worker
    return len(worker.core_worker.get_all_reference_counts())


@asynccontextmanager
async def nothing_left_behind(seconds: float = 20, *, connections: int = 0) -> AsyncIterator[None]:
    """Fail if the `with` block leaves more tasks, threads, files or Ray references than it found.

    Args:
        seconds: what is just ending has so long to end.
        connections: sockets that may stay, because Ray opens them once in each process.
    """
    gc.collect()
    tasks: set[object] = set(asyncio.all_tasks())
    threads = {each.ident for each in threading.enumerate()}
    files, references = _open_files(), _references()
    files["socket"] += connections
    yield
    left: list[str] = []

    def clean() -> bool:
        left[:] = _left(tasks, threads, files, references)
        return not left

    try:
        await eventually_in_loop(clean, seconds, "nothing is left behind")
    except AssertionError as error:
        raise AssertionError(f"left behind: {left}") from error
