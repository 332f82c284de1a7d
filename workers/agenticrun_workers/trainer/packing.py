"""Whether a model keeps packed sequences apart: tried at the start, because many silently do not."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

LENGTHS = (5, 9, 3)


@torch.no_grad()
def can_pack(decoder: PreTrainedModel) -> bool:
    """True if sequences packed into one row, with restarting position ids, give the hidden states that each gives alone."""
    ids_1T, position_ids_1T = packed_probe(decoder)
    rows = torch.split(ids_1T, list(LENGTHS), dim=1)
    alone_TH = torch.cat(
        [decoder(input_ids=row, use_cache=False).last_hidden_state[0] for row in rows]
    )
    packed_TH: Tensor = decoder(
        input_ids=ids_1T, position_ids=position_ids_1T, use_cache=False
    ).last_hidden_state[0]
    return bool((packed_TH - alone_TH).abs().max() <= probe_tolerance(alone_TH))


def packed_probe(decoder: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """One row of packed sequences of random tokens: ids and position ids, [1, T]. The same at each call."""
    embeddings: nn.Embedding = decoder.get_input_embeddings()
    device = embeddings.weight.device
    generator = torch.Generator().manual_seed(0)
    ids_1T = torch.cat(
        [
            torch.randint(embeddings.num_embeddings, (1, length), generator=generator)
            for length in LENGTHS
        ],
        1,
    )
    position_ids_1T = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return ids_1T.to(device), position_ids_1T.to(device)


def probe_tolerance(expected_TH: Tensor) -> float:
    """How far hidden states may be off that another way of computing gives.

    Agreement to the square root of the precision (float32's at best: some kernels round to it), where mixing is off by more than
    a tenth.
    """
    precision = max(torch.finfo(expected_TH.dtype).eps, torch.finfo(torch.float32).eps)
    return float(precision**0.5 * expected_TH.abs().max())
