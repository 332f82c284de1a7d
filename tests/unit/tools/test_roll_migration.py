"""The table of a ROLL checkout, on a checkout of our own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
import yaml

from roll_migration import main
from testcluster import ROOT

DATA = ROOT / "tests/data/roll"


def checkout(folder: Path) -> Path:
    """Make a checkout with a file for each result."""
    examples = folder / "examples"
    for part, names in (
        ("config", ["sokoban_rooms.yaml"]),
        ("small_agentic", ["agentic/sokoban_lora.yaml"]),
    ):
        (examples / part).mkdir(parents=True)
        for name in names:
            found = DATA / name if "/" in name else DATA / part / name
            copy(found, examples / part)
    problems: dict[str, Any] = {
        "pretrain": "Qwen/Qwen2.5-VL-3B",
        "max_steps": 2,
        "rollout_batch_size": 4,
        "adv_estimator": "reinforce",
        "custom_envs": {
            "Sums": {"env_type": "roll_math", "env_config": {"dataset_name": "owner/sums"}}
        },
        "train_env_manager": {"num_env_groups": 4, "group_size": 1, "tags": ["Sums"]},
    }
    (examples / "small_agentic/problems.yaml").write_text(yaml.safe_dump(problems))
    problems["custom_envs"]["Sums"]["env_type"] = "rg:sums"
    (examples / "small_agentic/foreign.yaml").write_text(yaml.safe_dump(problems))
    (examples / "small_agentic/lost_link.yaml").write_text("")
    (examples / "other.yaml").write_text("not: agentic\n")
    return folder


@pytest.fixture(autouse=True)
def logs() -> Iterator[None]:
    """Let loggers speak again after the tool, which has its process for itself."""
    yield
    logging.disable(logging.NOTSET)


def test_the_table_says_of_every_agentic_file_how_far_it_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["roll_migration.py", str(checkout(tmp_path))])
    assert main() == 0
    table = capsys.readouterr().out
    rows = {
        cells[1]: cells[2:-1]
        for cells in ([cell.strip() for cell in line.split("|")] for line in table.split("\n"))
        if len(cells) == 7 and cells[1].endswith(".yaml")
    }
    assert rows == {
        "small_agentic/foreign.yaml": ["no", "no", "2", "3"],
        "small_agentic/lost_link.yaml": ["no", "no", "", "64"],
        "small_agentic/problems.yaml": ["yes", "yes, with made-up data", "1", "3"],
        "small_agentic/sokoban_lora.yaml": ["yes", "yes", "", "0"],
    }
    assert "4 files: 2 validate, 2 train their first step, 1 are ready" in table


def test_a_folder_that_is_no_checkout_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["roll_migration.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "is it a checkout of ROLL?" in capsys.readouterr().err
