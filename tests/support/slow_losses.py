"""The actor's and the critic's loss written from the formulas, one token at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agenticrun_workers.algorithms.losses import (
    Cispo,
    Decoupled,
    Kimi15,
    Ppo,
    Tis,
    Topr,
    Vanilla,
    Variant,
)
from agenticrun_workers.trainer.actor_loss import LossSpec
from agenticrun_workers.trainer.samples import Sample


def actor_loss(model: PreTrainedModel, samples: list[Sample], spec: LossSpec) -> Tensor:
    """The whole loss of one optimizer step."""
    live = [s for s in samples if s.weight_T[1:].any()]
    tokens = sum(int(s.weight_T[1:].sum()) for s in live)
    total = torch.zeros((), dtype=torch.float64)
    for sample in live:
        losses = _token_losses(model, sample, spec)
        match spec.aggregation:
            case "token-mean":
                total = total + sum(losses) / tokens
            case "seq-mean-token-sum":
                total = total + sum(losses) / len(live)
            case "seq-mean-token-mean":
                total = total + sum(losses) / len(losses) / len(live)
            case "seq-mean-token-sum-norm":
                total = total + sum(losses) / (len(live) * spec.aggregation_norm)
    return total


def _token_losses(model: PreTrainedModel, s: Sample, spec: LossSpec) -> list[Tensor]:
    assert s.old_logprobs_T is not None
    assert s.ref_logprobs_T is not None
    assert s.engine_logprobs_T is not None
    ids_T = torch.from_numpy(s.tokens_T).long()
    logp_TV = torch.log_softmax(model(ids_T[None]).logits[0] / spec.temperature, -1)
    counted = [t for t in range(1, len(ids_T)) if s.weight_T[t]]
    new = {t: logp_TV[t - 1, ids_T[t]] for t in counted}
    losses = []
    for t in counted:
        level = {
            "token": [t],
            "segment": [u for u in counted if s.turns_T[u] == s.turns_T[t]],
            "sequence": counted,
        }[spec.ratio]
        differences = torch.stack([new[u] - float(s.old_logprobs_T[u]) for u in level])
        ratio = torch.exp(differences.sum() / len(level))
        behaviour = math.exp(float(s.old_logprobs_T[t]) - float(s.engine_logprobs_T[t]))
        loss = variant_loss(
            spec.variant,
            ratio,
            new[t],
            float(s.old_logprobs_T[t]),
            float(s.advantages_T[t]),
            s.score,
            behaviour,
        )
        if s.is_weights_T is not None:
            loss = float(s.is_weights_T[t]) * loss
        difference = float(s.ref_logprobs_T[t]) - new[t]
        kl = difference**2 / 2 if spec.kl_kind == "k2" else torch.exp(difference) - difference - 1
        entropy = -sum(p.exp() * p for p in logp_TV[t - 1])
        losses.append(loss + spec.kl_coef * kl - spec.entropy_coef * entropy)
    return losses


def variant_loss(
    variant: Variant,
    ratio: Tensor,
    new: Tensor,
    old: float,
    advantage: float,
    score: float,
    behaviour: float,
) -> Tensor:
    fixed = ratio.item()
    match variant:
        case Vanilla():
            return -advantage * new
        case Decoupled():
            return min(behaviour, variant.cap) * _clipped(variant, ratio, advantage)
        case Ppo():
            return _clipped(variant, ratio, advantage)
        case Tis():
            return -min(max(fixed, variant.lower_bound), variant.upper_bound) * advantage * new
        case Topr():
            return (
                -(
                    variant.positive_weight
                    if score > 0
                    else variant.negative_weight * min(fixed, 1.0)
                )
                * advantage
                * new
            )
        case Cispo():
            held = (advantage > 0 and fixed > 1 + variant.epsilon_high) or (
                advantage < 0 and fixed < 1 - variant.epsilon_low
            )
            weight = (
                0.0
                if held and variant.unified_mask
                else min(max(fixed, 1 - variant.epsilon_low), 1 + variant.epsilon_high)
            )
            return -weight * advantage * new
        case Kimi15():
            return -advantage * new + variant.tau / 2 * (new - old) ** 2
        case _:
            raise AssertionError(f"add {variant} here")


def _clipped(variant: Ppo, ratio: Tensor, advantage: float) -> Tensor:
    inside = min(max(ratio.item(), 1 - variant.clip_low), 1 + variant.clip_high)
    bounded = ratio if inside == ratio.item() else torch.tensor(inside, dtype=ratio.dtype)
    objective = (
        ratio * advantage if ratio.item() * advantage <= inside * advantage else bounded * advantage
    )
    if (
        variant.dual_clip is not None
        and advantage < 0
        and objective.item() < variant.dual_clip * advantage
    ):
        return torch.tensor(-variant.dual_clip * advantage, dtype=ratio.dtype)
    return -objective
