"""Sampling of one token for each row of a batch, independent of what else is in the batch.

Random numbers come from a counter (splitmix64 over the request's seed and the token's index), so a response depends on its
request alone: not on its neighbours, not on when it joined, not on pauses.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agenticrun_workers.types import SamplingParams

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds_B: NDArray[np.uint64], indices_B: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, index), float64 [B]. Steele, Lea, Flood 2014, "Fast splittable PRNGs"."""
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seeds_B + _GAMMA) + (indices_B + np.uint64(1)) * _GAMMA)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample_tokens(
    logits_BV: Tensor, sampling: list[SamplingParams], uniforms_B: NDArray[np.float64]
) -> tuple[Tensor, Tensor]:
    """Choose a token for each row.

    Returns:
        tokens int64 [B], and their log-probs float32 [B]: log_softmax(logits / T) over the full vocabulary, whatever top_k,
        top_p and min_p are, with T = `record_temperature`, or the sampling's (1 for greedy rows).
    """
    temperatures = [params.temperature or 1.0 for params in sampling]
    logprobs_BV = _log_softmax(logits_BV, temperatures)
    weights_BV = logprobs_BV.double().exp()
    for row, params in enumerate(sampling):
        if params.temperature and (params.top_k or params.top_p < 1 or params.min_p):
            weights_BV[row] = _truncated(weights_BV[row], params)
    sums_BV = weights_BV.cumsum(-1)
    thresholds_B1 = torch.as_tensor(uniforms_B, device=logits_BV.device)[:, None] * sums_BV[:, -1:]
    tokens_B = torch.searchsorted(sums_BV, thresholds_B1, right=True)[:, 0].clamp(
        max=logits_BV.shape[-1] - 1
    )
    greedy = [params.temperature == 0 for params in sampling]
    if any(greedy):
        tokens_B = torch.where(
            torch.tensor(greedy, device=logits_BV.device), logits_BV.argmax(-1), tokens_B
        )
    recorded = [
        params.record_temperature or t for params, t in zip(sampling, temperatures, strict=True)
    ]
    if recorded != temperatures:
        logprobs_BV = _log_softmax(logits_BV, recorded)
    return tokens_B, logprobs_BV.gather(-1, tokens_B[:, None])[:, 0]


def _log_softmax(logits_BV: Tensor, temperatures: list[float]) -> Tensor:
    """log_softmax(logits / temperature), float32 [B, V]."""
    scale_B = torch.tensor(temperatures, dtype=torch.float32, device=logits_BV.device)
    return torch.log_softmax(logits_BV.float() / scale_B[:, None], dim=-1)


def _truncated(weights_V: Tensor, params: SamplingParams) -> Tensor:
    """Weights with everything outside top_k, top_p and min_p set to 0, [V]."""
    ordered_V, order_V = weights_V.sort(descending=True, stable=True)
    keep_V = ordered_V >= params.min_p * ordered_V[0]
    if params.top_k:
        keep_V[params.top_k :] = False
    if params.top_p < 1:
        mass_before_V = (ordered_V.cumsum(-1) - ordered_V) / ordered_V.sum()
        keep_V &= mass_before_V < params.top_p
    return torch.zeros_like(weights_V).scatter(0, order_V, ordered_V * keep_V)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
