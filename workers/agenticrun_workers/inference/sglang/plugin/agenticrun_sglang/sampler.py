"""Sampling that depends only on the request, and log-probs at the temperature that it asks for.

Why not SGLang's own: a server reports log-probs at temperature 1 or at the sampling temperature,
never at that of a request. It has seeds only together with deterministic kernels, not on CPUs and
not with min_p.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from agenticrun_draws import uniforms
from torch import Tensor

from .batch import RequestBatch


def forward(
    original: Any,
    sampler: Any,
    logits_output: Any,
    info: RequestBatch,
    return_logprob: bool,
    *rest: Any,
    **options: Any,
) -> Any:
    """Wrap `Sampler.forward`: record log_softmax(logits / record temperature).

    SGLang divides `logprob_logits` by the sampling temperature, unless all rows are greedy.
    """
    if return_logprob and info.records_differ:
        applied = 1.0 if info.is_all_greedy else info.temperatures
        options["logprob_logits"] = logits_output.next_token_logits * (
            applied / info.record_temperatures
        )
    return original(sampler, logits_output, info, return_logprob, *rest, **options)


def sample_from_probs(
    _: Any, probs: Tensor, info: RequestBatch, positions: Tensor, simple: bool
) -> tuple[Tensor, None]:
    """Replace `Sampler._sample_from_probs`.

    Sample the token at which the cumulative sum passes the request's random number.

    Args:
        probs: float32 [B, V].
        positions: of the tokens sampled from, int64 [B].
        simple: no row has top_k, top_p or min_p.

    Returns:
        tokens int32 [B], and no mask.
    """
    weights_BV = probs.double() if simple else _truncated(probs, info)
    sums_BV = weights_BV.cumsum(-1)
    indices_B = positions.cpu() - info.first_positions
    draws_B = uniforms(info.seeds.numpy().astype(np.uint64), indices_B.numpy().astype(np.uint64))
    thresholds_B1 = torch.from_numpy(draws_B).to(probs.device)[:, None] * sums_BV[:, -1:]
    tokens_B = torch.searchsorted(sums_BV, thresholds_B1, right=True)[:, 0].clamp(
        max=probs.shape[-1] - 1
    )
    return tokens_B.to(torch.int32), None


def _truncated(probs: Tensor, info: RequestBatch) -> Tensor:
    """Return weights with tokens outside top_k, top_p and min_p set to 0, float64 [B, V]."""
    ordered_BV, order_BV = probs.double().sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(probs.shape[-1], device=probs.device)
    keep_BV = ranks_V < info.top_ks[:, None]
    keep_BV &= ordered_BV.cumsum(-1) - ordered_BV < info.top_ps[:, None]
    keep_BV &= ordered_BV >= info.min_ps[:, None] * ordered_BV[:, :1]
    return torch.zeros_like(ordered_BV).scatter_(-1, order_BV, ordered_BV * keep_BV)
