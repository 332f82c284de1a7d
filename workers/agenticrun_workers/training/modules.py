"""The trained networks: micro-batches in, one value per selected token out."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agenticrun_workers.models.heads import split_model
from agenticrun_workers.training.microbatch import MicroBatch

CHUNK_TOKENS = 8192


class PolicyModule(nn.Module):
    """A causal language model whose logits exist for `CHUNK_TOKENS` tokens at a time and are recomputed in the backward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        split_model(model)
        self.model = model

    @property
    def decoder(self) -> PreTrainedModel:
        return self.model.get_decoder()

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs of the selected tokens and the entropy they were sampled with, both under logits / temperature.

        Returns:
            log-probs [N] and entropies [N], in float32 or the model's wider dtype.
        """
        hidden_NH = read_hidden(self.decoder, batch)
        parts: list[tuple[Tensor, Tensor]] = []
        for chunk_CH, chunk_C in zip(torch.split(hidden_NH, CHUNK_TOKENS), torch.split(batch.targets_N, CHUNK_TOKENS), strict=True):
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


class ValueModule(nn.Module):
    """The decoder of a causal language model with a linear value head, which is zero at first: every text is worth 0."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.decoder: PreTrainedModel = model.get_decoder()
        parameter = next(self.decoder.parameters())
        size: int = model.config.get_text_config().hidden_size
        self.head = nn.Linear(size, 1, device=parameter.device, dtype=parameter.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Value of the text before each selected token, [N], in float32 or the model's wider dtype."""
        values_N: Tensor = self.head(read_hidden(self.decoder, batch))[:, 0]
        return values_N.to(torch.promote_types(values_N.dtype, torch.float32))


def read_hidden(decoder: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """The decoder's last hidden state at the token before each selected one, [N, H].

    Without a cache and without a two-dimensional mask, transformers reads the bounds of packed sequences from their
    position ids; with either, sequences of one row silently see each other.
    """
    output = decoder(input_ids=batch.ids_BT, position_ids=batch.position_ids_BT, use_cache=False)
    hidden_BTH: Tensor = output.last_hidden_state
    return hidden_BTH[batch.rows_N, batch.columns_N]
