"""Packed sequences must not see each other, and a model that lets them is not packed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from agenticrun_workers.models.pretrained import load_model
from agenticrun_workers.trainer.critic import CriticTrainer
from agenticrun_workers.trainer.fsdp2 import Fsdp2Strategy, fsdp2_policy
from agenticrun_workers.trainer.modules import can_pack
from agenticrun_workers.trainer.optimizer import OptimizerSpec
from agenticrun_workers.trainer.policy_trainer import PolicyTrainer
from ragged_samples import LOSSES, batch

SPEC = OptimizerSpec(1e-2)

Load = Callable[[], PreTrainedModel]


class BlindToPositions(nn.Module):
    """A decoder that ignores position ids, as one with a cache or a mask of its own does."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.get_input_embeddings()  # type: ignore[no-any-return, operator]

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        use_cache: bool = False,
    ) -> object:
        return self.decoder(input_ids=input_ids, use_cache=use_cache)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packing_is_tried_and_found_exact(folder: Path, dtype: torch.dtype, attention: str) -> None:
    assert can_pack(load_model(str(folder), dtype, attn_implementation=attention).get_decoder())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_model_that_mixes_packed_sequences_is_found_out(folder: Path, dtype: torch.dtype) -> None:
    assert not can_pack(BlindToPositions(load_model(str(folder), dtype).get_decoder()))


QWEN3 = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(vocab_size=32, hidden_size=16, intermediate_size=32, **QWEN3),
        GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2),
    ],
    ids=["qwen3", "gpt2"],
)
def test_other_architectures_pack_too(config: PretrainedConfig) -> None:
    assert can_pack(AutoModelForCausalLM.from_config(config).eval().get_decoder())


def test_a_packed_forward_pass_equals_an_unpacked_one(load: Load) -> None:
    samples = batch(load(), LOSSES["ppo"], count=20)
    plain = fsdp2_policy(load, SPEC, max_tokens=1).compute_log_probs(samples)
    packed = fsdp2_policy(load, SPEC, packing=True).compute_log_probs(samples)
    for a, b in zip(plain, packed, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("strategy", [fsdp2_policy, CriticTrainer])
def test_training_falls_back_to_padding_and_says_so(
    load: Load,
    strategy: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for probe in ("can_pack", "try_varlen"):
        monkeypatch.setattr(f"agenticrun_workers.trainer.sharded_module.{probe}", lambda *_: False)
    with caplog.at_level(logging.INFO):
        refused = strategy(load, SPEC, packing=True)
    if isinstance(refused, PolicyTrainer):
        assert isinstance(refused.strategy, Fsdp2Strategy)
        model = refused.strategy.model
    else:
        model = refused._model
    assert not model.batcher.packed
    assert "LlamaModel mixes packed sequences: its rows are padded" in caplog.text
