"""The preStop hook of head and trainer pods: the driver saves before the pod goes.

Kubernetes runs the hook when it removes a pod: for a drain, an eviction, a preemption, a taint or a
deletion. The pod's processes receive SIGTERM after the hook, and then Ray ends the driver unsaved.
The hook asks the reporter in the head pod to stop the driver. It returns when the driver has made
its final report, or at once if no driver runs.

It repeats the request: the reporter may restart, and another attempt may begin on this pod. It
imports the standard library only, so that it starts at once on a busy node.

In a trainer pod the hook then ends the raylet. When a whole RayCluster is deleted, the head goes
first. A raylet that gets SIGTERM after that tries to reach it for 40 s, and would keep its GPUs.

Run it with `python -m agenticrun_workers.reporting.leave SECONDS`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

# Of agenticrun_api.names, which takes half a second to import.
REPORTER_PORT = 8787
TOKEN_HEADER = "X-Ray-Authorization"

POLL_SECONDS = 0.5
ANSWER_SECONDS = 3.0
UNREACHABLE_SECONDS = 5.0
"""Time without an answer after which the head is gone, and its driver with it."""
READ_SECONDS = 10.0
"""Time that the operator gets to read the final report before the pod goes. It looks at once."""
END_SECONDS = 2.0
"""Time that a raylet gets to end in order. One with a head needs less than a second."""


def main() -> None:
    """Wait for at most as many seconds as the argument says."""
    address = os.environ.get("RAY_ADDRESS", "127.0.0.1:6379")
    pod = os.environ.get("POD_NAME") or socket.gethostname()
    seconds = float(sys.argv[1])
    head = address.rpartition(":")[0].strip("[]")
    stopped = leave(
        head,
        int(os.environ.get("AGENTICRUN_REPORTER_PORT", REPORTER_PORT)),
        os.environ.get("RAY_AUTH_TOKEN", ""),
        pod,
        seconds,
    )
    if head != "127.0.0.1":  # not in the head pod, whose Ray ends at once
        end_raylets()
    if not stopped:
        sys.exit(f"the driver has not stopped within {seconds:.0f} s")


def leave(host: str, port: int, token: str, pod: str, seconds: float) -> bool:
    """Ask the driver to stop, and wait until it has.

    Args:
        host: the head.
        port: of the reporter.
        token: Ray's token.
        pod: the name of this pod.
        seconds: the time limit.

    Returns:
        False if the driver still runs after this time.
    """
    begin = answered = time.monotonic()
    stopped: float | None = None
    while (now := time.monotonic()) < begin + seconds:
        answer = _ask(host, port, token, pod, min(ANSWER_SECONDS, begin + seconds - now))
        now = time.monotonic()
        if answer is None:
            # The head itself is gone: no driver is left to wait for.
            if now - answered >= UNREACHABLE_SECONDS:
                return True
        else:
            answered = now
            # A driver that starts again in between has not stopped.
            stopped = None if answer["driverRuns"] else stopped or now
            # The pod stays until the operator has read why the attempt ended, or the outcome is
            # lost.
            if stopped and (not answer["reportUnread"] or now - stopped >= READ_SECONDS):
                return True
        time.sleep(POLL_SECONDS)
    return stopped is not None


def end_raylets(proc: Path = Path("/proc"), seconds: float = END_SECONDS) -> None:
    """End the raylets of this pod: in order if they can, otherwise by SIGKILL.

    Args:
        proc: the folder of the processes.
        seconds: the time to end in order.
    """
    found = _raylets(proc)
    for pid in found:
        with suppress(OSError):  # it has ended
            os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + seconds
    # A raylet that ends in order tells its head at once, and Ray need not wait for a timeout.
    while found and time.monotonic() < end:
        time.sleep(0.1)
        found &= _raylets(proc)
    for pid in found:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _raylets(proc: Path) -> set[int]:
    """Return the ids of the living raylets."""
    found = set()
    for folder in proc.glob("[0-9]*"):
        with suppress(OSError):
            program = (folder / "cmdline").read_bytes().partition(b"\0")[0]
            if program.endswith(b"/raylet"):  # a zombie has no command line
                found.add(int(folder.name))
    return found


def _ask(host: str, port: int, token: str, pod: str, timeout: float) -> dict[str, bool] | None:
    """Return the reporter's `LeaveAnswer`; None if it gives none."""
    connection = HTTPConnection(host, port, timeout=timeout)
    headers = {TOKEN_HEADER: f"Bearer {token}", "Content-Type": "application/json"}
    try:
        connection.request("POST", "/leave", json.dumps({"pod": pod}), headers)
        response = connection.getresponse()
        body = response.read()
        return json.loads(body) if response.status == 200 else None
    except (OSError, HTTPException, ValueError):
        return None
    finally:
        connection.close()


if __name__ == "__main__":
    main()
