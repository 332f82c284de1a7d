"""Commands whose processes are stopped for a moment, again and again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from processes import lives
from testcluster import ROOT
from waiting import eventually

STALLS = (
    sys.executable,
    str(ROOT / "tools/stalls.py"),
    "--every",
    "0.02",
    "--shortest",
    "0.01",
    "--longest",
    "0.05",
)

COUNTS = """
import sys, time
for number in range(30):
    print(number, flush=True)
    time.sleep(0.02)
sys.exit(7)
"""

PARENT = """
import subprocess, time
# sh ends at once: its child's parent is gone
print(subprocess.run("sleep 600 >/dev/null 2>&1 & echo $!", shell=True, \
capture_output=True, text=True).stdout, flush=True)
time.sleep(600)
"""


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("share", ["0", "1"])
def test_a_command_does_what_it_does_and_its_status_is_passed_on(share: str) -> None:
    done = subprocess.run(
        [*STALLS, "--all", share, sys.executable, "-c", COUNTS], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.split()) == (7, [str(number) for number in range(30)])
    assert int(done.stderr.split()[0]) > 3, "stalls"


def test_processes_are_stopped_also_those_whose_parent_has_ended() -> None:
    with subprocess.Popen(
        [*STALLS, "--all", "0", sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout is not None
        child = int(command.stdout.readline())
        try:
            eventually(lambda: state(child) == "T", 60, "the child is stopped", 0.002)
            eventually(lambda: state(child) != "T", 60, "the child goes on", 0.002)
            command.send_signal(signal.SIGTERM)
            assert command.wait(60) == 128 + signal.SIGTERM
            assert lives(child)
            assert state(child) != "T", "nothing stays stopped"
        finally:
            command.kill()
            os.kill(child, signal.SIGKILL)


def test_what_somebody_else_has_stopped_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import stalls

    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            assert child.pid in stalls._descendants(os.getpid())
            child.send_signal(signal.SIGSTOP)
            eventually(lambda: state(child.pid) == "T", 60, "it is stopped")
            assert child.pid not in stalls._descendants(os.getpid())
        finally:
            child.kill()
