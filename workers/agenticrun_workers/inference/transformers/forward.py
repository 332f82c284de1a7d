"""One forward pass over the pending tokens of a batch, and one sampled token for each request.

Random numbers come from a counter (splitmix64 over the request's seed and the token's index), so a
response depends on its request alone: not on its neighbours in the batch, not on the time at which
it joined, not on pauses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from agenticrun_workers.inference.transformers.caches import RunningRequest
from agenticrun_workers.models.heads import split_model
from agenticrun_workers.types import SamplingParams

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


class Forward:
    """Computes with one model. Raises `UnsupportedModel` if it has no decoder and head."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._decoder, self._head = split_model(model)
        self._device = model.device

    @torch.inference_mode()
    def __call__(self, batch: Sequence[RunningRequest]) -> tuple[list[int], list[float]]:
        """Return a token and its log-prob for each request.

        All requests of a batch are in one cache, in ascending order of their slots.
        """
        cache = batch[0].cache
        assert cache is not None
        device = self._device
        pending_B = torch.tensor([running.pending for running in batch])
        starts_B = torch.tensor([running.cached for running in batch])
        width = int(pending_B.max())
        visible = int((starts_B + width).max())
        ids_BQ = torch.zeros(len(batch), width, dtype=torch.long)
        for row, running in enumerate(batch):
            ids_BQ[row, : running.pending] = torch.from_numpy(running.pending_T)
        positions_BQ = starts_B[:, None] + torch.arange(width)
        mask_B1QK = (torch.arange(visible) <= positions_BQ[..., None])[:, None]
        cache.select(
            torch.tensor([running.slot for running in batch], device=device),
            starts_B.to(device),
            width,
            visible,
        )
        hidden_BQH = self._decoder(
            input_ids=ids_BQ.to(device),
            position_ids=positions_BQ.to(device),
            attention_mask=mask_B1QK.to(device),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        last_BH = hidden_BQH[torch.arange(len(batch), device=device), (pending_B - 1).to(device)]
        seeds_B = np.array([running.request.seed for running in batch], np.uint64)
        indices_B = np.array([len(running.tokens) for running in batch], np.uint64)
        sampling = [running.request.sampling for running in batch]
        tokens_B, logprobs_B = sample_tokens(
            self._head(last_BH), sampling, uniforms(seeds_B, indices_B)
        )
        return tokens_B.tolist(), logprobs_B.tolist()


def uniforms(seeds_B: NDArray[np.uint64], indices_B: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return one random number in [0, 1) for each (seed, index), float64 [B].

    Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators".
    """
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seeds_B + _GAMMA) + (indices_B + np.uint64(1)) * _GAMMA)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample_tokens(
    logits_BV: Tensor, sampling: list[SamplingParams], uniforms_B: NDArray[np.float64]
) -> tuple[Tensor, Tensor]:
    """Sample a token for each row, independent of the other rows.

    Args:
        logits_BV: [B, V].
        sampling: parameters of each row.
        uniforms_B: random numbers in [0, 1), float64 [B].

    Returns:
        tokens int64 [B], and their log-probs float32 [B]: log_softmax(logits / T) over the full
        vocabulary, regardless of top_k, top_p and min_p. T is `record_temperature`, by default the
        sampling temperature (1 for greedy rows).
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
    """Return log_softmax(logits / temperature), float32 [B, V]."""
    scale_B = torch.tensor(temperatures, dtype=torch.float32, device=logits_BV.device)
    return torch.log_softmax(logits_BV.float() / scale_B[:, None], dim=-1)


def _truncated(weights_V: Tensor, params: SamplingParams) -> Tensor:
    """Return the weights with all tokens outside top_k, top_p and min_p set to 0, [V]."""
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
