"""Models that no trainer supports are refused before their weights are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from agenticrun_workers.models.devices import claim_device, collective_backends, compute_device
from agenticrun_workers.models.pretrained import ModelLoadError, load_config, load_model


@pytest.mark.parametrize(
    "model_type",
    [
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
        "deepseek_v3",
        "gpt_oss",
        "olmoe",
        "phimoe",
        "granitemoe",
    ],
)
def test_a_mixture_of_experts_is_refused(model_type: str, tmp_path: Path) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(
        ModelLoadError,
        match=rf"is a mixture of experts \({model_type}\), which is not offered yet: "
        "train a dense model",
    ):
        load_model(str(tmp_path))


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_ranks_live_on_the_cpu_and_talk_by_gloo() -> None:
    assert claim_device(3) == compute_device() == torch.device("cpu")
    assert collective_backends(compute_device()) == "gloo"


def test_tensors_on_a_gpu_go_by_nccl_and_those_in_host_memory_by_gloo() -> None:
    assert collective_backends(torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_ranks_that_see_the_same_gpus_take_them_in_turn() -> None:
    assert [claim_device(rank).index for rank in range(4)] == [
        rank % torch.cuda.device_count() for rank in range(4)
    ]
