"""Split causal language models, so that logits are computed only where they are needed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class UnsupportedModel(Exception):
    """The model's logits are not its output layer applied to its decoder's last hidden state."""


def split_model(model: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    """Return the decoder (ids -> hidden states) and the output layer (hidden states -> logits).

    Raises:
        UnsupportedModel: the two, applied to a probe, do not give the model's logits. Models with
            logit soft-capping or scaling would get wrong log-probs without this check. Or the
            weights hold NaN.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if not isinstance(decoder, PreTrainedModel) or head is None:
        raise UnsupportedModel(f"{type(model).__name__} has no separate decoder and output layer")
    probe = (
        torch.arange(4, device=model.device).unsqueeze(0)
        % model.config.get_text_config().vocab_size
    )
    with torch.no_grad():
        whole: Tensor = model(input_ids=probe, use_cache=False).logits
        halves: Tensor = head(decoder(input_ids=probe, use_cache=False).last_hidden_state)
    if (whole.isnan() | whole.isposinf()).any():
        for name, weight in model.named_parameters():
            if not weight.isfinite().all():
                raise UnsupportedModel(
                    f"the weights hold NaN or infinity ({name}): the training that wrote them has "
                    "diverged, or the file is damaged"
                )
        raise UnsupportedModel(
            f"{type(model).__name__} computes NaN or infinity in {whole.dtype}: set "
            "spec.model.dtype: float32"
        )
    if not torch.allclose(whole, halves, rtol=1e-3, atol=1e-3):
        raise UnsupportedModel(
            f"{type(model).__name__} changes its logits after the output layer "
            "(soft-capping or scaling)"
        )
    return decoder, head
