"""Whether a model keeps packed sequences apart: tried at the start, because many silently do not."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

LENGTHS = (5, 9, 3)


@torch.no_grad()
def can_pack(decoder: PreTrainedModel) -> bool:
    """True if sequences packed into one row, with restarting position ids, give the hidden states that each gives alone.

    Random tokens; agreement to the square root of the precision (float32's at best: some kernels round to it), where mixing is
    off by more than a tenth.
    """
    embeddings: nn.Embedding = decoder.get_input_embeddings()
    device = embeddings.weight.device
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(embeddings.num_embeddings, (1, length), generator=generator).to(device) for length in LENGTHS]
    alone_TH = torch.cat([decoder(input_ids=row, use_cache=False).last_hidden_state[0] for row in rows])
    position_ids = torch.cat([torch.arange(length, device=device) for length in LENGTHS])[None]
    packed_TH: Tensor = decoder(input_ids=torch.cat(rows, 1), position_ids=position_ids, use_cache=False).last_hidden_state[0]
    precision = max(torch.finfo(alone_TH.dtype).eps, torch.finfo(torch.float32).eps)
    tolerance = precision**0.5 * alone_TH.abs().max()
    return bool((packed_TH - alone_TH).abs().max() <= tolerance)
