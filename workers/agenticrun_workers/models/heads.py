"""Split causal language models, so that logits are computed only where they are needed."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

PROBE_TOKENS = 8
ADVICE = ": train a model of another type (docs/model-types.md lists them)"


class UnsupportedModel(Exception):
    """The model's logits are not its output layer applied to its decoder's last hidden state."""


@torch.no_grad()
def split_model(
    model: PreTrainedModel, device: torch.device | None = None
) -> tuple[nn.Module, nn.Module]:
    """Return the decoder (ids -> hidden states) and the output layer (hidden states -> logits).

    Args:
        device: of the computation; default: the embedding's.

    Raises:
        UnsupportedModel: the two, applied to a probe, do not give the model's logits: the model
            scales or soft-caps, or has layers between the two. Or tokens see later ones, or the
            weights hold NaN.
    """
    decoder, head = parts_of(model)
    kind = type(model).__name__
    probe = _probe(decoder, device)
    hidden = decoder(input_ids=probe, use_cache=False).last_hidden_state
    whole, entered, left = _logits(model, head, probe, 1.0)
    if (whole.isnan() | whole.isposinf()).any():
        for name, weight in model.named_parameters():
            if not weight.isfinite().all():
                raise UnsupportedModel(
                    f"the weights hold NaN or infinity ({name}): the training that wrote them has "
                    "diverged, or the file is damaged"
                )
        raise UnsupportedModel(
            f"{kind} computes NaN or infinity in {whole.dtype}: set spec.model.dtype: float32"
        )
    if not _equal(entered, hidden):
        raise UnsupportedModel(
            f"{kind} changes hidden states between its decoder and its output layer (another layer "
            f"or scaling){ADVICE}"
        )
    # Soft-capping hardly changes the small logits of untrained models, but it does change large
    # ones. A power of two keeps all digits of what is not capped.
    largest = float(left[left.isfinite()].abs().max())
    factor = 2.0 ** (10 - math.ceil(math.log2(largest))) if largest else 1.0
    whole, _, left = _logits(model, head, probe, factor)
    if not _equal(whole, left):
        raise UnsupportedModel(
            f"{kind} changes its logits after the output layer (soft-capping or scaling){ADVICE}"
        )
    require_causal(decoder, device)
    return decoder, head


def parts_of(model: PreTrainedModel) -> tuple[PreTrainedModel, nn.Module]:
    """Return the decoder and the output layer, without probing them.

    Raises:
        UnsupportedModel: the model has no separate ones.
    """
    decoder, head = decoder_of(model), model.get_output_embeddings()
    if not isinstance(decoder, PreTrainedModel) or head is None:
        raise UnsupportedModel(
            f"{type(model).__name__} has no separate decoder and output layer{ADVICE}"
        )
    return decoder, head


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a causal language model that computes hidden states.

    `get_decoder` returns the model itself for Llama 4, and the output layer for ModernBERT.
    """
    decoder = model.get_decoder()
    if decoder is model or not isinstance(decoder, PreTrainedModel):
        decoder = getattr(model, "model", None)
    return decoder


@torch.no_grad()
def require_causal(decoder: PreTrainedModel, device: torch.device | None = None) -> None:
    """Raise `UnsupportedModel` if the hidden state of a token depends on a later token."""
    probe = _probe(decoder, device)
    changed = probe.clone()
    changed[0, -1] = probe[0, 0]
    before, after = (
        decoder(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
        for ids in (probe, changed)
    )
    allowed = torch.finfo(before.dtype).eps ** 0.5 * before.abs().max()
    if (before - after).abs().max() > allowed:
        raise UnsupportedModel(
            f"{decoder.config.model_type} is no causal language model: its tokens attend to later "
            f"ones (config.json may need is_decoder: true){ADVICE}"
        )


def _probe(decoder: PreTrainedModel, device: torch.device | None) -> Tensor:
    """Return ids that differ, if the vocabulary is large enough, [1, T]."""
    embeddings: nn.Embedding = decoder.get_input_embeddings()
    ids_T = torch.arange(PROBE_TOKENS, device=device or embeddings.weight.device)
    return (ids_T % embeddings.weight.shape[0])[None]


def _logits(
    model: PreTrainedModel, head: nn.Module, ids_1T: Tensor, factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the model's logits, what entered the output layer, and what left it.

    Args:
        factor: of what leaves the output layer.
    """
    seen: list[tuple[Tensor, Tensor]] = []

    def multiply(_module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        seen.append((inputs[0], output * factor))
        return seen[-1][1]

    with ExitStack() as stack:
        stack.callback(head.register_forward_hook(multiply).remove)
        whole: Tensor = model(input_ids=ids_1T, use_cache=False).logits
    if len(seen) != 1:
        raise UnsupportedModel(
            f"{type(model).__name__} does not compute its logits by its output layer{ADVICE}"
        )
    return whole, *seen[0]


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(
        one.float(),
        other.float(),
        rtol=1e-3,
        atol=1e-3 * float(other.abs().nan_to_num(0, 0, 0).max()),
    )
