"""`strategy.config` of deepspeed: the options that are passed on, and those that are refused.

A refusal names the field that decides the value.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.pod_memory import PodMemory
from agenticrun_workers.trainer import strategies
from agenticrun_workers.trainer.deepspeed.options import DECIDED_ELSEWHERE, DeepSpeedOptions
from agenticrun_workers.trainer.optimizer import OptimizerSpec
from loaded_models import loaded

SPEC = OptimizerSpec(1e-3, max_grad_norm=0.5)


def parse(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> DeepSpeedOptions:
    return DeepSpeedOptions.parse(config, dtype)


def test_a_model_that_the_ranks_cannot_load_whole_is_refused_with_the_arithmetic(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, count = ModelSource(str(folder)), loaded(folder).num_parameters()
    monkeypatch.setattr(strategies, "ranks_of_this_host", lambda: 2)
    monkeypatch.setattr(PodMemory, "limit", lambda _: 2 * 4 * count)
    strategies._require_room(source)
    monkeypatch.setattr(PodMemory, "limit", lambda _: 2 * 4 * count - 1)
    with pytest.raises(InvalidConfig) as raised:
        strategies._require_room(source)
    assert str(raised.value) == (
        "spec.pipeline.actorTrain.strategy.name: with deepspeed each rank loads the whole model: "
        f"{count / 1e9:.3g} billion parameters x 4 bytes = {4 * count / 1e9:.3g} GB, for 2 ranks "
        f"here {8 * count / 1e9:.3g} GB, and their memory is {(8 * count - 1) / 1e9:.3g} GB: use "
        "the strategy fsdp2, whose ranks each load a shard, or raise roles.trainer.memory"
    )


def test_without_options_everything_is_sharded() -> None:
    options = parse({})
    assert options.stage == 3
    assert not options.gradient_checkpointing
    assert not options.offloads_optimizer


def test_options_of_zero_go_to_deepspeed_as_they_are() -> None:
    zero = {
        "stage": 2,
        "overlap_comm": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    }
    options = parse(
        {"zero_optimization": zero, "communication_data_type": "bf16", "wall_clock_breakdown": True}
    )
    config = options.config(SPEC, torch.bfloat16)
    assert options.stage == 2
    assert options.offloads_optimizer
    assert config["zero_optimization"] == zero
    assert config["communication_data_type"] == "bf16"
    assert config["wall_clock_breakdown"] is True


def test_precision_and_clipping_come_from_the_run() -> None:
    config = parse({"bf16": {"enabled": True}}, torch.bfloat16).config(SPEC, torch.bfloat16)
    assert config["bf16"] == {"enabled": True}
    assert config["gradient_clipping"] == 0.5
    assert config["communication_data_type"] == "fp32"
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert parse({}).config(SPEC, torch.float32)["bf16"] == {"enabled": False}


@pytest.mark.parametrize("name", DECIDED_ELSEWHERE)
def test_an_option_that_another_field_decides_is_refused_with_that_field(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"the option {name} of deepspeed is decided by (spec\.|the option )"
    ):
        parse({name: 1})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation of deepspeed is unknown or not offered"),
        ({"zero_optimization": 3}, "zero_optimization of deepspeed must be a mapping"),
        (
            {"zero_optimization": {"stage": 0}},
            "stage must be 1, 2 or 3, not 0; without ZeRO use the strategy fsdp2",
        ),
        ({"zero_optimization": {"stage": True}}, "stage must be 1, 2 or 3, not True"),
        (
            {"zero_optimization": {"zero_quantized_weights": True}},
            "zero_optimization.zero_quantized_weights of deepspeed is unknown or not",
        ),
        (
            {"zero_optimization": {"compute_grad_norm": False}},
            r"compute_grad_norm of deepspeed is decided by .*maxGradNorm",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme"}}},
            "offload_param.device must be cpu or none, not 'nvme'",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"nvme_path": "/x"}}},
            "offload_optimizer.nvme_path of deepspeed is unknown or not",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "offload_param needs zero_optimization.stage 3",
        ),
        (
            {
                "zero_optimization": {
                    "stage": 1,
                    "offload_optimizer": {"device": "cpu", "ratio": 0.5},
                }
            },
            "ratio needs zero_optimization.stage 3",
        ),
        (
            {"bf16": {"enabled": True}},
            "bf16.enabled of deepspeed is decided by spec.model.dtype, which is float32",
        ),
        (
            {"bf16": {"immediate_grad_update": True}},
            "bf16.immediate_grad_update of deepspeed is unknown or not offered",
        ),
        (
            {"gradient_checkpointing": "yes"},
            "gradient_checkpointing must be true or false, not 'yes'",
        ),
        (
            {"logits_chunk_elements": 0},
            "logits_chunk_elements must be a whole number of at least 1, not 0",
        ),
    ],
)
def test_a_wrong_option_is_refused_by_name(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse(config)


def test_float64_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        ValueError,
        match=r"computes in float32 or bfloat16: "
        r"set spec.model.dtype, or train in torch.float64 with fsdp2",
    ):
        parse({}, torch.float64)


def test_the_optimizer_s_offload_to_nowhere_is_none() -> None:
    assert not parse(
        {"zero_optimization": {"offload_optimizer": {"device": "none"}}}
    ).offloads_optimizer
