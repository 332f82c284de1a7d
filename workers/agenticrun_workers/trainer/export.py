"""A trained policy as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from agenticrun_workers.models.pretrained import write_model


def write_folder(
    folder: Path, model: PreTrainedModel, weights: dict[str, Tensor], files: Mapping[str, bytes]
) -> None:
    """Weights (safetensors, in the dtype they were trained in), config and generation config, and these files, into `folder`.

    `weights` are whole, by the names of the model's parameters; tied ones are listed once.
    """
    write_model(folder, model, weights)
    for name, content in files.items():
        (folder / name).write_bytes(content)
