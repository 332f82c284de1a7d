"""What a Hugging Face folder says about its model without loading it, and whether files hold its parameters.

Engines that load the model in another process look here first: a server that is given a wrong file would lose its weights half-way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agenticrun_workers.inference.engine import EngineError, UnusableModel

Shapes = Mapping[str, tuple[int, ...]]
HEADER_LIMIT = 100 * 2**20
"""safetensors' own."""
TIED = "lm_head.weight"
NOT_PARAMETERS = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")
"""Buffers that old checkpoints hold."""


def read_limits(folder: Path) -> tuple[int, int | None]:
    """Size of the vocabulary, and the longest sequence that the model knows. Raises `UnusableModel`."""
    config = _read_config(folder)
    if "vocab_size" not in config:
        raise UnusableModel(
            f"{folder}/config.json says no vocab_size: it is not a causal language model of text"
        )
    return int(config["vocab_size"]), config.get("max_position_embeddings")


def shapes_of_file(file: Path) -> dict[str, tuple[int, ...]]:
    """Parameter -> shape. Raises `EngineError` for a file that is missing or no safetensors file."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > HEADER_LIMIT:
                raise ValueError("its header is too long")
            header = dict(json.loads(stream.read(length)))
        return {
            name: tuple(tensor["shape"])
            for name, tensor in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise EngineError(f"{file} cannot be read as a safetensors file: {error!r}") from error


def shapes_of_model(folder: Path) -> dict[str, tuple[int, ...]]:
    """Parameter -> shape of a Hugging Face folder. Raises `UnusableModel`: it holds no safetensors files."""
    index = folder / "model.safetensors.index.json"
    try:
        names = (
            sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if index.exists()
            else ["model.safetensors"]
        )
        shapes = {
            name: shape for file in names for name, shape in shapes_of_file(folder / file).items()
        }
    except (EngineError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnusableModel(f"{folder} holds no model in safetensors files: {error}") from error
    return {name: shape for name, shape in shapes.items() if not name.endswith(NOT_PARAMETERS)}


def is_tied(folder: Path) -> bool:
    """Whether the output layer shares the embedding's weights. Raises `UnusableModel`."""
    return bool(_read_config(folder).get("tie_word_embeddings"))


class Incoming:
    """The parameters of one update, as its files come.

    Args:
        model: of all parameters.
        tied: the output layer shares the embedding's weights, so both, or the embedding alone, may come.
    """

    def __init__(self, model: Shapes, *, tied: bool) -> None:
        self._model = model
        self._missing = set(model) - ({TIED} if tied else set())
        self._optional = {TIED} if tied else set()

    def check(self, part: Path) -> None:
        """Count a file's parameters. Raises `EngineError` for names and shapes of another model."""
        self.take(shapes_of_file(part))

    def take(self, shapes: Shapes) -> None:
        """Count parameters. Raises `EngineError` for names and shapes of another model."""
        for name, shape in shapes.items():
            expected = self._model.get(name)
            if shape != expected and not (expected is None and name in self._optional):
                raise EngineError(
                    f"weights for {name} have shape {shape}, the model has {expected}"
                )
            self._missing.discard(name)

    def finish(self) -> None:
        """Raises `EngineError` naming a parameter that no file held."""
        if self._missing:
            raise EngineError(
                f"the new weights lack {len(self._missing)} parameters, {min(self._missing)} among them"
            )


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UnusableModel(f"{folder} is not the folder of a model: {error!r}") from error
