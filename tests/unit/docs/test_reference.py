"""docs/reference.md and docs/metrics.md are generated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agenticrun_api import AgenticRunSpec, Pipeline

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/reference.md"


@pytest.mark.parametrize("page", ["reference", "metrics"])
def test_the_committed_page_is_what_the_generator_writes(page: str) -> None:
    generated = subprocess.run(
        [sys.executable, f"tools/docs/{page}.py"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout
    assert (ROOT / f"docs/{page}.md").read_text() == generated, "run: make generate"


def test_every_field_of_spec_and_pipeline_is_listed() -> None:
    page = PAGE.read_text()
    for model, heading in ((AgenticRunSpec, "## `spec`\n"), (Pipeline, "## `spec.pipeline`\n")):
        section = page.split(heading)[1].split("\n## ")[0]
        missing = [
            info.alias
            for info in model.model_fields.values()
            if f"- `{info.alias}` (" not in section and f"[`{info.alias}`](#" not in section
        ]
        assert missing == []
