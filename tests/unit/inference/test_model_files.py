"""What a model's folder says without being loaded, and whether files hold its parameters."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from agenticrun_workers.inference import EngineError, InvalidRequest, UnusableModel
from agenticrun_workers.inference.engine import ABORTED_UNSAMPLED
from agenticrun_workers.inference.model_files import (
    RequestLimits,
    UpdateCheck,
    is_tied,
    read_limits,
    shapes_of_file,
    shapes_of_model,
)
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest, SamplingParams
from tiny_model import CONTEXT, VOCABULARY, tiny_model, weight_parts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def test_limits_are_the_models(model: Path) -> None:
    assert read_limits(model) == (VOCABULARY, CONTEXT)


@pytest.mark.parametrize("config", ["", "[1", "1"])
def test_a_folder_without_a_config_is_refused(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UnusableModel, match="not the folder of a model"):
        read_limits(tmp_path)


def test_a_config_of_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnusableModel, match="vocab_size"):
        read_limits(tmp_path)


def test_shapes_are_read_from_the_headers(model: Path) -> None:
    [file] = model.glob("*.safetensors")
    assert shapes_of_model(model) == {
        name: tuple(value.shape) for name, value in load_file(file).items()
    }


def test_shapes_of_a_model_in_several_files_come_from_those_of_its_index(
    model: Path, tmp_path: Path
) -> None:
    parts = weight_parts(model, tmp_path / "parts")
    index = {"weight_map": {name: part.name for part in parts for name in load_file(part)}}
    (tmp_path / "parts/model.safetensors.index.json").write_text(json.dumps(index))
    assert shapes_of_model(tmp_path / "parts") == shapes_of_model(model)


@pytest.mark.parametrize(
    "index",
    [None, "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": "missing.safetensors"}}'],
)
def test_a_folder_without_readable_weights_is_refused(tmp_path: Path, index: str | None) -> None:
    if index is not None:
        (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UnusableModel, match="holds no model in safetensors files"):
        shapes_of_model(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x03\0\0\0\0\0\0\0[1]"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(EngineError, match="cannot be read as a safetensors file"):
        shapes_of_file(tmp_path / "x")


def given(model: Path, *parts: Path, tied: bool = True) -> None:
    check = UpdateCheck(shapes_of_model(model), tied=tied)
    for part in parts:
        check.add_file(part)
    check.finish()


def test_all_parameters_must_come_each_in_its_shape_and_no_others(
    model: Path, tmp_path: Path
) -> None:
    first, second = weight_parts(model, tmp_path / "parts")
    given(model, first, second)
    with pytest.raises(EngineError, match=r"the new weights lack \d+ parameters, model\."):
        given(model, first)
    weights = load_file(second)
    name = next(iter(weights))
    save_file({**weights, name: weights[name].flatten()[:1].clone()}, second)
    with pytest.raises(EngineError, match=rf"weights for {name} have shape \(1,\), the model has"):
        given(model, first, second)
    save_file({**weights, "other": weights[name].clone()}, second)
    with pytest.raises(EngineError, match=r"weights for other have shape .*, the model has None"):
        given(model, first, second)


def test_a_tied_output_layer_may_come_or_stay_away(model: Path, tmp_path: Path) -> None:
    assert is_tied(model)
    first, second = weight_parts(model, tmp_path / "parts")
    weights = load_file(first) | load_file(second)
    save_file(
        {**load_file(second), "lm_head.weight": weights["model.embed_tokens.weight"].clone()},
        second,
    )
    given(model, first, second)
    with pytest.raises(EngineError, match=r"lm_head\.weight"):
        given(model, first, second, tied=False)


REQUEST = GenerationRequest("a", "a", np.zeros(1, np.int32), SamplingParams(3))


@pytest.mark.parametrize(
    ("tokens", "logprobs", "versions", "words"),
    [
        ([1, 2, 3, 4], 4, [3] * 4, "4 tokens instead of 3"),
        ([], 0, [], "a response without a token"),
        ([1, VOCABULARY], 2, [3, 3], rf"token ids outside \[0, {VOCABULARY}\)"),
        ([1, -1], 2, [3, 3], "token ids outside"),
        ([1, 2], 1, [3, 3], "2 tokens, 1 log-probs and 2 versions"),
        ([1, 2], 2, [3, -1], "tokens without a version"),
    ],
)
def test_an_answer_that_no_working_server_gives_is_an_error_of_the_engine(
    tokens: list[int], logprobs: int, versions: list[int], words: str
) -> None:
    limits = RequestLimits(VOCABULARY, CONTEXT)
    generation = Generation(
        np.array(tokens, np.int32),
        np.zeros(logprobs, np.float32),
        np.array(versions, np.int32),
        FinishReason.STOP,
    )
    with pytest.raises(EngineError, match=words) as caught:
        limits.check_generation(REQUEST, generation)
    assert not isinstance(caught.value, InvalidRequest)


@pytest.mark.parametrize("logprob", [float("nan"), float("inf"), float("-inf")])
def test_a_log_prob_that_is_no_finite_number_is_an_error_of_the_engine(logprob: float) -> None:
    generation = Generation(
        np.array([1, 2], np.int32),
        np.array([-1.0, logprob], np.float32),
        np.zeros(2, np.int32),
        FinishReason.STOP,
    )
    with pytest.raises(EngineError, match="log-probs that are not finite"):
        RequestLimits(VOCABULARY, CONTEXT).check_generation(REQUEST, generation)


def test_good_and_empty_answers_pass() -> None:
    limits = RequestLimits(VOCABULARY, CONTEXT)
    good = Generation(
        np.array([0, VOCABULARY - 1], np.int32),
        np.zeros(2, np.float32),
        np.array([0, 1], np.int32),
        FinishReason.LENGTH,
    )
    assert limits.check_generation(REQUEST, good) is good
    assert limits.check_generation(REQUEST, ABORTED_UNSAMPLED) is ABORTED_UNSAMPLED
