"""The fork server of the sandbox: calls are separate, and nothing is left when processes die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from agenticrun_workers.sandbox import (
    Limits,
    Outcome,
    SandboxUnavailable,
    python,
    run_python,
)
from processes import children, lives
from waiting import eventually

ENDLESS = "open('begun', 'w').close()\nwhile True: pass"
FLOODS_WHEN_TOLD = """import os, time
open('begun', 'w').close()
while not os.path.exists('go'): time.sleep(0.01)
while True: print('x' * 1000)"""
OPEN_FILES = """
import os
for fd in range(4096):
    try: os.fstat(fd)
    except OSError: continue
    print(fd)
"""


def server() -> int:
    """The process id of this process's."""
    run_python("")
    assert python._server is not None
    return python._server.process.pid


def gone(*pids: int) -> bool:
    return not any(map(lives, pids))


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.fixture(autouse=True)
def scratches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the calls' scratch folders."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def begun_call(scratches: Path, server: int) -> tuple[Path, int]:
    """Return scratch folder and process id of the one call that runs `ENDLESS` or similar code."""
    scratch = eventually(lambda: list(scratches.glob("*/begun")), 60, "the call begins")[0].parent
    return scratch, children(server)[0]


@contextmanager
def endless_call(
    scratches: Path, seconds: float, code: str = ENDLESS
) -> Iterator[tuple[Future[Outcome], Path, int]]:
    """A call that goes on, its scratch folder and its process."""
    pid = server()
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(run_python, code, Limits(seconds))
        yield call, *begun_call(scratches, pid)


def program(code: str) -> subprocess.Popen[str]:
    """Another process that uses the sandbox. Use it in a `with`, which closes its pipes."""
    packages = str(Path(python.__file__).parents[2])
    code = f"import os, signal, sys, threading\nsys.path.insert(0, {packages!r})\n{code}"
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_calls_share_a_process_to_be_forked_from_and_leave_nothing_in_it() -> None:
    pid = server()
    first = "import builtins, json, os, sys, types\nbuiltins.left = json.left = 1\n"
    first += "os.environ['LEFT'] = '1'\nsys.modules['left'] = types.ModuleType('left')\n"
    first += "open('left', 'w').close()\nos.getppid(), os.getcwd() == os.environ['HOME']"
    assert run_python(first).stdout == f"({pid}, True)\n"
    seen = "hasattr(builtins, 'left'), hasattr(json, 'left'), 'LEFT' in os.environ, "
    seen += "'left' in sys.modules, os.listdir()"
    assert (
        run_python(f"import builtins, json, os, sys\n{seen}").stdout
        == "(False, False, False, False, [])\n"
    )


def test_a_call_has_no_files_of_the_server_or_of_calls_at_the_same_time(scratches: Path) -> None:
    with endless_call(scratches, 60) as (_, scratch, other), ThreadPoolExecutor(8) as threads:
        for outcome in threads.map(run_python, [OPEN_FILES] * 16):
            assert outcome.stdout == "0\n1\n2\n"
        for path in (scratch, scratches):
            assert "PermissionError" in run_python(f"import os\nos.listdir({str(path)!r})").stderr
        os.kill(other, signal.SIGKILL)


def test_a_call_sees_no_frames_of_the_server() -> None:
    code = "import sys\nf = sys._getframe()\nwhile f: print(f.f_code.co_name); f = f.f_back"
    assert run_python(code).stdout.split() == ["<module>", "run", "main", "<module>"]


def test_signals_are_as_in_a_fresh_python() -> None:
    code = "import signal\nprint(*map(signal.getsignal, range(1, 32)), "
    code += "signal.pthread_sigmask(0, []), signal.set_wakeup_fd(-1))"
    assert (
        run_python(code).stdout
        == subprocess.run(
            ["env", "--default-signal=INT", sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )


def test_16_at_once_are_told_apart() -> None:
    with ThreadPoolExecutor(16) as threads:
        outcomes = list(threads.map(lambda n: run_python(f"print({n})\nexit({n})"), range(64)))
    assert [(outcome.stdout, outcome.end) for outcome in outcomes] == [
        (f"{n}\n", "failed" if n else "finished") for n in range(64)
    ]
    assert children(server()) == []


def test_files_do_not_add_up() -> None:
    pid = server()
    before = open_files(os.getpid())
    for number in range(50):
        run_python(["1", "1 / 0", "while True: print('x' * 1000)"][number % 3])
    run_python(ENDLESS, Limits(0.1))
    assert open_files(os.getpid()) <= before  # less: the collector has closed files of other tests
    assert children(pid) == []
    eventually(lambda: open_files(pid) == 5, 10, "the server's own, none of this process's pipes")


def test_it_is_in_a_session_of_its_own() -> None:
    assert os.getsid(server()) == server() != os.getsid(0)


def test_a_server_that_died_is_replaced_and_reaped() -> None:
    pid = server()
    before = open_files(os.getpid())
    os.kill(pid, signal.SIGKILL)
    assert run_python("1").stdout == "1\n"
    assert server() != pid
    assert not Path(f"/proc/{pid}").exists()
    assert open_files(os.getpid()) <= before


def test_a_server_that_dies_again_and_again_is_survived_by_many_callers() -> None:
    stop = threading.Event()

    def kill() -> None:
        while not stop.wait(0.05):
            if python._server is not None:
                python._server.process.kill()

    def call(number: int) -> bool:
        try:
            return run_python(f"{number}").stdout == f"{number}\n"
        except SandboxUnavailable:
            return True

    with ThreadPoolExecutor(8) as threads:
        killer = threads.submit(kill)
        assert all(threads.map(call, range(100)))
        stop.set()
        killer.result()
    assert run_python("1").stdout == "1\n"


def test_a_server_that_dies_during_a_call_ends_it_with_an_error(scratches: Path) -> None:
    with endless_call(scratches, 60) as (call, _, child):
        start = time.monotonic()
        os.kill(server(), signal.SIGKILL)
        with pytest.raises(SandboxUnavailable, match="ended during a call"):
            call.result(20)
    assert time.monotonic() - start < 20
    eventually(lambda: gone(child), 10, "the call's process ends")


def test_a_call_ends_at_its_limit_though_a_fork_of_the_caller_has_its_socket(
    scratches: Path,
) -> None:
    with endless_call(scratches, 60, FLOODS_WHEN_TOLD) as (call, scratch, child):
        fork = os.fork()
        if fork == 0:
            time.sleep(60)
            os._exit(0)
        try:
            (scratch / "go").touch()
            assert call.result(60).end == "output"
            assert gone(child)
        finally:
            os.kill(fork, signal.SIGKILL)
            os.waitpid(fork, 0)


@pytest.mark.parametrize("forks", [False, True], ids=["alone", "a fork lives on"])
def test_nothing_outlives_a_caller_that_is_killed(forks: bool, scratches: Path) -> None:
    code = "from agenticrun_workers.sandbox import Limits, python, run_python\n"
    code += "run_python('')\nprint(python._server.process.pid, flush=True)\n"
    code += (
        f"threading.Thread(target=run_python, args=({ENDLESS!r}, Limits(60))).start()\ninput()\n"
    )
    code += (
        "if os.fork() == 0: print('forked', os.getpid(), flush=True); input()\n" if forks else ""
    )
    fork = 0
    with program(code) as caller:
        assert caller.stdout is not None
        assert caller.stdin is not None
        pid = int(caller.stdout.readline())
        _, child = begun_call(scratches, pid)
        if forks:
            caller.stdin.write("\n")
            caller.stdin.flush()
            fork = int(caller.stdout.readline().split()[1])
        os.kill(caller.pid, signal.SIGKILL)
        try:
            eventually(lambda: gone(pid, child), 10, "the server and the call's process end")
            assert fork == 0 or not gone(fork)
        finally:
            if fork:
                os.kill(fork, signal.SIGKILL)


def test_a_fork_of_the_caller_has_a_server_of_its_own() -> None:
    code = """
from agenticrun_workers.sandbox import python, run_python
def server():
    assert run_python('1').stdout == '1\\n'
    return python._server.process.pid
busy = threading.Thread(target=lambda: [server() for _ in range(30)])
busy.start()
first = server()
for _ in range(3):
    fork = os.fork()
    if fork == 0:
        os._exit(server() == first)
    assert os.waitpid(fork, 0)[1] == 0
busy.join()
assert server() == first
"""
    with program(code) as caller:
        assert caller.wait(60) == 0


def test_a_caller_may_block_or_ignore_the_signal_of_ended_children() -> None:
    code = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from agenticrun_workers.sandbox import run_python
assert run_python('1').end == 'finished'
"""
    with program(code) as caller:
        assert caller.wait(60) == 0


def test_a_child_that_cannot_begin_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "launcher.py"
    broken.write_text(python.LAUNCHER.read_text().replace("os.chdir(", "1 / 0; os.chdir("))
    with monkeypatch.context() as patch:
        patch.setattr(python, "LAUNCHER", broken)
        with pytest.raises(SandboxUnavailable, match=r"(?s)did not start.*ZeroDivisionError"):
            run_python("1")
    assert run_python("1").stdout == "1\n"
