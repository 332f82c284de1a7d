"""When a receiver begins to load: as late as it can without ending later.

An engine samples nothing while it loads, so it should not wait for files then. How long it can
keep sampling is known from its last sync: files will probably arrive and load as they did then.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import suppress

from agenticrun_workers.launch import Result
from agenticrun_workers.weights.buckets import WeightFile
from agenticrun_workers.weights.protocols import Answer
from agenticrun_workers.weights.transports import ReplayStream


class LoadTimes:
    """When one receiver began a sync, and when each file was loaded."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.ends_B: list[float] = []

    async def loaded(self, call: Result[Answer]) -> None:
        """Wait for a call that loads a file, and note its end."""
        await call
        self.ends_B.append(asyncio.get_running_loop().time())


class LoadStarts:
    """Seconds after the first file at which each receiver begins its next load."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """By receiver. Its first sync, which may make the files, teaches nothing: 0."""

    async def wait(self, name: str, files: ReplayStream[WeightFile]) -> float:
        """Wait until a receiver should begin to load, and return the time.

        It begins at once if nothing is known of it, and when all files are there.
        """
        reader = aiter(files)
        await anext(reader, None)
        # Files that are all there end the wait, however long the last sync took.
        with suppress(TimeoutError):
            async with asyncio.timeout(self.seconds.get(name, 0.0)):
                async for _ in reader:
                    pass
        return asyncio.get_running_loop().time()

    def learn(self, name: str, arrivals_B: Sequence[float], load: LoadTimes) -> None:
        """Take note of a receiver's load, of which the files arrived at these times."""
        # The first sync may create files and compile: its times do not repeat.
        if name not in self.seconds:
            self.seconds[name] = 0.0
            return
        ready_B = [max(load.began, arrived) for arrived in arrivals_B]
        since_first_B = [arrived - arrivals_B[0] for arrived in arrivals_B]
        self.seconds[name] = latest_start(since_first_B, busy_seconds(ready_B, load.ends_B))


def latest_start(arrivals_B: Sequence[float], loads_B: Sequence[float]) -> float:
    """Return how long after the first file a load should begin.

    From then on it never waits for a file, if files arrive and load as in the last sync. It ends
    no later than a load that began at once.

    Args:
        arrivals_B: seconds from the first file to each file, in order.
        loads_B: seconds to load each file.
    """
    loaded_before = itertools.accumulate(loads_B, initial=0.0)
    return max(arrived - before for arrived, before in zip(arrivals_B, loaded_before, strict=False))


def busy_seconds(arrivals_B: Sequence[float], ends_B: Sequence[float]) -> list[float]:
    """Return the seconds that each file took to load, without the wait for it.

    Args:
        arrivals_B: when each could be loaded, in order.
        ends_B: when each was loaded.
    """
    ready = [max(pair) for pair in zip(arrivals_B, [0.0, *ends_B[:-1]], strict=True)]
    return [end - begin for end, begin in zip(ends_B, ready, strict=True)]
