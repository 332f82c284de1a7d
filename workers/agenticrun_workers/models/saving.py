"""A model as a Hugging Face folder.

Not by `PreTrainedModel.save_pretrained`, which imports every wrapper that the model might be in (DeepSpeed, if it is installed).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import PreTrainedModel


def write_model(folder: Path, model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Weights (safetensors, sharded as the hub likes them), config and generation config into `folder`, which is made.

    `weights` are whole, by the names of the model's parameters; tied ones are listed once. They may be on any device.
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
