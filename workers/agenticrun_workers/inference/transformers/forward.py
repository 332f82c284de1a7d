"""One forward pass over the pending tokens of a batch of requests, and one sampled token for each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from agenticrun_workers.inference.in_flight import Running
from agenticrun_workers.inference.sampling import sample_tokens, uniforms
from agenticrun_workers.models.heads import split_model


class Forward:
    """Computes with this model. Raises `UnsupportedModel` for one without a decoder and a head."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._decoder, self._head = split_model(model)
        self._device = model.device

    @torch.inference_mode()
    def __call__(self, batch: Sequence[Running]) -> tuple[list[int], list[float]]:
        """Tokens and their log-probs. All rows of a batch are in one cache, by ascending slot."""
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
