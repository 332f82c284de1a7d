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
import torch
from agenticrun_draws import uniforms
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler


class _Row(NamedTuple):
    """The `sampling_params.extra_args` of a request in the batch."""

    seed: int
    sampled: int
    """Tokens at the end of the prompt that another engine sampled for this response."""
    record_temperature: float
    outputs: list[int]
    """The server's own list of the tokens sampled so far. It grows."""


def _row(params: SamplingParams, outputs: list[int]) -> _Row:
    """Return the arguments of a request. Those of other clients get defaults, a random seed too."""
    arguments = params.extra_args or {}
    seed = arguments["seed"] if "seed" in arguments else secrets.randbits(64)
    record_temperature = arguments.get("record_temperature") or params.temperature or 1.0
    return _Row(seed, arguments.get("sampled", 0), record_temperature, outputs)


class RequestArguments(LogitsProcessor):  # type: ignore[misc]
    """Tracks the request in each row of the batch. Changes no logits."""

    def __init__(
        self,
        vllm_config: VllmConfig,  # noqa: ARG002
        device: torch.device,  # noqa: ARG002
        is_pin_memory: bool,  # noqa: ARG002
    ) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests as they join, leave and move between rows."""
        process_dict_updates(
            self._rows, batch_update, lambda params, _prompt, outputs: _row(params, outputs)
        )

    def apply(self, logits: Tensor) -> Tensor:
        return logits

    def uniforms(self, count: int) -> Tensor:
        """Return a random number for the next token of each of the first rows.

        Float64 [count, 1].
        """
        rows = [self._rows[row] for row in range(count)]
        seeds_B = np.array([row.seed for row in rows], np.uint64)
        indices_B = np.array([row.sampled + len(row.outputs) for row in rows], np.uint64)
        return torch.from_numpy(uniforms(seeds_B, indices_B)[:, None])

    def record_temperatures(self, count: int) -> Tensor:
        """Return the temperatures of the log-probs of the first rows, float32 [count, 1]."""
        return torch.tensor([[self._rows[row].record_temperature] for row in range(count)])


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
        count, device = len(logits), logits.device
        recorded_BV = (logits / arguments.record_temperatures(count).to(device)).log_softmax(-1)
        if sampling_metadata.all_greedy:
            return self.greedy_sample(logits), recorded_BV
        greedy_B = None if sampling_metadata.all_random else self.greedy_sample(logits)
        logits = self.apply_temperature(
            logits, sampling_metadata.temperature, sampling_metadata.all_random
        )
        for processor in sampling_metadata.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
        logits = apply_top_k_top_p(logits, sampling_metadata.top_k, sampling_metadata.top_p)
        sampled_B = _sample(logits, arguments.uniforms(count).to(device))
        if greedy_B is not None:
            sampled_B = torch.where(sampling_metadata.temperature == 0, greedy_B, sampled_B)
        return sampled_B, recorded_BV


def _sample(logits_BV: Tensor, uniforms_B1: Tensor) -> Tensor:
    """Return the token at which the cumulative probability passes the random number, int64 [B]."""
    sums_BV = logits_BV.softmax(-1).cumsum(-1, dtype=torch.float64)
    tokens_B1 = torch.searchsorted(sums_BV, uniforms_B1 * sums_BV[:, -1:], right=True)
    return tokens_B1[:, 0].clamp(max=logits_BV.shape[-1] - 1)
