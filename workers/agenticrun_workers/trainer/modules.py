"""The trained networks, from a micro-batch to one value per selected token."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import override

from agenticrun_workers.models.heads import (
    UnsupportedModel,
    decoder_of,
    parts_of,
    require_causal,
    split_model,
)
from agenticrun_workers.trainer.log_probs import CHUNK_ELEMENTS, score
from agenticrun_workers.trainer.micro_batch import Bounds, MicroBatch
from agenticrun_workers.trainer.router_load import RouterLoad
from agenticrun_workers.trainer.varlen import Rows, use_varlen

log = logging.getLogger(__name__)

PROBE_LENGTHS = (5, 9, 3)

T = TypeVar("T")


class Sequences(Protocol):
    """Division of the selected tokens between the ranks that share each sequence.

    Each of these ranks reads the hidden states of its own tokens; the results are then combined.
    """

    def hidden(self, decoder: PreTrainedModel, batch: MicroBatch) -> Tensor:
        """Return the decoder's last hidden states, [n, H]. Collective.

        They are read at the token before each selected token of this rank.
        """
        ...

    def real(self, batch: MicroBatch) -> Tensor:
        """Return, for each token that `hidden` computes here, how many samples have it; flat."""
        ...

    def mine(self, batch: MicroBatch, values_N: Tensor) -> Tensor:
        """Return the values of this rank's selected tokens, [n]."""
        ...

    def all(self, batch: MicroBatch, values_n: Tensor) -> Tensor:
        """Combine the ranks' values into those of all selected tokens, [N]. Collective."""
        ...


class FullSequences(Sequences):
    """Whole sequences on every rank: all selected tokens are this rank's.

    Args:
        varlen: the decoder's attention is that of `varlen`. Otherwise transformers makes a mask.
    """

    def __init__(self, *, varlen: bool = False) -> None:
        self._varlen = varlen

    @override
    def hidden(self, decoder: PreTrainedModel, batch: MicroBatch) -> Tensor:
        # transformers derives the bounds of packed sequences from their position ids, but only
        # without a cache and without a two-dimensional mask. With either, the sequences of one
        # row would silently attend to each other.
        ids_BT = batch.ids_BT
        shape = (len(ids_BT), ids_BT.shape[1])
        bounds = (
            {"rows": Rows.of(batch.bounds, shape, ids_BT.device, prefixes=batch.prefixes)}
            if self._varlen
            else {}
        )
        output = decoder(
            input_ids=ids_BT, position_ids=batch.position_ids_BT, use_cache=False, **bounds
        )
        hidden_BTH: Tensor = output.last_hidden_state
        return hidden_BTH[batch.rows_N, batch.columns_N]

    @override
    def real(self, batch: MicroBatch) -> Tensor:
        return batch.real_BT.flatten()

    @override
    def mine(self, batch: MicroBatch, values_N: Tensor) -> Tensor:
        return values_N

    @override
    def all(self, batch: MicroBatch, values_n: Tensor) -> Tensor:
        return values_n


class ProbedModule(nn.Module):
    """A network whose model is perhaps loaded after it is made, and is checked then."""

    def check(self, device: torch.device) -> None:
        """Run probes through the model.

        Args:
            device: of the computation.

        Raises:
            UnsupportedModel: it cannot be trained.
        """
        raise NotImplementedError

    def run(self, probe: Callable[[], T]) -> T:
        """Run a probe. If the module is sharded, this counts as its forward pass."""
        return probe()


class PolicyModule(ProbedModule):
    """A causal language model that never holds all its logits in memory (`log_probs`).

    Args:
        chunk_elements: logits that exist at a time.

    Raises:
        UnsupportedModel: the model has no separate decoder and output layer.
    """

    def __init__(self, model: PreTrainedModel, chunk_elements: int = CHUNK_ELEMENTS) -> None:
        super().__init__()
        _, head = parts_of(model)
        # A method of the layer, because a sharded layer has its weights only inside of one.
        head.score = partial(_score, head, chunk_elements)  # type: ignore[arg-type, assignment]
        self._head_type = type(head)  # FSDP2 gives it another one
        self.model = model
        self.router_load = RouterLoad(self.decoder)
        self.sequences: Sequences = FullSequences()

    @property
    def decoder(self) -> PreTrainedModel:
        return decoder_of(self.model)

    @override
    def check(self, device: torch.device) -> None:
        """Check that the logits are a plain linear function of the decoder's hidden states."""
        split_model(self.model, device)
        if self._head_type is not nn.Linear:
            raise UnsupportedModel(
                f"the output layer of {type(self.model).__name__} is a "
                f"{self._head_type.__name__}, not a plain linear layer"
            )

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Compute log-probs of the selected tokens and entropies of their distributions.

        Both are those of softmax(logits / temperature).

        Returns:
            log-probs [N] and entropies [N], in float32 or the model's wider dtype.
        """
        counts = self.router_load.exists and torch.is_grad_enabled()
        with self.router_load.counting(self.sequences.real(batch) if counts else None):
            hidden_NH = self.sequences.hidden(self.decoder, batch)
        targets_N = self.sequences.mine(batch, batch.targets_N)
        logprobs_N, entropies_N = self.model.get_output_embeddings().score(
            hidden_NH, targets_N, temperature
        )
        return self.sequences.all(batch, logprobs_N), self.sequences.all(batch, entropies_N)


def _score(
    head: nn.Linear, chunk_elements: int, hidden_NH: Tensor, targets_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    return score(hidden_NH, head.weight, head.bias, targets_N, temperature, chunk_elements)


class ValueModule(ProbedModule):
    """The decoder of a causal language model with a linear value head.

    The head starts at zero, so the first value of every text is 0.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.decoder: PreTrainedModel = decoder_of(model)
        self.sequences: Sequences = FullSequences()
        parameter = next(self.decoder.parameters())
        size: int = model.config.get_text_config().hidden_size
        # The files of a model that is loaded later have no value head.
        device = torch.device("cpu") if parameter.is_meta else parameter.device
        self.head = nn.Linear(size, 1, device=device, dtype=parameter.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @override
    def check(self, device: torch.device) -> None:
        """Check that no token attends to a later one."""
        require_causal(self.decoder, device)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Return the value of the text before each selected token.

        The result is [N], in float32 or the model's wider dtype.
        """
        values_N: Tensor = self.head(self.sequences.hidden(self.decoder, batch))[
            :, 0
        ].clone()  # FSDP2 puts hooks on it: no view
        return self.sequences.all(
            batch, values_N.to(torch.promote_types(values_N.dtype, torch.float32))
        )


@torch.no_grad()
def can_pack(decoder: PreTrainedModel, device: torch.device | None = None) -> bool:
    """Return True if the decoder keeps packed sequences apart.

    That is: sequences in one row, with restarting position ids, have the same hidden states as each
    sequence alone.
    """
    ids_1T, position_ids_1T = packed_probe(decoder, device)
    packed_TH: Tensor = decoder(
        input_ids=ids_1T, position_ids=position_ids_1T, use_cache=False
    ).last_hidden_state[0]
    return _same(packed_TH, _alone(decoder, ids_1T))


@torch.no_grad()
def try_varlen(decoder: PreTrainedModel, device: torch.device) -> bool:
    """Give the decoder the attention of `varlen`, if it keeps packed sequences apart with it."""
    config = decoder.config
    kinds = set(getattr(config, "layer_types", None) or ())
    if (
        config._attn_implementation != "sdpa"
        or not decoder._supports_attention_backend
        # The short sequences of the probe would not show another kind of attention.
        or not kinds <= {"full_attention", "sliding_attention"}
    ):
        return False
    ids_1T, position_ids_1T = packed_probe(decoder, device)
    expected_TH = _alone(decoder, ids_1T)
    use_varlen(decoder)
    rows = Rows.of(probe_bounds(), (1, ids_1T.shape[1]), device)
    try:
        packed_TH: Tensor = decoder(
            input_ids=ids_1T, position_ids=position_ids_1T, use_cache=False, rows=rows
        ).last_hidden_state[0]
        apart = _same(packed_TH, expected_TH)
    except (UnsupportedModel, TypeError) as error:  # its layers take other arguments
        log.debug("%s: %s", type(decoder).__name__, error)
        apart = False
    if not apart:
        decoder.set_attn_implementation("sdpa")
    return apart


def _alone(decoder: PreTrainedModel, ids_1T: Tensor) -> Tensor:
    """Return the hidden states of each sequence of the probe in a row of its own, [T, H]."""
    rows = torch.split(ids_1T, list(PROBE_LENGTHS), dim=1)
    return torch.cat([decoder(input_ids=row, use_cache=False).last_hidden_state[0] for row in rows])


def _same(found_TH: Tensor, expected_TH: Tensor) -> bool:
    return bool((found_TH - expected_TH).abs().max() <= probe_tolerance(expected_TH))


def probe_bounds() -> Bounds:
    """Return the bounds of the sequences in `packed_probe`."""
    ends = list(accumulate(PROBE_LENGTHS, initial=0))
    return tuple((0, start, end) for start, end in pairwise(ends))


def packed_probe(
    decoder: PreTrainedModel, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Return one row of packed random sequences: ids and position ids, [1, T].

    The result is the same at each call.

    Args:
        device: of the computation; default: the embedding's.
    """
    embeddings: nn.Embedding = decoder.get_input_embeddings()
    device = device or embeddings.weight.device
    generator = torch.Generator().manual_seed(0)
    ids_1T = torch.cat(
        [
            torch.randint(embeddings.num_embeddings, (1, length), generator=generator)
            for length in PROBE_LENGTHS
        ],
        1,
    )
    position_ids_1T = torch.cat([torch.arange(length) for length in PROBE_LENGTHS])[None]
    return ids_1T.to(device), position_ids_1T.to(device)


def probe_tolerance(expected_TH: Tensor) -> float:
    """Return the largest allowed difference between two computations of hidden states.

    Relative to the largest magnitude it is the square root of the precision (at best that of
    float32, to which some kernels round). Sequences that attend to each other differ by more than a
    tenth.
    """
    precision = max(torch.finfo(expected_TH.dtype).eps, torch.finfo(torch.float32).eps)
    return float(precision**0.5 * expected_TH.abs().max())
