"""Samples split into micro-batches within a token budget, padded or packed.

Micro-batches hold samples of similar length. Right padding under causal attention needs no mask,
because a token never attends to its right. It is therefore exact and can use the fastest attention
kernel. Sorting by length keeps the padding small. Packing fills the rest of a row with shorter
sequences. Packed rows are never longer than the longest sequence, so attention costs no more than
with padding.

The samples of a group begin with the same prompt. `shared` computes it once: the first sample is
whole, and the others continue its first tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agenticrun_workers.algorithms.losses import StepTotals
from agenticrun_workers.trainer.ranks import Ranks
from agenticrun_workers.trainer.samples import Sample
from agenticrun_workers.types import IntArray

Positions = NDArray[np.intp]
Place = tuple[int, int]
"""Row of a sample and its first column."""
Bounds = tuple[tuple[int, int, int], ...]
"""Row, start and end of each sequence in a micro-batch."""
Prefixes = Mapping[int, tuple[int, int]]
"""Sequences that continue the first tokens of another one in their row, by first column: the first
column of the other one, and the number of tokens."""
SHORTEST_SHARED = 16
"""Fewest first tokens that are computed once."""
LARGEST_FAMILY = 64
"""Most samples that share them. More would save little, and the search for the best division takes
this many looks for each sample."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B rows of T tokens, and the N selected tokens in them, ordered by sample and position."""

    samples: list[int]
    """Indices into the list of samples that was split."""
    positions: list[Positions]
    """Selected positions of each sample; position t is about predicting the sample's token t."""
    ids_BT: Tensor
    position_ids_BT: Tensor | None
    """Position ids that restart with each sequence of a packed row; None: one sequence per row."""
    prefixes: Prefixes
    """Empty if there is more than one row."""
    bounds: Bounds
    """Sequences of packed rows; otherwise each row, padding included."""
    spans: Bounds
    """Sequences without padding."""
    rows_N: Tensor
    columns_N: Tensor
    """Column of the token before each selected one, where the prediction is read."""
    targets_N: Tensor
    """The selected tokens; 0 for the position after a sample's last token."""
    sequence_N: Tensor
    """Index into `samples`."""
    used: int
    """Number of tokens that are not padding."""

    @property
    def real_BT(self) -> Tensor:
        """Number of samples that have each token, 0 for padding, in float64."""
        real_BT = np.zeros(tuple(self.ids_BT.shape))
        for row, start, end in self.spans:
            real_BT[row, start:end] = 1
        for first, count in self.prefixes.values():
            real_BT[0, first : first + count] += 1
        return torch.from_numpy(real_BT).to(self.ids_BT.device)

    def pick(self, samples: list[Sample], name: str, dtype: torch.dtype) -> Tensor:
        """Return one value per selected token, [N], from the array `name` of the samples.

        Args:
            samples: the list that was split.
            name: attribute of `Sample`.
            dtype: of the result.

        Raises:
            ValueError: a sample has no such array.
        """
        parts: list[NDArray[Any]] = [np.zeros(0)]
        for number, chosen in zip(self.samples, self.positions, strict=True):
            values_T: NDArray[Any] | None = getattr(samples[number], name)
            if values_T is None:
                raise ValueError(f"sample {number} lacks {name}, which the loss reads")
            parts.append(values_T[chosen])
        return torch.from_numpy(np.concatenate(parts, dtype=np.float64)).to(
            self.ids_BT.device, dtype
        )

    def put(self, values_N: Tensor, into: Sequence[NDArray[np.float32]]) -> None:
        """Write one value per selected token into the arrays of the samples.

        Args:
            values_N: the values.
            into: one array per sample of the list that was split, in its order.
        """
        sizes = [len(chosen) for chosen in self.positions]
        for sample, chosen, part in zip(
            self.samples, self.positions, torch.split(values_N.float().cpu(), sizes), strict=True
        ):
            into[sample][chosen] = part.numpy()


class MicroBatcher:
    """Splits the samples of an optimizer step into micro-batches. All methods are collective.

    Args:
        ranks: all of the trainer.
        device: of the micro-batches.
        max_tokens: tokens of one micro-batch, padding included.
        packed: several sequences in a row.
        shared: equal first tokens once.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        max_tokens: int,
        *,
        packed: bool,
        shared: bool = False,
    ) -> None:
        self.device = device
        self.packed = packed
        self._shared = shared
        self._ranks = ranks
        self._max_tokens = max_tokens

    def split(
        self, samples: list[Sample], select: Callable[[Sample], Positions]
    ) -> list[MicroBatch]:
        """Return this rank's micro-batches.

        All ranks return the same number: the largest that any of them needs.
        """
        batches = split(
            samples,
            select,
            self._max_tokens,
            self.device,
            packed=self.packed,
            shared=self._shared,
        )
        most = int(self._ranks.max([float(len(batches))])[0])
        return batches + [filler(self.device)] * (most - len(batches))

    def totals(self, samples: list[Sample]) -> StepTotals:
        """Return the denominators of an optimizer step on all ranks' samples."""
        weights = [float(sample.weight_T[1:].sum(dtype=np.float64)) for sample in samples]
        weight, sequences = self._ranks.sum([sum(weights), float(sum(w > 0 for w in weights))])
        return StepTotals(weight, sequences)

    def balance(self, batches: list[MicroBatch]) -> dict[str, float]:
        """Return the share of padding, and the largest load of a rank divided by the mean."""
        mine = float(sum(batch.used for batch in batches))
        used, computed = self._ranks.sum(
            [mine, float(sum(batch.ids_BT.numel() for batch in batches))]
        )
        [fullest] = self._ranks.max([mine])
        return {
            "train/padding_waste": 1 - used / computed if computed else 0.0,
            "train/token_imbalance": fullest * self._ranks.data_size / used if used else 1.0,
        }


def weighted(sample: Sample) -> Positions:
    """Return the positions that a loss reads; the first token has no prediction."""
    return np.flatnonzero(sample.weight_T[1:]) + 1


def responses(sample: Sample) -> Positions:
    """Return the positions of response tokens."""
    return np.flatnonzero(sample.turns_T[1:] >= 0) + 1


def responses_and_end(sample: Sample) -> Positions:
    """Return the positions of response tokens, and the one after the last token."""
    return np.append(responses(sample), len(sample.tokens_T))


def split(
    samples: list[Sample],
    select: Callable[[Sample], Positions],
    max_tokens: int,
    device: torch.device,
    *,
    packed: bool = False,
    shared: bool = False,
) -> list[MicroBatch]:
    """Split samples into micro-batches; each sample is in one of them.

    Samples without selected tokens are left out, and so are tokens after the last one that a
    prediction needs.

    Args:
        samples: to split.
        select: positions of a sample to predict.
        max_tokens: of a micro-batch, padding included. A longer sample has a micro-batch of its
            own.
        device: of the micro-batches.
        packed: put several sequences in a row.
        shared: compute equal first tokens once, if that saves much.
    """
    chosen = {i: positions for i, sample in enumerate(samples) if len(positions := select(sample))}
    lengths = {i: int(positions[-1]) for i, positions in chosen.items()}
    families = _families(samples, lengths, max_tokens) if shared else []
    if 0 < len(families) < len(lengths):
        return [
            _lay_out(samples, chosen, places, device, True, common)
            for places, common in _share(families, lengths, max_tokens)
        ]
    layouts = _pack(lengths, max_tokens) if packed else _pad(lengths, max_tokens)
    return [_lay_out(samples, chosen, places, device, packed, {}) for places in layouts]


def filler(device: torch.device) -> MicroBatch:
    """Return a micro-batch without selected tokens.

    Ranks with fewer micro-batches than others use it, so that all run the same number.
    """
    nothing = torch.zeros(0, dtype=torch.long, device=device)
    return MicroBatch(
        [],
        [],
        torch.zeros(1, 1, dtype=torch.long, device=device),
        None,
        {},
        ((0, 0, 1),),
        (),
        nothing,
        nothing,
        nothing,
        nothing,
        0,
    )


def _pad(lengths: dict[int, int], max_tokens: int) -> list[dict[int, Place]]:
    batches: list[dict[int, Place]] = []
    for i in sorted(lengths, key=lambda i: (lengths[i], i)):
        if not batches or (len(batches[-1]) + 1) * lengths[i] > max_tokens:
            batches.append({})
        batches[-1][i] = (len(batches[-1]), 0)
    return batches


def _pack(lengths: dict[int, int], max_tokens: int) -> list[dict[int, Place]]:
    """Place sequences first fit, longest first, into rows as long as the longest one."""
    batches: list[dict[int, Place]] = []
    waiting = sorted(lengths, key=lambda i: (-lengths[i], i))
    while waiting:
        width = lengths[waiting[0]]
        most_rows = max(1, max_tokens // width)
        places: dict[int, Place] = {}
        ends: list[int] = []
        for i in waiting:
            row = next(
                (row for row, end in enumerate(ends) if end + lengths[i] <= width), len(ends)
            )
            if row == len(ends):
                if row == most_rows:
                    continue
                ends.append(0)
            places[i] = (row, ends[row])
            ends[row] += lengths[i]
        batches.append(places)
        waiting = [i for i in waiting if i not in places]
    return batches


def _families(
    samples: list[Sample], lengths: dict[int, int], max_tokens: int
) -> list[tuple[list[int], int]]:
    """Divide samples into families, and return how many first tokens all of a family have.

    The division saves the most tokens. A family fits into a micro-batch.
    """
    order = sorted(lengths, key=lambda i: samples[i].tokens_T[: lengths[i]].tobytes())
    common = [
        _common(samples[a].tokens_T[: lengths[a] - 1], samples[b].tokens_T[: lengths[b] - 1])
        for a, b in pairwise(order)
    ]
    best: list[tuple[int, int, int]] = [(0, 0, 0)]
    """Saved tokens of the first samples, and where their last family begins and what it shares."""
    for end in range(1, len(order) + 1):
        longest = tokens = shortest = lengths[order[end - 1]]
        options = [(best[end - 1][0], end - 1, 0)]
        for begin in range(end - 2, max(-1, end - 1 - LARGEST_FAMILY), -1):
            shortest = min(shortest, common[begin])
            longest = max(longest, lengths[order[begin]])
            tokens += lengths[order[begin]]
            saved = shortest * (end - begin - 1)
            # After a short prefix, attention with a mask would cost more than what is saved.
            if shortest < max(SHORTEST_SHARED, longest / 3) or tokens - saved > max_tokens:
                break
            options.append((best[begin][0] + saved, begin, shortest))
        best.append(max(options))
    families = []
    end = len(order)
    while end:
        _, begin, shared = best[end]
        families.append((order[begin:end], shared))
        end = begin
    return families


def _common(a_T: IntArray, b_T: IntArray) -> int:
    """Return how many first tokens are equal."""
    length = min(len(a_T), len(b_T))
    return int(np.argmin(np.append(a_T[:length] == b_T[:length], False)))


def _share(
    families: list[tuple[list[int], int]], lengths: dict[int, int], max_tokens: int
) -> list[tuple[dict[int, Place], dict[int, tuple[int, int]]]]:
    """Place families one after another into a row per micro-batch.

    Returns:
        places, and for each sample but the first of its family: the column of the first one, and
        the number of tokens that it has there.
    """
    batches: list[tuple[dict[int, Place], dict[int, tuple[int, int]]]] = []
    end = max_tokens
    for family, shared in families:
        tokens = sum(lengths[i] for i in family) - shared * (len(family) - 1)
        if end + tokens > max_tokens:
            batches.append(({}, {}))
            end = 0
        places, prefixes = batches[-1]
        first, skipped = end, 0
        for i in family:
            places[i] = (0, end)
            if skipped:
                prefixes[i] = (first, skipped)
            end += lengths[i] - skipped
            skipped = shared
    return batches


def _lay_out(
    samples: list[Sample],
    chosen: dict[int, Positions],
    places: dict[int, Place],
    device: torch.device,
    packed: bool,
    prefixes: dict[int, tuple[int, int]],
) -> MicroBatch:
    order = sorted(places)
    lengths = [int(chosen[i][-1]) for i in order]
    skipped = [prefixes.get(i, (0, 0)) for i in order]
    spans = tuple(
        (row, start, start + length - count)
        for (row, start), length, (_, count) in zip(
            (places[i] for i in order), lengths, skipped, strict=True
        )
    )
    shape = (1 + max(row for row, _, _ in spans), max(end for _, _, end in spans))
    ids_BT = np.zeros(shape, np.int64)
    position_ids_BT = np.tile(np.arange(shape[1]), (shape[0], 1))
    columns = []
    for i, length, (row, start, end), (first, count) in zip(
        order, lengths, spans, skipped, strict=True
    ):
        ids_BT[row, start:end] = samples[i].tokens_T[count:length]
        position_ids_BT[row, start:end] = np.arange(count, length)
        before = chosen[i] - 1
        columns.append(before + np.where(before < count, first, start - count))
    bounds = spans if packed else tuple((row, 0, shape[1]) for row in range(shape[0]))
    counts = [len(chosen[i]) for i in order]
    rows_N = np.repeat([places[i][0] for i in order], counts)
    columns_N = np.concatenate(columns)
    targets_N = np.concatenate([np.append(samples[i].tokens_T, 0)[chosen[i]] for i in order])

    def to(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device)

    return MicroBatch(
        order,
        [chosen[i] for i in order],
        to(ids_BT),
        to(position_ids_BT) if packed else None,
        {places[i][1]: prefix for i, prefix in prefixes.items()},
        bounds,
        spans,
        to(rows_N),
        to(columns_N),
        to(targets_N),
        to(np.repeat(np.arange(len(order)), counts)),
        sum(end - start for _, start, end in spans),
    )
