"""Sampling of tokens in all engines: a token depends on its request's seed and its index only.

The embedded engine and the plug-ins of SGLang and vLLM call these functions. They run in the
servers' environments, so this module imports nothing of ours. No function waits for a GPU, and
none makes a tensor of 8 bytes per token of the vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import ArrayLike
from torch import Tensor

BLOCK = 1024
"""Tokens whose weights are summed in float32. A smaller vocabulary is one block."""

FLOAT_BITS = 31
"""Bits of a float32 without its sign."""
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
"""Factors of splitmix64. Signed integers of arrays and tensors wrap exactly as unsigned ones."""
_UNIT = 2.0**-53
MOST = 1 - _UNIT
"""The largest float64 below 1."""

_Integers = TypeVar("_Integers", npt.NDArray[np.int64], Tensor)


def on_device(values: ArrayLike, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy values from the host to `device`, without waiting until it has done its work."""
    on_host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    return on_host.to(device, non_blocking=True)


def streams(seeds: Sequence[int], starts: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the state of splitmix64 from which the random numbers of each request follow.

    Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators".

    Args:
        seeds: of the requests, 0 to 2**64 - 1.
        starts: the number that `uniforms` gets for the first token of each response.

    Returns:
        int64 [B].
    """
    state_B = _mix(np.array(seeds, np.uint64).view(np.int64) + _GAMMA)
    return state_B + (1 - np.array(starts, np.int64)) * _GAMMA


def uniforms(streams_B: Tensor, numbers_B: Tensor) -> Tensor:
    """Return a random number in [0, 1) for a token of each request.

    Where the host knows the numbers, `uniforms_on_device` is faster.

    Args:
        streams_B: `streams`, int64 [B].
        numbers_B: numbers of the tokens, counted from the request's `starts`, integers [B].

    Returns:
        float64 [B].
    """
    if streams_B.is_cuda:
        bits_B = _kernel()(streams_B, numbers_B)
    else:
        bits_B = _shift(_mix(torch.add(streams_B, numbers_B, alpha=_GAMMA)), 11)
    # The product is float64 at once, because the factor is a tensor of that type.
    return bits_B * torch.scalar_tensor(_UNIT, dtype=torch.float64)


def uniforms_on_device(
    streams_B: npt.NDArray[np.int64], numbers: Sequence[int], device: torch.device
) -> Tensor:
    """Return what `uniforms` returns, computed by the host: one copy and no kernel."""
    state_B = streams_B + np.array(numbers, np.int64) * _GAMMA
    return on_device(_shift(_mix(state_B), 11) * _UNIT, torch.float64, device)


def sample(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Return the tokens at which the cumulative weights pass the random numbers, int64 [B].

    The number chooses a block of the vocabulary first, then a token of that block. Within a block,
    sums are in float64. The weight of a block is a sum in float32, so the probability of a token is
    wrong by about 1e-7 of it, as the float32 probabilities themselves are.

    A GPU ends most kernels before the host has launched the next one, so their number decides the
    time (bounded in tests/unit/inference/test_samplers_never_wait.py).

    Args:
        weights_BV: probabilities, or multiples of them, float32 [B, V]. Not all of a row are 0.
        uniforms_B: random numbers in [0, 1), float64 [B].
    """
    rows, vocabulary = weights_BV.shape
    blocks = vocabulary // BLOCK
    whole = blocks * BLOCK
    columns = blocks + 2
    # 0, the weights of the whole blocks, and that of the rest.
    blocks_BC = weights_BV.new_zeros(rows, columns)
    torch.sum(weights_BV[:, :whole].view(rows, blocks, BLOCK), -1, out=blocks_BC[:, 1:-1])
    torch.sum(weights_BV[:, whole:], -1, out=blocks_BC[:, -1])
    # With one element more at both ends, a view has the sums before and after each block in pairs.
    flat = weights_BV.new_empty(rows * columns + 2, dtype=torch.float64)
    sums_BC = flat[1:-1].view(rows, columns)
    torch.cumsum(blocks_BC, -1, dtype=torch.float64, out=sums_BC)
    pairs_BC2 = flat.as_strided((rows, columns + 1, 2), (columns, 1, 1))
    # Below the total, also after rounding, because a random number is at most `MOST`.
    passed_B1 = uniforms_B[:, None] * sums_BC[:, -1:]
    after_B1 = torch.searchsorted(sums_BC, passed_B1, right=True)
    sums_B12 = pairs_BC2.gather(1, after_B1[:, :, None].expand(-1, -1, 2))
    before_B1, until_B1 = sums_B12.unbind(-1)
    share_B1 = ((passed_B1 - before_B1) / (until_B1 - before_B1)).clamp_(max=MOST)

    width = min(BLOCK, vocabulary)
    offsets_W = torch.arange(-BLOCK, width - BLOCK, device=weights_BV.device)
    tokens_BW = torch.add(offsets_W, after_B1, alpha=BLOCK)
    # A row of NaN passes nowhere. An index beyond the vocabulary would end the server.
    known_BW = tokens_BW.clamp(max=vocabulary - 1)
    # As float64, the mask turns its product with the weights into float64.
    mask_BW = torch.empty_like(tokens_BW, dtype=torch.float64)
    torch.lt(tokens_BW, vocabulary, out=mask_BW)
    sums_BW = mask_BW.mul_(weights_BV.gather(-1, known_BW)).cumsum(-1)
    number_B1 = torch.searchsorted(sums_BW, share_B1 * sums_BW[:, -1:], right=True)
    return known_BW.gather(-1, number_B1.clamp_(max=width - 1))[:, 0]


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
    # Floats of one sign have the order of their bits. A token of the weight `fits_B1` may stay,
    # one of the weight `low_B1` may not.
    fits_B1 = weights_BV.amax(-1, keepdim=True).view(torch.int32)
    low_B1 = torch.full_like(fits_B1, -1)
    for _ in range(FLOAT_BITS):
        middle_B1 = fits_B1 - (fits_B1 - low_B1).bitwise_right_shift_(1)
        torch.gt(weights_BV, middle_B1.view(torch.float32), out=above_BV)
        conditions = []
        if top_k is not None:
            conditions.append(above_BV.sum(-1, keepdim=True) < top_k[:, None])
        if top_p is not None:
            conditions.append(above_BV.mul_(weights_BV).sum(-1, keepdim=True) < mass_B1)
        may_stay_B1 = functools.reduce(torch.bitwise_and, conditions)
        fits_B1 = middle_B1.where(may_stay_B1, fits_B1)
        low_B1 = low_B1.where(may_stay_B1, middle_B1)
    lowest_B1 = fits_B1.view(torch.float32)
    torch.gt(weights_BV, lowest_B1, out=above_BV)
    counts = []
    if top_k is not None:
        counts.append(top_k[:, None] - above_BV.sum(-1, keepdim=True))
    if top_p is not None:
        left_B1 = mass_B1 - above_BV.mul_(weights_BV).sum(-1, keepdim=True)
        counts.append((left_B1 / lowest_B1).ceil())
    equal_BV = weights_BV == lowest_B1
    first_BV = equal_BV.cumsum(-1, dtype=torch.int32) <= torch.stack(counts).amin(0)
    return (weights_BV > lowest_B1) | (equal_BV & first_BV)


def _mix(state_B: _Integers) -> _Integers:
    """Return the finalizer of splitmix64 of each state."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        state_B = (state_B ^ _shift(state_B, shift)) * factor
    return state_B ^ _shift(state_B, 31)


def _shift(state_B: _Integers, bits: int) -> _Integers:
    """Shift right and fill with zeros, where `>>` copies the sign."""
    return (state_B >> bits) & ((1 << 64 - bits) - 1)


@functools.cache
def _kernel() -> Callable[[Tensor, Tensor], Tensor]:
    """Return the integers of `uniforms` as one kernel. PyTorch's operations would be 14 of them.

    NVRTC, which comes with PyTorch, compiles it at the first call.
    """
    first, second = (f"{factor % 2**64:#x}ull" for factor in _FACTORS)
    code = f"""
    template <typename T> T splitmix64(T stream, T number) {{
        unsigned long long state = stream + number * {_GAMMA % 2**64:#x}ull;
        state = (state ^ state >> 30) * {first};
        state = (state ^ state >> 27) * {second};
        return (state ^ state >> 31) >> 11;
    }}"""
    made: Callable[[Tensor, Tensor], Tensor] = torch.cuda.jiterator._create_jit_fn(code)
    return made
