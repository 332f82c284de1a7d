"""The `sampling_params.custom_params` of the requests of a batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor


def _empty() -> Tensor:
    return torch.empty(0)


@dataclasses.dataclass
class RequestBatch(SamplingBatchInfo):  # type: ignore[misc]
    """SGLang's sampling parameters of a batch, and ours. Rows come and go with their requests."""

    record_temperatures: Tensor = dataclasses.field(default_factory=_empty)
    """Temperatures of the log-probs, float32 [B, 1]."""
    records_differ: bool = False
    """True if a row is recorded at another temperature than it is sampled at."""
    seeds: Tensor = dataclasses.field(default_factory=_empty)
    """int64 [B]."""
    first_positions: Tensor = dataclasses.field(default_factory=_empty)
    """Position of the prompt's last token, from which the first token is sampled, int64 [B]."""

    @classmethod
    def from_schedule_batch(cls, batch: Any, vocab_size: int) -> RequestBatch:
        info: RequestBatch = super().from_schedule_batch(batch, vocab_size)
        params = [request.sampling_params for request in batch.reqs]
        own = [each.custom_params or {} for each in params]
        record = [
            given.get("record_temperature", each.temperature)
            for given, each in zip(own, params, strict=True)
        ]
        info.records_differ = record != [each.temperature for each in params]
        info.record_temperatures = torch.tensor(
            record, dtype=torch.float32, device=info.device
        ).view(-1, 1)
        info.seeds = torch.tensor([given.get("seed", 0) for given in own], dtype=torch.int64)
        info.first_positions = torch.tensor(
            [len(request.origin_input_ids) - 1 for request in batch.reqs], dtype=torch.int64
        )
        return info

    def filter_batch(self, keep_indices: list[int], keep_indices_device: Tensor) -> None:
        super().filter_batch(keep_indices, keep_indices_device)
        self.record_temperatures = self.record_temperatures[keep_indices_device]
        self.seeds, self.first_positions = (
            self.seeds[keep_indices],
            self.first_positions[keep_indices],
        )

    def merge_batch(self, other: RequestBatch) -> None:
        super().merge_batch(other)
        self.record_temperatures = torch.cat([self.record_temperatures, other.record_temperatures])
        self.records_differ |= other.records_differ
        self.seeds = torch.cat([self.seeds, other.seeds])
        self.first_positions = torch.cat([self.first_positions, other.first_positions])
