"""docs/reference.md, which is generated, is complete."""

from __future__ import annotations

from pathlib import Path

from agenticrun_api import AgenticRunSpec, Pipeline

PAGE = Path(__file__).parents[3] / "docs/reference.md"


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
