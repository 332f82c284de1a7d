"""Refuses models that the engine would compute differently than transformers does.

A model that is sampled from differently than it is trained learns from another policy's samples,
and no step fails. So before its first request the engine computes a few sequences through its
slots and compares the logits with a plain forward pass.
"""

from __future__ import annotations

import logging
from inspect import signature

import numpy as np
import torch
from transformers import PreTrainedModel

from agenticrun_workers.inference.transformers.caches import Forward, SlotCache
from agenticrun_workers.models.heads import UnsupportedModel, decoder_of
from agenticrun_workers.models.pretrained import has_attention

STATELESS = {"full_attention", "sliding_attention", "chunked_attention", "mlp", "moe"}
"""Kinds of layers that need nothing but the keys and values of earlier tokens."""
BEYOND = 32
"""Tokens of the probe after a window. Without a window the probe has twice as many."""
LONGEST = 1024
"""Most tokens of the probe: with more, a large model on a CPU would take minutes."""
SHORTEST = 8
"""Fewest tokens of the probe: two turns and two single tokens."""
OTHER_ENGINES = {
    "axk2": (),
    "bamba": (),
    "blt": (),
    "deepseek_v32": ("vllm", "sglang"),
    "dots3_note_text": ("vllm", "sglang"),
    "falcon": ("vllm",),
    "falcon_h1": ("vllm", "sglang"),
    "falcon_mamba": ("vllm", "sglang"),
    "glm_moe_dsa": ("vllm", "sglang"),
    "gpt_neo": (),
    "granitemoehybrid": ("vllm", "sglang"),
    "jamba": ("vllm",),
    "kimi_linear": ("vllm", "sglang"),
    "lfm2": ("vllm", "sglang"),
    "lfm2_moe": ("vllm", "sglang"),
    "lfm3": (),
    "mamba": ("vllm", "sglang"),
    "mamba2": ("vllm", "sglang"),
    "minimax": (),
    "nemotron_h": ("vllm", "sglang"),
    "olmo_hybrid": ("vllm",),
    "openai-gpt": (),
    "qwen3_5_moe_text": ("vllm", "sglang"),
    "qwen3_5_text": ("vllm", "sglang"),
    "qwen3_next": ("vllm", "sglang"),
    "reformer": (),
    "rwkv": (),
    "trocr": (),
    "zamba": (),
    "zamba2": ("vllm",),
    "zaya": ("sglang",),
}
"""Engines that serve the types of models that this one refuses; a test compares the table with the
engines' own lists."""

logger = logging.getLogger(__name__)


def refuse_states(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModel` if layers keep a state besides keys and values."""
    config = model.config.get_text_config(decoder=True)
    if not has_attention(config):
        raise UnsupportedModel(
            f"{config.model_type} has no attention layers, and the engine transformers keeps "
            f"nothing but keys and values: {other_engines(config.model_type)}"
        )
    kinds = getattr(config, "layer_types", None) or []
    states = [kind for kind in kinds if kind not in STATELESS]
    if states or (not kinds and model._is_stateful):
        kind = states[0].replace("_", "-") if states else "recurrent"
        raise UnsupportedModel(
            f"{config.model_type} has {kind} layers, whose state the engine transformers does not "
            f"keep: {other_engines(config.model_type)}"
        )
    if "past_key_values" not in signature(decoder_of(model).forward).parameters:
        raise UnsupportedModel(
            f"{config.model_type} cannot continue from keys and values of earlier tokens, as the "
            f"engine transformers does: {other_engines(config.model_type)}"
        )


def check_parity(model: PreTrainedModel, forward: Forward, max_length: int) -> None:
    """Compare the engine's computation with a plain forward pass of its model.

    Two sequences of different lengths are computed in slots behind an empty one: a prompt, a
    second turn, and two single tokens. The longer one exceeds the model's window, if it is at most
    `LONGEST - BEYOND` tokens.

    Args:
        model: the model that `forward` computes with.
        forward: the engine's computation.
        max_length: longest sequence of the engine.

    Raises:
        UnsupportedModel: the log-probs differ by more than `tolerance`, or the model cannot compute
            with the engine's cache.
    """
    config = model.config.get_text_config(decoder=True)
    windows = [
        window
        for name in ("sliding_window", "attention_chunk_size")
        if (window := getattr(config, name, None)) and window <= LONGEST - BEYOND
    ]
    length = max(SHORTEST, min(max(windows, default=BEYOND) + BEYOND, max_length))
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids_2T = torch.randint(vocabulary, (2, length), generator=generator).int().numpy()
    ends_2E = [
        [size // 2, size - 2, size - 1, size] for size in (length, max(SHORTEST, 3 * length // 4))
    ]
    # Without cache and mask: what training computes.
    plain_2EV = [
        forward.plain_logits(ids_T[: ends_E[-1]], ends_E)
        for ids_T, ends_E in zip(ids_2T, ends_2E, strict=True)
    ]
    # Slot 0 stays empty, so that a wrong offset of rows shows.
    cache, cached = SlotCache(3, length), [0, 0]
    gaps: list[float] = []
    for turn, ends in enumerate(zip(*ends_2E, strict=True)):
        pending = [ids_T[start:end] for ids_T, start, end in zip(ids_2T, cached, ends, strict=True)]
        try:
            logits_2V = forward.logits(cache, 1, cached, pending)
        # Running out of memory says nothing about the model.
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # what a model does with a cache that it does not know
            raise UnsupportedModel(
                f"{config.model_type} cannot compute with the cache of the engine transformers "
                f"({error}): {other_engines(config.model_type)}"
            ) from error
        gaps += [
            _gap(plain_EV[turn], row_V)
            for plain_EV, row_V in zip(plain_2EV, logits_2V, strict=True)
        ]
        cached = list(ends)
    gap, allowed = float(np.max(gaps)), tolerance(model.dtype)
    logger.info("engine and model differ by %.2g nats over %d tokens", gap, length)
    # Written so that NaN fails, too.
    if not gap <= allowed:
        reason = (
            ""
            if "position_ids" in signature(decoder_of(model).forward).parameters
            else ", because it does not take positions, which differ between requests of a batch"
        )
        raise UnsupportedModel(
            f"{config.model_type}: the engine transformers computes another model than a plain "
            f"forward pass{reason}: log-probs differ by {gap:.2g} nats, rounding allows "
            f"{allowed:.2g}: "
            f"{other_engines(config.model_type)}"
        )


def other_engines(model_type: str) -> str:
    """Return what to do about a model that this engine refuses."""
    engines = OTHER_ENGINES.get(model_type, ("vllm", "sglang"))
    if not engines:
        return "vllm and sglang do not serve it either, so train another model"
    return f"set spec.pipeline.actorInfer.strategy.name: {' or '.join(engines)}"


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest difference of log-probs that rounding explains, in nats.

    It is 7e-4 for float32 and 0.18 for bfloat16: twice the square root of the precision. A logit
    above 16 alone is rounded by up to 0.06 in bfloat16.
    """
    return 2 * float(torch.finfo(dtype).eps ** 0.5)


def _gap(plain_V: torch.Tensor, engine_V: torch.Tensor) -> float:
    """Return the mean |difference| of the log-probs of a token that the model samples, in nats."""
    plain_V, engine_V = plain_V.float().log_softmax(-1), engine_V.float().log_softmax(-1)
    probability_V = plain_V.exp()
    differences_V = (plain_V - engine_V).abs()
    # Padding of the vocabulary may have logits of minus infinity.
    return float((probability_V * differences_V)[probability_V > 0].sum())
