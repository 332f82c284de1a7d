"""Sampling that depends only on the request, and log-probs at the temperature that it asks for.

Why not vLLM's own:
- A server reports log-probs either at temperature 1 (`raw_logprobs`) or after temperature, top_k,
  top_p and min_p (`processed_logprobs`). It cannot return log_softmax(logits / T) to a request with
  T and top_p, or T = 1 to one request and its own T to the next.
- Its seeds are torch generators. On a CPU they end the server when a seeded prompt is computed in
  chunks ("CPU Generator does not use offset"), and on a GPU they cost a launch for each row.
"""

from __future__ import annotations

import secrets
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from agenticrun_sampling import on_device, sample, streams, truncate, uniforms_on_device
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor, process_dict_updates
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler


class _Row(NamedTuple):
    """The `sampling_params.extra_args` of a request in the batch."""

    seed: int
    sampled: int
    """Tokens at the end of the prompt that another engine sampled for this response."""
    temperature: float
    """At which it is sampled; 1 if it is greedy."""
    record_temperature: float
    min_p: float
    outputs: list[int]
    """The server's own list of the tokens sampled so far. It grows."""


class _Batch(NamedTuple):
    """The requests of a batch, by row."""

    rows: list[_Row]
    streams_B: npt.NDArray[np.int64]
    """Random numbers of each request, by index of the token in its response."""
    record_temperatures_B: Tensor | None
    """Temperatures of the log-probs, float32 [B]; None if each row has that of its sampling."""
    min_p_B: Tensor | None
    """float32 [B]; None if no row has it."""

    @staticmethod
    def of(rows: list[_Row], device: torch.device) -> _Batch:
        temperatures = [row.record_temperature for row in rows]
        return _Batch(
            rows,
            streams([row.seed for row in rows], [0] * len(rows)),
            on_device(temperatures, torch.float32, device)
            if any(row.record_temperature != row.temperature for row in rows)
            else None,
            on_device([row.min_p for row in rows], torch.float32, device)
            if any(row.min_p for row in rows)
            else None,
        )


def _row(params: SamplingParams, outputs: list[int]) -> _Row:
    """Return the arguments of a request. Those of other clients get defaults, a random seed too."""
    arguments = params.extra_args or {}
    seed = arguments["seed"] if "seed" in arguments else secrets.randbits(64)
    temperature = params.temperature or 1.0
    return _Row(
        seed,
        arguments.get("sampled", 0),
        temperature,
        arguments.get("record_temperature") or temperature,
        params.min_p,
        outputs,
    )


class RequestArguments(LogitsProcessor):  # type: ignore[misc]
    """Tracks the request in each row of the batch. Changes no logits."""

    def __init__(
        self,
        vllm_config: VllmConfig,  # noqa: ARG002
        device: torch.device,
        is_pin_memory: bool,  # noqa: ARG002
    ) -> None:
        self._device = torch.device(device)
        self._rows: dict[int, _Row] = {}
        self.batch = _Batch.of([], self._device)

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests as they join, leave and move between rows."""
        process_dict_updates(
            self._rows, batch_update, lambda params, _prompt, outputs: _row(params, outputs)
        )
        if batch_update is not None:
            rows = [self._rows[number] for number in range(batch_update.batch_size)]
            self.batch = _Batch.of(rows, self._device)

    def apply(self, logits: Tensor) -> Tensor:
        return logits

    def uniforms(self) -> Tensor:
        """Return a random number for the next token of each row, float64 [B]."""
        # The server also samples for rows whose prompt is incomplete, and drops those tokens: only
        # the lists know how many it has kept.
        indices = [row.sampled + len(row.outputs) for row in self.batch.rows]
        uniforms_B: Tensor = uniforms_on_device(self.batch.streams_B, indices, self._device)
        return uniforms_B


class RequestSampler(Sampler):  # type: ignore[misc]
    """vLLM's sampler with other random numbers and other log-probs."""

    def __init__(self) -> None:
        # In this mode `forward` takes the log-probs from `sample`.
        super().__init__("processed_logprobs")

    def sample(
        self,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
        logprobs_mode_override: Any = None,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Choose a token for each row.

        Args:
            logits: float32 [B, V]; overwritten.

        Returns:
            tokens int64 [B], and log_softmax(logits / record_temperature), float32 [B, V].
        """
        arguments = next(
            each for each in sampling_metadata.logitsprocs.all if isinstance(each, RequestArguments)
        )
        temperatures_B = arguments.batch.record_temperatures_B
        scaled_BV = logits if temperatures_B is None else logits / temperatures_B[:, None]
        if sampling_metadata.all_greedy:
            return self.greedy_sample(logits), scaled_BV.log_softmax(-1)
        greedy_B = None if sampling_metadata.all_random else self.greedy_sample(logits)
        logits = self.apply_temperature(
            logits, sampling_metadata.temperature, sampling_metadata.all_random
        )
        # Where the temperatures are equal, one division serves both.
        recorded_BV = (logits if temperatures_B is None else scaled_BV).log_softmax(-1)
        for processor in sampling_metadata.logitsprocs.argmax_invariant:
            # `truncate` knows min_p too. Applied before it, min_p would change what top_p keeps.
            if not isinstance(processor, MinPLogitsProcessor):
                logits = processor.apply(logits)
        weights_BV = truncate(
            logits.softmax(-1),
            sampling_metadata.top_k,
            sampling_metadata.top_p,
            arguments.batch.min_p_B,
        )
        sampled_B = sample(weights_BV, arguments.uniforms())
        if greedy_B is not None:
            sampled_B = torch.where(sampling_metadata.temperature == 0, greedy_B, sampled_B)
        return sampled_B, recorded_BV
