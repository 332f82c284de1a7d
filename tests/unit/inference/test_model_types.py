"""The embedded engine refuses models that it would compute differently than transformers does.

docs/model-types.md and its test show that it computes all others as transformers does.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_chunked_causal_mask

from agenticrun_workers.inference import UnusableModel
from agenticrun_workers.inference.transformers import parity
from agenticrun_workers.inference.transformers.caches import Forward, SlotCache
from agenticrun_workers.inference.transformers.engine import TransformersEngine
from agenticrun_workers.models.heads import UnsupportedModel
from model_comparison import WINDOW, Case, all_cases, random_model, tiny_config

CASES = {case.name: case for case in all_cases()}
NEITHER = "vllm and sglang do not serve it either, so train another model"
ELSEWHERE = "set spec.pipeline.actorInfer.strategy.name: "
REFUSED = {
    "qwen3_5_text": f"qwen3_5_text has linear-attention layers, .* {ELSEWHERE}vllm or sglang",
    "lfm2, with convolution": f"lfm2 has conv layers, whose state .* {ELSEWHERE}vllm or sglang",
    "olmo_hybrid": f"olmo_hybrid has linear-attention layers, .* {ELSEWHERE}vllm",
    "falcon_h1": f"falcon_h1 has hybrid layers, .* {ELSEWHERE}vllm or sglang",
    "mamba": f"mamba has no attention layers, .* {ELSEWHERE}vllm or sglang",
    "rwkv": f"rwkv has no attention layers, .*: {NEITHER}",
    "falcon, ALiBi": f"falcon cannot compute with the cache of the engine .* {ELSEWHERE}vllm",
    "openai-gpt": f"openai-gpt cannot continue from keys and values .*: {NEITHER}",
    "trocr": rf"trocr: .* because it does not take positions, .* by 0\.\d+ nats.*: {NEITHER}",
    "gpt_neo": rf"gpt_neo: .* differ by 0\.\d+ nats, rounding allows 0\.00069: {NEITHER}",
}


def tiny(name: str, attention: str = "eager") -> PreTrainedModel:
    return random_model(tiny_config(CASES[name]), attention)


def test_chunks_begin_at_positions_of_each_row() -> None:
    cache = SlotCache(2, 36)
    starts, width = [3, 30], 6
    cache.select(0, starts, width, torch.device("cpu"))
    config = tiny_config(Case("llama", options={"attention_chunk_size": WINDOW}))
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


@pytest.mark.parametrize("name", REFUSED)
def test_the_reason_and_the_engines_that_serve_the_type_are_named(name: str) -> None:
    with pytest.raises(UnusableModel, match=f"^{REFUSED[name]}$"):
        start(tiny(name, "sdpa" if name == "falcon, ALiBi" else "eager"))


def test_a_wrong_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("mistral")

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
