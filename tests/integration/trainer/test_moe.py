"""A mixture of experts trains on two ranks, each with some of the experts, as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agenticrun_workers.models.pretrained import load_model
from ragged_samples import largest_difference
from rank_programs import launch, load

PROGRAM = Path(__file__).with_name("moe_program.py")
pytestmark = pytest.mark.timeout(600)
program = load(PROGRAM)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = program.write_model(tmp_path_factory.mktemp("model"))
    return folder


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="module")
def two(model: Path, scratch: Path) -> list[dict[str, Any]]:
    program.write_model(scratch / "other", seed=1)
    return launch(PROGRAM, 2, scratch, [str(model), str(scratch)])


@pytest.fixture(scope="module")
def one(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = program.trained(model, "packed")
    return found


@pytest.mark.parametrize("name", program.OPTIONS)
def test_two_ranks_compute_what_one_process_computes(
    two: list[dict[str, Any]], one: dict[str, Any], name: str
) -> None:
    ranks = [rank["trained"][name] for rank in two]
    scored = (
        [ranks[0]["log_probs"][i] for i in range(8)]
        if name == "ulysses"
        else [ranks[i % 2]["log_probs"][i // 2] for i in range(8)]
    )
    for found_T, expected_T in zip(scored, one["log_probs"], strict=True):
        np.testing.assert_allclose(found_T, expected_T, atol=1e-5)
    for rank in ranks:
        assert largest_difference(rank["gradients"], one["gradients"]) < 1e-4
        for step, expected in zip(rank["metrics"], one["metrics"], strict=True):
            compared = [key for key in expected if not key.startswith("train/")]
            assert {key: step[key] for key in compared} == pytest.approx(
                {key: expected[key] for key in compared}, rel=1e-3, abs=1e-4
            )
    assert ranks[0]["weights"].keys() == one["weights"].keys()
    for key, weight in one["weights"].items():
        torch.testing.assert_close(ranks[0]["weights"][key], weight, rtol=1e-3, atol=1e-3)


def test_the_first_rank_exports_the_weights_of_the_files(
    two: list[dict[str, Any]], model: Path
) -> None:
    stored = load_file(model / "model.safetensors")
    first, second = (rank["trained"]["packed"]["weights"] for rank in two)
    assert {name: weight.shape for name, weight in first.items()} == {
        name: weight.shape for name, weight in stored.items()
    }
    assert second == {}


def test_a_checkpoint_resumes_with_the_same_bits(two: list[dict[str, Any]]) -> None:
    assert all(rank["resumed"] for rank in two)


@pytest.mark.usefixtures("two")
def test_an_exported_folder_is_a_model_like_the_first_one(model: Path, scratch: Path) -> None:
    first, exported = (
        load_file(folder / "model.safetensors") for folder in (model, scratch / "exported")
    )
    assert exported.keys() == first.keys()
    loaded, trained = (
        load_model(str(scratch / "exported")),
        dict(load_model(str(model)).named_parameters()),
    )
    changed = [name for name, p in loaded.named_parameters() if not torch.equal(p, trained[name])]
    assert len(changed) == len(trained)


def test_a_reference_takes_the_weights_of_the_policy_s_export(two: list[dict[str, Any]]) -> None:
    assert all(rank["reference"] for rank in two)


def test_a_rank_without_an_expert_is_refused(tmp_path: Path) -> None:
    model = program.write_model(tmp_path / "model", experts=3)
    for rank in launch(PROGRAM, 4, tmp_path, [str(model), str(tmp_path)]):
        assert rank["too few"] == (
            "the 3 experts of a layer cannot be spread over 4 ranks, because one would hold none: "
            "set fsdp_size to 2"
        )
