"""A mixture of experts trains on two ranks, each with some of the experts, as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agenticrun_workers.models.pretrained import load_model
from ragged_samples import batch, largest_difference
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
def even(scratch: Path) -> Path:
    program.write_model(scratch / "three layers", experts=program.EVEN, layers=3)
    folder: Path = program.write_model(scratch / "even", experts=program.EVEN)
    return folder


@pytest.fixture(scope="module")
def two(model: Path, scratch: Path, even: Path) -> list[dict[str, Any]]:
    program.write_model(scratch / "other", seed=1)
    program.write_model(scratch / "other even", experts=program.EVEN, seed=1)
    return launch(PROGRAM, 2, scratch, [str(model), str(scratch)])


@pytest.fixture(scope="module")
def four(model: Path, scratch: Path, even: Path) -> list[dict[str, Any]]:
    program.write_model(scratch / "three", experts=3)
    return launch(PROGRAM, 4, scratch, [str(model), str(scratch)])


@pytest.fixture(scope="module")
def one(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = program.trained(model, "packed")
    return found


@pytest.fixture(scope="module")
def one_adapted(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = program.trained(model, "adapters")
    return found


@pytest.fixture(scope="module")
def one_even(even: Path) -> dict[str, Any]:
    found: dict[str, Any] = program.trained(even, "packed")
    return found


@pytest.mark.parametrize("name", program.OPTIONS)
def test_two_ranks_compute_what_one_process_computes(
    two: list[dict[str, Any]], one: dict[str, Any], one_adapted: dict[str, Any], name: str
) -> None:
    alone = one_adapted if name == "adapters" else one
    assert_equal([rank["trained"][name] for rank in two], alone, shared=name == "ulysses")


@pytest.mark.parametrize("name", program.DIVIDED)
def test_two_ranks_that_divide_the_experts_compute_what_one_process_computes(
    two: list[dict[str, Any]], one_even: dict[str, Any], even: Path, name: str
) -> None:
    alone = program.trained(even, "adapters") if "adapters" in name else one_even
    assert_equal([rank["trained"][name] for rank in two], alone, shared="ulysses" in name)


@pytest.mark.parametrize("name", program.OF_FOUR)
def test_four_ranks_that_divide_and_spread_the_experts_compute_what_one_process_computes(
    four: list[dict[str, Any]], one_even: dict[str, Any], name: str
) -> None:
    assert_equal([rank["trained"][name] for rank in four], one_even, shared=False)


def assert_equal(ranks: list[dict[str, Any]], one: dict[str, Any], *, shared: bool) -> None:
    """Compare three steps of several ranks with those of one process.

    Args:
        shared: all ranks share each sequence.
    """
    parts = 1 if shared else len(ranks)
    scored = [ranks[i % parts]["log_probs"][i // parts] for i in range(8)]
    for found_T, expected_T in zip(scored, one["log_probs"], strict=True):
        np.testing.assert_allclose(found_T, expected_T, atol=1e-5)
    # As long as B of an adapter is zero, A has no gradient.
    gradients = {name: gradient for name, gradient in one["gradients"].items() if gradient.any()}
    assert gradients
    for rank in ranks:
        assert rank["gradients"].keys() == one["gradients"].keys()
        found = {name: rank["gradients"][name] for name in gradients}
        assert largest_difference(found, gradients) < 1e-4
        for step, expected in zip(rank["metrics"], one["metrics"], strict=True):
            compared = [key for key in expected if not key.startswith("train/")]
            assert {key: step[key] for key in compared} == pytest.approx(
                {key: expected[key] for key in compared}, rel=1e-3, abs=1e-4
            )
    assert ranks[0]["weights"].keys() == one["weights"].keys()
    for key, weight in one["weights"].items():
        torch.testing.assert_close(ranks[0]["weights"][key], weight, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("packed", {"all_gather": 2, "reduce_scatter": 1}),
        ("divided", {"all_gather": 2, "reduce_scatter": 1, "all_to_all": 5}),
        ("divided, recomputing", {"all_gather": 2, "reduce_scatter": 1, "all_to_all": 8}),
        ("divided and spread", {"all_gather": 4, "reduce_scatter": 2, "all_to_all": 5}),
        (
            "divided, two copies",
            {"all_gather": 2, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 5},
        ),
    ],
)
def test_a_layer_whose_experts_are_divided_exchanges_tokens_twice_in_each_pass(
    two: list[dict[str, Any]], four: list[dict[str, Any]], name: str, expected: dict[str, int]
) -> None:
    """And the number of tokens of each expert once in each forward pass.

    The experts of a rank that shares them with no other one are never gathered.
    """
    for rank in four if name in program.OF_FOUR else two:
        assert rank["collectives"][name] == expected


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
    assert [rank["resumed"] for rank in two] == [[True, True]] * 2


@pytest.mark.usefixtures("two")
def test_one_process_resumes_from_ranks_that_divide_the_experts(even: Path, scratch: Path) -> None:
    policy = program.policy_of(even)
    policy.load(str(scratch / "checkpoint divided"))
    policy.train_step(batch(load_model(str(even)), program.LOSS, count=8), program.LOSS)
    expected = load_file(scratch / "exported divided/model.safetensors")
    found = program.weights(policy)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("name", ["packed", "divided"])
def test_an_exported_folder_is_a_model_like_the_first_one(
    model: Path, even: Path, scratch: Path, name: str
) -> None:
    before = {"packed": model, "divided": even}[name]
    folder = scratch / f"exported {name}"
    first, exported = (load_file(each / "model.safetensors") for each in (before, folder))
    assert {name: weight.shape for name, weight in exported.items()} == {
        name: weight.shape for name, weight in first.items()
    }
    loaded, trained = load_model(str(folder)), dict(load_model(str(before)).named_parameters())
    changed = [name for name, p in loaded.named_parameters() if not torch.equal(p, trained[name])]
    assert len(changed) == len(trained)


def test_a_reference_takes_the_weights_of_the_policy_s_export(two: list[dict[str, Any]]) -> None:
    for rank in two:
        for changed, difference in rank["reference"]:
            assert changed
            assert difference < 1e-6


def test_a_rank_without_an_expert_is_refused(four: list[dict[str, Any]]) -> None:
    for rank in four:
        assert rank["too few"] == (
            "the 3 experts of a layer cannot be spread over 4 ranks, because one would hold none: "
            "set fsdp_size to 2"
        )
