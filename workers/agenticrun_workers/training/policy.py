"""The trained policy as one module: token ids in, log-probs and entropies of chosen tokens out."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agenticrun_workers.models.heads import split_model

CHUNK_TOKENS = 8192


class Policy(nn.Module):
    """A causal language model whose logits exist for `CHUNK_TOKENS` tokens at a time and are recomputed in the backward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        split_model(model)
        self.model = model

    def forward(self, ids_BT: Tensor, rows_N: Tensor, columns_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs of the tokens at (row, column) and the entropy they were sampled with, both under logits / temperature.

        Returns:
            log-probs [N] and entropies [N], in float32 or the model's wider dtype.
        """
        hidden_BTH: Tensor = self.model.get_decoder()(input_ids=ids_BT, use_cache=False).last_hidden_state
        hidden_NH = hidden_BTH[rows_N, columns_N - 1]
        targets_N = ids_BT[rows_N, columns_N]
        parts: list[tuple[Tensor, Tensor]] = []
        for chunk_CH, chunk_C in zip(torch.split(hidden_NH, CHUNK_TOKENS), torch.split(targets_N, CHUNK_TOKENS), strict=True):
            if torch.is_grad_enabled() and len(hidden_NH) > CHUNK_TOKENS:
                parts.append(checkpoint(self._score, chunk_CH, chunk_C, temperature, use_reentrant=False))
            else:
                parts.append(self._score(chunk_CH, chunk_C, temperature))
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def _score(self, hidden_CH: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits_CV: Tensor = self.model.get_output_embeddings()(hidden_CH)
        wide = torch.promote_types(logits_CV.dtype, torch.float32)
        logprobs_CV = torch.log_softmax(logits_CV.to(wide) / temperature, dim=-1)
        entropies_C = -(logprobs_CV.exp() * logprobs_CV).sum(-1)
        return logprobs_CV.gather(-1, targets_C[:, None])[:, 0], entropies_C
