"""Two gloo ranks, by FSDP2 and every stage of ZeRO, train adapters as one process does."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agenticrun_workers.models.pretrained import load_model
from ragged_samples import largest_difference, make_model
from rank_programs import launch, load

PROGRAM = Path(__file__).with_name("lora_program.py")
STRATEGIES = ("fsdp2", "zero 1", "zero 2", "zero 3")

Runs = dict[str, Any]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return load(PROGRAM)


@pytest.fixture(scope="module")
def alone(program: ModuleType, work: Path) -> Runs:
    """One process."""
    model = make_model(work / "model")
    return dict(
        program.train(program.STRATEGIES["fsdp2"](program.adapted(model)), model, work, "one rank")
    )


@pytest.fixture(scope="module")
def ranks(alone: Runs, work: Path) -> list[Runs]:
    return launch(PROGRAM, 2, work, [str(work / "model"), str(work)])


def assert_same_weights(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_allclose(found[name], weight, atol=3e-6, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_only_adapters_have_a_gradient_and_it_is_that_of_one_process(
    alone: Runs, ranks: list[Runs], strategy: str
) -> None:
    assert alone["gradients"]
    assert all("lora_" in name for name in alone["gradients"])
    for rank in ranks:
        assert largest_difference(rank[strategy]["gradients"], alone["gradients"]) < 1e-5


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_merged_weights_after_some_steps_are_those_of_one_process(
    alone: Runs, ranks: list[Runs], work: Path, strategy: str
) -> None:
    assert_same_weights(ranks[0][strategy]["weights"], alone["weights"])
    assert ranks[1][strategy]["weights"] == {}
    exported = dict(
        AutoModelForCausalLM.from_pretrained(work / f"exported {strategy}").named_parameters()
    )
    for name, weight in ranks[0][strategy]["weights"].items():
        np.testing.assert_array_equal(exported[name].detach().numpy(), weight)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_base_and_adapters_that_the_first_rank_exports_make_the_merged_weights(
    ranks: list[Runs], strategy: str
) -> None:
    """Bit for bit, in the order of the whole export."""
    found, expected = ranks[0][strategy]["expanded"], ranks[0][strategy]["weights"]
    assert list(found) == list(expected)
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)
    assert ranks[1][strategy]["expanded"] == {}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_base_stays_bit_for_bit(ranks: list[Runs], work: Path, strategy: str) -> None:
    expected = dict(load_model(str(work / "model")).named_parameters())
    for rank in ranks:
        found = rank[strategy]["base"]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_adapters_of_one_strategy_go_on_in_another(
    alone: Runs, ranks: list[Runs], program: ModuleType, work: Path
) -> None:
    model = work / "model"
    on_one = program.resume(
        program.STRATEGIES["fsdp2"](program.adapted(model)), model, work / "zero 2"
    )
    for weights in [on_one, *ranks[0]["resumed"].values()]:
        assert_same_weights(weights, alone["weights"])
