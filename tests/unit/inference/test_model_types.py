"""The embedded engine computes what transformers computes, for each type of model, or refuses it.

The models are tiny and random. Sequences are longer than the window of 16.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import create_chunked_causal_mask

from agenticrun_workers.inference import UnusableModel
from agenticrun_workers.inference.transformers import parity
from agenticrun_workers.inference.transformers.caches import Forward, SlotCache
from agenticrun_workers.inference.transformers.engine import TransformersEngine
from agenticrun_workers.models.heads import UnsupportedModel
from agenticrun_workers.types import GenerationRequest, SamplingParams
from tiny_model import plain_logprobs

VOCABULARY = 61
WINDOW = 16
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HALF = ["sliding_attention", "full_attention"] * 2
SLIDING: dict[str, Any] = {"sliding_window": WINDOW}
WINDOWED = {
    "mistral": SLIDING,
    "ministral": SLIDING,
    "phi3": SLIDING,
    "qwen2": {**SLIDING, "use_sliding_window": True, "max_window_layers": 2},
    "qwen3": {**SLIDING, "use_sliding_window": True, "max_window_layers": 2},
    "gemma3_text": {**SLIDING, "layer_types": HALF},
    "gemma4_text": {
        **SLIDING,
        "layer_types": HALF,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    },
    "olmo3": {**SLIDING, "layer_types": HALF},
    "exaone4": {**SLIDING, "layer_types": HALF},
    "starcoder2": SLIDING,
    "cwm": {**SLIDING, "layer_types": HALF},
    "cohere2": {**SLIDING, "layer_types": HALF, "logit_scale": 1.0},
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16}
SAME_MASK_EVERYWHERE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "lfm2": {"layer_types": ["full_attention"] * 4},
    "opt": {},
    "doge": {},
    "gpt2": {"n_head": 4},
    "olmo2": {},
    "granitemoehybrid": {
        "layer_types": ["full_attention"] * 4,
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
        **MAMBA,
    },
}
STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5_text": ("linear-attention", {}),
    "lfm2": ("conv", {"layer_types": ["conv", "full_attention"] * 2}),
    "olmo_hybrid": ("linear-attention", {}),
    "bamba": ("linear-attention", MAMBA),
    "granitemoehybrid": ("linear-attention", MAMBA),
    "nemotron_h": ("linear-attention", {"hybrid_override_pattern": "M*M-", **MAMBA}),
    "jamba": ("linear-attention", {"num_experts": 1}),
    "falcon_h1": ("hybrid", {}),
    "falcon_mamba": ("linear-attention", {"attention": "eager", "intermediate_size": 64}),
    "rwkv": ("recurrent", {"attention": "eager"}),
}


def tiny(model_type: str, attention: str = "sdpa", **options: Any) -> PreTrainedModel:
    """Return a model whose predictions depend on all tokens that it sees."""
    options = {**TINY, **options}
    if model_type == "falcon":
        del options["head_dim"]
    config = AutoConfig.for_model(model_type, **options)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention
    ).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.08, generator)
    return model


def mean_gap(model_type: str, **options: Any) -> float:
    """Return the mean difference between the engine's log-probs and eager attention's, in nats.

    Three sessions of different lengths play two turns together.
    """
    reference = tiny(model_type, "eager", **options)
    random = np.random.default_rng(0)
    gaps: list[float] = []

    async def turn(engine: TransformersEngine, name: int, prompt_T: np.ndarray) -> np.ndarray:
        request = GenerationRequest(
            f"{name}-{len(prompt_T)}", str(name), prompt_T, SamplingParams(6, 1.0), name
        )
        answer = await engine.generate(request)
        expected = plain_logprobs(reference, prompt_T, answer.tokens_T)
        gaps.extend(np.abs(answer.logprobs_T - expected))
        new_T = random.integers(VOCABULARY, size=20)
        return np.concatenate([prompt_T, answer.tokens_T, new_T]).astype(np.int32)

    async def two_turns() -> None:
        engine = TransformersEngine(lambda: tiny(model_type, **options), max_length=128)
        await engine.start()
        prompts = [random.integers(VOCABULARY, size=size).astype(np.int32) for size in (60, 37, 9)]
        for _ in range(2):
            prompts = await asyncio.gather(
                *(turn(engine, name, prompt_T) for name, prompt_T in enumerate(prompts))
            )
        await engine.stop()

    asyncio.run(asyncio.wait_for(two_turns(), 120))
    return float(np.mean(gaps))


@pytest.mark.parametrize("model_type", WINDOWED)
def test_layers_with_a_window_see_what_they_see_in_training(model_type: str) -> None:
    assert mean_gap(model_type, **WINDOWED[model_type]) < 2e-6


@pytest.mark.parametrize("model_type", SAME_MASK_EVERYWHERE)
def test_layers_without_a_window_see_all_tokens(model_type: str) -> None:
    assert mean_gap(model_type, **SAME_MASK_EVERYWHERE[model_type]) < 2e-6


def test_a_window_that_the_model_does_not_use_is_not_used() -> None:
    assert mean_gap("llama", sliding_window=WINDOW, attention_chunk_size=WINDOW) < 2e-6


def test_chunks_begin_at_positions_of_each_row() -> None:
    cache = SlotCache(2, 36)
    starts, width = [3, 30], 6
    cache.select(0, starts, width)
    config = AutoConfig.for_model("llama", attention_chunk_size=WINDOW)
    config._attn_implementation = "sdpa"
    mask_B1QK = create_chunked_causal_mask(config, torch.empty(2, width, 0), None, cache)
    for row, start in enumerate(starts):
        for query in range(width):
            position = start + query
            seen = mask_B1QK[row, 0, query].nonzero()[:, 0].tolist()
            assert seen == list(range(position - position % WINDOW, position + 1))


def start(model: PreTrainedModel) -> None:
    async def work() -> None:
        engine = TransformersEngine(lambda: model, max_length=128)
        try:
            await engine.start()
        finally:
            await engine.stop()

    asyncio.run(work())


@pytest.mark.parametrize("model_type", STATES)
def test_layers_with_a_state_are_refused_at_the_start(model_type: str) -> None:
    kind, options = STATES[model_type]
    with pytest.raises(
        UnusableModel,
        match=f"^{model_type} has {kind} layers, whose state the engine transformers does not "
        "keep: set pipeline.actorInfer.strategy.name: vllm or sglang$",
    ):
        start(tiny(model_type, **options))


def test_a_model_that_cannot_read_the_cache_is_refused_at_the_start() -> None:
    with pytest.raises(UnusableModel, match=r"^falcon cannot compute with the cache of the engine"):
        start(tiny("falcon", new_decoder_architecture=True, alibi=True))


def test_a_model_that_keeps_no_cache_is_refused_with_the_difference() -> None:
    with pytest.raises(UnusableModel, match=r"^openai-gpt: .* differ by 0\.\d+ nats, .* 0\.00069"):
        start(tiny("openai-gpt", "eager"))


def test_a_wrong_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("mistral", **SLIDING)

    class WithoutWindow(Forward):
        def logits(self, *arguments: Any) -> torch.Tensor:
            with monkeypatch.context() as patched:
                patched.setattr(model.config, "sliding_window", None)
                return super().logits(*arguments)

    with pytest.raises(UnsupportedModel, match=r"^mistral: .* differ by \S+ nats, rounding allows"):
        parity.check_parity(model, WithoutWindow(model), 128)


@pytest.mark.parametrize(("value", "weight"), [(float("nan"), "norm"), (float("inf"), "lm_head")])
def test_broken_weights_are_named_instead_of_soft_capping(value: float, weight: str) -> None:
    model = tiny("llama")
    parameter = dict(model.named_parameters())[
        {"norm": "model.norm.weight", "lm_head": "lm_head.weight"}[weight]
    ]
    torch.nn.init.constant_(parameter, value)
    with pytest.raises(UnusableModel, match=rf"^the weights hold NaN or infinity \(.*{weight}"):
        start(model)
