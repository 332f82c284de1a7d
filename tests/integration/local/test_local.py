"""`agenticrun run` as a user types it: it trains, can be interrupted and gone on with, and leaves nothing running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from agenticrun_api.names import ExitCode
from tiny_runs import tiny_document


class Command:
    """A running `agenticrun run`."""

    def __init__(self, folder: Path, **pipeline: object) -> None:
        self.output = folder / "out"
        file = folder / "run.yaml"
        document = tiny_document(**pipeline)
        del document["metadata"]["uid"]
        file.write_text(yaml.safe_dump(document))
        self.log = folder / "log"
        command = [sys.executable, "-m", "agenticrun_workers.cli", "run", "-f", str(file), "-o", str(self.output)]
        self.process = subprocess.Popen(command, stdout=self.log.open("w"), stderr=subprocess.STDOUT, start_new_session=True)

    def wait(self) -> int:
        return self.process.wait(200)

    def wait_for(self, line: str) -> None:
        while line not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)

    def left_behind(self) -> list[str]:
        """Processes of the command's session and files of its Ray that live on after it."""
        found = subprocess.run(["ps", "-o", "stat=,args=", "--sid", str(self.process.pid)], capture_output=True, text=True)
        living = [line for line in found.stdout.splitlines() if not line.startswith("Z")]  # the others only wait for init to notice
        return living + [str(path) for path in Path("/tmp").glob(f"arun-{self.process.pid}-*")]

    def steps(self) -> list[int]:
        lines = [json.loads(line) for line in (self.output / "metrics.jsonl").read_text().splitlines()]
        return [line["step"] for line in lines if "system/tps" in line]


def test_a_run_is_interrupted_and_gone_on_with(tmp_path: Path) -> None:
    first = Command(tmp_path, maxSteps=100_000, saveSteps=0)
    first.wait_for("step 2/")
    os.killpg(first.process.pid, signal.SIGINT)  # Ctrl-C reaches the whole group
    assert first.wait() == ExitCode.STOPPED, first.log.read_text()
    assert "Stopped: stopped as asked after" in first.log.read_text()
    assert first.left_behind() == []
    done = first.steps()[-1]

    second = Command(tmp_path, maxSteps=done + 1)
    assert second.wait() == ExitCode.SUCCEEDED, second.log.read_text()
    log = second.log.read_text()
    assert f"step {done + 1}/{done + 1}" in log
    assert "[warm-up]" not in log
    assert "validation success" in log
    assert str(second.output / "metrics.jsonl") in log
    assert second.steps() == list(range(1, done + 2))
    assert second.left_behind() == []


def test_an_environment_of_ones_own_lies_beside_the_yaml(tmp_path: Path) -> None:
    (tmp_path / "own_lake.py").write_text("import no_such_module\n")
    lake = tiny_document()["spec"]["pipeline"]["envs"][0] | {"type": "own_lake:Lake"}
    command = Command(tmp_path, envs=[lake])
    assert command.wait() == ExitCode.INVALID_CONFIG
    assert "importing own_lake failed: ModuleNotFoundError: No module named 'no_such_module'" in command.log.read_text()
    assert command.left_behind() == []


@pytest.mark.parametrize("argument", ["--help", "run --help"])
def test_help_needs_no_ray(argument: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "agenticrun_workers.cli", *argument.split()]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rsplit("|", 1)[-1].strip() for line in found.stderr.splitlines()}
    assert not imported & {"ray", "torch", "transformers"}


def test_an_interruption_while_it_starts_ends_it_at_once(tmp_path: Path) -> None:
    command = Command(tmp_path, maxSteps=100_000)
    command.wait_for("[starting] starting actors")
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.wait() == ExitCode.STOPPED
    assert "Stopped: stopped as asked after 0 steps" in command.log.read_text()
    assert command.left_behind() == []
