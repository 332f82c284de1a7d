"""Measure time and memory of log-probs and entropies of long sequences, backward pass included.

Compares the chunks of `trainer.log_probs` with the whole softmax.

    python benchmarks/log_probs.py [--quick] [--json FILE]

32,768 tokens, a vocabulary of 151,936 (Qwen's), float32; the loss reads the log-prob and the
entropy of every token. The hidden size is small, because the memory is about the vocabulary.
`peak_gibibytes` is the peak of a separate process above its level before the forward pass (VmHWM,
reset through /proc/self/clear_refs), gradients included; `logits_gibibytes` is one float32 tensor
of all logits: the whole softmax needs several. The whole softmax runs at `naive_tokens`, where it
fits, beside the chunks at the same size: `time_over_naive` and `peak_over_naive` compare these two.
On CPU; a GPU's memory is bounded in the same way.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from record import write_record
from torch import Tensor

from agenticrun_workers.trainer.log_probs import CHUNK_ELEMENTS, score

TOKENS, NAIVE_TOKENS, VOCABULARY, HIDDEN = 32_768, 1024, 151_936, 64
TEMPERATURE = 0.8
GIBIBYTE = 2**30


def naive(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: None, targets_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """From all logits at once."""
    logprobs_NV = torch.log_softmax(
        torch.nn.functional.linear(hidden_NH, weight_VH, bias_V) / temperature, dim=-1
    )
    return logprobs_NV.gather(-1, targets_N[:, None])[:, 0], -(logprobs_NV.exp() * logprobs_NV).sum(
        -1
    )


WAYS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"chunked": score, "naive": naive}


def measure(way: str, tokens: int, vocabulary: int) -> dict[str, float]:
    """Seconds and peak bytes of one forward and backward pass."""
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(tokens, HIDDEN, generator=generator).requires_grad_()
    weight_VH = (0.3 * torch.randn(vocabulary, HIDDEN, generator=generator)).requires_grad_()
    targets_N = torch.randint(vocabulary, (tokens,), generator=generator)
    ctypes.CDLL(None).malloc_trim(
        0
    )  # or memory that was freed and kept would be handed out uncounted
    before = _bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    began = time.perf_counter()
    logprobs_N, entropies_N = WAYS[way](hidden_NH, weight_VH, None, targets_N, TEMPERATURE)
    (-logprobs_N.mean() - 0.01 * entropies_N.mean()).backward()
    return {"seconds": time.perf_counter() - began, "bytes": _bytes("VmHWM") - before}


def _bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def in_a_process(way: str, tokens: int, vocabulary: int) -> dict[str, float]:
    """Run `measure` in a separate process, so that no other pass's memory is counted or reused."""
    command = [sys.executable, __file__, "--measure", way, str(tokens), str(vocabulary)]
    measured: dict[str, float] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    print(
        f"{way:8} {tokens:6} tokens   {measured['seconds']:7.1f} s   "
        f"peak {measured['bytes'] / GIBIBYTE:6.2f} GiB",
        flush=True,
    )
    return measured


def figures(tokens: int, naive_tokens: int, vocabulary: int) -> dict[str, float]:
    whole = in_a_process("naive", naive_tokens, vocabulary)
    small = in_a_process("chunked", naive_tokens, vocabulary)
    large = in_a_process("chunked", tokens, vocabulary)
    found = {
        "tokens": tokens,
        "vocabulary": vocabulary,
        "chunk_elements": CHUNK_ELEMENTS,
        "logits_gibibytes": tokens * vocabulary * 4 / GIBIBYTE,
        "peak_gibibytes": large["bytes"] / GIBIBYTE,
        "peak_over_logits": large["bytes"] / (tokens * vocabulary * 4),
        "seconds": large["seconds"],
        "naive_tokens": naive_tokens,
        "naive_peak_gibibytes": whole["bytes"] / GIBIBYTE,
        "naive_seconds": whole["seconds"],
        "peak_over_naive": small["bytes"] / whole["bytes"],
        "time_over_naive": small["seconds"] / whole["seconds"],
        "growth": (large["seconds"] / tokens) / (small["seconds"] / naive_tokens),
    }
    return {name: round(value, 4) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a sixteenth of the vocabulary and of the tokens: a smoke test, not a result",
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument(
        "--measure", nargs=3, metavar=("WAY", "TOKENS", "VOCABULARY"), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    if arguments.measure:
        way, tokens, vocabulary = arguments.measure
        print(json.dumps(measure(way, int(tokens), int(vocabulary))))
        return
    share = 16 if arguments.quick else 1
    found = figures(TOKENS // share, NAIVE_TOKENS // share, VOCABULARY // share)
    if arguments.json:
        write_record(arguments.json, found)


if __name__ == "__main__":
    main()
