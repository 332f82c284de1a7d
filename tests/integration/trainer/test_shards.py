"""Each rank loads only its shard of a model, and all report what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from agenticrun_workers.sizing.memory import LOAD_PEAK
from ragged_samples import make_model
from rank_programs import launch, load

PROGRAM = Path(__file__).with_name("shard_program.py")

pytestmark = pytest.mark.timeout(600)

program = load(PROGRAM)


def change(folder: Path, how: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the weights in a folder."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    how(weights)
    save_file(weights, file, {"format": "pt"})


def last_row_nan(weights: dict[str, Tensor]) -> None:
    weights["model.embed_tokens.weight"][-1] = torch.nan


def other_shape(weights: dict[str, Tensor]) -> None:
    name = "model.embed_tokens.weight"
    weights[name] = torch.cat([weights[name], weights[name][:1]])


def other_output_layer(weights: dict[str, Tensor]) -> None:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    program.write(folder / "tiny", program.Shape(2, 64))
    program.write(folder / "small", program.SMALL)
    program.write(folder / "untied", program.Shape(2, 64, 63), tied=False)
    make_model(folder / "adapted")
    faults = {
        "nan": last_row_nan,
        "shape": other_shape,
        "missing": lambda weights: weights.pop("model.norm.weight"),
        "untied": other_output_layer,
        "target": lambda weights: None,
    }
    for name, how in faults.items():
        change(make_model(folder / "faulty" / name), how)
    return folder


@pytest.fixture(scope="module")
def two(models: Path) -> list[dict[str, Any]]:
    return launch(PROGRAM, 2, models, [str(models)])


def test_a_rank_needs_little_more_memory_than_its_shard_to_load(models: Path) -> None:
    stored = (models / "small" / "model.safetensors").stat().st_size
    for rank in launch(PROGRAM, 2, models, [str(models), "small"]):
        # Half of the parameters, and twice their bytes: the files hold bfloat16.
        assert rank["shard"] == pytest.approx(stored, rel=0.01)
        assert rank["peak"] < LOAD_PEAK * rank["shard"]


def test_the_output_layer_that_a_critic_does_not_use_is_not_read_whole(
    two: list[dict[str, Any]],
) -> None:
    assert [rank["head"] for rank in two] == [(32, 63), (31, 63)]


def test_adapters_train_the_same_on_a_base_in_bfloat16_in_half_its_memory(
    two: list[dict[str, Any]], models: Path
) -> None:
    """The files hold float32 here; the published ones hold bfloat16."""
    for rank in two:
        shards, whole = rank["adapters"]["shards"], rank["adapters"]["whole"]
        assert shards["metrics"] == whole["metrics"]
        assert shards["held"] < 0.7 * whole["held"]
    found, expected = (two[0]["adapters"][name]["weights"] for name in ("shards", "whole"))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("nan", r"ModelLoadError: the weights of \S+ hold NaN \(model\.embed_tokens\.weight\)"),
        (
            "shape",
            r"ModelLoadError: the weight model\.embed_tokens\.weight of \S+ has shape \(22, 16\), "
            r"config\.json asks for \(21, 16\)",
        ),
        ("missing", r"ModelLoadError: \S+ lacks 1 of its weights, model\.norm\.weight among them"),
        (
            "untied",
            r"ModelLoadError: \S+ holds lm_head\.weight and model\.embed_tokens\.weight with "
            r"different values, config\.json ties them: set tie_word_embeddings: false",
        ),
        ("target", r"UnknownTarget: the model has no layer x"),
    ],
)
def test_what_one_rank_finds_all_ranks_raise(
    two: list[dict[str, Any]], fault: str, message: str
) -> None:
    """NaN is in the last row, which only the last rank reads."""
    for rank in two:
        assert re.match(message, rank["errors"][fault]), rank["errors"][fault]
