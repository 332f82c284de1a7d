"""The sandbox on this machine's kernel contains every attack, as root and as nobody."""

from __future__ import annotations

import gc
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agenticrun_workers import sandbox
from agenticrun_workers.sandbox import (
    Limits,
    Outcome,
    SandboxUnavailable,
    describe,
    python,
    run_python,
    seccomp,
)
from agenticrun_workers.sandbox.seccomp import NUMBERS
from processes import children
from waiting import eventually

NOBODY = 65534
SECRET = "s3cr3t-token"
LIMITS = {"memory_mb": 256, "output_bytes": 10_000, "scratch_mb": 4}
SHORT, LONG = 0.5, 20.0
"""Seconds for what never ends by itself, and for all else, however busy the machine is."""

ATTACKS: dict[str, tuple[str, str, str]] = {
    # name: code, how it ends, what standard error says
    "fork bomb": ("import os\nwhile True: os.fork()", "failed", "PermissionError"),
    "fork by libc": (
        "import ctypes\nassert ctypes.CDLL(None).fork() == 0, 'refused'",
        "failed",
        "refused",
    ),
    "vfork by number": (
        "import ctypes\nassert ctypes.CDLL(None).syscall(vfork) >= 0, 'refused'",
        "failed",
        "refused",
    ),
    "clone3 by number": (
        "import ctypes\nassert ctypes.CDLL(None).syscall(435, bytes(88), 88) >= 0, 'refused'",
        "failed",
        "refused",
    ),
    "another program": (
        "import os\nos.execv('/bin/sh', ['sh', '-c', 'echo out'])",
        "failed",
        "PermissionError",
    ),
    "subprocess": ("import subprocess\nsubprocess.run(['/bin/ls'])", "failed", "PermissionError"),
    "thread bomb": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,), "
        "daemon=True).start()",
        "failed",
        "thread",
    ),
    "memory bomb": ("x = []\nwhile True: x.append(bytearray(2**20))", "failed", "MemoryError"),
    "memory map": ("import mmap\nmmap.mmap(-1, 2**30)", "failed", "OSError"),
    "deep recursion": ("def f(): f()\nf()", "failed", "RecursionError"),
    "stack overflow": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(_): return list(map(f, [0]))\nf(0)",
        "*",
        "",
    ),
    "endless loop": ("while True: pass", "time", ""),
    "endless sleep": ("import time\ntime.sleep(100)", "time", ""),
    "endless without output": ("import os\nos.close(1)\nos.close(2)\nwhile True: pass", "time", ""),
    "ignores signals": (
        "import signal\nfor s in range(1, 32):\n  if s not in (9, 19): signal.signal(s, 1)\nwhile "
        "True: pass",
        "time",
        "",
    ),
    "output flood": ("while True: print('x' * 1000)", "output", ""),
    "error flood": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output", "xxx"),
    "socket": (
        "import socket\nsocket.create_connection(('127.0.0.1', 80))",
        "failed",
        "PermissionError",
    ),
    "udp": (
        "import socket\nsocket.socket(2, 2).sendto(b'x', ('127.0.0.1', 53))",
        "failed",
        "PermissionError",
    ),
    "unix socket": ("import socket\nsocket.socket(1, 1)", "failed", "PermissionError"),
    "name lookup": ("import socket\nsocket.getaddrinfo('example.com', 80)", "failed", "gaierror"),
    "io_uring": (
        "import ctypes\nassert ctypes.CDLL(None).syscall(425, 8, bytes(120)) >= 0, 'refused'",
        "failed",
        "refused",
    ),
    "environment of the parent": (
        "import os\nopen(f'/proc/{os.getppid()}/environ').read()",
        "failed",
        "PermissionError",
    ),
    "own environment in /proc": ("open('/proc/self/environ').read()", "failed", "PermissionError"),
    "list of processes": ("import os\nos.listdir('/proc')", "failed", "PermissionError"),
    "memory of the parent": (
        "import os\nopen(f'/proc/{os.getppid()}/mem', 'rb')",
        "failed",
        "PermissionError",
    ),
    "ptrace": (
        "import ctypes, os\nassert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0, "
        "'refused'",
        "failed",
        "refused",
    ),
    "reads memory": (
        "import ctypes, os\nassert ctypes.CDLL(None).process_vm_readv(os.getppid(), 0, 0, 0, 0, 0) "
        "== 0, 'refused'",
        "failed",
        "refused",
    ),
    "a token in a file": ("open(secret).read()", "failed", "PermissionError"),
    "accounts": ("open('/etc/passwd').read()", "failed", "PermissionError"),
    "home": ("import os\nos.listdir(home)", "failed", "PermissionError"),
    "the product's code": ("open(product).read()", "failed", "PermissionError"),
    "writes outside": ("open(folder + '/new', 'w')", "failed", "PermissionError"),
    "overwrites": ("open(secret, 'w')", "failed", "PermissionError"),
    "deletes": ("import os\nos.remove(secret)", "failed", "PermissionError"),
    "truncates": ("import os\nos.truncate(secret, 0)", "failed", "PermissionError"),
    "renames": (
        "import os\nopen('x', 'w').close()\nos.rename('x', folder + '/x')",
        "failed",
        "Error",
    ),
    "links": ("import os\nos.link(secret, 'x')", "failed", "PermissionError"),
    "symbolic link": ("import os\nos.symlink(secret, 'x')", "failed", "PermissionError"),
    "changes modes": ("import os\nos.chmod(secret, 0o777)", "failed", "PermissionError"),
    "changes times": ("import os\nos.utime(secret)", "failed", "PermissionError"),
    "shared memory": (
        "from multiprocessing.shared_memory import SharedMemory\nSharedMemory('x', True, 99)",
        "failed",
        "PermissionError",
    ),
    "folders": ("import os\nos.mkdir('x')", "failed", "PermissionError"),
    "a large file": (
        "f = open('x', 'wb')\nwhile True: f.write(bytes(2**20))",
        "failed",
        "File too large",
    ),
    "many large files": (
        "n = 0\nwhile True:\n  n += 1\n  open(f'f{n % 20}', 'wb').write(bytes(2**21))",
        "files",
        "",
    ),
    "very many files": ("n = 0\nwhile True:\n  n += 1\n  open(f'f{n}', 'w').close()", "files", ""),
    "open files": ("x = [open('/dev/null') for _ in range(100)]", "failed", "Too many open files"),
    "kills the parent": ("import os\nos.kill(os.getppid(), 9)", "failed", "PermissionError"),
    "kills everybody": ("import os\nos.kill(-1, 9)", "failed", "PermissionError"),
    "signals by files": (
        "import fcntl, os\nfcntl.fcntl(1, 8, os.getppid())",
        "failed",
        "PermissionError",
    ),
    "limits of the parent": (
        "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
        "failed",
        "PermissionError",
    ),
    "raises its limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
        "failed",
        "Error",
    ),
    "becomes root": ("import os\nos.setuid(0)\nos.setresuid(0, 0, 0)", "failed", "PermissionError"),
    "mounts": (
        "import ctypes\nassert ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, 0) == 0, "
        "'refused'",
        "failed",
        "refused",
    ),
    "namespaces": (
        "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0, 'refused'",
        "failed",
        "refused",
    ),
    "types into the terminal": (
        "import fcntl\nfcntl.ioctl(1, 0x5412, b'x')",
        "failed",
        "PermissionError",
    ),
    "leaves the session": ("import os\nos.setsid()", "failed", "PermissionError"),
    "asks for input": ("input()", "failed", "EOFError"),
    "descriptors of others": (
        "import os\nfor fd in range(3, 32):\n  os.fstat(fd)",
        "failed",
        "Bad file descriptor",
    ),
}


def play(secret: Path) -> dict[str, dict[str, Any]]:
    """Every attack's outcome; also run as nobody, in a process of its own."""
    names = {
        "secret": str(secret),
        "folder": str(secret.parent),
        "home": os.path.expanduser("~"),
        "product": sandbox.__file__,
        "vfork": 58 if platform.machine() == "x86_64" else 1071,
    }
    known = "".join(f"{name} = {value!r}\n" for name, value in names.items())

    def attack(code: str, end: str) -> dict[str, Any]:
        outcome = run_python(known + code, Limits(SHORT if end == "time" else LONG, **LIMITS))
        return {
            "end": outcome.end,
            "stdout": outcome.stdout,
            "stderr": outcome.stderr,
            "seconds": outcome.seconds,
        }

    with ThreadPoolExecutor(4) as threads:
        return dict(
            zip(ATTACKS, threads.map(lambda row: attack(*row[:2]), ATTACKS.values()), strict=True)
        )


@pytest.fixture(scope="module")
def secret() -> Iterator[Path]:
    """A file that everybody may read and write."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        file = Path(folder) / "token"
        file.write_text(SECRET)
        file.chmod(0o666)
        yield file


REFUSE_UNSHARE = """
import ctypes, platform, struct
number = 272 if platform.machine() == "x86_64" else 97
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
filter = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(code)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filter, 0, 0) == 0
from agenticrun_workers.sandbox import describe
assert describe()["namespaces"].startswith("no: "), describe()
"""
"""Forbid user namespaces, as container runtimes do in pods."""


def as_nobody(interpreter: str, program: str) -> subprocess.CompletedProcess[str]:
    packages = [str(Path(sandbox.__file__).parents[2]), str(Path(__file__).parents[2] / "support")]
    packages += (path for path in sys.path if path.endswith("site-packages"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(packages)}
    command = [interpreter, "-c", program]
    nobody: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    return subprocess.run(
        command, **nobody, cwd="/", env=environment, capture_output=True, text=True, timeout=120
    )


def interpreter_of_nobody() -> str:
    """Return this Python, or the system's of the same version if only root can enter its folder."""
    wanted = (
        f"import sys; assert sys.version_info[:2] == {sys.version_info[:2]}; import numpy, pytest"
    )
    for interpreter in (sys.executable, "/usr/bin/python3"):
        with suppress(OSError):
            if as_nobody(interpreter, wanted).returncode == 0:
                return interpreter
    pytest.skip(
        f"nobody may not run {sys.executable}, and /usr/bin/python3 is not the same version"
    )


@pytest.fixture(scope="module", params=["this user", "nobody", "nobody in a pod"])
def outcomes(request: pytest.FixtureRequest, secret: Path) -> dict[str, dict[str, Any]]:
    if request.param == "this user":
        return play(secret)
    if os.geteuid() != 0:
        pytest.skip("only root can become nobody")
    interpreter = interpreter_of_nobody()
    program = REFUSE_UNSHARE if request.param == "nobody in a pod" else ""
    program += "import importlib.util, json, pathlib, sys\n"
    program += f"spec = importlib.util.spec_from_file_location('attacks', {__file__!r})\n"
    program += "module = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(module)\n"
    program += f"print(json.dumps(module.play(pathlib.Path({str(secret)!r}))))"
    child = as_nobody(interpreter, program)
    assert child.returncode == 0, child.stderr[-2000:]
    answer: dict[str, dict[str, Any]] = json.loads(child.stdout)
    return answer


@pytest.mark.parametrize("name", ATTACKS)
def test_it_is_contained(name: str, outcomes: dict[str, dict[str, Any]], secret: Path) -> None:
    _, end, message = ATTACKS[name]
    got = outcomes[name]
    assert end in ("*", got["end"]), got
    assert got["end"] != "finished", got
    assert message in got["stderr"], got
    assert SECRET not in got["stdout"] + got["stderr"]
    assert got["seconds"] < (SHORT if end == "time" else LONG) + 25
    assert len(got["stdout"]) + len(got["stderr"]) <= 2 * 10_000
    assert secret.read_text() == SECRET
    assert [file.name for file in secret.parent.iterdir()] == ["token"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="32-bit system calls are x86's")
def test_32_bit_system_calls_end_the_process() -> None:
    """mov eax, 2 (fork); int 0x80; ret: the numbers mean other calls there."""
    code = "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\n"
    code += "m.write(bytes.fromhex('b802000000cd80c3'))\n"
    code += "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()\n"
    code += "print('broke out')"
    outcome = run_python(code)
    assert (outcome.end, outcome.stdout) == ("killed", "")


def test_the_environment_holds_constants_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", SECRET)
    names = run_python("import os\nprint(*os.environ)").stdout.split()
    assert set(names) <= {
        "HOME",
        "TMPDIR",
        "LANG",
        "LC_CTYPE",
        "PYTHONHASHSEED",
        "OPENBLAS_NUM_THREADS",
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
    }


@pytest.mark.parametrize(
    ("code", "stdout"),
    [
        ("print('a')\n1 + 2", "a\n3\n"),
        ("x = 5\nx", "5\n"),
        ("None", ""),
        ("", ""),
        ("print(list({'a', 'b', 'c', 'd'}) == list({'a', 'b', 'c', 'd'}), hash('a'))", None),
        ("import numpy as np\nnp.arange(3).sum()", "np.int64(3)\n"),
        ("import asyncio\nasync def f(): return 7\nasyncio.run(f())", "7\n"),
        (
            "import threading\nt = threading.Thread(target=print, "
            "args=('hi',))\nt.start()\nt.join()",
            "hi\n",
        ),
        ("open('a', 'w').write('hi')\nprint(open('a').read())\nimport os\nos.remove('a')", "hi\n"),
        ("import tempfile\nwith tempfile.TemporaryFile() as f: print(f.write(b'abc'))", "3\n"),
        ("from dataclasses import dataclass\n@dataclass\nclass P: x: 'int'\nP(1)", "P(x=1)\n"),
        (
            "import json, re, math, random, itertools, fractions, decimal, datetime, "
            "statistics\nmath.comb(5, 2)",
            "10\n",
        ),
        ("print('é')", "é\n"),
    ],
)
def test_computing_works(code: str, stdout: str | None) -> None:
    outcome = run_python(code)
    assert (outcome.end, outcome.stderr) == ("finished", "")
    assert stdout in (None, outcome.stdout)
    assert run_python(code).stdout == outcome.stdout


@pytest.mark.parametrize(
    ("code", "stderr"),
    [
        (
            "1 / 0",
            [
                '  File "<code>", line 1, in <module>',
                "    1 / 0",
                "ZeroDivisionError: division by zero",
            ],
        ),
        ("x =", ['  File "<code>", line 1', "    x =", "SyntaxError: invalid syntax"]),
        (
            "def f(): g()\ndef g(): h()\ndef h(): 1 / 0\nf()",
            ["line 4, in <module>", "line 2, in g", "line 3, in h", "ZeroDivisionError"],
        ),
        ("raise SystemExit(3)", []),
        ("exit(1)", []),
    ],
)
def test_failures_say_where(code: str, stderr: list[str]) -> None:
    """The code's own frames, the first and the last two; `f` between them is left out."""
    outcome = run_python(code)
    assert outcome.end == "failed"
    assert all(line in outcome.stderr for line in stderr)
    assert "launcher" not in outcome.stderr
    assert "in f\n" not in outcome.stderr


def test_nothing_stays_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_python("")  # what starts with the first call stays
    gc.collect()  # later it would close files of other tests
    files = len(os.listdir("/proc/self/fd"))
    run_python("open('a', 'w').write('x')")
    run_python("while True: pass", Limits(seconds=0.2))
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= files
    assert "a" not in run_python("import os\nos.listdir('.')").stdout


@pytest.mark.parametrize(
    ("code", "end", "stdout"),
    [
        ("print(1)", "finished", "1\n"),
        ("import time\nprint(1, flush=True)\ntime.sleep(0.2)\nprint(2)", "finished", "1\n2\n"),
        ("print(1)\nexit(3)", "failed", "1\n"),
        ("print(1, flush=True)\nimport ctypes\nctypes.string_at(0)", "killed", "1\n"),
        ("print('x' * 20_000)", "output", "x" * 10_000),
        ("print(1)\nfor n in range(40): open(f'{n}', 'w').close()", "files", "1\n"),
    ],
)
def test_what_ended_while_its_watcher_was_away_was_not_late(
    code: str, end: str, stdout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_python("")
    assert python._server is not None
    server, asked = python._server.process.pid, []

    def monotonic() -> float:
        """An hour goes by between the first two questions."""
        asked.append(time.monotonic())
        if len(asked) > 1:
            eventually(lambda: not children(server), 60, "the code ends")
        return asked[-1] + 3600 * (len(asked) > 1)

    monkeypatch.setattr(python, "time", SimpleNamespace(monotonic=monotonic))
    outcome = run_python(code, Limits(LONG, **LIMITS))
    assert (outcome.end, outcome.stdout) == (end, stdout)


def test_many_run_at_once() -> None:
    with ThreadPoolExecutor(8) as threads:
        outcomes = list(threads.map(lambda number: run_python(f"print({number})"), range(16)))
    assert [outcome.stdout for outcome in outcomes] == [f"{number}\n" for number in range(16)]


def test_it_says_which_layers_hold() -> None:
    layers = describe()
    assert set(layers) == {
        "limits",
        "no_new_privileges",
        "landlock",
        "seccomp",
        "capabilities",
        "namespaces",
    }
    assert not [name for name in python.REQUIRED if layers[name].startswith("no: ")]


def test_it_refuses_where_a_layer_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(
        SandboxUnavailable, match=r"seccomp: there is no filter for this machine.*best-effort"
    ):
        run_python("print('ran')")
    outcome = run_python("print('ran')", mode="best-effort")
    assert (outcome.stdout, outcome.layers["seccomp"]) == (
        "ran\n",
        "no: there is no filter for this machine",
    )


def test_a_python_that_does_not_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python, "LAUNCHER", Path("/nowhere.py"))
    with pytest.raises(SandboxUnavailable, match=r"did not start.*nowhere\.py"):
        run_python("1")


@pytest.mark.parametrize(
    "limits", [{"seconds": 0}, {"memory_mb": -1}, {"output_bytes": 0}, {"scratch_mb": -1}]
)
def test_limits_that_allow_nothing_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Limits(**limits)


@pytest.mark.parametrize(
    ("header", "column"),
    [
        ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", 0),
        ("/usr/include/asm-generic/unistd.h", 1),
    ],
)
def test_the_numbers_are_the_kernels(header: str, column: int) -> None:
    if not Path(header).exists():
        pytest.skip(f"{header} is not installed")
    theirs = {
        name: int(number)
        for name, number in re.findall(
            r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text()
        )
    }
    theirs |= {"newfstatat": theirs.get("newfstatat", theirs.get("fstatat", -1))}
    for name, numbers in NUMBERS.items():
        assert numbers[column] == theirs.get(name), name


def test_programs_are_whole_instructions_and_end_with_a_refusal() -> None:
    for machine in seccomp.ARCHITECTURES:
        code = seccomp.program(machine)
        assert len(code) % 8 == 0
        assert code[-8:] == bytes([6, 0, 0, 0, 1, 0, 5, 0])


def test_a_call_costs_its_caller_a_few_milliseconds() -> None:
    run_python("1")  # the first starts what the others are forked from
    costs = []
    for _ in range(5):
        start = time.process_time()
        assert isinstance(run_python("1"), Outcome)
        costs.append(time.process_time() - start)
    assert min(costs) < 0.1  # other threads of this process compute, too
