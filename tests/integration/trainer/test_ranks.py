"""Two and three real gloo processes train exactly as one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agenticrun_workers.models.pretrained import load_model
from ragged_samples import VALUE_LOSSES, largest_difference, make_model
from rank_programs import launch, load

PROGRAM = Path(__file__).with_name("rank_program.py")
TOLERANCE = {"float64": 1e-10, "float32": 1e-4}

Runs = dict[Any, Any]

program = load(PROGRAM)


def run_ranks(world: int, model: Path, work: Path) -> list[Runs]:
    """What each of so many processes found."""
    return launch(PROGRAM, world, work, [str(model), str(work)])


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def runs(work: Path) -> Runs:
    """Run everything that is compared: one rank in this process, two and three in other ones."""
    model = make_model(work / "model")
    one = {
        "gradients": program.gradients(model),
        "fresh": vars(program.train(model, save=work / "saved-by-1")),
    }
    two, three = run_ranks(2, model, work), run_ranks(3, model, work)
    one["resumed from 2"] = vars(program.train(model, resume=work / "saved-by-2"))
    return {
        1: one,
        2: two,
        3: three,
        "batch": program.batch(load_model(str(model), torch.float64), program.LOSS, 0, 11),
    }


def assert_same_weights(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_allclose(found[name], weight, atol=1e-10, rtol=1e-7, err_msg=name)


pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_gradient_is_the_same_on_one_two_or_three_ranks_padded_or_packed(
    runs: Runs, world: int, dtype: str
) -> None:
    for name in [*program.losses_of(dtype, world), *(f"critic {name}" for name in VALUE_LOSSES)]:
        expected = runs[1]["gradients"][name, dtype, "padded"]
        assert all(gradient.norm() > 0 for gradient in expected.values()), name
        for rank in [runs[1]] if world == 1 else runs[world]:
            for cut in program.CUTS:
                found = rank["gradients"][name, dtype, cut]
                assert largest_difference(found, expected) < TOLERANCE[dtype], (name, cut)


def test_two_ranks_reach_the_same_weights_as_one(runs: Runs) -> None:
    assert_same_weights(runs[2][0]["fresh"]["weights"], runs[1]["fresh"]["weights"])


def test_only_rank_zero_exports_weights(runs: Runs) -> None:
    assert runs[2][1]["fresh"]["weights"] == {}


def test_two_ranks_write_one_folder_that_transformers_loads(runs: Runs, work: Path) -> None:
    found = AutoModelForCausalLM.from_pretrained(work / "exported").state_dict()
    expected = load_model(str(work / "model")).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (work / "exported" / "note.txt").read_text() == "exported"


def test_metrics_are_global_and_equal_on_every_rank(runs: Runs) -> None:
    first, second = (rank["fresh"]["metrics"] for rank in runs[2])
    assert first == second
    for alone, together in zip(runs[1]["fresh"]["metrics"], first, strict=True):
        about_the_loss = {name for name in alone if not name.startswith("train/")}
        assert {name: together[name] for name in about_the_loss} == pytest.approx(
            {name: alone[name] for name in about_the_loss}, rel=1e-10, abs=1e-10
        )


def test_the_balance_of_the_ranks_is_the_fullest_one_s_tokens_over_the_mean(runs: Runs) -> None:
    lengths = [
        [
            sum(
                int(np.flatnonzero(s.weight_T[1:])[-1]) + 1
                for s in program.part(runs["batch"], rank, 2)
                if s.weight_T[1:].any()
            )
        ]
        for rank in range(2)
    ]
    assert runs[1]["fresh"]["metrics"][0]["train/token_imbalance"] == 1
    assert runs[2][0]["fresh"]["metrics"][0]["train/token_imbalance"] == pytest.approx(
        max(lengths)[0] / np.mean(lengths)
    )


def test_each_rank_computes_the_log_probs_and_values_of_its_own_samples(runs: Runs) -> None:
    for what in ("logprobs", "values"):
        alone, parts = runs[1]["fresh"][what], [rank["fresh"][what] for rank in runs[2]]
        if what == "logprobs":  # of the policy, then of the reference
            halves = [(part[: len(part) // 2], part[len(part) // 2 :]) for part in parts]
            parts = [half for which in zip(*halves, strict=True) for half in which]
        for a, b in zip(alone, [array for part in parts for array in part], strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def test_a_checkpoint_goes_on_exactly_with_as_many_or_with_other_ranks(runs: Runs) -> None:
    """Policy, critic and the copied reference."""
    for rank in (0, 1):
        for name in ("resumed from 2", "resumed from 1"):
            resumed, straight = runs[2][rank][name], runs[2][rank]["fresh"]
            assert resumed["policy_version"] == 3
            assert len(resumed["metrics"]) == 3
            for what in ("logprobs", "values"):
                for a, b in zip(resumed[what], straight[what], strict=True):
                    np.testing.assert_allclose(a, b, atol=1e-6)
    for resumed in (
        runs[1]["resumed from 2"],
        runs[2][0]["resumed from 2"],
        runs[2][0]["resumed from 1"],
    ):
        assert_same_weights(resumed["weights"], runs[1]["fresh"]["weights"])
