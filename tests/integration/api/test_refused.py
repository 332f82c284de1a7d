"""`kubectl apply` and `agenticrun validate` refuse wrong YAML, and name the path of the same field.

The first lines of each file in refused/ name the expected path. For a change of an existing run
they also name the file that was applied before.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agenticrun_api import InvalidRun, load_run
from testcluster import Cluster, CommandFailed

HERE = Path(__file__).parent
CASES = sorted((HERE / "refused").glob("*.yaml"))


def _header(file: Path, key: str) -> str | None:
    found = re.search(rf"^# {key}: (.+)$", file.read_text(), re.MULTILINE)
    return found.group(1) if found else None


@pytest.fixture
def empty(api: Cluster) -> Cluster:
    """The namespace, without runs."""
    api.kubectl("delete", "agenticruns", "--all", "--wait=true")
    return api


def test_all_kinds_are_here() -> None:
    assert len(CASES) == 12
    assert all(_header(case, "path") for case in CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_kubectl_apply_refuses_and_names_the_field(empty: Cluster, case: Path) -> None:
    before = _header(case, "after")
    if before:
        empty.kubectl("apply", "-f", str((case.parent / before).resolve()))
    with pytest.raises(CommandFailed) as caught:
        empty.kubectl("apply", "-f", str(case))
    path = _header(case, "path")
    assert re.search(rf'(^|\s|"){re.escape(str(path))}(:|")', caught.value.stderr), (
        caught.value.stderr
    )
    if not before:
        assert empty.list("agenticruns") == []


@pytest.mark.parametrize(
    "case", [case for case in CASES if not _header(case, "after")], ids=lambda path: path.stem
)
def test_load_run_refuses_with_the_same_path(case: Path) -> None:
    with pytest.raises(InvalidRun) as caught:
        load_run(case)
    assert [line.split(": ")[0] for line in caught.value.errors] == [_header(case, "path")]
