"""Commands print on terminals and pipes of any encoding, whatever characters a run holds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from run_folders import make_run_folder

COMMAND = [sys.executable, "-c", "from agenticrun_workers.cli import main; main()"]
ROLL = Path(__file__).parents[2] / "data/roll"


def run(encoding: str, *words: str | Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, *map(str, words)],
        env={**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "120"},
        capture_output=True,
        check=False,
    )


def printed(encoding: str, *words: str | Path) -> str:
    """Return what a command prints, read in its encoding."""
    done = run(encoding, *words)
    output = (done.stdout + done.stderr).decode(encoding, "replace")
    assert done.returncode == 0, output
    assert "Traceback" not in output
    return output


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    folder = make_run_folder(tmp_path / "out")
    for file in folder.glob("samples/*.txt"):
        file.write_text(file.read_text("utf-8").replace("Down", "Down 🙂 天 é"), "utf-8")
    return folder


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_samples_are_printed_with_question_marks(encoding: str, ended: Path) -> None:
    shown = printed(encoding, "samples", ended)
    assert ("Down ? ? ?" if encoding == "ascii" else "Down ? ? é") in shown


def test_a_run_is_watched_and_its_curve_is_printed(ended: Path) -> None:
    assert "???? 0.4 (0.1 to 0.4)" in printed("latin-1", "watch", ended)


def test_names_of_files_are_printed(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "目标")
    file = folder / "run.yaml"
    assert "is valid" in printed("cp1252", "validate", "-f", file)
    assert "report.html: " in printed("cp1252", "report", folder, "-o", folder / "report.html")


def test_a_converted_run_is_utf_8(tmp_path: Path) -> None:
    shutil.copytree(ROLL, tmp_path / "roll")
    config = tmp_path / "roll/agentic/traj_frozen_lake.yaml"
    config.write_text(config.read_text("utf-8").replace('"WARN"', '"警告"'), "utf-8")
    done = run("ascii", "convert", config)
    assert done.returncode == 0, done.stderr
    assert "value: 警告" in done.stdout.decode()
