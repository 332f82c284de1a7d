"""Options of fsdp2 on two and four real gloo processes do not change the training result.

They change where numbers lie and when they are computed.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agenticrun_workers.trainer.fsdp2 import fsdp2_policy
from ragged_samples import LOSSES, largest_difference
from rank_programs import launch, load

PROGRAM = Path(__file__).with_name("fsdp_program.py")

pytestmark = pytest.mark.timeout(600)


program = load(PROGRAM)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def two(work: Path) -> list[dict[str, Any]]:
    return launch(PROGRAM, 2, work, [str(work)])


@pytest.fixture(scope="module")
def four(work: Path) -> list[dict[str, Any]]:
    return launch(PROGRAM, 4, work, [str(work)])


@cache
def alone(shape: str) -> dict[str, dict[str, torch.Tensor]]:
    """The gradients of plain torch in this process."""
    found: dict[str, dict[str, torch.Tensor]] = program.gradients(
        partial(program.qwen2, shape, torch.float64), program.OPTIONS["plain"], "padded"
    )
    return found


def assert_same_gradients(ranks: list[dict[str, Any]], shape: str, option: str) -> None:
    for name, expected in alone(shape).items():
        assert all(gradient.norm() > 0 for gradient in expected.values())
        for cut in program.CUTS:
            for rank in ranks:
                assert (
                    largest_difference(rank["gradients"][shape, option, cut][name], expected)
                    < 1e-10
                ), (name, cut)


@pytest.mark.parametrize("option", program.ON_TWO)
def test_an_option_changes_no_gradient(two: list[dict[str, Any]], option: str) -> None:
    assert_same_gradients(two, "two key-value heads", option)


@pytest.mark.parametrize("shape", program.SHAPES)
def test_ranks_that_share_sequences_get_the_gradient_of_whole_ones(
    two: list[dict[str, Any]], shape: str
) -> None:
    assert_same_gradients(two, shape, "ulysses")


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("fsdp", {"all_gather": 2, "reduce_scatter": 1}),
        ("fsdp, gathered once", {"all_gather": 1, "reduce_scatter": 1}),
        ("ulysses", {"all_gather": 2, "reduce_scatter": 1, "all_to_all": 4}),
    ],
)
def test_a_layer_takes_no_more_collectives_than_its_sharding_needs(
    two: list[dict[str, Any]], option: str, expected: dict[str, int]
) -> None:
    """Gathered before each pass, reduced after it; two exchanges around attention in each pass."""
    for rank in two:
        assert rank["collectives"][option] == expected


def test_two_groups_of_two_ranks_get_it_too(four: list[dict[str, Any]]) -> None:
    assert_same_gradients(four, "two key-value heads", "ulysses")


@pytest.mark.parametrize("option", ["two copies", "two copies, ulysses"])
def test_two_copies_of_the_model_on_two_ranks_each_get_it(
    four: list[dict[str, Any]], option: str
) -> None:
    assert_same_gradients(four, "two key-value heads", option)


def test_two_copies_reach_the_weights_of_one_process_and_save_them(
    four: list[dict[str, Any]], work: Path
) -> None:
    load = partial(program.qwen2, "two key-value heads", torch.float64)
    expected = program.steps(load, LOSSES["ppo"])["weights"]
    resumed = fsdp2_policy(load, program.SPEC)
    resumed.load(str(work / "copies"))
    for found in (four[0]["steps"]["two copies"]["weights"], dict(resumed.export_weights())):
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-7, atol=1e-10)


def test_a_sum_over_the_data_counts_ranks_that_share_a_part_once(
    two: list[dict[str, Any]], four: list[dict[str, Any]]
) -> None:
    assert [rank["sums"] for rank in two] == [[1.0, 0.0]] * 2
    assert [rank["sums"] for rank in four] == [[2.0, 1.0]] * 4


def test_ranks_that_share_sequences_reach_the_same_weights_metrics_and_log_probs(
    two: list[dict[str, Any]],
) -> None:
    """Also after visits to host memory."""
    expected = program.steps(
        partial(program.qwen2, "two key-value heads", torch.float64), LOSSES["ppo"]
    )
    first, second = (rank["steps"]["ulysses"] for rank in two)
    for found in (first, second):
        for a, b in zip(found["metrics"], expected["metrics"], strict=True):
            assert a.keys() == b.keys()
            about = {name for name in a if name != "train/padding_waste"}
            assert {name: a[name] for name in about} == pytest.approx(
                {name: b[name] for name in about}, rel=1e-9, abs=1e-10
            )
        for x, y in zip(found["logprobs"], expected["logprobs"], strict=True):
            np.testing.assert_allclose(x, y, atol=1e-6)
    assert second["weights"] == {}
    assert first["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(first["weights"][name], weight, rtol=1e-7, atol=1e-10)


def test_bfloat16_is_computed_with_and_served_while_masters_and_moments_stay_float32(
    two: list[dict[str, Any]],
) -> None:
    first, second = (rank["steps"]["bfloat16"] for rank in two)
    assert first["kept"] == second["kept"] == {torch.float32}
    assert {weight.dtype for weight in first["weights"].values()} == {torch.bfloat16}
    assert first["metrics"] == second["metrics"]
    exact = program.steps(
        partial(program.qwen2, "two key-value heads", torch.float32), LOSSES["ppo"]
    )
    found, expected = first["metrics"][0], exact["metrics"][0]
    assert found["actor/total_loss"] == pytest.approx(expected["actor/total_loss"], abs=0.05)
    assert found["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=0.15)


def test_log_probs_are_those_of_the_served_bfloat16_weights_to_the_bit(
    two: list[dict[str, Any]],
) -> None:
    """As a reference or an engine with these weights and kernels computes them."""
    model = program.qwen2("two key-value heads", torch.bfloat16)
    served = two[0]["steps"]["bfloat16"]["weights"]
    model.load_state_dict(served, strict="lm_head.weight" in served)
    samples = program.batch(program.qwen2("two key-value heads", torch.float32), LOSSES["ppo"], 0)
    policy = fsdp2_policy(lambda: model, program.SPEC, max_tokens=30)
    for rank, found in enumerate(two):
        expected = policy.compute_log_probs(program.part(samples, rank, 2))
        for a, b in zip(found["steps"]["bfloat16"]["logprobs"], expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_checkpoint_of_bfloat16_training_holds_the_masters(
    two: list[dict[str, Any]], work: Path
) -> None:
    policy = fsdp2_policy(
        partial(program.qwen2, "two key-value heads", torch.float32), program.SPEC
    )
    policy.load(str(work / "bfloat16"))
    rounded = two[0]["steps"]["bfloat16"]["weights"]
    masters = dict(policy.export_weights())
    assert all(torch.equal(masters[name].bfloat16(), weight) for name, weight in rounded.items())
    assert any(not torch.equal(masters[name], weight.float()) for name, weight in rounded.items())
