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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
from typing_extensions import override

from agenticrun_workers.inference.engine import SampledTokens
from agenticrun_workers.inference.server_path.agenticrun_sampling import (
    on_device,
    sample,
    streams,
    truncate,
    uniforms_on_device,
)
from agenticrun_workers.models.heads import split_model
from agenticrun_workers.types import (
    FinishReason,
    Generation,
    GenerationRequest,
    IntArray,
    SamplingParams,
)


@dataclass(frozen=True)
class _Selection:
    """The slots and positions of a forward pass."""

    rows: slice
    width: int
    """Number of new tokens of each row."""
    visible: int
    """Number of keys that attention sees."""
    starts_B: Tensor
    """Position of each row's first new token, int64."""
    start: int | None
    """The same if it is equal for all rows, else None."""
    write_at: dict[int, Tensor] = field(default_factory=dict)
    """Places of the new tokens in the storage, by number of heads: `SlotCache._flat_positions`."""


class SlotCache(Cache):  # type: ignore[misc]
    """Keys and values of many sessions, which a transformers model reads and writes in batches.

    Each layer stores [slots, heads, length, head size], so attention reads the keys of a head in
    one piece. `select` chooses the slots and positions of the next forward pass. The storage grows
    for a longer sequence or a higher slot. Positions beyond a slot's own length hold garbage, which
    the attention mask hides, so padding may be written there.

    Args:
        max_slots: number of slots.
        max_length: most positions of a slot, without padding.
    """

    def __init__(self, max_slots: int, max_length: int) -> None:
        super().__init__(layers=[])
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._max_slots, self._max_length = max_slots, max_length
        self._slots = self._length = 0
        self._chosen = _Selection(slice(0, 0), 0, 0, torch.zeros(0, dtype=torch.int64), 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return sum(held.nbytes for held in (*self._keys, *self._values))

    def select(self, first: int, starts: Sequence[int], width: int, device: torch.device) -> None:
        """Choose the slots and positions of the next forward pass.

        Args:
            first: slot of the first row. Each other row has the slot after the one before it.
            starts: number of positions that each slot holds already.
            width: number of tokens that each row adds from there.
            device: of the model.
        """
        rows, visible = slice(first, first + len(starts)), max(starts) + width
        # Only the wanted size is set here: each layer grows when it is written next.
        self._slots = _grown(self._slots, rows.stop, self._max_slots)
        self._length = _grown(self._length, visible, self._max_length)
        # One start for all rows is the common case of decoding, which needs neither mask nor index.
        start = starts[0] if min(starts) == max(starts) else None
        self._chosen = _Selection(
            rows, width, visible, on_device(starts, torch.int64, device), start
        )

    def get_query_offset(self, layer_idx: int = 0) -> int | Tensor:  # noqa: ARG002
        """Return the position of each row's first new token: int, or int64 [B]. See `_mask_rows`.

        With an int, transformers leaves out masks that attention can do without.
        """
        return self._chosen.starts_B if self._chosen.start is None else self._chosen.start

    def get_mask_sizes(
        self,
        query_length: int,  # noqa: ARG002
        layer_idx: int,  # noqa: ARG002
    ) -> tuple[int, int]:
        """Return the number of keys that attention sees, and the position of the first."""
        return self._chosen.visible, 0

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
            # The first pass makes the storage, because only the model knows heads and head size.
            for store, states in ((self._keys, key_states), (self._values, value_states)):
                store.append(states.new_zeros(0, states.shape[1], 0, states.shape[3]))
        return (
            self._exchange(self._keys, layer_idx, key_states),
            self._exchange(self._values, layer_idx, value_states),
        )

    @torch.inference_mode()
    def copy(self, source: int, target: int, positions: slice) -> None:
        """Copy keys and values from one slot to another."""
        # The target may lie beyond what has been used so far.
        self._slots = _grown(self._slots, target + 1, self._max_slots)
        for layer in range(len(self._keys)):
            for store in (self._keys, self._values):
                held = self._at_full_size(store, layer)
                held[target, :, positions] = held[source, :, positions]

    @torch.inference_mode()
    def swap(self, one: int, other: int, length: int) -> None:
        """Exchange the first positions of two slots."""
        if not length:
            return
        self._slots = _grown(self._slots, max(one, other) + 1, self._max_slots)
        for layer in range(len(self._keys)):
            for store in (self._keys, self._values):
                held = self._at_full_size(store, layer)
                # A copy, because the next line overwrites what a view would show.
                moved = held[one, :, :length].clone()
                held[one, :, :length] = held[other, :, :length]
                held[other, :, :length] = moved

    def _exchange(self, store: list[Tensor], layer: int, states: Tensor) -> Tensor:
        held, chosen = self._at_full_size(store, layer), self._chosen
        rows = held[chosen.rows]
        if chosen.start is not None:
            rows[:, :, chosen.start : chosen.visible] = states
        else:
            heads, size = states.shape[1], states.shape[3]
            if heads not in chosen.write_at:
                chosen.write_at[heads] = self._flat_positions(heads)
            # index_copy_ is many times faster than index_put_ and scatter_.
            held.view(-1, size).index_copy_(0, chosen.write_at[heads], states.reshape(-1, size))
        return rows[:, :, : chosen.visible]

    def _flat_positions(self, heads: int) -> Tensor:
        """Return where the storage has the new tokens of all rows and heads, int64 [B * H * Q]."""
        chosen = self._chosen
        device = chosen.starts_B.device
        slots_B = torch.arange(chosen.rows.start, chosen.rows.stop, device=device)
        blocks_BH = slots_B[:, None] * heads + torch.arange(heads, device=device)
        positions_BQ = chosen.starts_B[:, None] + torch.arange(chosen.width, device=device)
        return (blocks_BH[:, :, None] * self._length + positions_BQ[:, None]).flatten()

    def _at_full_size(self, store: list[Tensor], layer: int) -> Tensor:
        held = store[layer]
        slots, heads, length, size = held.shape
        # Old positions keep their place, so no session loses its cache when the storage grows.
        if (slots, length) != (self._slots, self._length):
            grown = held.new_zeros(self._slots, heads, self._length, size)
            grown[:slots, :, :length] = held
            store[layer] = held = grown
        return held


@dataclass
class Slot:
    """A row of a cache, and the tokens for which it holds keys and values."""

    cache: SlotCache
    number: int
    cached: int = 0
    """Number of leading tokens with keys and values."""
    idle_T: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    """These tokens, while no request uses the slot."""
    busy: bool = False


@dataclass(eq=False)
class RunningRequest:
    """A request in flight and the tokens sampled for it so far."""

    request: GenerationRequest
    done: asyncio.Future[Generation]
    session: str
    slot: Slot = field(init=False)
    """Holds its keys and values. Set when the request is admitted."""
    sampled: SampledTokens = field(default_factory=SampledTokens)

    @property
    def cached(self) -> int:
        """Leading tokens of `context_T` whose keys and values the slot holds."""
        return self.slot.cached

    @cached.setter
    def cached(self, count: int) -> None:
        self.slot.cached = count

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
        # The caller may have cancelled it while the step was computed.
        if not self.done.done():
            self.done.set_result(self.sampled.response(reason))


@dataclass(frozen=True)
class SharedPrefix:
    """Keys and values that one request computes, or has computed, and another one copies."""

    leader: RunningRequest
    follower: RunningRequest
    start: int
    """First position that is copied."""
    end: int
    """Position after the last one."""

    @property
    def computed(self) -> bool:
        """True if the leader has computed them."""
        return self.leader.cached >= self.end

    def copy(self) -> None:
        source, target = self.leader.slot, self.follower.slot
        source.cache.copy(source.number, target.number, slice(self.start, self.end))


class Caches(Protocol):
    """Assigns slots of caches to requests."""

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that outlive a request."""
        ...

    def open(self, running: RunningRequest) -> None:
        """Set the `slot` of a new request, and how much of the request it holds."""
        ...

    def close(self, running: RunningRequest) -> None:
        """Release the slot of a finished request."""
        ...

    def invalidate(self) -> None:
        """Drop all keys and values: the weights have changed."""
        ...

    def share(self, requests: Iterable[RunningRequest]) -> list[SharedPrefix]:
        """Return what requests copy instead of computing it, and count it as cached."""
        ...

    def arrange(self, batches: Iterable[list[RunningRequest]]) -> None:
        """Give the rows of each batch slots that follow each other, and sort them by slot."""
        ...


class SessionCaches(Caches):
    """Slots of one cache. A session keeps its slot until another needs it (LRU).

    Args:
        slots: number of slots.
        max_length: longest sequence.
    """

    def __init__(self, slots: int, max_length: int) -> None:
        self._cache = SlotCache(slots, max_length)
        self._slots = [Slot(self._cache, number) for number in range(slots)]
        """By number."""
        self._sessions: OrderedDict[str, Slot] = OrderedDict()
        self._free = self._slots[::-1]

    @property
    @override
    def nbytes(self) -> int:
        return self._cache.nbytes

    @override
    def open(self, running: RunningRequest) -> None:
        """A second request of a busy session gets a slot of its own."""
        # Two requests in one slot would overwrite each other's keys and values.
        if running.session in self._sessions and self._sessions[running.session].busy:
            running.session = running.request.request_id
        if running.session not in self._sessions:
            if self._free:
                slot = self._free.pop()
            else:
                oldest = next(name for name, slot in self._sessions.items() if not slot.busy)
                slot = self._sessions.pop(oldest)
                # Its tokens are those of the session that has lost it.
                slot.idle_T = slot.idle_T[:0]
            self._sessions[running.session] = slot
        running.slot = slot = self._sessions[running.session]
        slot.busy = True
        self._sessions.move_to_end(running.session)
        prompt_T = running.request.prompt_tokens
        # Never all of the prompt: the logits after its last token have to be computed.
        slot.cached = min(_common_prefix(slot.idle_T, prompt_T), len(prompt_T) - 1)

    @override
    def close(self, running: RunningRequest) -> None:
        """The session keeps its keys and values."""
        running.slot.busy = False
        # The last sampled token has no keys and values yet, so it is not among them.
        running.slot.idle_T = running.context_T[: running.cached]

    @override
    def invalidate(self) -> None:
        # Free slots, too: a later session must not find keys and values of old weights.
        for slot in self._slots:
            slot.cached, slot.idle_T = 0, slot.idle_T[:0]

    @override
    def share(self, requests: Iterable[RunningRequest]) -> list[SharedPrefix]:
        # The samples of a group have the same prompt. A request waits for another one's forward
        # pass only if that saves at least half of its own work.
        requests = list(requests)
        # Decoding steps end here, so that they pay nothing for prompts.
        if all(running.pending < SHORTEST_SHARED for running in requests):
            return []
        shared: list[SharedPrefix] = []
        leader: RunningRequest | None = None
        # Sorted by the bytes of their tokens, requests with a common prefix are neighbours.
        for running in sorted(
            requests, key=lambda r: (r.request.prompt_tokens.tobytes(), -r.cached)
        ):
            if leader is not None and running.pending >= SHORTEST_SHARED:
                context_T = running.context_T
                end = min(_common_prefix(leader.context_T, context_T), len(context_T) - 1)
                if 2 * (end - running.cached) >= running.pending:
                    shared.append(SharedPrefix(leader, running, running.cached, end))
                    # Counted now; they are copied after the leader's batch of the same step.
                    running.cached = end
                    continue
            leader = running
        return shared

    @override
    def arrange(self, batches: Iterable[list[RunningRequest]]) -> None:
        """Slots of the wrong place are exchanged, so attention reads without gaps."""
        batches = list(batches)
        numbers = [running.slot.number for batch in batches for running in batch]
        # A group that begins has neighbouring slots behind those of idle sessions: it stays there.
        first = min(numbers, default=0)
        if first + len(numbers) > len(self._slots):
            first = 0
        for batch in batches:
            places = range(first, first + len(batch))
            # Slots that no row of this batch has: their sessions are idle and move.
            vacant = set(places) - {running.slot.number for running in batch}
            for running in batch:
                if running.slot.number not in places:
                    self._exchange(running.slot, self._slots[vacant.pop()])
            # Rows and slots must have one order, because a batch is a range of slots.
            batch.sort(key=lambda running: running.slot.number)
            first = places.stop

    def _exchange(self, one: Slot, other: Slot) -> None:
        self._cache.swap(one.number, other.number, max(one.cached, other.cached))
        one.number, other.number = other.number, one.number
        self._slots[one.number], self._slots[other.number] = one, other


class PrivateCaches(Caches):
    """A new cache for each request: shapes, strides and alignment depend on that request alone.

    A prefix from an earlier turn, or of another request, would save work. But then evictions and
    the choice of the engine would decide whether a prompt is computed in one piece or in two, and
    floating point sums of the two differ in their last bits.

    Args:
        max_length: longest sequence.
    """

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length

    nbytes = 0
    """Bytes of the keys and values of sessions: none are kept."""

    @override
    def open(self, running: RunningRequest) -> None:
        running.slot = Slot(SlotCache(1, self._max_length), 0)

    @override
    def close(self, running: RunningRequest) -> None:
        pass

    @override
    def invalidate(self) -> None:
        pass

    @override
    def share(self, requests: Iterable[RunningRequest]) -> list[SharedPrefix]:
        return []

    @override
    def arrange(self, batches: Iterable[list[RunningRequest]]) -> None:
        """Each batch is one request."""


SHORTEST_SHARED = 16
"""Fewest pending tokens with which a request looks for another one to copy from."""


def _common_prefix(a_T: IntArray, b_T: IntArray) -> int:
    length = min(len(a_T), len(b_T))
    different = np.flatnonzero(a_T[:length] != b_T[:length])
    return int(different[0]) if len(different) else length


def _grown(size: int, needed: int, most: int) -> int:
    """Return the next size of a storage, which is copied a few times while it grows bit by bit.

    It is a power of two or three fourths of one, at most `most`, but no less than needed.
    """
    if size >= needed:
        return size
    power = 1 << (needed - 1).bit_length()
    return max(needed, min(most, power if 3 * power // 4 < needed else 3 * power // 4))


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
        # Other caches, and rows with one start, are transformers' own business.
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
        # The least finite number: minus infinity would make NaN of a row that is all padding.
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

        The slots of a batch follow each other in one cache.
        """
        first = batch[0].slot
        logits_BV = self.logits(
            first.cache,
            first.number,
            [running.cached for running in batch],
            [running.pending_T for running in batch],
        )
        streams_B = streams([running.request.seed for running in batch], [0] * len(batch))
        indices = [running.request.sampled + len(running.sampled) for running in batch]
        uniforms_B = uniforms_on_device(streams_B, indices, self._device)
        sampling = [running.request.sampling for running in batch]
        tokens_B, logprobs_B = sample_tokens(logits_BV, sampling, uniforms_B)
        # One copy: the only time that a step waits for the GPU.
        tokens, logprobs = torch.stack([tokens_B.double(), logprobs_B.double()]).tolist()
        return [int(token) for token in tokens], logprobs

    @torch.inference_mode()
    def logits(
        self, cache: SlotCache, first: int, cached: list[int], pending: list[IntArray]
    ) -> Tensor:
        """Compute pending tokens, and return the logits after the last one of each row, [B, V].

        Args:
            cache: holds keys and values of the tokens before, and takes the new ones.
            first: slot of the first row; the other rows follow.
            cached: number of tokens that the cache holds of each row.
            pending: the tokens that follow, at least one of each row.
        """
        device = self._device
        width = max(len(ids_T) for ids_T in pending)
        ids_BQ = np.zeros((len(pending), width), np.int64)
        for row, ids_T in enumerate(pending):
            ids_BQ[row, : len(ids_T)] = ids_T
        positions_BQ = np.array(cached)[:, None] + np.arange(width)
        # Before the decoder, which asks the cache for its masks.
        cache.select(first, cached, width, device)
        hidden_BQH = self._decoder(
            input_ids=on_device(ids_BQ, torch.int64, device),
            position_ids=on_device(positions_BQ, torch.int64, device),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        # Rows are padded at the end, so each has its last token elsewhere.
        last_B = on_device([len(ids_T) - 1 for ids_T in pending], torch.int64, device)
        last_BH = hidden_BQH[torch.arange(len(pending), device=device), last_B]
        logits_BV: Tensor = self._head(last_BH)
        return logits_BV

    @torch.inference_mode()
    def plain_logits(self, ids_T: IntArray, ends: list[int]) -> Tensor:
        """Return the logits after the first `ends` tokens, [ends, V], without cache or mask."""
        ids_1T = torch.from_numpy(ids_T).long()[None].to(self._device)
        hidden_TH = self._decoder(input_ids=ids_1T, use_cache=False).last_hidden_state[0]
        logits_EV: Tensor = self._head(hidden_TH[torch.tensor(ends, device=self._device) - 1])
        return logits_EV


def sample_tokens(
    logits_BV: Tensor, sampling: list[SamplingParams], uniforms_B: Tensor
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
    device, vocabulary = logits_BV.device, logits_BV.shape[-1]

    def column(
        values: list[float], off: float, dtype: torch.dtype = torch.float32
    ) -> Tensor | None:
        return on_device(values, dtype, device) if any(each != off for each in values) else None

    # Greedy rows ignore their weights; 1 only avoids a division by zero.
    temperatures = [params.temperature or 1.0 for params in sampling]
    logprobs_BV = _log_softmax(logits_BV, temperatures)
    weights_BV = truncate(
        logprobs_BV.exp(),
        column([params.top_k or vocabulary for params in sampling], vocabulary, torch.int64),
        column([params.top_p for params in sampling], 1.0),
        column([params.min_p for params in sampling], 0.0),
    )
    tokens_B = sample(weights_BV, uniforms_B)
    greedy_B = column([params.temperature == 0 for params in sampling], False, torch.bool)
    if greedy_B is not None:
        tokens_B = torch.where(greedy_B, logits_BV.argmax(-1), tokens_B)
    recorded = [
        params.record_temperature or t for params, t in zip(sampling, temperatures, strict=True)
    ]
    # Rare, so the second softmax over the vocabulary is paid only then.
    if recorded != temperatures:
        logprobs_BV = _log_softmax(logits_BV, recorded)
    return tokens_B, logprobs_BV.gather(-1, tokens_B[:, None])[:, 0]


def _log_softmax(logits_BV: Tensor, temperatures: list[float]) -> Tensor:
    """Return log_softmax(logits / temperature), float32 [B, V]."""
    if all(temperature == 1 for temperature in temperatures):
        return torch.log_softmax(logits_BV.float(), dim=-1)
    scale_B = on_device(temperatures, torch.float32, logits_BV.device)
    return torch.log_softmax(logits_BV.float() / scale_B[:, None], dim=-1)
