"""Load a causal language model and its tokenizer from a local folder or a hub name."""

from __future__ import annotations

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from agenticrun_workers.models.devices import compute_device

disable_progress_bar()
"""Pods write to logs, where a bar is noise."""

EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_moe_experts",
)
"""What configs call the number of experts of a layer."""


class ModelLoadError(Exception):
    """The folder holds no usable model or tokenizer; the message says which path and why."""


def load_config(path: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config of a dense, text-only causal language model. Raises `ModelLoadError` for any other."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise ModelLoadError(
            f"no causal language model could be loaded from {path}: {error}"
        ) from error
    text = config.get_text_config(decoder=True)
    if text is not config:
        raise ModelLoadError(
            f"{path} is a model of several modalities ({config.model_type}), which is not offered yet: "
            "train a text-only model, such as the language model that it was built from"
        )
    if any((getattr(config, name, None) or 0) > 1 for name in EXPERTS):
        raise ModelLoadError(
            f"{path} is a mixture of experts ({config.model_type}), which is not offered yet: train a dense model, such as Qwen3 or Llama"
        )
    return config


def load_model(
    path: str,
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | None = None,
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model in evaluation mode, on `device` (default: this process's GPU, else the CPU). Raises `ModelLoadError`."""
    config = load_config(path, trust_remote_code=trust_remote_code)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError, ImportError) as error:
        raise ModelLoadError(
            f"no causal language model could be loaded from {path}: {error}"
        ) from error
    model.to(device or compute_device())
    return model.eval()


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer; it must have a chat template. Raises `ModelLoadError`."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, ImportError) as error:
        raise ModelLoadError(f"no tokenizer could be loaded from {path}: {error}") from error
    if not tokenizer.chat_template:
        raise ModelLoadError(
            f"the tokenizer in {path} has no chat template: use an instruction-tuned model"
        )
    return tokenizer
