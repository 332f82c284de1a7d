"""Facts about a model from its Hugging Face folder, read without loading it.

Servers do not protect themselves: some end at a token id outside the vocabulary, others cut a
prompt that does not fit, and a wrong weights file half-way leaves them without weights. Engines
therefore check requests (`RequestLimits`) and files (`UpdateCheck`) before the server sees them.
The engine's actor checks what comes back: a trainer never sees what no model has sampled.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agenticrun_workers.inference.engine import (
    EngineError,
    EngineStartError,
    InvalidRequest,
    UnusableModel,
)
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest

Shapes = Mapping[str, tuple[int, ...]]
HEADER_LIMIT = 100 * 2**20
"""The limit of safetensors itself, in bytes."""
CONTEXT_KEYS = ("max_seq_len", "n_positions", "context_length")
"""Names of the longest sequence in configs whose class does not map them (mpt)."""
TIED = "lm_head.weight"
NOT_PARAMETERS = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")
"""Suffixes of buffers that old checkpoints hold."""


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one model and engine on requests.

    Attributes:
        vocabulary: number of token ids.
        max_length: longest sequence, prompt and response.
    """

    vocabulary: int
    max_length: int

    @staticmethod
    def of_model(folder: Path, max_length: int) -> RequestLimits:
        """Return the limits of the model in a Hugging Face folder.

        Raises:
            UnusableModel: the folder holds no causal language model.
            EngineStartError: `max_length` exceeds the model's context.
        """
        vocabulary, longest = read_limits(folder)
        if longest is not None and max_length > longest:
            raise EngineStartError(
                f"sequences of {max_length} tokens do not fit into the model's context of {longest}"
            )
        return RequestLimits(vocabulary, max_length)

    def check(self, request: GenerationRequest, in_flight: Container[str]) -> None:
        """Raise `InvalidRequest` unless an engine can serve the request.

        Args:
            request: the request.
            in_flight: ids of the requests in flight.
        """
        ids_T, new = request.prompt_tokens, request.sampling.max_new_tokens
        # Two requests with one id could not be aborted separately.
        if request.request_id in in_flight:
            raise InvalidRequest(f"request {request.request_id} is already in flight")
        if not len(ids_T):
            raise InvalidRequest("the prompt is empty")
        lowest, highest = int(ids_T.min()), int(ids_T.max())
        if lowest < 0 or highest >= self.vocabulary:
            raise InvalidRequest(
                f"token ids must be in [0, {self.vocabulary}): {lowest}..{highest}"
            )
        if new < 1 or len(ids_T) + new > self.max_length:
            raise InvalidRequest(
                f"{len(ids_T)} prompt tokens and {new} new ones do not fit into the engine's "
                f"{self.max_length} tokens"
            )

    def check_generation(self, request: GenerationRequest, generation: Generation) -> Generation:
        """Return an engine's generation. Raises `EngineError` if no working engine returns it."""
        # Engines are programs of others: what they return is checked before it is trained on.
        sampled, new = len(generation.tokens_T), request.sampling.max_new_tokens
        if sampled > new:
            raise EngineError(f"the engine returned {sampled} tokens instead of {new}")
        # An aborted request may have been waiting.
        if not sampled and generation.finish is not FinishReason.ABORT:
            raise EngineError("the engine returned a response without a token")
        return self.check_tokens(generation)

    def check_tokens(self, generation: Generation) -> Generation:
        """Return a part of a generation. Raises `EngineError` as `check_generation`."""
        tokens_T = generation.tokens_T
        if not len(tokens_T) == len(generation.logprobs_T) == len(generation.versions_T):
            raise EngineError(
                f"the engine returned {len(tokens_T)} tokens, {len(generation.logprobs_T)} "
                f"log-probs and {len(generation.versions_T)} versions"
            )
        # Staleness limits and corrections need the version of each token.
        if (generation.versions_T < 0).any():
            raise EngineError("the engine returned tokens without a version")
        if len(tokens_T) and not 0 <= int(tokens_T.min()) <= int(tokens_T.max()) < self.vocabulary:
            raise EngineError(
                f"the engine returned token ids outside [0, {self.vocabulary}): "
                f"{int(tokens_T.min())}..{int(tokens_T.max())}"
            )
        # A NaN would spread to the gradient of the whole batch.
        if not np.isfinite(generation.logprobs_T).all():
            raise EngineError("the engine returned log-probs that are not finite numbers")
        return generation


def read_limits(folder: Path) -> tuple[int, int | None]:
    """Return the vocabulary size and the longest sequence of a model, None if unlimited.

    Raises:
        UnusableModel: the folder holds no causal language model.
    """
    config = _read_config(folder)
    if "vocab_size" not in config:
        raise UnusableModel(
            f"{folder}/config.json has no vocab_size: it is not a causal language model of text"
        )
    key = usual = "max_position_embeddings"
    if usual not in config and "model_type" in config:
        # Only for a config without the usual name: the import takes seconds.
        from transformers import CONFIG_MAPPING

        # Custom model code maps its own names, if at all.
        if config["model_type"] in CONFIG_MAPPING:
            names: dict[str, str] = CONFIG_MAPPING[config["model_type"]].attribute_map
            key = names.get(usual, next((key for key in CONTEXT_KEYS if key in config), usual))
    return int(config["vocab_size"]), config.get(key)


def shapes_of_file(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter in a safetensors file.

    Raises:
        EngineError: the file is missing or not a safetensors file.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            # The length comes from the file: a damaged one must not fill the memory.
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
    """Return the shape of each parameter in a Hugging Face folder.

    Raises:
        UnusableModel: the folder holds no safetensors files.
    """
    # Small models have one file and no index.
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
    # The trainer does not have them, so no update brings them.
    return {name: shape for name, shape in shapes.items() if not name.endswith(NOT_PARAMETERS)}


def is_tied(folder: Path) -> bool:
    """Return True if the output layer shares the embedding's weights. Raises `UnusableModel`."""
    return bool(_read_config(folder).get("tie_word_embeddings"))


@dataclass(frozen=True)
class ServedModel:
    """The limits and parameters of the model that the server of an engine serves."""

    limits: RequestLimits
    shapes: Shapes
    tied: bool

    @staticmethod
    def read(folder: Path, limits: RequestLimits) -> ServedModel:
        """Read the rest beside the limits. Raises `UnusableModel`."""
        return ServedModel(limits, shapes_of_model(folder), is_tied(folder))

    def update_check(self) -> UpdateCheck:
        """Return a check of new weights."""
        return UpdateCheck(self.shapes, tied=self.tied)


class UpdateCheck:
    """Checks that an update brings exactly the parameters of the model.

    Args:
        model: shapes of all parameters.
        tied: the output layer shares the embedding's weights, so its own are optional.
    """

    def __init__(self, model: Shapes, *, tied: bool) -> None:
        self._model = model
        # Trainers may export the tied layer or leave it out.
        self._missing = set(model) - ({TIED} if tied else set())
        self._optional = {TIED} if tied else set()

    def add_file(self, part: Path) -> None:
        """Count the parameters of a file. Raises `EngineError` if they are another model's."""
        self.add(shapes_of_file(part))

    def add(self, shapes: Shapes) -> None:
        """Count these parameters. Raises `EngineError` if they are another model's."""
        for name, shape in shapes.items():
            expected = self._model.get(name)
            if shape != expected and not (expected is None and name in self._optional):
                raise EngineError(
                    f"weights for {name} have shape {shape}, the model has {expected}"
                )
            self._missing.discard(name)

    def finish(self) -> None:
        """Raise `EngineError` if a parameter of the model has not come."""
        if self._missing:
            raise EngineError(
                f"the new weights lack {len(self._missing)} parameters, {min(self._missing)} "
                "among them"
            )


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UnusableModel(f"{folder} is not the folder of a model: {error!r}") from error
