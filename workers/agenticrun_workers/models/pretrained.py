"""Load causal language models from Hugging Face folders, and write them.

Writing does not use `PreTrainedModel.save_pretrained`, which imports every wrapper that the model
might be in (DeepSpeed, if it is installed).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from agenticrun_workers.models.devices import compute_device
from agenticrun_workers.models.source import ModelSource

disable_progress_bar()
"""Pods write to logs, where a bar is noise."""

EXPERT_COUNTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_moe_experts",
)
"""Names that configs use for the number of experts of a layer."""


class ModelLoadError(Exception):
    """The folder holds no usable model; the message says which folder and why."""


def load_config(path: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Load the config of a dense, text-only causal language model.

    Raises:
        ModelLoadError: there is no such model, or it is of another kind.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise ModelLoadError(
            f"no causal language model could be loaded from {path}: {error}"
        ) from error
    text = config.get_text_config(decoder=True)
    if text is not config:
        raise ModelLoadError(
            f"{path} is a model of several modalities ({config.model_type}), which is not offered "
            "yet: train a text-only model, such as the language model that it was built from"
        )
    if any((getattr(config, name, None) or 0) > 1 for name in EXPERT_COUNTS):
        raise ModelLoadError(
            f"{path} is a mixture of experts ({config.model_type}), which is not offered yet: "
            "train a dense model, such as Qwen3 or Llama"
        )
    return config


MAKING = threading.Lock()
"""Held while transformers makes a model.

It changes torch's default dtype and the functions of torch.nn.init for the whole process meanwhile,
and actors may share a process.
"""


def load_model(
    path: str,
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | None = None,
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a model in evaluation mode.

    Args:
        path: a folder or a name on the hub.
        device: default: this process's GPU, else the CPU.

    Raises:
        ModelLoadError: see `load_config`.
    """
    config = load_config(path, trust_remote_code=trust_remote_code)
    try:
        with MAKING:
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
            )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise ModelLoadError(
            f"no causal language model could be loaded from {path}: {error}"
        ) from error
    model.to(device or compute_device())
    return model.eval()


def load_source(source: ModelSource, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load the model of a run, in `dtype` (default: the source's). Raises `ModelLoadError`."""
    with source.folder() as folder:
        return load_model(
            folder,
            dtype or getattr(torch, source.dtype),
            attn_implementation=source.attn_implementation,
            trust_remote_code=source.trust_remote_code,
        )


def write_model(folder: Path, model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Write weights (sharded safetensors), config and generation config into a new folder.

    Args:
        weights: whole tensors, on any device, by the names of the model's parameters. Tied ones
            are listed once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(
        {name: weight.detach().contiguous() for name, weight in weights.items()}, folder
    )
    dtypes = {weight.dtype for weight in weights.values()}
    config = type(model.config)(**model.config.to_dict())
    config.architectures = [type(model).__name__]
    if len(dtypes) == 1:
        config.dtype = dtypes.pop()
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
