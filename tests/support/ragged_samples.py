"""Ragged multi-turn samples with every array that a loss reads; losses and splits of tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agenticrun_workers.algorithms.losses import Cispo, Decoupled, Kimi15, Ppo, Tis, Topr, Vanilla
from agenticrun_workers.models.initialize import InitializeSpec, initialize_model
from agenticrun_workers.trainer.actor_loss import LossSpec
from agenticrun_workers.trainer.critic import ValueLossSpec
from agenticrun_workers.trainer.samples import Sample

VOCABULARY = 21


class Added(TypedDict):
    """Fields of `LossSpec` that every loss below has."""

    entropy_coef: float
    kl_coef: float
    temperature: float
    aggregation_norm: float


ADDED: Added = {"entropy_coef": 0.03, "kl_coef": 0.05, "temperature": 0.8, "aggregation_norm": 7.0}


class Cut(TypedDict):
    """Arguments of trainers that split a batch into micro-batches."""

    max_tokens: int
    packing: NotRequired[bool]


def make_model(folder: Path) -> Path:
    """A tiny model whose log-probs differ much from token to token."""
    initialize_model(
        folder,
        InitializeSpec(
            tuple("abcdefghijklmnop"),
            hidden_size=16,
            intermediate_size=32,
            heads=2,
            initializer_range=0.3,
        ),
    )
    return folder


LOSSES: dict[str, LossSpec] = {
    "vanilla": LossSpec(Vanilla(), aggregation="token-mean", **ADDED),
    "ppo": LossSpec(Ppo(0.1, 0.15), aggregation="seq-mean-token-mean", **ADDED),
    "ppo dual clip": LossSpec(Ppo(0.1, 0.15, 1.2), "segment", aggregation="token-mean", **ADDED),
    "ppo sequence": LossSpec(
        Ppo(0.02, 0.03), "sequence", aggregation="seq-mean-token-mean", **ADDED
    ),
    "tis": LossSpec(Tis(0.8, 1.1), aggregation="seq-mean-token-sum", **ADDED),
    "topr segment": LossSpec(Topr(0.7, 1.3), "segment", aggregation="seq-mean-token-mean", **ADDED),
    "cispo": LossSpec(Cispo(unified_mask=True), aggregation="token-mean", **ADDED),
    "cispo sequence": LossSpec(
        Cispo(0.01, 0.02), "sequence", aggregation="seq-mean-token-sum-norm", **ADDED
    ),
    "kimi15": LossSpec(Kimi15(0.3), aggregation="seq-mean-token-mean", **ADDED, kl_kind="k2"),
    "decoupled": LossSpec(Decoupled(0.1, 0.1, cap=1.1), aggregation="seq-mean-token-mean", **ADDED),
    "decoupled segment": LossSpec(
        Decoupled(0.1, 0.1, 1.5, cap=1.2), "segment", aggregation="token-mean", **ADDED
    ),
}
"""Every variant and ratio level, with entropy and KL."""

VALUE_LOSSES = {"plain": ValueLossSpec(), "clipped": ValueLossSpec(0.2, "seq-mean-token-mean")}


def batch(
    model: PreTrainedModel, loss: LossSpec, seed: int = 0, count: int = 9, common: int = 0
) -> list[Sample]:
    """Return samples of one to three turns.

    A filter took some tokens, all of sample 4, and a turn of sample 5.

    Log-probs are those of the model plus noise: some ratios are clipped and others are not.
    Every three samples begin with the same `common` tokens.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for number in range(count):
        parts: list[np.ndarray] = [np.full(common, -1)]
        for turn in range(int(rng.integers(1, 4))):
            parts += [np.full(rng.integers(1, 4), -1), np.full(rng.integers(1, 5), turn)]
        turns_T = np.concatenate(parts).astype(np.int32)
        tokens_T = rng.integers(VOCABULARY, size=len(turns_T)).astype(np.int32)
        tokens_T[:common] = (np.arange(common) + number // 3) % VOCABULARY
        weight_T = (
            (turns_T >= 0)
            & (rng.random(len(turns_T)) < 0.8)
            & (number != 4)
            & ((number != 5) | (turns_T != 0))
        )
        logprobs_T = token_log_probs(model, tokens_T, loss.temperature).detach().double().numpy()

        def near(spread: float, base_T: np.ndarray = logprobs_T) -> np.ndarray:
            return (base_T + rng.normal(size=len(base_T)) * spread).astype(np.float32)

        old_T = near(0.2)
        sample = Sample(
            tokens_T,
            weight_T.astype(np.float32),
            rng.normal(size=len(turns_T)).astype(np.float32),
            turns_T,
            old_logprobs_T=old_T,
            ref_logprobs_T=near(0.5),
            engine_logprobs_T=near(0.2, old_T),
            is_weights_T=None
            if isinstance(loss.variant, Decoupled)
            else rng.uniform(0.2, 1.2, len(turns_T)).astype(np.float32),
            returns_T=rng.normal(size=len(turns_T)).astype(np.float32),
            old_values_T=(rng.normal(size=len(turns_T)) * 0.3).astype(np.float32),
            score=float(rng.normal()),
        )
        samples.append(sample)
    return samples


def token_log_probs(model: PreTrainedModel, tokens_T: np.ndarray, temperature: float) -> Tensor:
    """Log-prob of every token, [T]; 0 for the first. The sequence alone, without padding."""
    ids_T = torch.from_numpy(tokens_T).long()
    logits_TV = model(ids_T[None]).logits[0, :-1] / temperature
    return torch.cat(
        [logits_TV.new_zeros(1), torch.log_softmax(logits_TV, -1).gather(-1, ids_T[1:, None])[:, 0]]
    )


def largest_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest absolute difference of gradients over all parameters.

    It is relative to the parameter's gradient norm.
    """
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - gradient).abs().max() / gradient.norm())
        for name, gradient in expected.items()
    )
