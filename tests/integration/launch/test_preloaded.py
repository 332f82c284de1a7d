"""Preloaded processes of tests are like those that an interpreter starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from preloaded import executable

PROGRAM = """
import json, os, sys
found = {
    "arguments": sys.argv[1:],
    "name": __name__,
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "read": sys.stdin.read(),
    "threads": len(os.listdir("/proc/self/task")),
    "first": sys.path[0],
    "rest": [entry for entry in sys.path if "-packages" in entry or entry.endswith("workers")],
}
print(json.dumps(found))
print("an error", file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.parametrize("module", [False, True])
def test_a_program_sees_what_it_would_see_in_an_interpreter(tmp_path: Path, module: bool) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    folder = tmp_path if module else Path("/")
    words = ["-m", "program"] if module else [str(program)]
    paths = [*filter(None, sys.path), str(tmp_path / "workers")]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "WORD": "zwei\nZeilen", "EMPTY": ""}
    found = []
    for command in ([sys.executable], executable()):
        done = subprocess.run(
            [*command, *words, "one", ""],
            input="a line",
            cwd=folder,
            env=environment | {"LC_CTYPE": "C.UTF-8"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 3, done.stderr
        assert done.stderr.startswith("an error\n")
        found.append(json.loads(done.stdout))
    expected, preloaded = found
    assert preloaded == expected
    assert preloaded["threads"] == 1


def test_a_process_has_imported_torch_and_dies_by_signals(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os, sys; assert 'torch' in sys.modules; os.kill(os.getpid(), 9)")
    done = subprocess.run([*executable(), str(program)], timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGKILL


def test_a_process_ends_with_its_client(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import time; print('there', flush=True); time.sleep(600)")
    command = [*executable(), str(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"there\n"
        client.kill()
        assert client.stdout.read() == b"", "the program has the other end of the pipe"


def test_a_process_gets_the_signals_of_its_client(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("""
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
print("there", flush=True)
signal.sigwait({signal.SIGTERM})
print("terminated", flush=True)
signal.sigwait({signal.SIGINT})
sys.exit(7)
""")
    command = [*executable(), str(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"there\n"
        client.terminate()
        assert client.stdout.readline() == b"terminated\n"
        client.send_signal(signal.SIGINT)
        assert client.wait(60) == 7


def test_processes_end_with_the_process_that_started_their_server(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import time; print('there', flush=True); time.sleep(600)")
    starting = f"""
import os, subprocess
import preloaded
from preloaded import executable
preloaded.MODULES = ()
with subprocess.Popen([*executable(), {str(program)!r}], stdout=subprocess.PIPE) as process:
    process.stdout.readline()
    os._exit(0)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", starting], env=environment, stderr=subprocess.PIPE
    ) as owner:
        assert owner.stderr is not None
        owner.stderr.read()  # which all processes of it have
        assert owner.wait(60) == 0
