"""The split of a batch over mini-batches and ranks."""

from __future__ import annotations

import numpy as np

from agenticrun_api import Pipeline
from agenticrun_workers.rollout.controller import Group
from agenticrun_workers.rollout.groups import EpisodeResult
from agenticrun_workers.seeds import derive
from agenticrun_workers.trainer.batch import RankPlan, optimizer_steps_per_batch
from agenticrun_workers.types import EpisodeKey


def plan_batch(
    pipeline: Pipeline, groups: tuple[Group, ...], ranks: int, version: int
) -> list[RankPlan]:
    """Assign each trajectory to a mini-batch and a rank, once per step.

    Mini-batches are random sets of whole groups, spread over the ranks by tokens. Every epoch has
    the same ones, in another order. The draws depend on (seed, version, epoch) only.

    Args:
        version: the policy version that this step makes.

    Returns:
        one plan per rank.
    """
    epochs = pipeline.algorithm.ppo_epochs
    count = optimizer_steps_per_batch(pipeline) // epochs

    def draw(epoch: int, size: int) -> list[int]:
        """Return the numbers below `size` in the random order of an epoch."""
        seed = derive(pipeline.seed, "mini-batches", version, epoch)
        return (
            # With one mini-batch the order has no effect, so none is drawn.
            np.random.default_rng(seed).permutation(size).tolist() if count > 1 else [*range(size)]
        )

    items: list[list[tuple[EpisodeKey, int]]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    chunks: list[list[tuple[int, ...]]] = []
    for chunk in np.array_split(draw(0, len(groups)), count):
        results = [result for index in sorted(chunk) for result in groups[index].results]
        # In each mini-batch, because the ranks wait for the slowest in every optimizer step. A
        # trajectory stays whole: its returns and advantages are computed on one rank. Members of a
        # group may be on different ranks: their baseline comes from the driver.
        shares = balance(results, ranks)
        loads = [sum(result.tokens for result in share) for share in shares]
        heaviest_first = sorted(range(ranks), key=lambda share: -loads[share])
        # The ranks are even over the whole batch, too.
        lightest_first = sorted(range(ranks), key=lambda rank: tokens[rank])
        places: list[tuple[int, ...]] = [()] * ranks
        for number, rank in zip(heaviest_first, lightest_first, strict=True):
            first = len(items[rank])
            items[rank] += [(result.key, result.store) for result in shares[number]]
            places[rank] = tuple(range(first, len(items[rank])))
            tokens[rank] += loads[number]
        chunks.append(places)
    # A trajectory cannot change its rank between epochs, so no epoch has other mini-batches.
    orders = [list(range(count)), *(draw(epoch, count) for epoch in range(1, epochs))]
    return [
        RankPlan(
            tuple(items[rank]), tuple(chunks[chunk][rank] for order in orders for chunk in order)
        )
        for rank in range(ranks)
    ]


def balance(results: list[EpisodeResult], ranks: int) -> list[list[EpisodeResult]]:
    """Split results into `ranks` shares of nearly equal tokens.

    Longest first, each to the lightest share; within a share the order stays.
    """
    order = {result.key: index for index, result in enumerate(results)}
    shares: list[list[EpisodeResult]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    # Ties are broken by key, so that the split is the same in every run.
    for result in sorted(results, key=lambda r: (-r.tokens, r.key)):
        lightest = loads.index(min(loads))
        shares[lightest].append(result)
        loads[lightest] += result.tokens
    return [sorted(share, key=lambda r: order[r.key]) for share in shares]
