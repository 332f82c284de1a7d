"""What AgenticRun adds to an SGLang server: each request's own temperature of log-probs, and its own seed.

SGLang finds this package by its entry point, in the server's PYTHONPATH, and calls `register` in each of its processes. It runs in
SGLang's environment and imports nothing of ours. Both hooks leave requests alone that carry no `custom_params` of ours.
"""

import dataclasses
import os
from typing import Any

import torch

RECORD_TEMPERATURE = "agenticrun_record_temperature"
SEED = "agenticrun_seed"
SEEDED = "AGENTICRUN_SGLANG_SEEDED"
"""Set where the sampling backend takes seeds (pytorch)."""


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.sampling import sampling_batch_info

    @dataclasses.dataclass
    class OwnSamplingBatchInfo(sampling_batch_info.SamplingBatchInfo):
        """Sampling parameters of a batch, and the temperature that each row's log-probs are recorded at."""

        record_temperatures: torch.Tensor | None = None
        """float32 [rows, 1]."""
        records_differ: bool = False
        """Whether any row is recorded at another temperature than it is sampled at."""

        @classmethod
        def from_schedule_batch(cls, batch: Any, vocab_size: int) -> Any:
            info = super().from_schedule_batch(batch, vocab_size)
            params = [request.sampling_params.custom_params or {} for request in batch.reqs]
            sampled_at = [request.sampling_params.temperature for request in batch.reqs]
            record = [own.get(RECORD_TEMPERATURE, other) for own, other in zip(params, sampled_at, strict=True)]
            info.records_differ = record != sampled_at
            info.record_temperatures = torch.tensor(record, dtype=torch.float32, device=info.device).view(-1, 1)
            if info.sampling_seed is None and os.environ.get(SEEDED):
                info.sampling_seed = torch.tensor([own.get(SEED, 0) for own in params], dtype=torch.int64, device=info.device)
            return info

        def filter_batch(self, keep_indices: list[int], keep_indices_device: torch.Tensor) -> None:
            super().filter_batch(keep_indices, keep_indices_device)
            self.record_temperatures = self.record_temperatures[keep_indices_device]

        def merge_batch(self, other: Any) -> None:
            super().merge_batch(other)
            self.record_temperatures = torch.cat([self.record_temperatures, other.record_temperatures])
            self.records_differ |= other.records_differ

    HookRegistry.register("sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo", OwnSamplingBatchInfo, HookType.REPLACE)
    HookRegistry.register("sglang.srt.layers.sampler.Sampler.forward", _forward, HookType.AROUND)
    HookRegistry.register("sglang.srt.layers.sampler.multinomial_with_seed", _multinomial, HookType.AROUND)


def _forward(original: Any, sampler: Any, logits_output: Any, info: Any, return_logprob: bool, *rest: Any, **options: Any) -> Any:
    """Sample, with log-probs of log_softmax(logits / record temperature) over the whole vocabulary.

    SGLang divides `logprob_logits` by the sampling temperature, unless the whole batch is greedy.
    """
    if return_logprob and info.records_differ:
        applied = 1.0 if info.is_all_greedy else info.temperatures
        options["logprob_logits"] = logits_output.next_token_logits * (applied / info.record_temperatures)
    seeds = info.sampling_seed
    if info.need_min_p_sampling:
        info.sampling_seed = None  # SGLang has no seeded min-p
    try:
        return original(sampler, logits_output, info, return_logprob, *rest, **options)
    finally:
        info.sampling_seed = seeds


def _multinomial(original: Any, logprobs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One index per row, decided by the row's seed and position; int64 [rows, 1]. SGLang's own kernel exists for GPUs only.

    The Gumbel trick: argmax(log p - log e) with e from the exponential distribution. `logprobs` is [rows, columns], not normalised.
    """
    if not logprobs.is_cpu:
        return original(logprobs, seeds, positions)
    noise, generator = torch.empty_like(logprobs, dtype=torch.float64), torch.Generator()
    for row, key in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        noise[row].exponential_(generator=generator.manual_seed(hash(key) & 0xFFFFFFFF))
    return (logprobs - noise.log_()).argmax(-1, keepdim=True)
