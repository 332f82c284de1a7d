"""Load a causal language model and its tokenizer from a local folder or a hub name."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()
"""Pods write to logs, where a bar is noise."""


class ModelLoadError(Exception):
    """The folder holds no usable model or tokenizer; the message says which path and why."""


def load_model(
    path: str,
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | None = None,
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model in evaluation mode, on `device` (default: the first visible GPU, else the CPU). Raises `ModelLoadError`."""
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, ImportError) as error:
        raise ModelLoadError(f"no causal language model could be loaded from {path}: {error}") from error
    model.to(device or torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return model.eval()


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer; it must have a chat template. Raises `ModelLoadError`."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise ModelLoadError(f"no tokenizer could be loaded from {path}: {error}") from error
    if not tokenizer.chat_template:
        raise ModelLoadError(f"the tokenizer in {path} has no chat template: use an instruction-tuned model")
    return tokenizer
