"""Definition of the sampling of all engines, one operation at a time.

The product does the same with fewer kernels, and must return the same bits. It shares no code with
this module.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1024
FLOAT_BITS = 31
GAMMA = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MASK = 2**64 - 1


def uniform(seed: int, index: int) -> float:
    """Return the random number of a token: splitmix64, as in `java.util.SplittableRandom`."""
    return (_mix(_mix(seed + GAMMA & MASK) + (index + 1) * GAMMA & MASK) >> 11) * 2.0**-53


def _mix(state: int) -> int:
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        state = (state ^ state >> shift) * factor & MASK
    return state ^ state >> 31


def sample(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Return the tokens at which the cumulative weights pass the random numbers, int64 [B].

    The number chooses a block of the vocabulary first, then a token of that block. Within a block,
    sums are in float64. The weight of a block is a sum in float32, so the probability of a token is
    wrong by about 1e-7 of it, as the float32 probabilities themselves are.

    Args:
        weights_BV: probabilities, or multiples of them, float32 [B, V]. Not all of a row are 0.
        uniforms_B: random numbers in [0, 1), float64 [B].
    """
    vocabulary = weights_BV.shape[-1]
    blocks = vocabulary // BLOCK
    whole = blocks * BLOCK
    blocks_BC = torch.cat(
        [
            weights_BV[:, :whole].reshape(len(weights_BV), blocks, BLOCK).sum(-1),
            weights_BV[:, whole:].sum(-1, keepdim=True),
        ],
        dim=-1,
    )
    block_B1, shares_B1 = _pass(blocks_BC, uniforms_B[:, None])
    width = min(BLOCK, vocabulary)
    tokens_BW = block_B1 * BLOCK + torch.arange(width, device=weights_BV.device)
    inside_BW = weights_BV.gather(-1, tokens_BW.clamp(max=vocabulary - 1))
    inside_BW = inside_BW.where(tokens_BW < vocabulary, 0)
    number_B1, _ = _pass(inside_BW, shares_B1)
    # A row of NaN passes nowhere. An index beyond the vocabulary would end the server.
    return (block_B1 * BLOCK + number_B1)[:, 0].clamp(max=vocabulary - 1)


def truncate(
    weights_BV: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """Return the weights with those of the tokens outside top_k, top_p and min_p set to 0.

    A token stays if it is among the k most likely, if the more likely ones have less than p of the
    mass, and if it has at least min_p of the weight of the most likely one. Of equal weights, the
    first count as the more likely ones.

    The smallest weight that stays is found by bisection over the bits of its float32, without a
    sort of the vocabulary.

    Args:
        weights_BV: probabilities, or multiples of them, float32 [B, V].
        top_k: of each row, integers [B]; None if no row has it. A row without it has V or more.
        top_p: of each row, float32 [B]; None if no row has it.
        min_p: of each row, float32 [B]; None if no row has it.

    Returns:
        float32 [B, V].
    """
    keep_BV = None
    if top_k is not None or top_p is not None:
        keep_BV = _most_likely(weights_BV, top_k, top_p)
    if min_p is not None:
        likely_BV = weights_BV >= min_p[:, None] * weights_BV.amax(-1, keepdim=True)
        keep_BV = likely_BV if keep_BV is None else keep_BV & likely_BV
    return weights_BV if keep_BV is None else weights_BV.where(keep_BV, 0)


def _most_likely(weights_BV: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Return True for the tokens that top_k and top_p leave, bool [B, V]."""
    if top_p is not None:
        totals_B = weights_BV.sum(-1)
        # Sums are rounded, and without top_p no token may be lost for it.
        mass_B1 = (top_p * totals_B).where(top_p < 1, torch.inf)[:, None]

    above_BV = torch.empty_like(weights_BV)

    def room(weight_B1: Tensor) -> Tensor:
        """Return how many tokens of this weight may stay, [B, 1]: none, or less, if it is low."""
        torch.gt(weights_BV, weight_B1, out=above_BV)
        counts = []
        if top_k is not None:
            counts.append(top_k[:, None] - above_BV.sum(-1, keepdim=True))
        if top_p is not None:
            left_B1 = mass_B1 - above_BV.mul_(weights_BV).sum(-1, keepdim=True)
            counts.append((left_B1 / weight_B1).ceil())
        return torch.stack(counts).amin(0)

    # Floats of one sign have the order of their bits.
    high_B1 = weights_BV.amax(-1, keepdim=True).view(torch.int32)
    low_B1 = torch.zeros_like(high_B1)
    for _ in range(FLOAT_BITS):
        middle_B1 = low_B1 + (high_B1 - low_B1) // 2
        fits_B1 = room(middle_B1.view(torch.float32)) > 0
        low_B1 = low_B1.where(fits_B1, middle_B1 + 1)
        high_B1 = middle_B1.where(fits_B1, high_B1)
    lowest_B1 = high_B1.view(torch.float32)
    equal_BV = weights_BV == lowest_B1
    first_BV = equal_BV.cumsum(-1, dtype=torch.int32) <= room(lowest_B1)
    return (weights_BV > lowest_B1) | (equal_BV & first_BV)


def _pass(weights_BN: Tensor, shares_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number at which the cumulative weights pass a share of their sum, int64 [B, 1].

    Also return how much of its own weight the share has passed, float64 [B, 1].
    """
    sums_BM = torch.nn.functional.pad(weights_BN.double().cumsum(-1), (1, 0))
    total_B1 = sums_BM[:, -1:]
    # Below the total, or rounding would choose what follows the last weight above 0.
    passed_B1 = torch.minimum(shares_B1 * total_B1, total_B1.nextafter(torch.zeros_like(total_B1)))
    last = weights_BN.shape[-1] - 1
    number_B1 = torch.searchsorted(sums_BM[:, 1:].contiguous(), passed_B1, right=True)
    number_B1 = number_B1.clamp(max=last)  # of NaN
    before_B1, after_B1 = sums_BM.gather(-1, number_B1), sums_BM.gather(-1, number_B1 + 1)
    return number_B1, (passed_B1 - before_B1) / (after_B1 - before_B1)
