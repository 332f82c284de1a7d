"""Sampling that depends only on the request, and log-probs at the temperature that it asks for.

Why not SGLang's own: a server reports log-probs at temperature 1 or at the sampling temperature,
never at that of a request. It has seeds only together with deterministic kernels, not on CPUs and
not with min_p.

Responses end at the stop tokens of their request only. SGLang either stops at the model's
end-of-sequence tokens too, or (`ignore_eos`) at none at all.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from agenticrun_sampling import on_device, sample, streams, truncate, uniforms
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.utils.weight_versions import compute_weight_version_spans
from torch import Tensor


def _empty() -> Tensor:
    return torch.empty(0)


@dataclasses.dataclass
class RequestBatch(SamplingBatchInfo):  # type: ignore[misc]
    """SGLang's sampling parameters of a batch, and ours (`sampling_params.custom_params`).

    Rows come and go with their requests.
    """

    record_temperatures: Tensor = dataclasses.field(default_factory=_empty)
    """Temperatures of the log-probs, float32 [B, 1]."""
    records_differ: bool = False
    """True if a row is recorded at another temperature than it is sampled at."""
    streams: Tensor = dataclasses.field(default_factory=_empty)
    """Random numbers of each request, by position, int64 [B].

    A response's first token is sampled from the position of the prompt's last token, or from one
    before it if the prompt ends with tokens that another engine sampled for this response
    (`sampled`).
    """

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
        device = torch.device(info.device)
        info.record_temperatures = on_device(record, torch.float32, device)[:, None]
        first_positions = [
            len(request.origin_input_ids) - 1 - given.get("sampled", 0)
            for request, given in zip(batch.reqs, own, strict=True)
        ]
        streams_B = streams([given.get("seed", 0) for given in own], first_positions)
        info.streams = on_device(streams_B, torch.int64, device)
        return info

    def filter_batch(self, keep_indices: list[int], keep_indices_device: Tensor) -> None:
        super().filter_batch(keep_indices, keep_indices_device)
        self.record_temperatures = self.record_temperatures[keep_indices_device]
        self.streams = self.streams[keep_indices_device]

    def merge_batch(self, other: RequestBatch) -> None:
        super().merge_batch(other)
        self.record_temperatures = torch.cat([self.record_temperatures, other.record_temperatures])
        self.records_differ |= other.records_differ
        self.streams = torch.cat([self.streams, other.streams])


def forward(
    original: Any,
    sampler: Any,
    logits_output: Any,
    info: RequestBatch,
    return_logprob: bool,
    *rest: Any,
    **options: Any,
) -> Any:
    """Wrap `Sampler.forward`: record log_softmax(logits / record temperature).

    SGLang divides `logprob_logits` by the sampling temperature, unless all rows are greedy.
    """
    if return_logprob and info.records_differ:
        applied = 1.0 if info.is_all_greedy else info.temperatures
        options["logprob_logits"] = logits_output.next_token_logits * (
            applied / info.record_temperatures
        )
    return original(sampler, logits_output, info, return_logprob, *rest, **options)


def sample_from_probs(
    _: Any, probs: Tensor, info: RequestBatch, positions: Tensor, simple: bool
) -> tuple[Tensor, None]:
    """Replace `Sampler._sample_from_probs`.

    Args:
        probs: float32 [B, V].
        positions: of the tokens sampled from, int64 [B].
        simple: no row has top_k, top_p or min_p.

    Returns:
        tokens int32 [B], and no mask.
    """
    if not simple:
        probs = truncate(
            probs,
            info.top_ks if info.need_top_k_sampling else None,
            info.top_ps if info.need_top_p_sampling else None,
            info.min_ps if info.need_min_p_sampling else None,
        )
    tokens_B = sample(probs, uniforms(info.streams, positions))
    return tokens_B.to(torch.int32), None


def ends(request: Any, new_accepted_tokens: list[int]) -> bool:
    """Replace `Req._check_token_based_finish`."""
    for number, token in enumerate(new_accepted_tokens):
        if token in (request.sampling_params.stop_token_ids or ()):
            request.finished_reason = FINISH_MATCHED_TOKEN(matched=token)
            request.finished_len = len(request.output_ids) - len(new_accepted_tokens) + number + 1
            return True
    return False


def accept(original: Any, events: Any, *, req: Any) -> None:
    """Wrap `_GenerationStreamAccumulator.accept`, which puts a request into the next events.

    Add the versions of the tokens. SGLang sends them in a request's last event only.
    """
    original(events, req=req)
    if events.weight_versions and events.weight_versions[-1] is None:
        events.weight_versions[-1] = compute_weight_version_spans(
            req.weight_version_events, events.current_weight_version, len(req.output_ids)
        )
