"""A run on this machine that is steered from another terminal: checkpoint, stop, resume, report."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from agenticrun_api.names import ExitCode
from agenticrun_workers.reporting.run_folder import RunFolder
from preloaded import environment, executable
from tiny_runs import tiny_document
from traces import durations, processes, read_trace
from waiting import eventually

pytestmark = pytest.mark.timeout(600)

CLI = ("-m", "agenticrun_workers.cli")


def cli(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        [*executable(), *CLI, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environment(),
    )
    return done.returncode, done.stdout


def check_phases(traced: Path) -> None:
    """Assert that the driver's phases are inside its steps, and that all processes are there."""
    document = read_trace(traced)
    names = processes(document["traceEvents"])
    assert list(names) == ["driver", "trainer-0", "engine-0", "env-worker-0"]
    spent = durations(document["traceEvents"], names["driver"])
    phases = ("sync", "rollout", "old_log_probs_values", "credit", "train")
    assert 0 < sum(spent[phase] for phase in phases) <= spent["step"]
    shares = document["otherData"]["shares"]
    assert {"train_actor", "idle: rollout"} <= set(shares["trainer"])
    assert {"computing", "idle: weights", "idle: gate"} <= set(shares["engine"])
    assert {"playing", "idle: gate"} <= set(shares["env worker"])


def test_a_run_is_steered_from_another_terminal(tmp_path: Path) -> None:
    document = tiny_document(maxSteps=100_000, saveSteps=0, evalSteps=0)
    del document["metadata"]["uid"]
    file, output, log = tmp_path / "run.yaml", tmp_path / "out", tmp_path / "log"
    file.write_text(yaml.safe_dump(document))
    folder = RunFolder(output)
    with log.open("w") as stream:
        run = subprocess.Popen(
            [sys.executable, *CLI, "run", "-f", str(file), "-o", str(output), "--in-process"],
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    try:
        eventually(lambda: len(folder.metrics()) > 1 or run.poll() is not None, 300, "a step")
        assert run.poll() is None, log.read_text()

        code, said = cli("run", "-f", str(file), "-o", str(output), "--in-process")
        assert (code, f"process {run.pid} trains in" in said) == (ExitCode.INVALID_CONFIG, True)

        assert cli("checkpoint", str(output))[0] == 0
        eventually(lambda: folder.checkpoint() is not None, 120, "a checkpoint")
        assert run.poll() is None

        code, shown = cli("watch", str(output), "--once")
        assert code == 0
        assert f"/{document['spec']['pipeline']['maxSteps']}" in shown
        assert "remaining" in shown

        traced = tmp_path / "trace.json.gz"
        code, said = cli("trace", str(output), "--steps", "2", "-o", str(traced))
        assert (code, "2 whole steps" in said) == (0, True), said
        assert "incomplete" not in said
        check_phases(traced)

        for _ in range(2):  # the second one changes nothing
            code, said = cli("stop", str(output))
            assert code == 0 or "no process of this machine trains" in said
        assert run.wait(120) == ExitCode.STOPPED, log.read_text()
    finally:
        if run.poll() is None:
            os.kill(run.pid, signal.SIGKILL)
            run.wait()
    text = log.read_text()
    assert "Stopped: stopped on request after" in text
    assert f"checkpoint   {folder.checkpoint()}" in text
    assert f"agenticrun resume {output}" in text
    assert cli("stop", str(output))[0] == ExitCode.INVALID_CONFIG

    page = tmp_path / "report.html"
    assert cli("report", str(output), "-o", str(page))[0] == 0
    assert "rollout/score/mean" in page.read_text()

    done = int(folder.metrics()[-1]["step"])
    config = yaml.safe_load((output / "run.yaml").read_text())
    config["spec"]["pipeline"]["maxSteps"] = done + 1
    (output / "run.yaml").write_text(yaml.safe_dump(config))
    code, said = cli("resume", str(output))
    assert code == ExitCode.SUCCEEDED, said
    steps = [line["step"] for line in folder.metrics() if "time/step" in line]
    assert steps == list(range(1, done + 2))
    code, said = cli("resume", str(output))
    assert (code, "For more steps" in said) == (ExitCode.INVALID_CONFIG, True)
