"""`agenticrun run` as a user types it: it trains, stops, resumes, and leaves nothing running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import yaml

from agenticrun_api.names import ExitCode
from preloaded import environment, executable
from processes import of_session, ray_folders
from tiny_runs import tiny_document
from waiting import eventually

pytestmark = pytest.mark.timeout(1200)


class Command:
    """A running `agenticrun run`.

    Args:
        preloaded: its processes have imported torch before they start.
    """

    def __init__(self, folder: Path, *, preloaded: bool = False, **pipeline: object) -> None:
        self.output = folder / "out"
        file = folder / "run.yaml"
        document = tiny_document(**pipeline)
        del document["metadata"]["uid"]
        file.write_text(yaml.safe_dump(document))
        self.log = folder / "log"
        command = [
            *(executable() if preloaded else [sys.executable]),
            "-m",
            "agenticrun_workers.cli",
            "run",
            "-f",
            str(file),
            "-o",
            str(self.output),
        ]
        self._folders = ray_folders()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | (environment() if preloaded else {}),
            )

    def wait(self) -> int:
        return self.process.wait(550)

    def wait_for(self, line: str) -> None:
        eventually(
            lambda: line in self.log.read_text() or self.process.poll() is not None, 550, line, 0.1
        )
        assert line in self.log.read_text(), self.log.read_text()

    def end(self) -> None:
        """If a failure has left it running, with all that it started."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def leaves_nothing_behind(self) -> None:
        """Neither processes of its session nor files of its Ray live on after it."""
        with suppress(AssertionError):
            eventually(lambda: not self._left_behind(), 30, "nothing left")
        assert self._left_behind() == []

    def _left_behind(self) -> list[str]:
        return of_session(self.process.pid) + [
            str(folder) for folder in ray_folders(self.process.pid) - self._folders
        ]

    def steps(self) -> list[int]:
        lines = [
            json.loads(line) for line in (self.output / "metrics.jsonl").read_text().splitlines()
        ]
        return [line["step"] for line in lines if "system/tps" in line]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Starts a `Command` in the test's folder."""
    with ExitStack() as commands:

        def started(*, preloaded: bool = False, **pipeline: object) -> Command:
            command = Command(tmp_path, preloaded=preloaded, **pipeline)
            commands.callback(command.end)
            return command

        yield started


def test_a_run_is_interrupted_and_gone_on_with(start: Callable[..., Command]) -> None:
    first = start(maxSteps=100_000, saveSteps=0)
    first.wait_for("step 2/")
    os.killpg(first.process.pid, signal.SIGINT)  # Ctrl-C reaches the whole group
    assert first.wait() == ExitCode.STOPPED, first.log.read_text()
    assert "Stopped: stopped on request after" in first.log.read_text()
    first.leaves_nothing_behind()
    done = first.steps()[-1]

    second = start(preloaded=True, maxSteps=done + 1)
    assert second.wait() == ExitCode.SUCCEEDED, second.log.read_text()
    log = second.log.read_text()
    assert f"step {done + 1}/{done + 1}" in log
    assert "[warm-up]" not in log
    assert "validation success" in log
    assert str(second.output / "metrics.jsonl") in log
    assert second.steps() == list(range(1, done + 2))
    second.leaves_nothing_behind()


def test_an_environment_of_ones_own_lies_beside_the_yaml(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    (tmp_path / "own_lake.py").write_text("import no_such_module\n")
    lake = tiny_document()["spec"]["pipeline"]["envs"][0] | {"type": "own_lake:Lake"}
    command = start(preloaded=True, envs=[lake])
    assert command.wait() == ExitCode.INVALID_CONFIG
    assert (
        "importing own_lake failed: ModuleNotFoundError: No module named 'no_such_module'"
        in command.log.read_text()
    )
    command.leaves_nothing_behind()


@pytest.mark.parametrize("argument", ["--help", "run --help"])
def test_help_needs_no_ray(argument: str) -> None:
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "agenticrun_workers.cli",
        *argument.split(),
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rsplit("|", 1)[-1].strip() for line in found.stderr.splitlines()}
    assert not imported & {"ray", "torch", "transformers"}


def test_an_interruption_while_it_starts_ends_it_at_once(start: Callable[..., Command]) -> None:
    command = start(preloaded=True, maxSteps=100_000)
    command.wait_for("[starting] starting actors")
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.wait() == ExitCode.STOPPED
    assert "Stopped: stopped on request after 0 steps" in command.log.read_text()
    command.leaves_nothing_behind()


STALLING = """
import json, os, signal, subprocess
import ray
from agenticrun_workers.driver.local_actors import embedded_ray
from processes import lives
from tiny_runs import tiny_run

with open("/proc/self/comm", "wb") as name:  \
# the kernel cuts names of processes after 15 bytes, also within a letter
    name.write(bytes([0x61, 0xC3]))

terminate = subprocess.Popen.terminate

def stop_and_terminate(process):
    if os.path.basename(process.args[0]) == "raylet":
        process.send_signal(signal.SIGSTOP)
    terminate(process)

subprocess.Popen.terminate = stop_and_terminate

@ray.remote(num_cpus=0)
class Env:
    def pids(self):
        return [os.getpid(), subprocess.Popen(["sleep", "600"], start_new_session=True).pid]

others = [subprocess.Popen(["sleep", "600"])]
with embedded_ray(tiny_run()):
    env = Env.remote()
    pids = ray.get(env.pids.remote())
    others.append(subprocess.Popen(["sleep", "600"]))
look = subprocess.Popen(["ps", "-o", "pid=,stat=,args=", "--sid", str(os.getpid())], \
stdout=subprocess.PIPE, text=True)
processes = [line.split(maxsplit=2) for line in look.communicate()[0].splitlines()]
expected = {os.getpid(), look.pid, *(process.pid for process in others)}
print(json.dumps({
    "left": [line for line in processes if int(line[0]) not in expected and "Z" not in line[1]],
    "env": [pid for pid in pids if lives(pid)],
    "others": [lives(process.pid) for process in others],
}))
for process in others:
    process.kill()
    process.wait()
"""


def test_a_ray_that_has_to_be_killed_takes_all_that_it_started_with_it_and_nothing_else(
    tmp_path: Path,
) -> None:
    """Ray's daemon has a second to end its children; Ray's agents check on it once a minute."""
    before, log = ray_folders(), tmp_path / "log"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with log.open("w") as errors:
        command = [sys.executable, "-c", STALLING]
        program = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=variables,
            text=True,
            start_new_session=True,
        )
    try:
        output, _ = program.communicate(timeout=550)
        assert program.returncode == 0, log.read_text()
        found = json.loads(output)
        assert found["left"] == []
        assert found["env"] == []
        assert found["others"] == [True, True]
        assert not ray_folders(program.pid) - before
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
