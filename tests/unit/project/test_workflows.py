"""Hosted checks run commands that exist, with few rights and pinned actions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
ACTIONS = sorted((ROOT / ".github/actions").glob("*/action.yml"))
each_workflow = pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)


def read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(file.read_text())
    return found


def steps(document: dict[str, Any]) -> list[dict[str, Any]]:
    if "runs" in document:
        return list(document["runs"]["steps"])
    return [step for job in document["jobs"].values() for step in job.get("steps", [])]


@pytest.mark.parametrize(
    "file", WORKFLOWS + ACTIONS, ids=lambda file: f"{file.parent.name}-{file.stem}"
)
def test_commands_and_actions_exist(file: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for step in steps(read(file)):
        assert set(re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))) <= targets
        for program in re.findall(r"\b(?:tools|images)/[\w./-]+", step.get("run", "")):
            assert (ROOT / program).exists(), program
        used = step.get("uses", "")
        if used.startswith("./"):
            assert (ROOT / used / "action.yml").exists(), used
        elif used:
            assert re.fullmatch(r"[\w-]+/[\w./-]+@(v\d+|[0-9a-f]{40})", used), used


@each_workflow
def test_a_workflow_may_read_and_only_some_jobs_may_write(file: Path) -> None:
    workflow = read(file)
    assert workflow["permissions"] == {"contents": "read"}
    assert "concurrency" in workflow
    writing = {
        name
        for name, job in workflow["jobs"].items()
        if "write" in job.get("permissions", {}).values()
    }
    assert writing == {"release": {"image", "chart", "release"}, "dependencies": {"locks"}}.get(
        file.stem, set()
    )
    for name, job in workflow["jobs"].items():
        assert "uses" in job or "timeout-minutes" in job, name


def test_unit_tests_run_on_every_supported_python() -> None:
    pythons = read(ROOT / ".github/workflows/ci.yml")["jobs"]["unit"]["strategy"]["matrix"][
        "python"
    ]
    classifiers = re.findall(
        r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text()
    )
    assert pythons == classifiers


@pytest.mark.parametrize("file", ["bug.yml", "feature.yml"])
def test_issue_forms_have_what_github_asks_for(file: str) -> None:
    form = read(ROOT / ".github/ISSUE_TEMPLATE" / file)
    assert form["name"]
    assert form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"input", "textarea", "dropdown", "checkboxes"}
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    assert all(
        isinstance(option, str)
        for field in fields
        for option in field["attributes"].get("options", [])
    )
