"""Measure how fast and how large a step's credit computation is, relative to copying one tensor.

The tensor has one float32 number per token, and `clone()` copies it in the same run.

    python benchmarks/algorithms.py [--quick] [--json FILE]

1,024 trajectories of 8,192 tokens, 60 % of them responses, in 10 turns; states are raw 32-byte
hashes. Inputs are full arrays with prompts and observations in them. Every case goes through the
product's own functions, allocates its outputs, and is timed in turn with the clone, several times;
figures are ratios of medians. `<case>_growth` is the time per token at four times the trajectories
over that at 1,024: 1 is linear. (Smaller sizes say nothing about that: the allocator then reuses
cached memory, and no page is faulted in.) `<case>_memory` is the peak of the process's memory above
its level before the call (VmHWM, reset through /proc/self/clear_refs), outputs included, in tensors
of that size. `--quick` stops at twice the
trajectories and repeats less: smaller batches would stay in the processor's cache.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from record import write_record

from agenticrun_workers.algorithms import (
    CorrectionSpec,
    CreditSpec,
    Episodes,
    FilterSpec,
    Tokens,
    TokenSpec,
    WeightSpec,
    assign_credit,
    compiled,
    token_advantages,
)

TOKENS, RESPONSES, TURNS, GROUP = 8192, 4915, 10, 8
SIZES = (1024, 2048, 3072, 4096)
LIMITS = {"gae": 6.0, "reinforce": 4.0, "gigpo": 12.0, "correction": 8.0}
MEMORY_LIMIT = 3.0


@dataclass(frozen=True)
class Batch:
    episodes: Episodes
    tokens: Tokens
    tensor: torch.Tensor
    """One number per token: what the clone copies."""


def make_batch(trajectories: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    turns_L = np.concatenate([_turns(rng, n) for n in range(trajectories)])
    cu = np.arange(trajectories + 1, dtype=np.int64) * TOKENS
    size, turns = trajectories * TOKENS, trajectories * TURNS

    def noise(scale: float) -> np.ndarray:
        return scale * rng.standard_normal(size, np.float32)

    old = -np.abs(noise(1.0))
    tokens = Tokens(
        cu,
        cu,
        turns_L,
        np.ones(trajectories, np.bool_),
        old + noise(0.05),
        old,
        old + noise(0.1),
        noise(1.0),
    )
    start_pages = rng.integers(0, 256, (turns // 4, 32), np.uint8)
    episodes = Episodes(
        cu_turns_N1=np.arange(trajectories + 1, dtype=np.int64) * TURNS,
        rewards_K=rng.random(turns),
        invalid_K=rng.random(turns) < 0.05,
        response_tokens_K=np.bincount(turns_L[turns_L >= 0], minlength=turns),
        groups_N=np.arange(trajectories, dtype=np.int64) // GROUP,
        tags_N=np.zeros(trajectories, np.int64),
        format_penalty_N=np.full(trajectories, -0.1),
        truncated_N=np.zeros(trajectories, np.bool_),
        trainable_N=np.ones(trajectories, np.bool_),
        states_K=start_pages[rng.integers(0, len(start_pages), turns)],
    )
    return Batch(episodes, tokens, torch.from_numpy(noise(1.0)))


def _turns(rng: np.random.Generator, trajectory: int) -> np.ndarray:
    """A trajectory's turn numbers: observations and responses of random lengths."""
    responses = rng.multinomial(RESPONSES - TURNS, np.full(TURNS, 1 / TURNS)) + 1
    observations = rng.multinomial(TOKENS - RESPONSES, np.full(TURNS, 1 / TURNS))
    lengths = np.stack([observations, responses], axis=1).ravel()
    numbers = np.stack([np.full(TURNS, -1), trajectory * TURNS + np.arange(TURNS)], axis=1).ravel()
    return np.repeat(numbers, lengths).astype(np.int32)


def alone(sums: np.ndarray) -> np.ndarray:
    """The reduction of one rank."""
    return sums


LEVEL_FILTERS = tuple(
    FilterSpec(level, 0.8, 1.2, -0.5, 0.5)
    for level in ("token", "segment", "geometric", "sequence")
)
CASES: dict[str, Callable[[Batch], object]] = {
    "clone": lambda b: b.tensor.clone(),
    "gae": lambda b: token_advantages(
        TokenSpec("gae", 0.99, 0.95), b.tokens, b.episodes.rewards_K, 0.0, alone
    ),
    "reinforce": lambda b: token_advantages(
        TokenSpec("reinforce", 0.99), b.tokens, b.episodes.rewards_K, 0.0, alone
    ),
    "gigpo": lambda b: token_advantages(
        TokenSpec("gigpo"),
        b.tokens,
        assign_credit(CreditSpec("gigpo"), b.episodes).per_turn_K,
        0.0,
        alone,
    ),
    "correction": lambda b: token_advantages(
        TokenSpec("grpo", correction=CorrectionSpec(WeightSpec("token"), LEVEL_FILTERS)),
        b.tokens,
        b.episodes.rewards_K,
        0.0,
        alone,
    ),
}


def seconds(batches: dict[int, Batch], repeats: int) -> dict[int, dict[str, float]]:
    """Return the median time of every case at every size. Cases alternate: load hits all alike."""
    times: dict[tuple[int, str], list[float]] = {
        (size, name): [] for size in batches for name in CASES
    }
    for _ in range(repeats):
        for size, batch in batches.items():
            for name, case in CASES.items():
                began = time.perf_counter()
                result = case(batch)
                times[size, name].append(time.perf_counter() - began)
                del result
    return {
        size: {name: statistics.median(times[size, name]) for name in CASES} for size in batches
    }


def extra_memory(batch: Batch, case: Callable[[Batch], object]) -> float:
    """Peak memory above what was held before, in tensors of the batch's size."""
    ctypes.CDLL(None).malloc_trim(
        0
    )  # or memory that was freed and kept would be handed out uncounted
    before = _kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    result = case(batch)
    peak = _kilobytes("VmHWM")
    del result
    return (peak - before) * 1024 / (batch.tensor.numel() * 4)


def _kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def warm_up() -> None:
    """Compiles every kernel and starts the threads."""
    tokens = make_batch(32)
    for case in CASES.values():
        case(tokens)
        case(replace(tokens, tokens=replace(tokens.tokens, trains_N=~tokens.tokens.trains_N)))


def measure(sizes: tuple[int, ...], repeats: int) -> dict[str, float]:
    batches = {size: make_batch(size) for size in sizes}
    seconds(batches, 1)
    times = seconds(batches, repeats)
    for size, of in times.items():
        cases = "   ".join(
            f"{name} {1e3 * of[name]:6.1f} ms ({of[name] / of['clone']:4.1f})" for name in LIMITS
        )
        print(f"{size:5} trajectories   clone {1e3 * of['clone']:6.1f} ms   {cases}", flush=True)
    smallest, largest = sizes[0], sizes[-1]
    figures = {"clone_milliseconds": 1e3 * times[smallest]["clone"]}
    for name, case in CASES.items():
        if name in LIMITS:
            figures[f"{name}_over_clone"] = times[smallest][name] / times[smallest]["clone"]
            figures[f"{name}_memory"] = extra_memory(batches[smallest], case)
            figures[f"{name}_growth"] = (times[largest][name] / largest) / (
                times[smallest][name] / smallest
            )
        figures |= {
            f"{name}_nanoseconds_per_token_{size}": 1e9 * times[size][name] / (size * TOKENS)
            for size in sizes
        }
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two sizes, three repeats: ratios are noisy",
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(compiled.threads())
    warm_up()
    sizes = SIZES[:2] if arguments.quick else SIZES
    figures = measure(sizes, 3 if arguments.quick else arguments.repeats)
    for name, limit in LIMITS.items():
        memory = figures[f"{name}_memory"]
        growth, times = figures[f"{name}_growth"], sizes[-1] // sizes[0]
        print(
            f"{name:10} {figures[f'{name}_over_clone']:5.2f} of clone (at most {limit:g})   "
            f"memory {memory:4.2f} tensors "
            f"(under {MEMORY_LIMIT:g})   time per token at {times}x the size {growth:4.2f} times"
        )
    if arguments.json:
        write_record(
            arguments.json,
            figures,
            f"numba on {compiled.threads()} threads, numpy {np.__version__}",
        )


if __name__ == "__main__":
    main()
