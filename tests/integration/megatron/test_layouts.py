"""Two and four real gloo processes train with Megatron in every layout.

The result is that of one process with torch.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agenticrun_workers.models.pretrained import load_model
from agenticrun_workers.trainer.fsdp2 import fsdp2_policy
from agenticrun_workers.trainer.policy_trainer import PolicyTrainer
from megatron_cases import (
    CASES,
    CONFIGS,
    DTYPES,
    LOSS,
    MAX_TOKENS,
    SAVED,
    SPEC,
    Result,
    make_models,
    resume,
    samples_of,
    save_after,
    train,
)
from rank_programs import launch

PROGRAM = Path(__file__).with_name("rank_program.py")
TRAINED = [(case, family) for case in CASES for family in case.families]
EXACT = [(case, family) for case, family in TRAINED if case.dtype != "bfloat16"]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    make_models(folder)
    return folder


def torch_policy(work: Path, family: str, dtype: str) -> PolicyTrainer:
    load = partial(load_model, str(work / family), DTYPES[dtype])
    return fsdp2_policy(load, SPEC, max_tokens=MAX_TOKENS, temperature=LOSS.temperature)


@pytest.fixture(scope="module")
def references(work: Path) -> dict[tuple[str, str], Result]:
    """What a single process finds, by family and dtype."""
    save_after(
        torch_policy(work, "llama", "float64"), SAVED, work / "torch", samples_of(work, "llama")
    )
    wanted = {(family, case.dtype) for case, family in EXACT}
    return {
        key: train(torch_policy(work, *key), samples_of(work, key[0])) for key in sorted(wanted)
    }


@pytest.fixture(scope="module")
def ranks(work: Path, references: dict[tuple[str, str], Result]) -> dict[int, list[dict[Any, Any]]]:
    """What each of two and of four processes found."""
    assert references
    return {world: launch(PROGRAM, world, work, [str(work), str(work)]) for world in (2, 4)}


def distance(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """The largest relative distance of a tensor."""
    assert found.keys() == expected.keys()
    return max(
        float(np.linalg.norm(found[name] - value) / np.linalg.norm(value))
        for name, value in expected.items()
    )


def tolerance(family: str, dtype: str) -> float:
    """Return the relative tolerance.

    YaRN's rotary scores are rounded to float32 in another place than in transformers.
    """
    return 2e-4 if dtype == "float32" else 5e-6 if family == "qwen3" else 1e-9


def named(pairs: list[Any]) -> dict[str, Any]:
    return {"argvalues": pairs, "ids": [f"{case.name}-{family}" for case, family in pairs]}


@pytest.mark.parametrize(("case", "family"), **named(EXACT))
def test_gradient_weights_and_metrics_are_those_of_one_process(
    case: Any, family: str, ranks: Any, references: Any
) -> None:
    found, expected = ranks[case.world][0][case.name, family], references[family, case.dtype]
    assert all(np.linalg.norm(gradient) > 0 for gradient in expected.gradient.values())
    assert distance(found["gradient"], expected.gradient) < tolerance(family, case.dtype)
    assert distance(found["weights"], expected.weights) < tolerance(family, case.dtype)
    for mine, alone in zip(found["metrics"], expected.metrics, strict=True):
        assert mine.keys() == alone.keys()
        about_the_loss = [name for name in alone if not name.startswith("train/")]
        assert [mine[name] for name in about_the_loss] == pytest.approx(
            [alone[name] for name in about_the_loss], rel=1e-3, abs=1e-4
        )


@pytest.mark.parametrize(("case", "family"), **named(EXACT))
def test_log_probs_are_those_of_one_process_on_every_rank_of_a_data_rank(
    case: Any, family: str, ranks: Any, references: Any
) -> None:
    by_part: dict[int, list[np.ndarray]] = {}
    for rank in ranks[case.world]:
        (data_rank, _), logprobs = (
            rank[case.name, family]["data"],
            rank[case.name, family]["logprobs"],
        )
        assert all(
            np.array_equal(a, b)
            for a, b in zip(by_part.setdefault(data_rank, logprobs), logprobs, strict=True)
        )
    together = [array for data_rank in sorted(by_part) for array in by_part[data_rank]]
    for mine, alone in zip(together, references[family, case.dtype].logprobs, strict=True):
        np.testing.assert_allclose(mine, alone, atol=1e-4)


@pytest.mark.parametrize(("case", "family"), **named(TRAINED))
def test_metrics_are_equal_on_every_rank_and_rank_zero_alone_exports(
    case: Any, family: str, ranks: Any
) -> None:
    first, *others = [rank[case.name, family] for rank in ranks[case.world]]
    assert all(other["metrics"] == first["metrics"] for other in others)
    assert all(other["weights"] == {} for other in others)


def test_bfloat16_is_as_near_to_float32_as_that_of_one_process(
    work: Path, ranks: Any, references: Any
) -> None:
    found, expected = ranks[2][0]["bfloat16", "qwen3"], references["qwen3", "float32"]
    load = partial(load_model, str(work / "qwen3"))
    alone = train(
        fsdp2_policy(
            load, SPEC, max_tokens=MAX_TOKENS, temperature=LOSS.temperature, dtype=torch.bfloat16
        ),
        samples_of(work, "qwen3"),
    )
    for what in ("gradient", "weights"):
        error = distance(getattr(alone, what), getattr(expected, what))
        assert error > 0
        assert distance(found[what], getattr(expected, what)) < 1.5 * error


@pytest.mark.parametrize("layout", ["tensor", "data", "pipeline", "context"])
def test_a_checkpoint_goes_on_in_another_layout(layout: str, ranks: Any, references: Any) -> None:
    """Each from the one before it, the first from a torch policy's."""
    assert distance(ranks[2][0]["resumed"][layout], references["llama", "float64"].weights) < 1e-9


@pytest.mark.parametrize("way", ["whole from sharded", "sharded from whole"])
def test_a_sharded_optimizer_s_checkpoint_goes_on_whole_and_back(
    way: str, ranks: Any, references: Any
) -> None:
    assert distance(ranks[2][0]["resumed"][way], references["qwen3", "float32"].weights) < 1e-4


def test_a_torch_policy_goes_on_from_a_checkpoint_of_two_stages(
    work: Path, ranks: Any, references: Any
) -> None:
    assert ranks
    found = resume(
        torch_policy(work, "llama", "float64"), work / "pipeline", samples_of(work, "llama")
    )
    assert distance(found, references["llama", "float64"].weights) < 1e-9


def test_a_checkpoint_of_another_model_is_refused_on_every_rank(ranks: Any) -> None:
    first, second = (rank["mismatch"] for rank in ranks[2])
    assert first == second
    assert "spec.model" in first


def test_a_gradient_that_is_not_finite_changes_nothing_and_ends_the_run_if_it_stays(
    ranks: Any,
) -> None:
    for rank in ranks[2]:
        assert rank["broken"]["skipped"] == 1
        assert "2 gradients in a row were not finite" in rank["broken"]["error"]
        assert "model.embed_tokens.weight" in rank["broken"]["error"]
    before, after = ranks[2][0]["broken"]["before"], ranks[2][0]["broken"]["after"]
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_batch_without_anything_to_learn_is_no_step(ranks: Any) -> None:
    assert [rank["nothing"] for rank in ranks[2]] == [[{"actor/skipped_steps": 0.0}] * 2] * 2


def test_memory_that_was_left_to_an_engine_comes_back(ranks: Any, references: Any) -> None:
    assert distance(ranks[2][0]["offloaded"], references["llama", "float32"].weights) < 1e-4


def test_layouts_that_do_not_fit_are_refused_by_name(ranks: Any) -> None:
    refused = ranks[2][0]["refused"]
    assert (
        "2 trainer ranks are not a multiple of 3" in refused["ranks"]
        or "tensor_model_parallel_size 3 must divide" in refused["ranks"]
    )
    assert (
        "tensor_model_parallel_size 4 must divide the model's 2 key-value heads" in refused["heads"]
    )
    assert "use_distributed_optimizer" in refused["double"]
    assert "already has the layout" in refused["second layout"]


def test_two_stages_write_one_folder_that_transformers_loads_bit_for_bit(
    work: Path, ranks: Any
) -> None:
    assert ranks
    found, missing = AutoModelForCausalLM.from_pretrained(
        work / "exported", output_loading_info=True
    )
    expected = load_model(str(work / "llama")).state_dict()
    assert not missing["missing_keys"]
    assert found.state_dict().keys() == expected.keys()
    assert all(
        torch.equal(value.float(), expected[name]) for name, value in found.state_dict().items()
    )
    assert (
        found.config.to_dict()["rope_parameters"] == CONFIGS["llama"].to_dict()["rope_parameters"]
    )
    assert (work / "exported" / "note.txt").read_text() == "exported"
