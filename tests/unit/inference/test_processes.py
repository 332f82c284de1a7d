"""Families of processes: found without zombies, and ended with patience, then by force."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil

from agenticrun_workers.processes import children, descendants, end_families, families
from processes import lives

PARENT = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import time; time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def a_family() -> tuple[subprocess.Popen[str], int]:
    """A process and the pid of its child, which is in a session of its own."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


def test_a_family_is_a_process_and_its_descendants() -> None:
    parent, child = a_family()
    with parent:
        assert psutil.Process(parent.pid) in children(os.getpid())
        assert psutil.Process(child) not in children(os.getpid())
        assert [process.pid for process in descendants(parent.pid)] == [child]
        assert {process.pid for process in families([psutil.Process(parent.pid)])} == {
            parent.pid,
            child,
        }
        os.kill(child, 9)
        parent.kill()


def test_what_does_not_end_by_itself_is_killed_with_its_orphans_and_a_zombie_has_ended() -> None:
    parent, child = a_family()
    with parent:
        began = time.monotonic()
        assert end_families([psutil.Process(parent.pid)], 0.3, 60) == set()
        assert 0.3 <= time.monotonic() - began < 60
        assert not lives(child)
        assert not lives(parent.pid)
        assert families([psutil.Process(parent.pid)]) == set(), "it is a zombie until it is reaped"
