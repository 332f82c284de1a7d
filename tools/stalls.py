#!/usr/bin/env python3
"""Run a command as on a machine that stalls.

Again and again one of its processes, or all of them, get no processor for a moment.

    python3 tools/stalls.py .venv/bin/pytest -q tests/unit

A test that fails only here depends on who is faster. The exit status is that of the command.
Whatever was stopped is continued, also on Ctrl-C.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shortest",
        type=float,
        default=0.05,
        metavar="SECONDS",
        help="stall (default %(default)s)",
    )
    parser.add_argument(
        "--longest", type=float, default=1.0, metavar="SECONDS", help="stall (default %(default)s)"
    )
    parser.add_argument(
        "--every",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="from one stall to the next, on average (default %(default)s)",
    )
    parser.add_argument(
        "--all",
        type=float,
        default=0.2,
        metavar="SHARE",
        help="of the stalls that stop every process (default %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of when, how long and whom (default %(default)s)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if not options.command:
        parser.error("no command")
    rng, stalls = random.Random(options.seed), 0
    # Processes become ours when their parents end: all that the command starts descends from us.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    command = subprocess.Popen(options.command)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: command.send_signal(number))
    while not _ended(command, rng.uniform(0, 2 * options.every)):
        victims = _descendants(os.getpid())
        if rng.random() >= options.all:
            victims = rng.sample(victims, min(1, len(victims)))
        _stall(victims, rng.uniform(options.shortest, options.longest))
        stalls += 1
    print(f"{stalls} stalls", file=sys.stderr)
    return command.returncode if command.returncode >= 0 else 128 - command.returncode


def _ended(command: subprocess.Popen[bytes], seconds: float) -> bool:
    """Return True if the command ends within `seconds`; reap orphans that have ended."""
    end = time.monotonic() + seconds
    while command.poll() is None and time.monotonic() < end:
        while (
            ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        ) and ended.si_pid != command.pid:
            os.waitpid(ended.si_pid, 0)
        time.sleep(0.02)
    return command.returncode is not None


def _stall(processes: list[int], seconds: float) -> None:
    stopped = []
    try:
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                stopped.append(pid)
        time.sleep(seconds)
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _descendants(root: int) -> list[int]:
    """Return what descends from `root`, except what others have stopped: that stays stopped."""
    children: dict[int, list[int]] = {}
    stopped = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            pid, (state, parent, *_) = (
                int(stat.parent.name),
                stat.read_text(errors="replace").rpartition(")")[2].split(),
            )
            children.setdefault(int(parent), []).append(pid)
            if state == "T":
                stopped.add(pid)
    found = list(children.get(root, []))
    for pid in found:  # which grows
        found += children.get(pid, [])
    return sorted(set(found) - stopped)


if __name__ == "__main__":
    sys.exit(main())
