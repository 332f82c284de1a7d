"""What trainers ask all data-parallel ranks about a step: its denominators, and how evenly its tokens lie."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from agenticrun_workers.algorithms.aggregation import StepTotals
from agenticrun_workers.trainer.micro_batch import MicroBatch
from agenticrun_workers.trainer.strategy import Sample

Reduce = Callable[[list[float]], list[float]]
"""Element-wise over the data-parallel ranks. Collective."""


def step_totals(samples: list[Sample], add: Reduce) -> StepTotals:
    """The denominators of an optimizer step on all ranks' samples. Collective."""
    weights = [float(sample.weight_T[1:].sum(dtype=np.float64)) for sample in samples]
    weight, sequences = add([sum(weights), float(sum(w > 0 for w in weights))])
    return StepTotals(weight, sequences)


def balance(
    batches: list[MicroBatch], data_size: int, add: Reduce, most: Reduce
) -> dict[str, float]:
    """How evenly the tokens lie: the share of computed ones that was padding, and the fullest rank's over the mean. Collective."""
    mine = float(sum(batch.used for batch in batches))
    used, computed = add([mine, float(sum(batch.ids_BT.numel() for batch in batches))])
    [fullest] = most([mine])
    return {
        "train/padding_waste": 1 - used / computed if computed else 0.0,
        "train/token_imbalance": fullest * data_size / used if used else 1.0,
    }
