"""The task of both sides of benchmarks/peers.py, and the measurement of steps.

The task is to answer with words that end in 1. A step is taken for each line on stdin.
"""

from __future__ import annotations

import random
import sys
import time

WORDS = [f"w{number}" for number in range(500)]
SAMPLES = 8
NEW_TOKENS = 128
LEARNING_RATE = 1e-4

ANSWER = "seconds of this step: "


def random_prompt(seed: int) -> str:
    """Return twelve words."""
    return " ".join(random.Random(seed).choices(WORDS, k=12))


def score(answer: str) -> float:
    """Return the share of words that end in 1."""
    words = answer.split()
    return sum(word.endswith("1") for word in words) / max(len(words), 1)


class StepGate:
    """Between two steps the process waits, so that another one can be measured."""

    def __init__(self) -> None:
        self._began = 0.0

    def begin(self) -> None:
        """Wait for a line. Raise `EOFError` at the end of stdin."""
        if not sys.stdin.readline():
            raise EOFError
        self._began = time.perf_counter()

    def end(self) -> None:
        """Print the seconds since `begin` returned."""
        print(f"{ANSWER}{time.perf_counter() - self._began}", flush=True)
