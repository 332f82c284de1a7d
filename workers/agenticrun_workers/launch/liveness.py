"""When a process counts as frozen, and what happens then.

A process that is stopped, deadlocked or out of reach fails no call: its callers would wait
forever. A time limit on each call would end long work that is healthy: one token per second is
slow, not dead. So the rule is:

- **Polls alone have a deadline.** The owner of an actor polls it: `ActorHandle.poll` calls a method
  that returns within `POLL_SECONDS`, whatever else the actor does. After `FROZEN_POLLS` without an
  answer the actor is killed. Its death fails all calls to it, wherever they are awaited.
- **Who polls whom.** `EnvPool` its env workers, `EnginePool` its engines, `RunActors` the
  stores, `FileSync` the nodes that a sync uses. Env workers and engines are replaced. A node fails
  its receivers. A store ends the attempt.
- **An engine's server** is polled by its `EngineActor`, with a longer limit (`STEP_SECONDS` of
  `inference.engine`), because it answers between two steps. What a weight update asks of it has
  time limits of its own. A frozen server is killed, and its actor is replaced.
- **A slow engine** is not frozen, but it does not hold up the others: one that is far slower gets
  no requests for a time (`inference.slow_engines`). So does one with a frozen server, minutes
  before the limit above. One that computes nothing whenever it is tried again is replaced.
- **An engine that answers polls and no request** is found by what it computes: with requests in
  flight, fewer than 30 tokens in `STEP_SECONDS` (`Pace` of `inference.actor`). Polls count only
  while it should compute: not while it is paused, sleeps or loads weights. A prompt that is
  computed at once has more time. A request that a server has lost keeps the run from its next
  step, so sooner or later it is the only one in flight.
- **A process that was given up may still run**, if it was only out of reach. It is ignored: the
  stores refuse its trajectories (`TrajectoryStore.refuse`), its requests are aborted with its
  connections, and no client or sync knows a replaced engine.
- **A lost network** breaks the connections of the generation clients by TCP's own probes
  (`request_port`). Reconnecting has a time limit, and until then requests go to other engines.
- **A disk that hangs** is no frozen process: what waits for it may be needless or lost. What the
  trajectory stores write stays in their memory after as long as `FROZEN_POLLS`. What they cannot
  read back in that time is nowhere else: the call fails, which ends the attempt.
- **A pod that is being removed** says so itself, before its processes end: its preStop hook asks
  the reporter to stop the driver (`reporting.leave`).
- **Ranks of trainers are not polled**: a rank runs one call at a time, and a training step may take
  any time. The same holds for an actor that is still starting. If one hangs, no step ends, and the
  operator's stall detection (`failurePolicy.stall`) gives the attempt up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

T = TypeVar("T")

POLL_SECONDS = 5.0
FROZEN_POLLS = 12
"""A minute. Imports and the code of environments may block an event loop for many seconds."""


JOIN_SECONDS = 30.0
"""Time for actors beyond the needed ones to start before the others begin."""


class NoAnswer(Exception):
    """A process has missed too many polls."""


async def answered(answer: Awaitable[T], polls: int | None = None) -> T:
    """Wait for an answer for `polls` times `POLL_SECONDS`; by default `FROZEN_POLLS`.

    Counts waits instead of seconds: if this process itself was stopped, the answer may be there,
    and no process has missed more than one poll.

    Raises:
        NoAnswer: it has not come.
    """
    waiting = asyncio.ensure_future(answer)
    try:
        for _ in range(FROZEN_POLLS if polls is None else polls):
            await asyncio.wait({waiting}, timeout=POLL_SECONDS)
            if waiting.done():
                return waiting.result()
    finally:
        waiting.cancel()
    raise NoAnswer


async def enough_of(starts: Sequence[asyncio.Future[T]], needed: int) -> set[asyncio.Future[T]]:
    """Wait until all of `starts` have ended, or `needed` have and the others had `JOIN_SECONDS`.

    An actor whose pod cannot be placed never starts. The others must not wait for it.

    Returns:
        The actors that have not ended.

    Raises:
        Exception: the error of the first call that failed. All others are cancelled.
    """
    waiting = set(starts)
    try:
        while waiting:
            # With enough of them, each one more gets its own JOIN_SECONDS.
            enough = len(starts) - len(waiting) >= needed
            done, waiting = await asyncio.wait(
                waiting,
                timeout=JOIN_SECONDS if enough else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for start in done:
                # Raises the first error: a wrong setting would fail all others in the same way.
                start.result()
            if not done:
                break
    except BaseException:
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)
        raise
    return waiting
