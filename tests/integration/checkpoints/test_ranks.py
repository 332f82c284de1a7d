"""Several gloo processes resume from the checkpoint of another number of them.

The checkpoint is in a folder or on S3.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from rank_programs import launch, load

PROGRAM = Path(__file__).with_name("module_program.py")

pytestmark = pytest.mark.timeout(600)


def launch_program(
    world: int, out: Path, environment: dict[str, str], tasks: list[str]
) -> list[dict[str, Any]]:
    """What each of `world` processes saw."""
    return [
        {task: SimpleNamespace(**seen) for task, seen in found.items()}
        for found in launch(PROGRAM, world, out, tasks, environment)
    ]


@dataclass
class Runs:
    """What one, two and three ranks saw, by rank and task; `base` is where they saved."""

    base: str
    one: dict[str, Any]
    two: list[dict[str, Any]]
    three: list[dict[str, Any]]


@pytest.fixture(scope="module", params=["folder", "s3"])
def runs(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    s3_server: dict[str, str],
) -> Runs:
    out = tmp_path_factory.mktemp("ranks")
    base = str(out / "saved") if request.param == "folder" else "s3://checkpoints/ranks"
    if dist.is_initialized():  # a policy of an earlier test in this process was alone in a group
        dist.destroy_process_group()
    program = load(PROGRAM)
    one = {"train": program.run("train", f"{base}/by-1")}
    two_tasks = [
        f"train={base}/by-2",
        f"resume={base}/by-1",
        f"resume={base}/by-2",
        f"damage={base}/damaged",
        f"other={base}/by-2",
    ]
    two = launch_program(2, out, s3_server, two_tasks)
    one["resume by-2"] = program.run("resume", f"{base}/by-2")
    return Runs(base, one, two, launch_program(3, out, s3_server, [f"resume={base}/by-2"]))


def assert_goes_on(found: Any, straight: Any) -> None:
    """Check that the next optimizer steps equal those of the run without interruption."""
    assert found.error == ""
    assert found.progress == {"steps": 3}
    for got, expected in (
        (found.next_weights, straight.next_weights),
        (found.weights, straight.weights),
    ):
        assert got.keys() == expected.keys()
        for name, weight in expected.items():
            np.testing.assert_allclose(got[name], weight, rtol=1e-5, atol=1e-6, err_msg=name)


def test_one_rank_s_checkpoint_goes_on_with_two(runs: Runs) -> None:
    assert_goes_on(runs.two[0][f"resume={runs.base}/by-1"], runs.one["train"])


def test_two_ranks_checkpoint_goes_on_with_two(runs: Runs) -> None:
    assert_goes_on(runs.two[0][f"resume={runs.base}/by-2"], runs.two[0][f"train={runs.base}/by-2"])


def test_two_ranks_checkpoint_goes_on_with_one(runs: Runs) -> None:
    assert_goes_on(runs.one["resume by-2"], runs.two[0][f"train={runs.base}/by-2"])


def test_two_ranks_checkpoint_goes_on_with_three(runs: Runs) -> None:
    assert_goes_on(
        runs.three[0][f"resume={runs.base}/by-2"], runs.two[0][f"train={runs.base}/by-2"]
    )


def test_however_many_ranks_the_training_is_the_same(runs: Runs) -> None:
    assert_goes_on(runs.two[0][f"train={runs.base}/by-2"], runs.one["train"])


def test_each_rank_goes_on_with_its_own_random_numbers(runs: Runs) -> None:
    saved = [rank[f"train={runs.base}/by-2"].draws for rank in runs.two]
    assert saved[0] != saved[1]
    assert [rank[f"resume={runs.base}/by-2"].draws for rank in runs.two] == saved
    assert [rank[f"resume={runs.base}/by-2"].draws for rank in runs.three[:2]] == saved
    assert runs.one["resume by-2"].draws == saved[0]


def test_a_new_rank_draws_random_numbers_of_its_own(runs: Runs) -> None:
    draws = [rank[f"resume={runs.base}/by-2"].draws for rank in runs.three]
    assert draws[2] not in draws[:2]
    assert (
        runs.two[1][f"resume={runs.base}/by-1"].draws
        != runs.two[0][f"resume={runs.base}/by-1"].draws
    )


def test_a_shard_that_one_rank_finds_damaged_is_the_error_of_all(runs: Runs) -> None:
    errors = [rank[f"damage={runs.base}/damaged"].error for rank in runs.two]
    assert errors[0] == errors[1]
    assert errors[0].startswith(f"DamagedFile: {runs.base}/damaged/__1_0.distcp was altered")


def test_another_model_is_refused_by_parameter_on_all_ranks_and_changes_nothing(runs: Runs) -> None:
    for rank in runs.two:
        seen = rank[f"other={runs.base}/by-2"]
        assert seen.error.startswith(
            "CheckpointMismatch: 0.weight: the model has shape [9, 5], the checkpoint in "
        )
        assert "has shape [7, 5]; set spec.model" in seen.error
        for name, weight in seen.next_weights.items():
            np.testing.assert_array_equal(seen.weights[name], weight)
