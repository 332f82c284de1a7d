"""The trained networks: micro-batches in, one value per selected token out."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agenticrun_workers.models.heads import UnsupportedModel, split_model
from agenticrun_workers.trainer.log_probs import CHUNK_ELEMENTS, score
from agenticrun_workers.trainer.micro_batch import MicroBatch
from agenticrun_workers.trainer.sequences import Sequences, WholeSequences


class PolicyModule(nn.Module):
    """A causal language model whose logits never exist whole (`scoring`).

    Args:
        chunk_elements: logits that exist at a time.

    Raises:
        UnsupportedModel: the logits are more than a plain linear layer of the decoder's hidden states.
    """

    def __init__(self, model: PreTrainedModel, chunk_elements: int = CHUNK_ELEMENTS) -> None:
        super().__init__()
        _, head = split_model(model)
        if type(head) is not nn.Linear:
            raise UnsupportedModel(
                f"the output layer of {type(model).__name__} is a {type(head).__name__}, not a plain linear layer"
            )
        self.model = model
        self.sequences: Sequences = WholeSequences()
        self._chunk_elements = chunk_elements

    @property
    def decoder(self) -> PreTrainedModel:
        return self.model.get_decoder()

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs of the selected tokens and the entropy they were sampled with, both under logits / temperature.

        Returns:
            log-probs [N] and entropies [N], in float32 or the model's wider dtype.
        """
        hidden_NH = self.sequences.hidden(self.decoder, batch)
        targets_N = self.sequences.mine(batch, batch.targets_N)
        head = self.model.get_output_embeddings()
        logprobs_N, entropies_N = score(
            hidden_NH, head.weight, head.bias, targets_N, temperature, self._chunk_elements
        )
        return self.sequences.all(batch, logprobs_N), self.sequences.all(batch, entropies_N)


class ValueModule(nn.Module):
    """The decoder of a causal language model with a linear value head, which is zero at first: every text is worth 0."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.decoder: PreTrainedModel = model.get_decoder()
        self.sequences: Sequences = WholeSequences()
        parameter = next(self.decoder.parameters())
        size: int = model.config.get_text_config().hidden_size
        self.head = nn.Linear(size, 1, device=parameter.device, dtype=parameter.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Value of the text before each selected token, [N], in float32 or the model's wider dtype."""
        values_N: Tensor = self.head(self.sequences.hidden(self.decoder, batch))[
            :, 0
        ].clone()  # FSDP2 puts hooks on it: no view
        return self.sequences.all(
            batch, values_N.to(torch.promote_types(values_N.dtype, torch.float32))
        )
