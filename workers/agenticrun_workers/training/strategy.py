"""The protocol every trainer implements: one instance per rank, called by all ranks with the same arguments in the same order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from agenticrun_workers.algorithms.losses import Aggregation, KlKind
from agenticrun_workers.types import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence to train on. All arrays are ragged, [T] tokens, and never padded.

    `weight_T` is the loss mask: 1 on tokens that count. `advantages_T`, `old_logprobs_T` (engine values; the trainer recomputes
    where the algorithm needs it) and `ref_logprobs_T` are 0 where `weight_T` is 0. Position t holds the value of predicting token t.
    """

    tokens_T: IntArray
    weight_T: FloatArray
    advantages_T: FloatArray
    old_logprobs_T: FloatArray
    ref_logprobs_T: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class LossSpec:
    """What `train_step` minimises. Plain numbers, so that strategies import no configuration."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    aggregation: Aggregation = "token-mean"
    aggregation_norm: float = 1.0
    """The constant C of seq-mean-token-sum-norm."""
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_kind: KlKind = "k3"
    temperature: float = 1.0


class TrainStrategy(Protocol):
    """A policy under training on one or more ranks. Denominators are global over the optimizer step, whatever the split."""

    rank: int
    world_size: int
    policy_version: int

    def compute_log_probs(self, samples: list[Sample]) -> list[FloatArray]:
        """Log-probs of each sample's weighted tokens under the current weights and sampling temperature, 0 elsewhere.

        This rank's samples only; collective.
        """
        ...

    def supervised_step(self, samples: list[Sample]) -> Mapping[str, float]:
        """One optimizer step of weighted next-token cross-entropy (warm-up). Collective."""
        ...

    def train_step(self, samples: list[Sample], loss: LossSpec, old: list[FloatArray] | None = None) -> Mapping[str, float]:
        """One optimizer step on this rank's share of a mini-batch. Collective; returns metrics equal on every rank.

        `old` are recomputed log-probs; without them the detached current ones serve (ratio 1).
        A non-finite gradient skips the step and is counted in `actor/skipped_steps`.
        """
        ...

    def export_weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """Full parameters under their Hugging Face names, float32 on the host. Collective; yields on rank 0 only."""
        ...

    def save(self, folder: Path) -> None:
        """Write this rank's shard of model, optimizer, schedule and RNG. Collective."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote. Raises `CheckpointMismatch` naming the first parameter that does not fit."""
        ...


class CheckpointMismatch(Exception):
    """A checkpoint of another model or layout."""
