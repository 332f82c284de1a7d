"""Measure how evenly the trajectories of a step are spread over ranks and mini-batches.

    python benchmarks/balance.py [--quick] [--json FILE]

Trajectories have log-normal lengths (median 1,000 tokens, sigma 0.5), in groups of 8. Figures are
means over the mini-batches of ten steps (`--quick`: of one); `<r>_<m>` stands for r ranks and m
mini-batches:

    balance_<r>_<m>         256 groups: tokens of the fullest rank / mean of the ranks
    balance_<r>_<m>_whole   the same if only the whole batch is balanced over the ranks
    balance_<r>_<m>_few     64 groups: the fullest rank / the best possible, which is the mean of
                            the ranks or the longest trajectory, as that cannot be split
    balance_<r>_<m>_few_mean, _few_whole: against the mean, with both ways
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from record import write_record

from agenticrun_api import Pipeline
from agenticrun_workers.driver.batch_plan import balance, plan_batch
from agenticrun_workers.rollout.controller import Group
from agenticrun_workers.rollout.groups import EpisodeResult
from agenticrun_workers.types import EpisodeKey, StopReason, Stream

CASES = {(8, 4): 1.10, (32, 8): 1.15, (64, 8): 1.25}
"""Largest `balance` for ranks and mini-batches."""
MEMBERS = 8


def make_groups(number: int, seed: int) -> tuple[Group, ...]:
    lengths = np.random.default_rng(seed).lognormal(np.log(1000), 0.5, (number, MEMBERS)).round()
    return tuple(
        Group(group, "A", tuple(_result(group, member, int(n)) for member, n in enumerate(row)))
        for group, row in enumerate(lengths)
    )


def _result(group: int, member: int, tokens: int) -> EpisodeResult:
    return EpisodeResult(
        key=EpisodeKey(Stream.TRAIN, group, member),
        tag="A",
        attempt=0,
        stop_reason=StopReason.COMPLETED,
        rewards_K=np.zeros(1, np.float32),
        valid_K=np.ones(1, np.bool_),
        response_tokens_K=np.array([tokens], np.int32),
        states_K=b"",
        tokens=tokens,
        oldest_version=0,
    )


def pipeline(groups: int, mini_batches: int) -> Pipeline:
    size = groups * MEMBERS
    return Pipeline.model_validate(
        {
            "maxSteps": 1,
            "rolloutBatchSize": size,
            "evalSteps": 0,
            "envs": [{"tag": "A", "type": "frozen_lake"}],
            "trainEnvs": {"groups": groups, "groupSize": MEMBERS, "tags": ["A"]},
            "actorTrain": {"training": {"miniBatchSize": size // mini_batches}},
        }
    )


def measure_balance(groups: int, ranks: int, mini_batches: int, steps: int) -> dict[str, float]:
    """Return the fullest rank's tokens, against the best possible and the mean of the ranks.

    `whole` is against the mean, if the ranks' shares are even only over the whole batch.
    """
    config = pipeline(groups, mini_batches)
    ratios: dict[str, list[float]] = {"best": [], "mean": [], "whole": []}
    for step in range(steps):
        batch = make_groups(groups, step)
        results = [result for group in batch for result in group.results]
        tokens = {result.key: result.tokens for result in results}
        plans = plan_batch(config, batch, ranks, step)
        whole = {
            result.key: rank
            for rank, share in enumerate(balance(results, ranks))
            for result in share
        }
        for number in range(mini_batches):
            shares = [[plan.items[i][0] for i in plan.mini_batches[number]] for plan in plans]
            keys = [key for share in shares for key in share]
            mean = sum(tokens[key] for key in keys) / ranks
            fullest = max(sum(tokens[key] for key in share) for share in shares)
            by_rank = np.bincount([whole[key] for key in keys], [tokens[key] for key in keys])
            ratios["best"].append(fullest / max(mean, *(tokens[key] for key in keys)))
            ratios["mean"].append(fullest / mean)
            ratios["whole"].append(float(by_rank.max()) / mean)
    return {name: float(np.mean(values)) for name, values in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one step instead of ten")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    steps = 1 if arguments.quick else 10
    figures: dict[str, float] = {}
    failed = False
    for (ranks, mini_batches), limit in CASES.items():
        name = f"balance_{ranks}_{mini_batches}"
        many = measure_balance(256, ranks, mini_batches, steps)
        few = measure_balance(64, ranks, mini_batches, steps)
        figures |= {
            name: many["mean"],
            f"{name}_whole": many["whole"],
            f"{name}_few": few["best"],
            f"{name}_few_mean": few["mean"],
            f"{name}_few_whole": few["whole"],
        }
        failed |= max(many["mean"], few["best"]) > limit
    for name, figure in figures.items():
        print(f"{name:28} {figure:.3f}")
    if arguments.json:
        write_record(arguments.json, figures)
    if failed:
        raise SystemExit("a rank has too much of a mini-batch")


if __name__ == "__main__":
    main()
