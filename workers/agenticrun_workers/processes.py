"""Processes of this machine that descend from ours: find them and end them. Imports that cost less.

Variables with which programs reach this machine without a proxy.

A `psutil.Process` is a pid and a start time, so a pid that comes back is another process.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from operator import attrgetter

import psutil

POLL_SECONDS = 0.02


LOOPBACK = ("127.0.0.1", "localhost", "::1")


def direct(environment: Mapping[str, str], hosts: Iterable[str] = LOOPBACK) -> dict[str, str]:
    """Return the variables with which a program reaches these hosts without a proxy.

    HTTP_PROXY is for the world outside: no proxy reaches an endpoint of this machine or pod.

    Args:
        environment: of the program.
        hosts: names and addresses.

    Returns:
        NO_PROXY and no_proxy, of which libraries read one or the other; empty if they need no
        change.
    """
    proxies = ("http_proxy", "https_proxy", "all_proxy")
    listed = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    if listed == "*" or not any(environment.get(n) or environment.get(n.upper()) for n in proxies):
        return {}
    names = dict.fromkeys([*(name.strip() for name in listed.split(",") if name.strip()), *hosts])
    return dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(names))


def is_alive(process: psutil.Process) -> bool:
    """Return False for a zombie, too: it has ended and waits for its parent."""
    try:
        return process.is_running() and process.status() not in (
            psutil.STATUS_ZOMBIE,
            psutil.STATUS_DEAD,
        )
    except psutil.NoSuchProcess:
        return False


def children(pid: int) -> set[psutil.Process]:
    """Return the living children of a process."""
    return set(filter(is_alive, _children(pid, recursive=False)))


def descendants(pid: int) -> list[psutil.Process]:
    """Return all living descendants of a process, parents before their children."""
    return list(filter(is_alive, _children(pid, recursive=True)))


def families(processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    """Return the living among these processes, and all living descendants of theirs."""
    found: set[psutil.Process] = set()
    for process in sorted(processes, key=attrgetter("pid")):  # mostly parents first, to save looks
        if process not in found and is_alive(process):
            found |= {process, *descendants(process.pid)}
    return found


def end_families(
    processes: Iterable[psutil.Process], patience: float, kill_seconds: float
) -> set[psutil.Process]:
    """Wait until these processes and their descendants have ended; kill any that take too long.

    Args:
        processes: the roots. Take them while their parents live, or orphans are missed.
        patience: seconds to end by themselves.
        kill_seconds: seconds to be gone after SIGKILL.

    Returns:
        the processes that could not be killed.
    """
    known, began = set(processes), time.monotonic()
    while living := families(known):
        # Children of a process that has ended have another parent: they are only found while it
        # lives.
        known |= living
        waited = time.monotonic() - began
        if waited > patience + kill_seconds:
            return living
        if waited > patience:
            for process in living:
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    process.kill()
        time.sleep(POLL_SECONDS)
    return set()


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import in the `with` block without the garbage collector.

    It would look through all that torch and transformers define, again and again, and free nothing:
    a fifth of the CPU seconds of these imports.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _children(pid: int, *, recursive: bool) -> list[psutil.Process]:
    try:
        found: list[psutil.Process] = psutil.Process(pid).children(recursive=recursive)
        return found
    except psutil.NoSuchProcess:
        return []
