"""BatchPlan: which rank trains on which trajectory, in which mini-batch. Made once per step, in the driver."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agenticrun_api import Pipeline
from agenticrun_workers.rollout.groups import EpisodeResult, Group
from agenticrun_workers.seeds import derive
from agenticrun_workers.types import EpisodeKey


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds of a batch, and in which order it trains on it."""

    items: tuple[tuple[EpisodeKey, int], ...]
    """(key, store) of each trajectory."""
    mini_batches: tuple[tuple[int, ...], ...]
    """Indices into `items`, one tuple per optimizer step. Every rank has the same number; a tuple may be empty."""


def optimizer_steps_per_batch(pipeline: Pipeline) -> int:
    """Optimizer steps of one training step."""
    size = pipeline.actor_train.training.mini_batch_size or pipeline.rollout_batch_size
    return pipeline.rollout_batch_size // size * pipeline.algorithm.ppo_epochs


def plan_batch(
    pipeline: Pipeline, groups: tuple[Group, ...], ranks: int, version: int
) -> list[RankPlan]:
    """One plan per rank. Mini-batches hold whole groups, drawn anew in each epoch; ranks get equal shares of tokens.

    The draw depends on (seed, version, epoch) only. `version` is the one that this step makes.
    """
    epochs = pipeline.algorithm.ppo_epochs
    chunks = optimizer_steps_per_batch(pipeline) // epochs
    items: list[list[tuple[EpisodeKey, int]]] = [[] for _ in range(ranks)]
    place: dict[EpisodeKey, tuple[int, int]] = {}
    for rank, share in enumerate(
        balance([result for group in groups for result in group.results], ranks)
    ):
        for result in share:
            place[result.key] = (rank, len(items[rank]))
            items[rank].append((result.key, result.store))
    mini_batches: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
    for epoch in range(epochs):
        order = np.random.default_rng(
            derive(pipeline.seed, "mini-batches", version, epoch)
        ).permutation(len(groups))
        for chunk in np.array_split(order if chunks > 1 else np.arange(len(groups)), chunks):
            chosen = [
                place[result.key] for index in sorted(chunk) for result in groups[index].results
            ]
            for rank in range(ranks):
                mini_batches[rank].append(tuple(index for owner, index in chosen if owner == rank))
    return [RankPlan(tuple(items[rank]), tuple(mini_batches[rank])) for rank in range(ranks)]


def balance(results: list[EpisodeResult], ranks: int) -> list[list[EpisodeResult]]:
    """Split into `ranks` shares of nearly equal tokens: longest first, each to the lightest share. Shares keep the order."""
    order = {result.key: index for index, result in enumerate(results)}
    shares: list[list[EpisodeResult]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for result in sorted(results, key=lambda r: (-r.tokens, r.key)):
        lightest = loads.index(min(loads))
        shares[lightest].append(result)
        loads[lightest] += result.tokens
    return [sorted(share, key=lambda r: order[r.key]) for share in shares]
