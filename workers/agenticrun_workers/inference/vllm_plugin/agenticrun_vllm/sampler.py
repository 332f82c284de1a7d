"""Log-probs at a temperature that each request names, over the full vocabulary, whatever it is sampled with.

vLLM's own modes are `raw_logprobs` (temperature 1) and `processed_logprobs` (after temperature, top_k, top_p and min_p); one server
cannot give log_softmax(logits / T) to a request with T and top_p, nor T = 1 to one request and its own T to the next.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

ARGUMENT = "record_temperature"
"""Key in a request's `sampling_params.extra_args`."""


class RecordTemperature(LogitsProcessor):
    """Keeps the temperature that each row of the batch records with; changes no logits."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:  # noqa: ARG002
        self._by_row: dict[int, float] = {}
        self._device = device
        self._temperatures_B1 = torch.ones(0, 1, device=device)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        value = (sampling_params.extra_args or {}).get(ARGUMENT)
        if not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"extra_args.{ARGUMENT} must be a number above 0, not {value!r}")

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests as they join, leave and move between rows."""
        changed = process_dict_updates(self._by_row, batch_update, lambda params, _prompt, _output: params.extra_args[ARGUMENT])
        if changed or (batch_update and batch_update.batch_size != len(self._temperatures_B1)):
            rows = range(max(self._by_row, default=-1) + 1)
            self._temperatures_B1 = torch.tensor([[self._by_row.get(row, 1.0)] for row in rows], device=self._device)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def temperatures(self, rows: int) -> torch.Tensor:
        """Of the first rows of the batch, float32 [rows, 1]."""
        return self._temperatures_B1[:rows]


class RecordingSampler(Sampler):
    """vLLM's sampler; only the log-probs that it reports are others."""

    def __init__(self, use_fp64_gumbel: bool) -> None:
        super().__init__("raw_logprobs", use_fp64_gumbel)
        # Of this mode `forward` computes no log-probs itself but takes those of `sample`.
        self.logprobs_mode = "processed_logprobs"

    def sample(self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, logprobs_mode_override: Any = None) -> Any:
        """Tokens, and the log-probs of all of the vocabulary. `logits` is float32 and overwritten by the sampling."""
        recorded_BV = None
        if sampling_metadata.max_num_logprobs is not None:
            record = next(each for each in sampling_metadata.logitsprocs.all if isinstance(each, RecordTemperature))
            recorded_BV = (logits / record.temperatures(len(logits))).log_softmax(-1)
        sampled, _ = super().sample(logits, sampling_metadata, logprobs_mode_override)
        return sampled, recorded_BV
