"""DeepSpeed on real gloo ranks trains as `PolicyTrainer` does on one."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agenticrun_workers.models.pretrained import load_model
from agenticrun_workers.trainer import checkpoint
from ragged_samples import largest_difference, make_model
from rank_programs import launch, load

PROGRAM = Path(__file__).with_name("deepspeed_program.py")
STAGES = (1, 2, 3)

Runs = dict[str, Any]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return load(PROGRAM)


@pytest.fixture(scope="module")
def reference(program: ModuleType, work: Path) -> Runs:
    """`PolicyTrainer` in this process: what all others are compared with."""
    model = make_model(work / "model")
    narrow = program.make_torch(model, torch.bfloat16)
    bfloat16 = program.train(narrow, model, steps=program.STEPS)
    checkpoint.save(str(work / "bfloat16 torch"), narrow.snapshot())
    policy = program.make_torch(model)
    return {
        "gradients": program.gradients(policy, model),
        "training": program.train(policy, model, save=work / "torch"),
        "warmed up": program.warmed_up(program.make_torch(model), model),
        "half": program.train(program.make_torch(model), model, steps=program.STEPS),
        "bfloat16": bfloat16,
    }


@pytest.fixture(scope="module")
def one_rank(reference: Runs, work: Path) -> Runs:
    [result] = launch(PROGRAM, 1, work, [str(work / "model"), str(work), "one rank"])
    return dict(result)


@pytest.fixture(scope="module")
def two_ranks(one_rank: Runs, work: Path) -> list[Runs]:
    return launch(PROGRAM, 2, work, [str(work / "model"), str(work), "two ranks"])


def flat(weights: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([weight.ravel() for weight in weights.values()])


def assert_same_weights(
    found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = 2e-6
) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_allclose(found[name], weight, atol=tolerance, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("stage", STAGES)
def test_the_gradient_of_uneven_shares_and_many_micro_batches_is_that_of_one_process(
    reference: Runs, two_ranks: list[Runs], stage: int
) -> None:
    for name, expected in reference["gradients"].items():
        assert all(gradient.norm() > 0 for gradient in expected.values())
        for rank in two_ranks:
            assert largest_difference(rank[f"gradients {stage}"][name], expected) < 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_steps_lead_to_the_weights_log_probs_and_metrics_of_one_process(
    reference: Runs, two_ranks: list[Runs], stage: int
) -> None:
    expected, found = reference["training"], [rank[f"training {stage}"] for rank in two_ranks]
    assert_same_weights(found[0]["weights"], expected["weights"])
    assert found[1]["weights"] == {}
    for a, b in zip(
        expected["logprobs"], [array for rank in found for array in rank["logprobs"]], strict=True
    ):
        np.testing.assert_allclose(a, b, atol=3e-5)
    assert found[0]["metrics"] == found[1]["metrics"]
    for alone, together in zip(expected["metrics"], found[0]["metrics"], strict=True):
        assert alone.keys() == together.keys()
        about_the_loss = alone.keys() - {"train/padding_waste", "train/token_imbalance"}
        assert {name: together[name] for name in about_the_loss} == pytest.approx(
            {name: alone[name] for name in about_the_loss}, rel=1e-4, abs=1e-4
        )


@pytest.mark.parametrize("stage", STAGES)
def test_the_first_rl_step_starts_with_a_new_optimizer(
    reference: Runs, two_ranks: list[Runs], stage: int
) -> None:
    """The tolerance is larger than elsewhere: AdamW's first step divides a gradient by itself."""
    assert_same_weights(two_ranks[0][f"warmed up {stage}"], reference["warmed up"], 2e-5)


def test_one_rank_trains_too(reference: Runs, one_rank: Runs) -> None:
    assert_same_weights(one_rank["weights"], reference["training"]["weights"])


@pytest.mark.parametrize("name", ["offloaded zero 1", "offloaded zero 3", "checkpointed zero 3"])
def test_offload_and_checkpointing_change_nothing(
    reference: Runs, two_ranks: list[Runs], name: str
) -> None:
    assert_same_weights(two_ranks[0][name]["weights"], reference["half"]["weights"])


@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_is_computed_with_and_float32_is_trained(
    reference: Runs, two_ranks: list[Runs], program: ModuleType, work: Path, stage: int
) -> None:
    """Check that the masters, which a checkpoint holds, follow those of `PolicyTrainer`.

    Rounding differs on the way.
    """
    start, found, expected = (program.make_torch(work / "model") for _ in range(3))
    found.load(str(work / f"bfloat16 zero {stage}"))
    expected.load(str(work / "bfloat16 torch"))
    masters, exported = program.weights(found), two_ranks[0][f"bfloat16 zero {stage}"]["weights"]
    for name, weight in masters.items():
        rounded = torch.from_numpy(weight).bfloat16().float().numpy()
        assert (weight != rounded).any()
        np.testing.assert_array_equal(exported[name], rounded)
    first = flat(program.weights(start))
    way, torch_way = flat(masters) - first, flat(program.weights(expected)) - first
    assert way @ torch_way / np.linalg.norm(way) / np.linalg.norm(torch_way) > 0.98
    assert 0.98 < np.linalg.norm(way) / np.linalg.norm(torch_way) < 1.02
    norms = [
        [step["actor/grad_norm"] for step in run["metrics"] if "actor/grad_norm" in step]
        for run in (two_ranks[0][f"bfloat16 zero {stage}"], reference["bfloat16"])
    ]
    assert norms[0] == pytest.approx(norms[1], rel=0.05)


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_not_finite_and_a_step_without_weight_change_nothing(
    two_ranks: list[Runs], stage: int
) -> None:
    found = two_ranks[0][f"broken {stage}"]
    before, after, still, later = found["weights"]
    assert found["skipped"] == [1, 1]
    for name, weight in before.items():
        np.testing.assert_array_equal(after[name], weight)
        np.testing.assert_array_equal(still[name], weight)
        assert np.isfinite(later[name]).all()
    assert any((later[name] != weight).any() for name, weight in before.items())
    assert (
        "2 gradients in a row were not finite; "
        "in the last, that of model.model.embed_tokens.weight is the first" in found["error"]
    )


def test_a_checkpoint_goes_on_on_other_ranks_in_another_stage_or_trainer(
    reference: Runs, two_ranks: list[Runs], program: ModuleType, work: Path
) -> None:
    expected = reference["training"]
    [alone] = launch(PROGRAM, 1, work, [str(work / "model"), str(work), "resumed on one rank"])
    in_torch = program.train(
        program.make_torch(work / "model"), work / "model", resume=work / "zero2-by-2"
    )
    for resumed in (
        alone,
        in_torch,
        two_ranks[0]["from torch"],
        two_ranks[0]["from zero 1 on one rank"],
    ):
        assert resumed["policy_version"] == program.STEPS
        assert len(resumed["metrics"]) == program.STEPS
        assert resumed["metrics"][-1]["actor/lr"] == expected["metrics"][-1]["actor/lr"]
        assert_same_weights(resumed["weights"], expected["weights"])


def test_two_ranks_write_one_folder_that_transformers_loads(
    two_ranks: list[Runs], work: Path
) -> None:
    found = AutoModelForCausalLM.from_pretrained(work / "exported").state_dict()
    expected = load_model(str(work / "model")).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (work / "exported" / "note.txt").read_text() == "exported"
