"""Isolated environments: a crash costs one episode, and no process outlives its worker."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agenticrun_workers.envs import EnvCalls, EnvFault, FrozenLake, Renders, StepResult
from agenticrun_workers.envs import isolated as isolated_module
from agenticrun_workers.envs.isolated import MAX_GROWTH, IsolatedEnv, Isolation
from agenticrun_workers.types import StopReason, Stream
from processes import children, lives
from waiting import eventually_in_loop

HERE = Path(__file__)
SUICIDAL = f"{HERE.stem}:Suicidal"


class Suicidal:
    """Does what its answer says."""

    def __init__(self, start: str = "") -> None:
        self.grown = b""
        if start:
            self.step(start)

    def reset(self, seed: int, split: Stream) -> Any:
        self.instruction = f"play {seed}"
        return f"{split} {os.getpid()}", {"pid": os.getpid()}

    def step(self, action: str) -> Any:
        match action:
            case "exit":
                os._exit(3)
            case "segfault":
                ctypes.string_at(0)
            case "hang":
                ctypes.PyDLL(None).sleep(100)  # holds the GIL
            case "sys.exit":
                sys.exit(4)
            case "raise":
                raise ValueError("no such door")
            case "lambda":
                return StepResult("seen", 0.0, False, info={"f": lambda: None})
            case "huge":
                return StepResult("x" * 100_000_000, 0.0, False)
            case "leak":
                self.grown = b"x" * (MAX_GROWTH + 100_000_000)
            case "child":
                subprocess.Popen(["sleep", "100"])
        return "seen", 1, False, False, {"pid": os.getpid()}

    def valid_actions(self) -> list[str]:
        return ["exit"]


class Polite:
    """Async, of gymnasium's shape, with items."""

    def set_item(self, item: dict[str, Any]) -> None:
        self.item = item

    async def reset(self, *, seed: int | None = None) -> Any:
        await asyncio.sleep(0)
        return f"{self.item['word']} {seed}", {}

    async def step(self, action: str) -> StepResult:
        await asyncio.sleep(0)
        return StepResult(action, 0.0, True)


@contextmanager
def isolated(type: str, timeout: float | None = 60.0, **config: Any) -> Iterator[Isolation]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE.parent))
        isolation = Isolation(type, config, timeout)
        yield isolation
        isolation.stop()


@pytest.fixture(scope="module")
def suicidal() -> Iterator[Isolation]:
    with isolated(SUICIDAL) as isolation:
        yield isolation


@pytest.fixture(autouse=True)
async def _ended(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """End the environments of a test in its event loop."""
    started: list[IsolatedEnv] = []
    start = Isolation.start

    async def noted(isolation: Isolation) -> IsolatedEnv:
        started.append(await start(isolation))
        return started[-1]

    monkeypatch.setattr(Isolation, "start", noted)
    yield
    for env in started:
        env.end()
    await asyncio.sleep(0)  # the loop closes the connections


async def fault_of(isolation: Isolation, action: str, timeout: float = 60.0) -> EnvFault:
    env = await isolation.start()
    await EnvCalls(60.0).reset(env, 0, Stream.TRAIN)
    with pytest.raises(EnvFault) as caught:
        await EnvCalls(timeout).step(env, action)
    return caught.value


async def test_an_isolated_environment_plays_like_any_other() -> None:
    with isolated("frozen_lake", size=5, isSlippery=True) as isolation:
        calls, ours, theirs = (
            EnvCalls(60.0),
            FrozenLake(size=5, is_slippery=True),
            await isolation.start(),
        )
        for seed in range(5):
            assert await calls.reset(theirs, seed, Stream.VALIDATION) == await calls.reset(
                ours, seed, Stream.VALIDATION
            )
            for action in ("Down", "Right", "Nowhere", "Down"):
                assert await calls.step(theirs, action) == await calls.step(ours, action)
        assert await calls.valid_actions(theirs) == ours.valid_actions()
        theirs.film = True
        await calls.reset(theirs, 3, Stream.TRAIN)
        ours.reset(3, Stream.TRAIN)
        assert isinstance(theirs, Renders)
        np.testing.assert_array_equal(theirs.render(), ours.render())


async def test_every_shape_and_items_work() -> None:
    with isolated(f"{HERE.stem}:Polite") as isolation:
        calls, env = EnvCalls(60.0), await isolation.start()
        start = await calls.reset(env, 7, Stream.TRAIN, {"word": "hot"})
        assert (start.observation, start.instruction) == ("hot 7", "")
        assert (await calls.step(env, "cold")).observation == "cold"
        assert not isinstance(env, Renders)


@pytest.mark.parametrize(
    ("action", "reason", "message"),
    [
        ("exit", StopReason.ENV_ERROR, "the environment's process ended itself with exit code 3"),
        ("segfault", StopReason.ENV_ERROR, "the environment's process was ended by SIGSEGV"),
        ("hang", StopReason.TIMEOUT, "Suicidal.step took more than 0.2 s"),
        ("sys.exit", StopReason.ENV_ERROR, "SystemExit: 4"),
        ("raise", StopReason.ENV_ERROR, f"ValueError: no such door ({HERE.name}:"),
        (
            "lambda",
            StopReason.ENV_ERROR,
            "step returned something that cannot leave the environment's process",
        ),
        ("huge", StopReason.ENV_ERROR, "sent no answer: TooLong: 100,0"),
    ],
)
async def test_what_it_does_to_itself_is_a_fault_and_others_play_on(
    suicidal: Isolation, action: str, reason: StopReason, message: str
) -> None:
    calls, other = EnvCalls(60.0), await suicidal.start()
    await calls.reset(other, 0, Stream.TRAIN)
    fault = await fault_of(suicidal, action, 0.2 if action == "hang" else 60.0)
    assert (fault.reason, message in str(fault)) == (reason, True), str(fault)
    assert (await calls.step(other, "go")).reward == 1.0


@pytest.mark.parametrize(
    ("type", "start", "message"),
    [
        (SUICIDAL, "exit", "the environment's process ended itself with exit code 3"),
        (
            SUICIDAL,
            "raise",
            "it could not be built: EnvConfigError: env 'test_isolated:Suicidal' refuses its "
            "config: no such door",
        ),
        (SUICIDAL, "hang", "took more than 0.5 s to be built"),
        (f"{HERE.stem}:Nobody", "", "test_isolated has no Nobody"),
    ],
)
async def test_what_cannot_be_built_says_so(type: str, start: str, message: str) -> None:
    with isolated(type, 0.5 if start == "hang" else 60.0, start=start) as isolation:
        with pytest.raises(EnvFault) as caught:
            await isolation.start()
        assert message in str(caught.value)


async def test_a_module_whose_import_hangs_is_imported_again_after_some_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the requests pile up at a server that never reads them, until sending one blocks."""
    monkeypatch.setattr(isolated_module, "MAX_TIMEOUTS", 2)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "sleepy.py").write_text("import time\ntime.sleep(600)\n")
    isolation = Isolation("sleepy:Env", {}, 0.2)
    ended = []
    for _ in range(4):
        with pytest.raises(EnvFault, match=r"sleepy:Env took more than 0\.2 s to be built"):
            await isolation.start()
        ended.append(isolation._server is None)
    assert ended == [False, True] * 2


async def test_a_start_that_is_cancelled_leaves_no_process_and_no_connection(
    suicidal: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between the fork and the connection to the process."""
    (await suicidal.start()).end()
    assert suicidal._server is not None
    ends: list[socket.socket] = []
    fork = suicidal._server.fork

    def noted(files: Sequence[int]) -> socket.socket:
        ends.append(fork(files))
        return ends[-1]

    async def cancelled(sock: socket.socket) -> None:
        ends.append(sock)
        raise asyncio.CancelledError

    monkeypatch.setattr(suicidal._server, "fork", noted)
    monkeypatch.setattr(asyncio, "open_connection", cancelled)
    with pytest.raises(asyncio.CancelledError):
        await suicidal.start()
    assert [end.fileno() for end in ends] == [-1, -1]
    server = suicidal._server.process.pid
    await eventually_in_loop(lambda: not children(server), 60, "the process ends")


async def all_end(*pids: int) -> None:
    await eventually_in_loop(lambda: not any(map(lives, pids)), 60, "the processes end")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def pid_of(env: IsolatedEnv) -> int:
    return int((await EnvCalls(60.0).reset(env, 0, Stream.TRAIN)).info["pid"])


async def test_end_ends_the_process_also_one_that_hangs_in_c_with_what_it_started(
    suicidal: Isolation,
) -> None:
    env = await suicidal.start()
    pid = await pid_of(env)
    await EnvCalls(60.0).step(env, "child")
    (child,) = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    with pytest.raises(EnvFault):
        await EnvCalls(0.2).step(env, "hang")
    await all_end(pid, child)


async def test_any_number_of_environments_may_be_ended_and_how_the_next_one_ends_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = socket.socketpair

    def tiny_pair(*arguments: Any) -> tuple[socket.socket, socket.socket]:
        """Return a pair with room for only a few statuses at each end."""
        ends = pair(*arguments)
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return ends

    monkeypatch.setattr(socket, "socketpair", tiny_pair)
    with isolated(SUICIDAL) as isolation:
        (await isolation.start()).end()
        before = open_files()
        for at_once in (1, 16, 1, 16):
            envs = [await isolation.start() for _ in range(at_once)]
            pids = [await pid_of(env) for env in envs]
            for env in envs:
                env.end()
            await all_end(*pids)
            (
                await isolation.start()
            ).end()  # its process begins after the server has seen the others end
        assert "exit code 3" in str(await fault_of(isolation, "exit"))
        await eventually_in_loop(lambda: open_files() <= before, 60, "no connection stays open")


NURSERY = """
import subprocess
CHILD = subprocess.Popen(["sleep", "1000"])

class Nursery:
    def reset(self, seed, split):
        return str(CHILD.pid)

    def step(self, action):
        return "seen", 0.0, False, False, {}
"""


async def test_what_the_environments_module_started_may_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nursery.py").write_text(NURSERY)
    monkeypatch.syspath_prepend(str(tmp_path))
    with isolated("nursery:Nursery") as isolation:
        calls, env = EnvCalls(60.0), await isolation.start()
        child = int((await calls.reset(env, 0, Stream.TRAIN)).observation)
        os.kill(child, signal.SIGTERM)
        await eventually_in_loop(
            lambda: not Path(f"/proc/{child}").exists(), 60, "the server reaps it"
        )
        await isolation.start()
        await calls.step(env, "go")


SLOW = """
import os, time
while not os.path.exists({path!r}):
    time.sleep(0.01)

class Slow:
    def reset(self, seed, split):
        return "seen"

    def step(self, action):
        return "seen", 0.0, False, False, {{}}
"""


@pytest.mark.timeout(120)
async def test_400_starts_at_once_wait_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the module is imported nothing is forked, so requests would fill the socket."""
    go = tmp_path / "go"
    (tmp_path / "slow.py").write_text(SLOW.format(path=str(go)))
    monkeypatch.syspath_prepend(str(tmp_path))

    async def start_and_end(isolation: Isolation) -> None:
        (await isolation.start()).end()

    with isolated("slow:Slow") as isolation:
        starts = [asyncio.create_task(start_and_end(isolation)) for _ in range(400)]
        for _ in range(10):
            await asyncio.sleep(0)
        go.touch()
        await asyncio.gather(*starts)


async def test_no_file_left_for_a_start_leaves_other_environments_alone(
    suicidal: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = await suicidal.start()
    assert suicidal._server is not None

    def refuse(files: Sequence[int]) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(suicidal._server, "fork", refuse)
        with pytest.raises(EnvFault, match=r"Suicidal cannot be started: .*Too many open files"):
            await suicidal.start()
    await EnvCalls(60.0).step(env, "look")
    await suicidal.start()


async def test_a_process_that_has_grown_is_worn_out(suicidal: Isolation) -> None:
    env = await suicidal.start()
    await EnvCalls(60.0).reset(env, 0, Stream.TRAIN)
    assert not env.worn_out
    await EnvCalls(60.0).step(env, "leak")
    assert env.worn_out


WORKER = f"""
import asyncio, sys
sys.path[:0] = {[str(HERE.parent), str(HERE.parents[2] / "support")]!r}
from agenticrun_workers.envs import EnvCalls
from agenticrun_workers.envs.isolated import Isolation

async def work():
    isolation = Isolation("{HERE.stem}:Suicidal", {{}}, 60.0)
    envs = [await isolation.start() for _ in range(3)]
    pids = [(await EnvCalls().reset(env, 0, "train")).info["pid"] for env in envs]
    print(isolation._server.process.pid, *pids, flush=True)
    await EnvCalls().step(envs[0], "hang")

asyncio.run(work())
"""


async def test_a_worker_that_is_killed_leaves_no_process_behind() -> None:
    worker = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True)
    assert isinstance(worker.stdout, io.TextIOWrapper)
    pids = list(map(int, worker.stdout.readline().split()))
    assert len(pids) == 4
    assert all(map(lives, pids))
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    await all_end(*pids)
