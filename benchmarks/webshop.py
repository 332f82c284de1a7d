"""Steps of WebShop on one core: random valid actions in the made-up catalogue, text in and text out, searches included.

python benchmarks/webshop.py [--quick] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

from record import write_record

from agenticrun_workers.envs.webshop import WebShop
from agenticrun_workers.types import Stream

TURNS = 15
"""Of an episode at most."""


def webshop_figures(quick: bool) -> dict[str, float]:
    """webshop_step_per_second; `quick` is one second instead of ten."""
    env = WebShop()
    rng = random.Random(0)
    seconds = 1.0 if quick else 10.0
    steps, stepping, seed = 0, 0.0, 0
    while stepping < seconds:
        env.reset(seed, Stream.TRAIN)
        seed += 1
        for _ in range(TURNS):
            action = rng.choice(env.valid_actions())
            start = time.perf_counter()
            result = env.step(action)
            stepping += time.perf_counter() - start
            steps += 1
            if result.terminated:
                break
    return {"webshop_step_per_second": steps / stepping}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    figures = webshop_figures(arguments.quick)
    print(json.dumps(figures, indent=2))
    if arguments.output:
        write_record(arguments.output, figures)
