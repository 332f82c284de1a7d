"""Speed of the environments, against gymnasium's FrozenLake and gym-sokoban 0.0.6.

    python benchmarks/envs.py [--quick] [--json FILE]

One core, side by side in one run: rounds of ours and of the reference take turns, and the ratios
are of the fastest rounds, which other processes disturbed least. `reset` gets a fresh seed each
time, with no cache of levels; `step` takes the text of an action and returns text, reward, ends and
metrics. The references are behind the same text interface, as ROLL wraps them: gymnasium's
FrozenLake on a new random map for each episode (4 x 4, frozen with 0.8, not slippery), gym-sokoban
(6 x 6, one box, its own 20 steps of walk and depth 300), which draws an unused picture in each
step. `..._without_picture` is against the same wrapper without drawing, `..._without_text` against
gymnasium's step alone, which produces no text.

`sokoban_..._p` compare the difficulty of the levels. They are p-values of two-sample
Kolmogorov-Smirnov tests over 2,000 levels of each: the length of the shortest solution (breadth
first) and the distance between box and target. Ours are drawn without the holdout, as in training.

`webshop_step_per_second` is of random valid actions in the made-up catalogue, text in and text out,
searches included.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map
from record import write_record

from agenticrun_workers.envs import FrozenLake, Sokoban
from agenticrun_workers.envs.webshop import WebShop
from agenticrun_workers.types import Stream

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
from sokoban_reference import ReferenceSokoban, box_distance, ks_p_value, solution_length

ROUNDS = 9
ROUND_SECONDS = 0.2
"""Seconds of measured time, the same for ours and for the reference."""
LEVELS = 2000
EPISODE_STEPS = 20
WEBSHOP_STEPS = 15

Reset = Callable[[int], object]
Step = Callable[[str], tuple[object, bool]]


class ReferenceFrozenLake:
    """gymnasium's FrozenLake: text in, text out."""

    def __init__(self) -> None:
        self.actions = ("Left", "Down", "Right", "Up")
        self.numbers = {action.lower(): number for number, action in enumerate(self.actions)}
        self.symbols = {b"S": "_", b"F": "_", b"H": "O", b"G": "G"}
        self.player_on = {b"S": "P", b"F": "P", b"H": "X", b"G": "√"}

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self.env: Any = FrozenLakeEnv(
            desc=generate_random_map(4, 0.8, seed=seed), is_slippery=False
        )
        self.env.reset(seed=seed)
        return self.board(), {}

    def play(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        number = self.numbers.get(action.strip().lower())
        if number is None:
            return self.board(), 0.0, False, False, self.info(False, False, False)
        before = self.env.s
        _, reward, terminated, truncated, _ = self.env.step(number)
        return (
            self.board(),
            float(reward),
            terminated,
            truncated,
            self.info(True, before != self.env.s, reward > 0),
        )

    def step_without_text(self, action: str) -> tuple[object, bool]:
        result = self.env.step(self.numbers[action.lower()])
        return result, bool(result[2])

    def board(self) -> str:
        player = divmod(int(self.env.s), self.env.ncol)
        rows = [[self.symbols[cell] for cell in row] for row in self.env.desc.tolist()]
        rows[player[0]][player[1]] = self.player_on[bytes(self.env.desc[player])]
        return "\n".join("".join(row) for row in rows)

    @staticmethod
    def info(valid: bool, effective: bool, success: bool) -> dict[str, Any]:
        metrics = {
            "action_is_valid": valid,
            "action_is_effective": effective,
            "num_actions": 1,
            "success": success,
        }
        return {"metrics": {name: float(value) for name, value in metrics.items()}}


def seconds_of_reset(reset: Reset, seeds: Iterator[int]) -> float:
    """Measure one reset, each with a fresh seed."""
    spent, done = 0.0, 0
    while spent < ROUND_SECONDS:
        chosen = [next(seeds) for _ in range(20)]
        began = time.perf_counter()
        for seed in chosen:
            reset(seed)
        spent += time.perf_counter() - began
        done += len(chosen)
    return spent / done


def seconds_of_step(
    reset: Reset, step: Step, actions: tuple[str, ...], seeds: Iterator[int]
) -> float:
    """Measure one step, over episodes of random actions; resets are not counted."""
    rng = random.Random(0)
    spent, done = 0.0, 0
    while spent < ROUND_SECONDS:
        reset(next(seeds))
        chosen = rng.choices(actions, k=EPISODE_STEPS)
        began = time.perf_counter()
        for action in chosen:
            done += 1
            _, ended = step(action)
            if ended:
                break
        spent += time.perf_counter() - began
    return spent / done


def side_by_side(measures: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The fastest of the rounds in which they take turns, of each; a first round warms up."""
    taken: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(rounds + 1):
        for name, measure in measures.items():
            seconds = measure()
            if number:
                taken[name].append(seconds)
    return {name: min(values) for name, values in taken.items()}


def _ours(env: FrozenLake | Sokoban) -> tuple[Reset, Step]:
    def step(action: str) -> tuple[object, bool]:
        result = env.step(action)
        return result, result.terminated

    return lambda seed: env.reset(seed, Stream.TRAIN), step


def _theirs(env: ReferenceFrozenLake | ReferenceSokoban) -> tuple[Reset, Step]:
    def step(action: str) -> tuple[object, bool]:
        result = env.play(action)
        return result, result[2]

    return env.reset, step


def speed(
    world: str, players: dict[str, tuple[Reset, Step]], actions: tuple[str, ...], rounds: int
) -> dict[str, float]:
    """Figures of a world. `players`: ours, the reference, and other ways to step it."""
    seeds = iter(range(2**40, 2**41))
    resets = side_by_side(
        {
            name: partial(seconds_of_reset, players[name][0], seeds)
            for name in ("ours", "reference")
        },
        rounds,
    )
    steps = side_by_side(
        {
            name: partial(seconds_of_step, *player, actions, seeds)
            for name, player in players.items()
        },
        rounds,
    )
    found = {
        f"{world}_reset_ratio": resets["reference"] / resets["ours"],
        f"{world}_step_ratio": steps["reference"] / steps["ours"],
        f"{world}_reset_microseconds": resets["ours"] * 1e6,
        f"{world}_reset_reference_microseconds": resets["reference"] * 1e6,
        f"{world}_step_microseconds": steps["ours"] * 1e6,
        f"{world}_step_reference_microseconds": steps["reference"] * 1e6,
    }
    for name in players.keys() - {"ours", "reference"}:
        found[f"{world}_step_ratio_{name}"] = steps[name] / steps["ours"]
    return found


def difficulty(levels: int) -> dict[str, float]:
    """Compare Sokoban's levels, ours and the reference's."""
    ours, reference = Sokoban(), ReferenceSokoban()
    boards = {
        "ours": [ours.reset(seed, Stream.TRAIN) for seed in range(levels)],
        "reference": [reference.reset(s)[0] for s in range(levels)],
    }
    found: dict[str, float] = {"sokoban_levels_compared": levels}
    for name, measure in (("solution_length", solution_length), ("box_distance", box_distance)):
        values: dict[str, list[int]] = {}
        for who, some in boards.items():
            values[who] = [value for board in some if (value := measure(board)) is not None]
            if len(values[who]) < len(some):
                raise AssertionError(f"a level of {who} cannot be solved")
        found[f"sokoban_{name}_p"] = ks_p_value(values["ours"], values["reference"])
        found |= {
            f"sokoban_{name}_mean_{who}": float(np.mean(some)) for who, some in values.items()
        }
    return found


def webshop(seconds: float) -> dict[str, float]:
    """Measure WebShop's steps for this many seconds."""
    env, rng = WebShop(), random.Random(0)
    steps, spent, seeds = 0, 0.0, itertools.count()
    while spent < seconds:
        env.reset(next(seeds), Stream.TRAIN)
        for _ in range(WEBSHOP_STEPS):
            action = rng.choice(env.valid_actions())
            began = time.perf_counter()
            result = env.step(action)
            spent += time.perf_counter() - began
            steps += 1
            if result.terminated:
                break
    return {"webshop_step_per_second": steps / spent}


def figures(quick: bool) -> dict[str, float]:
    rounds = 3 if quick else ROUNDS
    lake, sokoban = ReferenceFrozenLake(), ReferenceSokoban()
    found = speed(
        "frozen_lake",
        {
            "ours": _ours(FrozenLake()),
            "reference": _theirs(lake),
            "without_text": (lake.reset, lake.step_without_text),
        },
        lake.actions,
        rounds,
    )
    found |= speed(
        "sokoban",
        {
            "ours": _ours(Sokoban()),
            "reference": _theirs(sokoban),
            "without_picture": _theirs(ReferenceSokoban(draws=False)),
        },
        Sokoban().actions,
        rounds,
    )
    found |= difficulty(LEVELS // 10 if quick else LEVELS) | webshop(1.0 if quick else 10.0)
    return {name: round(value, 4) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer rounds and a tenth of the levels: a smoke test, not a result",
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    found = figures(arguments.quick)
    for name, value in found.items():
        print(f"{name:45} {value:12.4f}")
    if arguments.json:
        write_record(arguments.json, found)


if __name__ == "__main__":
    main()
