"""Compares engines with the trainer: do they compute the same model?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from agenticrun_workers.inference.parity import Parity, ParityProbe, ProbeSample
from agenticrun_workers.trainer.policy_trainer import PolicyTrainer
from agenticrun_workers.trainer.samples import Sample
from agenticrun_workers.types import FloatArray

WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size", "window_size")
"""Names of the windows of layers in configs."""
ROUNDING = 4.0
"""Factor on the difference that rounding explains, in `allowed_gap`."""
LEAST_SPREAD = 0.1
FLOAT32 = 2.0**-14
TF32 = 2.0**-10
"""Precision of float32 on GPUs, whose matrix products may round to TF32."""
QUANTIZED = 2.0**-3
"""Precision of 8-bit floats."""
QUANTIZATION = ("quantization", "kv_cache_dtype", "torchao_config")
"""Options of SGLang and vLLM."""


def make_probe(config: PretrainedConfig, max_length: int, temperature: float) -> ParityProbe:
    """Make the prompts for a model. See `ParityProbe.make`."""
    text = config.get_text_config(decoder=True)
    given = [getattr(text, name, None) for name in WINDOWS]
    windows = [window for window in given if isinstance(window, int) and window < max_length]
    return ParityProbe.make(text.vocab_size, max(windows, default=0), max_length, temperature)


def compare(
    policy: PolicyTrainer,
    engines: Mapping[str, Sequence[ProbeSample]],
    layers: int,
    precision: float,
) -> dict[str, Parity]:
    """Score what engines sampled, in the layout that the run trains in. Collective.

    Args:
        policy: computes as in a training step: packed, if the run packs.
        engines: the conversations of each engine; equal on every rank.
        layers: number of layers.
        precision: see `precision_of`.
    """
    samples = [
        Sample(
            each.tokens_T, np.zeros(len(each.tokens_T), np.float32), each.logprobs_T, each.turns_T
        )
        for played in engines.values()
        for each in played
    ]
    scored = iter(policy.compute_log_probs(samples))
    result: dict[str, Parity] = {}
    for engine, played in engines.items():
        mine_N, its_N = (
            np.concatenate([logprobs_T[each.turns_T >= 0] for logprobs_T, each in pairs])
            for pairs in (
                [(next(scored), each) for each in played],
                [(each.logprobs_T, each) for each in played],
            )
        )
        gap = float(np.abs(mine_N - its_N).mean())
        result[engine] = Parity(gap, allowed_gap(mine_N, layers, precision), len(mine_N))
    return result


def allowed_gap(logprobs_N: FloatArray, layers: int, precision: float) -> float:
    """Return the largest mean difference of log-probs that rounding explains, in nats.

    Each layer rounds the hidden state by about `precision`, and independent errors add up with the
    square root of the layers. An error of the hidden state moves log-probs by its share of their
    spread. So the bound is `ROUNDING` * precision * sqrt(layers) * spread. For right models of
    docs/model-types.md the difference is at most 0.9 of precision * sqrt(layers) * spread in
    bfloat16; for models without their window it is at least 14.
    """
    spread = max(float(logprobs_N.std()), LEAST_SPREAD)
    return ROUNDING * precision * math.sqrt(layers) * spread


def quantizes(config: Mapping[str, Any]) -> bool:
    """Return True if an engine's options keep weights, or keys and values, in 8 bits or fewer."""
    return any(config.get(option) not in {None, "auto"} for option in QUANTIZATION)


def precision_of(dtype: torch.dtype, device: torch.device, *, quantized: bool) -> float:
    """Return the relative error of a computation.

    Args:
        dtype: of the run. float32 is taken as 2^-14, not 2^-23: other kernels sum in another order,
            and trained models amplify that. Wrong models still differ by a hundred times more.
        device: of the trainer.
        quantized: the engine keeps weights, or keys and values, in 8 bits.
    """
    single = TF32 if device.type == "cuda" else FLOAT32
    return max(torch.finfo(dtype).eps, single, QUANTIZED if quantized else 0.0)
