"""Requests in flight, the keys and values that they compute with, and a forward pass over them.

A session (trajectory) keeps a slot of one large cache between its turns (`SessionCaches`), or each
request has a cache of its own (`PrivateCaches`). `Forward` computes all pending tokens of a batch
and samples one token for each request.

Random numbers come from a counter (splitmix64 over the request's seed and the token's index), so a
response depends on its request alone: not on its neighbours in the batch, not on the time at which
it joined, not on pauses.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from agenticrun_workers.inference.engine import SampledTokens
from agenticrun_workers.models.heads import split_model
from agenticrun_workers.types import (
    FinishReason,
    Generation,
    GenerationRequest,
    IntArray,
    SamplingParams,
)


class SlotCache(Cache):  # type: ignore[misc]
    """Keys and values of many sessions, which a transformers model reads and writes in batches.

    Each layer stores [slots, length, heads, head size]; `select` chooses the slots and positions of
    the next forward pass. The storage grows for a longer sequence or a higher slot. Positions
    beyond a slot's own length hold garbage, which the attention mask hides, so padding may be
    written there.

    Args:
        slots: initial number of slots.
    """

    def __init__(self, slots: int = 16) -> None:
        super().__init__(layers=[])
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._slots = slots
        self._length = 64

    def select(self, slots_B: Tensor, starts_B: Tensor, width: int, visible: int) -> None:
        """Choose the slots and positions of the next forward pass.

        Args:
            slots_B: slot of each row, int64 [B], ascending.
            starts_B: number of positions that each slot holds already, int64 [B].
            width: number of tokens that each row adds from there.
            visible: number of positions that attention sees.
        """
        self._slots = _at_least(self._slots, int(slots_B[-1]) + 1)
        self._length = _at_least(self._length, visible)
        positions_BQ = starts_B[:, None] + torch.arange(width, device=slots_B.device)
        self._write_at = (slots_B[:, None] * self._length + positions_BQ).flatten()
        self._visible = visible
        first, last = int(slots_B[0]), int(slots_B[-1])
        self._range = (first, last + 1) if last - first + 1 == len(slots_B) else None
        self._rows = slots_B
        self._starts_B = starts_B

    def get_query_offset(self, layer_idx: int = 0) -> Tensor:  # noqa: ARG002
        """Return the position of each row's first new token, int64 [B]. See `_mask_rows`."""
        return self._starts_B

    def get_mask_sizes(
        self,
        query_length: int,  # noqa: ARG002
        layer_idx: int,  # noqa: ARG002
    ) -> tuple[int, int]:
        """Return the number of keys that attention sees, and the position of the first."""
        return self._visible, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values and return all visible ones.

        Args:
            key_states: [B, heads, Q, head size].
            value_states: [B, heads, Q, head size].
            layer_idx: index of the layer.

        Returns:
            keys and values, [B, heads, visible, head size].
        """
        if layer_idx == len(self._keys):
            _, heads, _, size = key_states.shape
            self._keys.append(key_states.new_zeros(0, 0, heads, size))
            self._values.append(value_states.new_zeros(0, 0, heads, value_states.shape[-1]))
        return (
            self._exchange(self._keys, layer_idx, key_states),
            self._exchange(self._values, layer_idx, value_states),
        )

    def _exchange(self, store: list[Tensor], layer: int, states: Tensor) -> Tensor:
        held = store[layer]
        if held.shape[:2] != (self._slots, self._length):
            grown = held.new_zeros(self._slots, self._length, *held.shape[2:])
            grown[: held.shape[0], : held.shape[1]] = held
            store[layer] = held = grown
        held.flatten(0, 1).index_copy_(0, self._write_at, states.transpose(1, 2).flatten(0, 1))
        rows = held[self._range[0] : self._range[1]] if self._range else held[self._rows]
        return rows[:, : self._visible].transpose(1, 2)


@dataclass
class RunningRequest:
    """A request in flight and the tokens sampled for it so far."""

    request: GenerationRequest
    done: asyncio.Future[Generation]
    session: str
    cache: SlotCache | None = None
    """Holds its keys and values. None until the request is admitted."""
    slot: int = -1
    cached: int = 0
    """Leading tokens of `context_T` whose keys and values the slot holds."""
    sampled: SampledTokens = field(default_factory=SampledTokens)

    @property
    def context_T(self) -> IntArray:
        sampled_T = np.asarray(self.sampled.tokens, np.int32)
        return np.concatenate([self.request.prompt_tokens, sampled_T])

    @property
    def pending(self) -> int:
        """Number of tokens to compute before the next one can be sampled."""
        return len(self.request.prompt_tokens) + len(self.sampled) - self.cached

    @property
    def pending_T(self) -> IntArray:
        """The tokens to compute, without a copy of the whole context."""
        prompt = len(self.request.prompt_tokens)
        sampled_T = np.asarray(self.sampled.tokens[max(0, self.cached - prompt) :], np.int32)
        return np.concatenate([self.request.prompt_tokens[self.cached :], sampled_T])

    def restart(self) -> int:
        """Drop the sampled tokens and return their number."""
        count, self.sampled = len(self.sampled), SampledTokens()
        return count

    def finish(self, reason: FinishReason) -> None:
        if not self.done.done():
            self.done.set_result(self.sampled.response(reason))


class Caches(Protocol):
    """Assigns caches to requests."""

    def open(self, running: RunningRequest) -> None:
        """Set `cache`, `slot` and `cached` of a new request."""
        ...

    def close(self, running: RunningRequest) -> None:
        """Release the cache of a finished request."""
        ...

    def invalidate(self) -> None:
        """Drop all keys and values: the weights have changed."""
        ...


@dataclass
class _Session:
    """A slot of the cache, and the tokens for which it holds keys and values."""

    slot: int
    cached_T: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    busy: bool = False


class SessionCaches:
    """Slots of one cache. A session keeps its slot until another needs it (LRU)."""

    def __init__(self, slots: int) -> None:
        self._cache = SlotCache()
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._free_slots = list(range(slots - 1, -1, -1))

    def open(self, running: RunningRequest) -> None:
        """See `Caches`. A second request of a busy session gets a slot of its own."""
        if running.session in self._sessions and self._sessions[running.session].busy:
            running.session = running.request.request_id
        session = self._sessions.get(running.session)
        if session is None:
            session = self._sessions[running.session] = _Session(self._take_slot())
        session.busy = True
        self._sessions.move_to_end(running.session)
        prompt_T = running.request.prompt_tokens
        running.cache = self._cache
        running.slot = session.slot
        running.cached = min(_common_prefix(session.cached_T, prompt_T), len(prompt_T) - 1)

    def close(self, running: RunningRequest) -> None:
        """See `Caches`. The session keeps its keys and values."""
        session = self._sessions[running.session]
        session.busy = False
        session.cached_T = running.context_T[: running.cached]

    def invalidate(self) -> None:
        """See `Caches`."""
        for session in self._sessions.values():
            session.cached_T = session.cached_T[:0]

    def _take_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        oldest = next(name for name, session in self._sessions.items() if not session.busy)
        return self._sessions.pop(oldest).slot


class PrivateCaches:
    """A new cache for each request: shapes, strides and alignment depend on that request alone.

    A prefix from an earlier turn would save work. But then evictions and the choice of the engine
    would decide whether a prompt is computed in one piece or in two, and floating point sums of the
    two differ in their last bits.
    """

    def open(self, running: RunningRequest) -> None:
        """See `Caches`."""
        running.cache, running.slot, running.cached = SlotCache(slots=1), 0, 0

    def close(self, running: RunningRequest) -> None:
        """See `Caches`."""

    def invalidate(self) -> None:
        """See `Caches`."""


def _common_prefix(a_T: IntArray, b_T: IntArray) -> int:
    length = min(len(a_T), len(b_T))
    different = np.flatnonzero(a_T[:length] != b_T[:length])
    return int(different[0]) if len(different) else length


def _at_least(size: int, needed: int) -> int:
    while size < needed:
        size *= 2
    return size


def _mask_rows(one_start: Callable[..., Any], *, added: bool) -> Callable[..., Any]:
    """Let a mask function of transformers serve rows that start at positions of their own.

    Each model asks for the masks of its layers (causal, sliding window, chunked), which say for
    positions of a query and a key what is seen. Only the step that makes tensors of them assumes
    one start for all rows.

    Args:
        one_start: transformers' own function, called for all caches but `SlotCache`.
        added: the attention adds the mask to its scores, and does not take booleans.
    """

    def make_mask(*, q_offset: int | Tensor = 0, **call: Any) -> Any:
        if not isinstance(q_offset, Tensor) or not q_offset.ndim:
            return one_start(q_offset=q_offset, **call)
        rows_B = torch.arange(len(q_offset), device=q_offset.device)
        width_Q = torch.arange(call["q_length"], device=q_offset.device)
        mask_B1QK = call["mask_function"](
            rows_B[:, None, None, None],
            rows_B[:1],
            (q_offset[:, None] + width_Q)[:, None, :, None],
            torch.arange(call["kv_length"], device=q_offset.device),
        )
        if not added:
            return mask_B1QK
        dtype = call["dtype"]
        return torch.zeros_like(mask_B1QK, dtype=dtype).masked_fill(
            ~mask_B1QK, torch.finfo(dtype).min
        )

    return make_mask


AttentionMaskInterface.register("sdpa", _mask_rows(sdpa_mask, added=False))
AttentionMaskInterface.register("eager", _mask_rows(eager_mask, added=True))


class Forward:
    """Computes with one model.

    Raises:
        UnsupportedModel: it has no decoder and head.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._decoder, self._head = split_model(model)
        self._device = model.device

    @torch.inference_mode()
    def __call__(self, batch: Sequence[RunningRequest]) -> tuple[list[int], list[float]]:
        """Return a token and its log-prob for each request.

        All requests of a batch are in one cache, in ascending order of their slots.
        """
        cache = batch[0].cache
        assert cache is not None
        logits_BV = self.logits(
            cache,
            [running.slot for running in batch],
            [running.cached for running in batch],
            [running.pending_T for running in batch],
        )
        seeds_B = np.array([running.request.seed for running in batch], np.uint64)
        indices_B = np.array(
            [running.request.sampled + len(running.sampled) for running in batch], np.uint64
        )
        sampling = [running.request.sampling for running in batch]
        tokens_B, logprobs_B = sample_tokens(logits_BV, sampling, uniforms(seeds_B, indices_B))
        return tokens_B.tolist(), logprobs_B.tolist()

    @torch.inference_mode()
    def logits(
        self, cache: SlotCache, slots: list[int], cached: list[int], pending: list[IntArray]
    ) -> Tensor:
        """Compute pending tokens, and return the logits after the last one of each row, [B, V].

        Args:
            cache: holds keys and values of the tokens before, and takes the new ones.
            slots: slot of each row, ascending.
            cached: number of tokens that the cache holds of each row.
            pending: the tokens that follow, at least one of each row.
        """
        device = self._device
        pending_B = torch.tensor([len(ids_T) for ids_T in pending])
        starts_B = torch.tensor(cached)
        width = int(pending_B.max())
        ids_BQ = torch.zeros(len(pending), width, dtype=torch.long)
        for row, ids_T in enumerate(pending):
            ids_BQ[row, : len(ids_T)] = torch.from_numpy(ids_T)
        positions_BQ = starts_B[:, None] + torch.arange(width)
        cache.select(
            torch.tensor(slots, device=device),
            starts_B.to(device),
            width,
            int((starts_B + width).max()),
        )
        hidden_BQH = self._decoder(
            input_ids=ids_BQ.to(device),
            position_ids=positions_BQ.to(device),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        last_BH = hidden_BQH[torch.arange(len(pending), device=device), (pending_B - 1).to(device)]
        logits_BV: Tensor = self._head(last_BH)
        return logits_BV

    @torch.inference_mode()
    def plain_logits(self, ids_T: IntArray, ends: list[int]) -> Tensor:
        """Return the logits after the first `ends` tokens, [ends, V], without cache or mask."""
        ids_1T = torch.from_numpy(ids_T).long()[None].to(self._device)
        hidden_TH = self._decoder(input_ids=ids_1T, use_cache=False).last_hidden_state[0]
        logits_EV: Tensor = self._head(hidden_TH[torch.tensor(ends, device=self._device) - 1])
        return logits_EV


_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds_B: NDArray[np.uint64], indices_B: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return one random number in [0, 1) for each (seed, index), float64 [B].

    Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators".
    """
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seeds_B + _GAMMA) + (indices_B + np.uint64(1)) * _GAMMA)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample_tokens(
    logits_BV: Tensor, sampling: list[SamplingParams], uniforms_B: NDArray[np.float64]
) -> tuple[Tensor, Tensor]:
    """Sample a token for each row, independent of the other rows.

    Args:
        logits_BV: [B, V].
        sampling: parameters of each row.
        uniforms_B: random numbers in [0, 1), float64 [B].

    Returns:
        tokens int64 [B], and their log-probs float32 [B]: log_softmax(logits / T) over the full
        vocabulary, regardless of top_k, top_p and min_p. T is `record_temperature`, by default the
        sampling temperature (1 for greedy rows).
    """
    temperatures = [params.temperature or 1.0 for params in sampling]
    logprobs_BV = _log_softmax(logits_BV, temperatures)
    weights_BV = logprobs_BV.double().exp()
    for row, params in enumerate(sampling):
        if params.temperature and (params.top_k or params.top_p < 1 or params.min_p):
            weights_BV[row] = _truncated(weights_BV[row], params)
    sums_BV = weights_BV.cumsum(-1)
    thresholds_B1 = torch.as_tensor(uniforms_B, device=logits_BV.device)[:, None] * sums_BV[:, -1:]
    tokens_B = torch.searchsorted(sums_BV, thresholds_B1, right=True)[:, 0].clamp(
        max=logits_BV.shape[-1] - 1
    )
    greedy = [params.temperature == 0 for params in sampling]
    if any(greedy):
        tokens_B = torch.where(
            torch.tensor(greedy, device=logits_BV.device), logits_BV.argmax(-1), tokens_B
        )
    recorded = [
        params.record_temperature or t for params, t in zip(sampling, temperatures, strict=True)
    ]
    if recorded != temperatures:
        logprobs_BV = _log_softmax(logits_BV, recorded)
    return tokens_B, logprobs_BV.gather(-1, tokens_B[:, None])[:, 0]


def _log_softmax(logits_BV: Tensor, temperatures: list[float]) -> Tensor:
    """Return log_softmax(logits / temperature), float32 [B, V]."""
    scale_B = torch.tensor(temperatures, dtype=torch.float32, device=logits_BV.device)
    return torch.log_softmax(logits_BV.float() / scale_B[:, None], dim=-1)


def _truncated(weights_V: Tensor, params: SamplingParams) -> Tensor:
    """Return the weights with all tokens outside top_k, top_p and min_p set to 0, [V]."""
    ordered_V, order_V = weights_V.sort(descending=True, stable=True)
    keep_V = ordered_V >= params.min_p * ordered_V[0]
    if params.top_k:
        keep_V[params.top_k :] = False
    if params.top_p < 1:
        mass_before_V = (ordered_V.cumsum(-1) - ordered_V) / ordered_V.sum()
        keep_V &= mass_before_V < params.top_p
    return torch.zeros_like(weights_V).scatter(0, order_V, ordered_V * keep_V)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
