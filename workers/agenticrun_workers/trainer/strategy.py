"""The protocols of trainers: one instance per rank, called by all ranks with the same arguments in the same order.

Denominators are global over the optimizer step: how samples are split into ranks, micro-batches and packs changes no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from agenticrun_workers.algorithms.aggregation import Aggregation
from agenticrun_workers.algorithms.losses import Kimi15, KlKind, Ppo, RatioLevel, Vanilla, Variant
from agenticrun_workers.algorithms.segments import Floats
from agenticrun_workers.models.lora import Adapters
from agenticrun_workers.types import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence to train on. All arrays are ragged, [T] tokens, and never padded.

    Position t holds the value of predicting token t. The first token is never predicted. Optional arrays are read where
    `weight_T` is above 0 only.
    """

    tokens_T: IntArray
    weight_T: FloatArray
    """The loss mask: 1 on tokens that count. 0 on prompts, observations, and what a filter removed."""
    advantages_T: FloatArray
    turns_T: IntArray
    """Number of the turn on response tokens, not falling; -1 elsewhere. `compute_*` cover all response tokens."""
    old_logprobs_T: FloatArray | None = None
    """Recomputed by the trainer at the batch's start; without them the detached current ones serve (ratio 1)."""
    ref_logprobs_T: FloatArray | None = None
    engine_logprobs_T: FloatArray | None = None
    """Recorded while sampling."""
    is_weights_T: FloatArray | None = None
    """Factor of each token's loss (train-inference correction)."""
    returns_T: FloatArray | None = None
    """What the critic learns to foresee."""
    old_values_T: FloatArray | None = None
    """The critic's values at the batch's start, for its clip."""
    score: float = 0.0
    """Of the whole trajectory; TOPR reads its sign."""


@dataclass(frozen=True, slots=True)
class LossSpec:
    """What `TrainStrategy.train_step` minimises: aggregated policy loss + kl_coef KL - entropy_coef entropy.

    Raises:
        ValueError: a ratio level other than token for a variant without ratios.
    """

    variant: Variant = field(default_factory=Ppo)
    ratio: RatioLevel = "token"
    aggregation: Aggregation = "token-mean"
    aggregation_norm: float = 1.0
    """The constant C of seq-mean-token-sum-norm."""
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_kind: KlKind = "k3"
    kl_limit: float | None = 10.0
    """A token's estimate above it counts as it, without gradient."""
    temperature: float = 1.0
    """Of the sampling: log-probs and entropies are those of logits / temperature."""

    def __post_init__(self) -> None:
        if self.ratio != "token" and isinstance(self.variant, Vanilla | Kimi15):
            raise ValueError(
                f"the loss {type(self.variant).__name__} has no ratio that could be of level {self.ratio}"
            )


@dataclass(frozen=True, slots=True)
class ValueLossSpec:
    """What `CriticStrategy.train_step` minimises."""

    clip: float | None = None
    """How far a value may move from `old_values_T` in one step's loss."""
    aggregation: Aggregation = "token-mean"
    aggregation_norm: float = 1.0


@dataclass(frozen=True, slots=True)
class Values:
    """The critic's values of one sample, float32."""

    values_T: FloatArray
    """On response tokens: value of the text before the token; 0 elsewhere."""
    final: float
    """Value of the whole text, to bootstrap from."""


class LogProbStrategy(Protocol):
    """A policy that says how probable tokens are."""

    rank: int
    world_size: int

    def compute_log_probs(self, samples: list[Sample]) -> list[FloatArray]:
        """Log-probs [T] of each sample's response tokens at the sampling temperature, 0 elsewhere.

        This rank's samples only; collective.
        """
        ...


class Checkpointed(Protocol):
    """What can be saved and restored, on any number of ranks. `folder` is a path or an fsspec URI."""

    def save(self, folder: str) -> None:
        """Write this rank's shards of the weights and, under training, of optimizer, schedule and RNG. Collective."""
        ...

    def load(self, folder: str) -> None:
        """Restore what `save` wrote. Raises `CheckpointMismatch` naming the first parameter that does not fit."""
        ...


class ReferenceStrategy(LogProbStrategy, Checkpointed, Protocol):
    """A frozen policy."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Become the policy with these whole parameters, as `TrainStrategy.export_weights` yields them, on every rank. Collective.

        Raises `CheckpointMismatch` for another model's.
        """
        ...


class TrainStrategy(LogProbStrategy, Checkpointed, Protocol):
    """A policy under training.

    Ranks of one `data_rank` share a model (by tensor, pipeline, context or sequence parallelism): they are given the same samples in the
    same order, and every one of them returns the same.
    """

    policy_version: int
    data_rank: int
    """This rank's part of a batch, below `data_size`."""
    data_size: int
    adapters: Adapters | None
    """What alone trains, where that is adapters."""

    def sum_over_data(self, values: Floats) -> Floats:
        """Element-wise sum over the parts of a batch: over one rank of each `data_rank`. Collective."""
        ...

    def supervised_step(self, samples: list[Sample]) -> Mapping[str, float]:
        """One optimizer step of weighted next-token cross-entropy (warm-up). Collective."""
        ...

    def train_step(self, samples: list[Sample], loss: LossSpec) -> Mapping[str, float]:
        """One optimizer step on this rank's share of a mini-batch. Collective; returns metrics equal on every rank.

        A non-finite gradient, or a mini-batch without a weighted token, changes nothing and is counted in `actor/skipped_steps`.

        Raises:
            NonFiniteGradient: too many in a row.
            ValueError: samples lack an array that the loss reads.
        """
        ...

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full parameters under their Hugging Face names, in the dtype that engines serve (`spec.model.dtype`).

        On any device, maybe views of the parameters: read each before taking the next. Tied ones come once. With LoRA, merged.
        Collective; yields on rank 0 only.
        """
        ...

    def export_folder(self, folder: Path, files: Mapping[str, bytes]) -> None:
        """Write a Hugging Face model folder: weights, config, and these files (the tokenizer's). Collective; rank 0 writes."""
        ...


class CriticStrategy(Checkpointed, Protocol):
    """A value function under training."""

    rank: int
    world_size: int

    def compute_values(self, samples: list[Sample]) -> list[Values]:
        """Values of each of this rank's samples. Collective."""
        ...

    def train_step(self, samples: list[Sample], loss: ValueLossSpec) -> Mapping[str, float]:
        """One optimizer step towards `returns_T`. Collective; as `TrainStrategy.train_step`, metrics are `critic/...`."""
        ...


class CheckpointMismatch(Exception):
    """A checkpoint of another model or layout."""


class NonFiniteGradient(Exception):
    """So many optimizer steps in a row were skipped that the run must end; names the first parameter whose gradient broke."""
