"""A server as a child process: started, watched and removed, on real processes and ports."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from agenticrun_workers.inference import server_process
from agenticrun_workers.inference.engine import EngineStartError
from agenticrun_workers.inference.server_process import (
    ServerProcess,
    ServerSpec,
    free_port,
    inherited,
    listeners,
)
from processes import family, lives
from waiting import eventually

SERVER = """
import http.server, os, subprocess, sys, tempfile
port, tokens = int(sys.argv[1]), sys.argv[2:]
print("one line of the log", flush=True)
tempfile.mkstemp()
if "child" in tokens:  # one in a session of its own, as a process group's kill would not reach it
    code = "import time; print('child', flush=True); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
if "misnamed" in tokens:  # as a long name of several bytes a letter, which the kernel cuts
    code = "import ctypes, time; ctypes.CDLL(None).prctl(15, bytes([195]), 0, 0, 0); \
time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
if "semaphore" in tokens:
    import multiprocessing, time
    context = multiprocessing.get_context("spawn")
    semaphore = context.Semaphore()
    context.Process(target=time.sleep, args=(600,)).start()  # keeps the resource tracker alive
    print("semaphore", semaphore._semlock.name, flush=True)
for made in [token for token in tokens if token.startswith("/dev/shm/")]:
    code = "import mmap, sys, time; file = open(sys.argv[1], 'a+b'); file.truncate(9); \
memory = mmap.mmap(file.fileno(), 9); print('mapped', flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code, made], stdout=subprocess.PIPE)
    child.stdout.readline()
if "dies" in tokens:
    sys.exit("the model is wrong")
if "slow" in tokens:
    import time; time.sleep(600)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(os.environ.get("WORD", "").encode())
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def a_server(folder: Path, *words: str, start_seconds: float = 120) -> ServerSpec:
    return ServerSpec(
        "toy",
        lambda port: [sys.executable, "-c", SERVER, str(port), *words],
        folder,
        environment={"WORD": "hello"},
        start_seconds=start_seconds,
        stop_seconds=0.5,
    )


def the_processes_of(process: ServerProcess) -> list[int]:
    return family(process._supervisor.pid)  # type: ignore[union-attr]


@pytest.fixture(autouse=True)
def temporary_folders_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


async def test_a_started_server_answers_and_a_stopped_one_leaves_no_process_no_port_and_no_file(
    tmp_path: Path,
) -> None:
    process = ServerProcess(a_server(tmp_path / "logs", "child"))
    await process.start()
    port = int(process.url.rpartition(":")[2])
    pids = the_processes_of(process)
    assert len(pids) == 4, "the relay and the supervisor, the server and its child"
    assert process.alive
    await process.stop()
    await process.stop()
    assert not process.alive
    assert not [pid for pid in pids if lives(pid)]
    assert not listeners(port)
    assert [entry.name for entry in tmp_path.iterdir()] == ["logs"]
    assert "one line of the log" in process.log.read_text()


async def test_a_server_that_ends_before_it_serves_is_an_error_that_quotes_its_log(
    tmp_path: Path,
) -> None:
    with pytest.raises(EngineStartError, match=r"toy ended with status 1[\s\S]*the model is wrong"):
        await ServerProcess(a_server(tmp_path / "logs", "dies", "child")).start()
    assert [entry.name for entry in tmp_path.iterdir()] == ["logs"]


async def test_a_server_that_never_serves_is_an_error_and_is_stopped(tmp_path: Path) -> None:
    process = ServerProcess(a_server(tmp_path / "logs", "slow", start_seconds=1))
    with pytest.raises(EngineStartError, match="not ready after 1 s"):
        await process.start()
    assert len(the_processes_of(process)) == 1
    assert not lives(the_processes_of(process)[0])


async def test_a_port_that_is_taken_in_between_leads_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        given = iter([other.getsockname()[1]])
        monkeypatch.setattr(
            server_process, "free_port", lambda host: next(given, None) or free_port(host)
        )
        process = ServerProcess(a_server(tmp_path))
        await process.start()
        assert process.url != f"http://127.0.0.1:{other.getsockname()[1]}"
        await process.stop()


async def test_a_program_that_answers_on_the_port_instead_of_the_server_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ServerProcess(a_server(tmp_path))
    await first.start()
    given = iter([int(first.url.rpartition(":")[2])])
    monkeypatch.setattr(
        server_process, "free_port", lambda host: next(given, None) or free_port(host)
    )
    second = ServerProcess(a_server(tmp_path))
    await second.start()
    assert second.url != first.url
    await first.stop()
    await second.stop()


async def test_four_taken_ports_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setattr(server_process, "free_port", lambda host: other.getsockname()[1])
        with pytest.raises(EngineStartError, match="port taken 4 times"):
            await ServerProcess(a_server(tmp_path)).start()


async def test_a_server_that_is_killed_is_noticed_and_takes_its_children_along(
    tmp_path: Path,
) -> None:
    process = ServerProcess(a_server(tmp_path, "child"))
    await process.start()
    relay, supervisor, server, child = the_processes_of(process)
    os.kill(server, signal.SIGKILL)
    assert "toy was killed" in await asyncio.wait_for(process.wait(), 60)
    assert not process.alive
    assert not lives(child)
    assert not lives(supervisor)
    assert not lives(relay)


async def test_processes_with_names_that_are_no_text_are_found_and_killed_too(
    tmp_path: Path,
) -> None:
    process = ServerProcess(a_server(tmp_path, "misnamed"))
    await process.start()
    _, _, server, child = the_processes_of(process)
    eventually(
        lambda: Path(f"/proc/{child}/comm").read_bytes() == b"\xc3\n", 60, "the child has its name"
    )
    assert child in the_processes_of(process)
    os.kill(server, signal.SIGKILL)
    await asyncio.wait_for(process.wait(), 60)
    assert not lives(child)


SLOW_SUPERVISOR = """
import os, subprocess, sys, time
sys.path.insert(0, sys.argv[2])
import process_supervisor
class Popen(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        print("started", flush=True)
        time.sleep(1)
subprocess.Popen = Popen
sys.exit(process_supervisor.main(os.getppid(), sys.argv[1], ["sh", "-c", "sleep 600 & wait"]))
"""


def test_a_server_that_is_stopped_as_it_starts_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    command = [
        sys.executable,
        "-c",
        SLOW_SUPERVISOR,
        str(folder),
        str(Path(server_process.__file__).parent),
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as relay:
        assert relay.stdout is not None
        assert relay.stdout.readline() == "started\n"
        pids = family(relay.pid)
        relay.terminate()
        assert relay.wait(60) == 128 + signal.SIGTERM, "the server's"
    eventually(lambda: not any(map(lives, pids)), 60, "the processes end")
    assert not folder.exists()


PARENT = """
import asyncio, sys, tempfile
from pathlib import Path
tempfile.tempdir = sys.argv[2]
from agenticrun_workers.inference.server_process import ServerProcess, ServerSpec
async def main():
    def command(port):
        return [sys.executable, "-c", sys.argv[1], str(port), "child"]
    process = ServerProcess(ServerSpec("toy", command, Path(sys.argv[2], "logs")))
    await process.start()
    print(process._supervisor.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_semaphores_of_a_server_that_is_killed_are_removed(tmp_path: Path) -> None:
    process = ServerProcess(a_server(tmp_path, "semaphore"))
    await process.start()
    name = next(
        line.split()[1]
        for line in process.log.read_text().splitlines()
        if line.startswith("semaphore")
    )
    semaphore = Path("/dev/shm", "sem." + name.strip("/"))
    assert semaphore.exists()
    os.kill(the_processes_of(process)[2], signal.SIGKILL)
    await process.wait()
    assert not semaphore.exists()


@pytest.mark.parametrize("end", ["stop", "kill", "crash"])
async def test_shared_memory_that_a_server_made_is_removed_and_no_other(
    tmp_path: Path, end: str
) -> None:
    """SGLang leaves a file of 16 KB for each server that is killed, and larger ones on GPUs."""
    name = f"/dev/shm/agenticrun-test-{os.getpid()}"
    made, shared, earlier = (Path(f"{name}-{each}") for each in ("made", "shared", "earlier"))
    earlier.write_bytes(bytes(9))
    process = ServerProcess(a_server(tmp_path, str(made), str(shared), str(earlier)))
    try:
        await process.start()
        with shared.open("r+b") as file, mmap.mmap(file.fileno(), 9):  # as another server
            if end == "crash":
                os.kill(the_processes_of(process)[2], signal.SIGKILL)
                await process.wait()
            elif end == "kill":
                process.kill()
                await process.wait()
            else:
                await process.stop()
            assert [path.exists() for path in (made, shared, earlier)] == [False, True, True]
    finally:
        for path in (made, shared, earlier):
            path.unlink(missing_ok=True)


async def test_nothing_is_left_when_the_programs_own_children_are_killed(tmp_path: Path) -> None:
    # Ray does so with the children of an actor that it ends
    process = ServerProcess(a_server(tmp_path / "logs", "child"))
    await process.start()
    relay, *others = the_processes_of(process)
    os.kill(relay, signal.SIGKILL)
    await process.wait()
    eventually(lambda: not any(map(lives, others)), 60, "the others end")
    eventually(
        lambda: [entry.name for entry in tmp_path.iterdir()] == ["logs"], 60, "no file is left"
    )


def test_nothing_is_left_when_the_program_that_started_a_server_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, SERVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = family(int(parent.stdout.readline()))
        assert len(pids) == 4, "the relay and the supervisor, the server and its child"
        parent.kill()
    eventually(lambda: not any(map(lives, pids)), 60, "the processes end")
    eventually(
        lambda: [entry.name for entry in tmp_path.iterdir()] == ["logs"], 60, "no file is left"
    )


def test_free_ports_are_outside_the_range_of_outgoing_connections_and_can_be_bound() -> None:
    for _ in range(20):
        port = free_port("127.0.0.1")
        assert server_process.PORTS[0] <= port <= server_process.PORTS[1]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_a_server_gets_what_the_user_has_set_and_not_what_we_have_set() -> None:
    ours = {"PYTHONPATH": "/code", "RAY_ADDRESS": "x", "MALLOC_ARENA_MAX": "2"}
    theirs = {"HF_TOKEN": "secret", "CUDA_VISIBLE_DEVICES": "0"}
    assert inherited(ours | theirs) == theirs
    assert inherited({"MALLOC_ARENA_MAX": "8"}) == {"MALLOC_ARENA_MAX": "8"}


@pytest.mark.parametrize(
    ("given", "listed"),
    [
        ({"HTTP_PROXY": "http://proxy", "NO_PROXY": "a, b"}, "a,b,127.0.0.1,localhost,::1"),
        ({"all_proxy": "http://proxy", "no_proxy": "127.0.0.1"}, "127.0.0.1,localhost,::1"),
        ({"https_proxy": "http://proxy", "no_proxy": "*"}, None),
        ({"http_proxy": "", "NO_PROXY": "a"}, None),
    ],
)
def test_no_proxy_comes_between_a_server_and_itself(
    given: dict[str, str], listed: str | None
) -> None:
    added = {"NO_PROXY": listed, "no_proxy": listed} if listed else {}
    assert inherited(given) == given | added
