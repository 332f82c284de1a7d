"""Models that no trainer supports are refused before their weights are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from agenticrun_workers.models.pretrained import ModelLoadError, load_config, load_model

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.mark.parametrize(
    "model_type",
    [
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
        "olmoe",
        "deepseek_v3",
        "gpt_oss",
        "phimoe",
        "llama4_text",
        "ernie4_5_moe",
    ],
)
def test_a_mixture_of_experts_is_taken(model_type: str, tmp_path: Path) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    assert load_config(str(tmp_path)).model_type == model_type


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("jetmoe", "its experts are not the rows of weights that a layer has for all of them"),
        ("deepseek_v4", "transformers does not write its weights one by one under the names"),
        ("hy_v4", r"model\..* must stay in float32 in a module that computes in bfloat16"),
    ],
)
def test_a_mixture_that_cannot_be_trained_or_exported_is_refused(
    model_type: str, reason: str, tmp_path: Path
) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(
        ModelLoadError,
        match=rf"is a mixture of experts \({model_type}\) that is not offered, because {reason}",
    ):
        load_model(str(tmp_path))


@pytest.mark.parametrize("method", ["mxfp4", "fp8", "gptq"])
def test_quantised_weights_are_refused(method: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model("qwen3", quantization_config={"quant_method": method})
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=rf"are quantised \({method}\).* copy of the model in"):
        load_config(str(tmp_path))


@pytest.mark.parametrize("model_type", ["bart", "whisper", "t5gemma"])
def test_a_model_with_an_encoder_is_refused(model_type: str, tmp_path: Path) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=rf"an encoder besides its decoder \({model_type}\)"):
        load_config(str(tmp_path))


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("doge", {"is_moe": True, "num_experts": 16}),
        ("jetmoe", {"num_local_experts": 2}),
    ],
)
def test_experts_make_a_mixture(model_type: str, options: dict[str, Any], tmp_path: Path) -> None:
    AutoConfig.for_model(model_type, **SMALL, **options).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=rf"is a mixture of experts \({model_type}\)"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("doge", {}),
        ("nemotron_h", {"hybrid_override_pattern": "M*M-"}),
        ("jamba", {"num_experts": 1}),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3]}),
        ("gemma3n_text", {"intermediate_size": 48}),
    ],
)
def test_a_number_of_experts_that_no_layer_has_is_no_mixture(
    model_type: str, options: dict[str, Any], tmp_path: Path
) -> None:
    config = AutoConfig.for_model(model_type, **SMALL | options)
    config.save_pretrained(tmp_path)
    assert load_config(str(tmp_path)).model_type == model_type


@pytest.mark.parametrize(
    "model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "gemma3", "mllama", "qwen2_audio"]
)
def test_a_model_of_several_modalities_is_refused(model_type: str, tmp_path: Path) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(
        ModelLoadError,
        match=rf"is a model of several modalities \({model_type}\), which is not offered yet: "
        "train a text",
    ):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2", "phi3", "olmo2"]
)
def test_a_dense_text_model_is_not(model_type: str, tmp_path: Path) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    assert load_config(str(tmp_path)).model_type == model_type


def test_a_folder_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"{tmp_path} has no config.json"):
        load_config(str(tmp_path))
