"""docs/reference.md is generated from the models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from agenticrun_api import AgenticRunSpec, Pipeline

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/reference.md"


def test_the_committed_page_is_what_the_generator_writes() -> None:
    generated = subprocess.run(
        [sys.executable, "tools/docs/reference.py"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout
    assert PAGE.read_text() == generated, "run: make generate"


def test_every_field_of_spec_and_pipeline_is_listed() -> None:
    page = PAGE.read_text()
    for model, heading in ((AgenticRunSpec, "## `spec`\n"), (Pipeline, "## `spec.pipeline`\n")):
        section = page.split(heading)[1].split("\n## ")[0]
        missing = [
            info.alias
            for info in model.model_fields.values()
            if f"- `{info.alias}` (" not in section
        ]
        assert missing == []
