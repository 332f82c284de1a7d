"""One version everywhere, and what the release workflow takes from the repository."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import release
from agenticrun_api.version import REGISTRY, __version__

ROOT = Path(__file__).resolve().parents[3]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def test_the_build_reads_the_version_of_the_api() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "crds/agenticrun_api/version.py"
    assert release.version() == __version__


def test_the_chart_has_the_version() -> None:
    text = (ROOT / "charts/agenticrun/Chart.yaml").read_text()
    chart = yaml.safe_load(text)
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__), "make generate"
    assert release.with_version(text, __version__) == text


def test_a_new_version_changes_two_lines_of_the_chart() -> None:
    text = (ROOT / "charts/agenticrun/Chart.yaml").read_text()
    old, new = text.splitlines(), release.with_version(text, "9.8.7").splitlines()
    assert [(a, b) for a, b in zip(old, new, strict=True) if a != b] == [
        (f"version: {__version__}", "version: 9.8.7"),
        (f"appVersion: {__version__}", "appVersion: 9.8.7"),
    ]


def test_the_version_is_the_newest_release_or_the_one_that_follows() -> None:
    """A tree with changes that no release has is not to be taken for the last release."""
    headings = re.findall(r"^## (.+)$", CHANGELOG, re.MULTILINE)
    unreleased = headings[0] == "Unreleased"
    newest = headings[1] if unreleased else headings[0]
    dated = re.fullmatch(r"(\d+)\.(\d+)\.(\d+) - \d{4}-\d\d-\d\d", newest)
    assert dated, newest
    major, minor, patch = (int(part) for part in dated.groups())
    following = {f"{major}.{minor}.{patch + 1}-dev", f"{major}.{minor + 1}.0-dev"}
    assert __version__ in (following if unreleased else {f"{major}.{minor}.{patch}"})


def test_release_notes_are_one_section() -> None:
    text = (
        "# Changelog\n\n## Unreleased\n\n- c\n\n## 0.2.0 - 2027-01-02\n\n### Added\n\n- b\n\n"
        "## 0.1.0 - 2026-11-22\n\n- a\n"
    )
    assert release.notes(text, "0.2.0") == "### Added\n\n- b\n"
    assert release.notes(text, "0.1.0") == "- a\n"


@pytest.mark.parametrize(
    "text",
    [
        "## Unreleased\n\n- c\n",
        "## 0.2.0\n\n- b\n",
        "## 0.2.0 - 2027-01-02\n\n## 0.1.0 - 2026-11-22\n- a\n",
    ],
)
def test_a_release_without_notes_is_refused(text: str) -> None:
    with pytest.raises(release.NotReady, match=r"0\.2\.0"):
        release.notes(text, "0.2.0")


def test_the_chart_has_the_registry_of_the_version() -> None:
    values = yaml.safe_load((ROOT / "charts/agenticrun/values.yaml").read_text())
    assert release.registry() == REGISTRY == values["registry"], "make generate"


def test_a_source_tree_names_no_registry() -> None:
    """Somebody else might own the name, and pods would run what is there."""
    assert REGISTRY == "" or not __version__.endswith("-dev")


@pytest.mark.parametrize(
    "path", ["charts/agenticrun/values.yaml", "crds/agenticrun_api/version.py"]
)
def test_a_release_sets_its_registry_in_one_line(path: str) -> None:
    text = (ROOT / path).read_text()
    new = release.with_registry(text, "ghcr.io/o/r")
    (line,) = set(new.splitlines()) - set(text.splitlines())
    assert line.endswith('"ghcr.io/o/r"')
    assert release.with_registry(new, "") == text


def test_a_file_without_the_line_is_refused() -> None:
    with pytest.raises(release.NotReady, match="0 lines"):
        release.with_registry("image: {}\n", "ghcr.io/o/r")
