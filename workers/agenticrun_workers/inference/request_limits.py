"""What an engine must not be asked: some servers end at an id outside the vocabulary, others cut what does not fit."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from agenticrun_workers.inference.engine import EngineStartError, InvalidRequest
from agenticrun_workers.inference.model_files import read_limits
from agenticrun_workers.types import GenerationRequest


@dataclass(frozen=True)
class RequestLimits:
    """Of one model and engine; `max_length` counts prompt and response."""

    vocabulary: int
    max_length: int

    @staticmethod
    def of_model(folder: Path, max_length: int) -> RequestLimits:
        """Of the model in a Hugging Face folder. Raises `UnusableModel`, and `EngineStartError` for sequences longer than its context."""
        vocabulary, longest = read_limits(folder)
        if longest is not None and max_length > longest:
            raise EngineStartError(
                f"sequences of {max_length} tokens do not fit into the model's context of {longest}"
            )
        return RequestLimits(vocabulary, max_length)

    def check(self, request: GenerationRequest, in_flight: Container[str]) -> None:
        """Raises `InvalidRequest`."""
        ids_T, new = request.prompt_tokens, request.sampling.max_new_tokens
        if request.request_id in in_flight:
            raise InvalidRequest(f"request {request.request_id} is already in flight")
        if not len(ids_T):
            raise InvalidRequest("the prompt is empty")
        if int(ids_T.min()) < 0 or int(ids_T.max()) >= self.vocabulary:
            raise InvalidRequest(
                f"token ids must be in [0, {self.vocabulary}): {int(ids_T.min())}..{int(ids_T.max())}"
            )
        if new < 1 or len(ids_T) + new > self.max_length:
            raise InvalidRequest(
                f"{len(ids_T)} prompt tokens and {new} new ones do not fit into {self.max_length}"
            )
