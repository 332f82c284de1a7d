"""`kubectl agenticrun`, and completion in a shell."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

SCRIPTS = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
    "scripts"
]


def test_the_plugin_is_the_same_command() -> None:
    assert SCRIPTS["kubectl-agenticrun"] == SCRIPTS["agenticrun"]


def test_commands_are_completed() -> None:
    program = "from agenticrun_workers.cli import app; app(prog_name='agenticrun')"
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "_AGENTICRUN_COMPLETE": "complete_bash",
            "COMP_WORDS": "agenticrun c",
            "COMP_CWORD": "1",
        },
        capture_output=True,
        text=True,
    )
    assert set(found.stdout.split()) == {"check-env", "check-model", "convert", "checkpoint"}
