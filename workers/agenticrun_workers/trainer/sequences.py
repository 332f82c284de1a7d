"""How a rank computes the sequences of a micro-batch: whole, or a part of each (`ulysses`)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from agenticrun_workers.trainer.micro_batch import MicroBatch


class Sequences(Protocol):
    """Reads hidden states of those selected tokens that are this rank's, and brings together what was made of them."""

    def hidden(self, decoder: PreTrainedModel, batch: MicroBatch) -> Tensor:
        """The decoder's last hidden state at the token before each selected one of this rank, [n, H]. Collective."""
        ...

    def mine(self, batch: MicroBatch, values_N: Tensor) -> Tensor:
        """Those of this rank's selected tokens, [n]."""
        ...

    def all(self, batch: MicroBatch, values_n: Tensor) -> Tensor:
        """The values [N] of all selected tokens, from those of each rank's own. Collective."""
        ...


class WholeSequences:
    """Every selected token is this rank's."""

    def hidden(self, decoder: PreTrainedModel, batch: MicroBatch) -> Tensor:
        """See `Sequences`.

        Without a cache and without a two-dimensional mask, transformers reads the bounds of packed sequences from their
        position ids; with either, sequences of one row silently see each other.
        """
        output = decoder(
            input_ids=batch.ids_BT, position_ids=batch.position_ids_BT, use_cache=False
        )
        hidden_BTH: Tensor = output.last_hidden_state
        return hidden_BTH[batch.rows_N, batch.columns_N]

    def mine(self, batch: MicroBatch, values_N: Tensor) -> Tensor:  # noqa: ARG002
        """See `Sequences`."""
        return values_N

    def all(self, batch: MicroBatch, values_n: Tensor) -> Tensor:  # noqa: ARG002
        """See `Sequences`."""
        return values_n
