"""Tiny models that every engine can serve, and what they say, computed plainly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from agenticrun_workers.models.initialize import InitializeSpec, initialize_model
from agenticrun_workers.types import FloatArray, IntArray

WORDS = tuple("abcdefghijklmnopqrstuvwxyz")
VOCABULARY = len(WORDS) + 5
CONTEXT = 512


def tiny_model(
    folder: Path, *, seed: int = 0, experts: int = 0, words: Sequence[str] = WORDS
) -> Path:
    """Make a model of sharp distributions with grouped heads of 32, and its tokenizer.

    vLLM's CPU attention has no smaller heads.

    Args:
        folder: where the model is written.
        seed: of the weights.
        experts: of each layer of a Qwen3-MoE model, of which a token uses two; 0: a Llama model.
        words: of the vocabulary.
    """
    folder.mkdir(parents=True, exist_ok=True)
    spec = InitializeSpec(
        tuple(words),
        "qwen3_moe" if experts else "llama",
        experts=experts,
        experts_per_token=2 if experts else 0,
        hidden_size=128,
        intermediate_size=128,
        heads=4,
        key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.1,
        seed=seed,
    )
    initialize_model(folder, spec)
    return folder


def weight_parts(model: Path, folder: Path, count: int = 2) -> list[Path]:
    """The model's weights in several safetensors files, as a trainer sends them."""
    folder.mkdir(parents=True)
    weights = {
        name: value
        for file in sorted(model.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }
    parts = [folder / f"bucket-{number}.safetensors" for number in range(count)]
    for number, part in enumerate(parts):
        save_file({name: weights[name] for name in sorted(weights)[number::count]}, part)
    return parts


def plain_logprobs(
    model: PreTrainedModel, prompt_T: IntArray, response_T: IntArray, temperature: float = 1.0
) -> FloatArray:
    """Return log_softmax(logits / temperature) of each response token.

    Computed in one forward pass over the whole sequence.
    """
    ids = torch.from_numpy(np.concatenate([prompt_T, response_T])).long()[None]
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0].float() / temperature, -1)
    return logprobs[len(prompt_T) - 1 : -1].gather(-1, ids[0, len(prompt_T) :, None])[:, 0].numpy()


def greedy_tokens(model: PreTrainedModel, prompt_T: IntArray, count: int) -> list[int]:
    ids: list[int] = prompt_T.tolist()
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt_T) :]
