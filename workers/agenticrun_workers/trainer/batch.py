"""The batch of a training step: the values that driver and ranks exchange, and one rank's share.

    RankPlan       driver -> rank    which trajectories the rank gets, and its mini-batches
    ScoredBatch    rank -> driver    KL of each turn, and the gap to the engines' log-probs
                   rank -> rank      outputs of a reference or critic on pods of its own
    TurnCredits    driver -> rank    one number per turn, for trajectories in the loss
    ValueTargets   rank -> rank      targets of a critic on pods of its own

What belongs to one trajectory is keyed by its `EpisodeKey`, because a reference or critic on pods
of its own splits the batch into other shares. `RankBatch` holds the tokens; they never visit the
driver.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from agenticrun_api import Pipeline
from agenticrun_workers.algorithms.kl import KlKind
from agenticrun_workers.algorithms.normalization import Reduce
from agenticrun_workers.algorithms.segments import Floats, joined, offsets
from agenticrun_workers.algorithms.token_advantages import (
    Tokens,
    TokenSpec,
    token_advantages,
    turn_kl,
)
from agenticrun_workers.trainer.samples import Sample, policy_samples
from agenticrun_workers.types import EpisodeKey, FloatArray, Scalar, Trajectory

LogprobGaps = Mapping[str, tuple[float, float]]
"""By engine: sum of |trainer's - engine's log-prob| on the same weights, and number of tokens."""


@dataclass(frozen=True)
class RankPlan:
    """The trajectories of one rank, and the order in which it trains on them."""

    items: tuple[tuple[EpisodeKey, int], ...]
    """Key and store number of each trajectory."""
    mini_batches: tuple[tuple[int, ...], ...]
    """Indices into `items`, one tuple per optimizer step.

    Every rank has the same number of tuples; a tuple may be empty.
    """


@dataclass(frozen=True)
class ScoredBatch:
    """Results of a rank that has scored its share of a batch."""

    kl: Mapping[EpisodeKey, Floats] | None = None
    """Summed KL of each turn to the reference; None where the reward has no KL penalty."""
    gaps: LogprobGaps = field(default_factory=dict)
    ref_logprobs: Mapping[EpisodeKey, list[FloatArray]] | None = None
    """From a reference on pods of its own, one array per sequence of each trajectory."""
    values: Mapping[EpisodeKey, list[FloatArray]] | None = None
    """From a critic on pods of its own, in the same form, [T + 1] as `RankBatch.values`."""

    @staticmethod
    def merge(parts: Sequence[ScoredBatch]) -> ScoredBatch:
        """Combine what the driver reads of the shares of all ranks: KL and gaps."""
        kls = [part.kl for part in parts if part.kl is not None]
        engines = sorted({engine for part in parts for engine in part.gaps})
        found = {e: [part.gaps[e] for part in parts if e in part.gaps] for e in engines}
        gaps = {
            engine: (sum(gap for gap, _ in each), sum(tokens for _, tokens in each))
            for engine, each in found.items()
        }
        return ScoredBatch(
            {key: values for kl in kls for key, values in kl.items()} if kls else None, gaps
        )


TurnCredits = Mapping[EpisodeKey, Floats | None]
"""By trajectory, float64 [turns]; None if its tokens are not in the loss."""

ValueTargets = dict[EpisodeKey, list[tuple[FloatArray | None, FloatArray]]]
"""Returns and loss mask of each trajectory's sequences."""


def optimizer_steps_per_batch(pipeline: Pipeline) -> int:
    """Return the number of optimizer steps in one training step.

    A variance filter leaves fewer mini-batches, not smaller ones.
    """
    group_size, variance_filter = pipeline.train_envs.group_size, pipeline.algorithm.variance_filter
    groups = pipeline.groups_per_batch
    if variance_filter is not None:
        groups = variance_filter.kept(groups)
    size = pipeline.actor_train.training.mini_batch_size or pipeline.rollout_batch_size
    return math.ceil(groups / (size // group_size)) * pipeline.algorithm.ppo_epochs


@dataclass
class RankBatch:
    """One rank's share of a batch, from trajectories to the samples that it trains on.

    The stages of a step fill it in this order: models score it (`old_logprobs`, `ref_logprobs`,
    `values`), `compute_advantages` turns the driver's credits into advantages and returns, and
    `mini_batch_samples` hands out what the losses read. Sequences of one trajectory are adjacent
    and in turn order.
    """

    trajectories: list[Trajectory]
    bootstrap: bool = False
    """True if a truncated trajectory's returns continue with the critic's value of its end."""
    mini_batches: Sequence[Sequence[int]] = ()
    """As in `RankPlan`."""
    old_logprobs: list[FloatArray] | None = None
    ref_logprobs: list[FloatArray] | None = None
    values: list[FloatArray] | None = None
    """[T + 1] for each sequence: before each token, and after the text or, with `bootstrap`, after
    the observation that ends a truncated trajectory."""
    samples: list[Sample] = field(init=False)
    """A sample per sequence; until `compute_advantages` with weight 1 on every response token."""

    def __post_init__(self) -> None:
        parts = [policy_samples(trajectory) for trajectory in self.trajectories]
        self.samples = [sample for part in parts for sample in part]
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        self._sequences = [
            range(end - len(part), end) for part, end in zip(parts, ends.tolist(), strict=True)
        ]

    def compute_values(self, critic: Callable[[list[Sample]], list[FloatArray]]) -> None:
        """Score the sequences with the critic.

        The final value of a truncated trajectory is read after the observation that the policy
        did not get to answer. That text is appended to the last sequence, or is a sequence of its
        own for step-wise agents.
        """
        endings = [t.ending_T if self.bootstrap else t.ending_T[:0] for t in self.trajectories]
        inputs = list(self.samples)
        ending_inputs: dict[int, int] = {}
        for trajectory, ending_T, sequences in zip(
            self.trajectories, endings, self._sequences, strict=True
        ):
            if len(ending_T) and len(sequences):
                last = sequences[-1]
                if trajectory.stepwise:
                    ending_inputs[last] = len(inputs)
                    inputs.append(Sample.of_text(ending_T))
                else:
                    inputs[last] = inputs[last].with_ending(ending_T)
        found = critic(inputs)
        self.values = [
            np.append(
                values_T1[: len(sample.tokens_T)],
                found[ending_inputs[number]][-1] if number in ending_inputs else values_T1[-1],
            )
            for number, (sample, values_T1) in enumerate(zip(self.samples, found, strict=False))
        ]

    def scores(self) -> ScoredBatch:
        """Return what this rank's models computed, for the policy's ranks."""
        pairs = list(zip(self.trajectories, self._sequences, strict=True))
        ref, values = self.ref_logprobs, self.values
        return ScoredBatch(
            ref_logprobs=None
            if ref is None
            else {t.key: [ref[sequence] for sequence in sequences] for t, sequences in pairs},
            values=None
            if values is None
            else {t.key: [values[sequence] for sequence in sequences] for t, sequences in pairs},
        )

    def merge_scores(self, scores: Sequence[ScoredBatch]) -> None:
        """Take what models on other pods computed for these trajectories."""
        refs = {key: found for part in scores for key, found in (part.ref_logprobs or {}).items()}
        values = {key: found for part in scores for key, found in (part.values or {}).items()}
        if refs:
            self.ref_logprobs = [
                logprobs_T
                for trajectory in self.trajectories
                for logprobs_T in refs[trajectory.key]
            ]
        if values:
            self.values = [
                found for trajectory in self.trajectories for found in values[trajectory.key]
            ]

    def turn_kl(self, kind: KlKind) -> dict[EpisodeKey, Floats]:
        """Return the summed token KL of each trajectory's turns."""
        turns = [len(trajectory.turns) for trajectory in self.trajectories]
        if not turns:
            return {}
        kl_K = turn_kl(self._tokens(np.ones(len(turns), np.bool_)), kind, sum(turns))
        keys = [trajectory.key for trajectory in self.trajectories]
        return dict(zip(keys, np.split(kl_K, np.cumsum(turns)[:-1]), strict=True))

    def logprob_gaps(self, version: int) -> dict[str, tuple[float, float]]:
        """Compare trainer and engines on the tokens that were sampled with weights `version`.

        `old_logprobs` must be the trainer's.
        """
        gaps: dict[str, tuple[float, float]] = {}
        if not self.trajectories:
            return gaps
        assert self.old_logprobs is not None
        ends = np.cumsum([trajectory.num_tokens for trajectory in self.trajectories])[:-1]
        for trajectory, old_T in zip(
            self.trajectories, np.split(joined(self.old_logprobs, np.float32), ends), strict=True
        ):
            same_T = (trajectory.turns_T >= 0) & (trajectory.versions_T == version)
            turns, gap = trajectory.turns_T[same_T], np.abs(old_T - trajectory.logprobs_T)[same_T]
            sums_K = np.bincount(turns, gap, minlength=len(trajectory.turns))
            counts_K = np.bincount(turns, minlength=len(trajectory.turns))
            for turn, summed, count in zip(trajectory.turns, sums_K, counts_K, strict=True):
                total, tokens = gaps.get(turn.engine, (0.0, 0.0))
                gaps[turn.engine] = total + float(summed), tokens + float(count)
        return gaps

    def rollout_logprobs(self) -> list[FloatArray]:
        """Return the log-probs that the engines recorded, [T] for each sample."""
        return self._per_sample([trajectory.logprobs_T for trajectory in self.trajectories])

    def compute_advantages(
        self, spec: TokenSpec, credits: TurnCredits, kl_coef: float, reduce: Reduce
    ) -> Mapping[str, float]:
        """Put advantages, loss mask and returns into `samples`. Collective through `reduce`.

        Args:
            credits: of at least these trajectories.
            kl_coef: current coefficient of the KL in the reward.
            reduce: element-wise sum over the shares of the batch.

        Returns:
            metrics over all ranks.
        """
        found = [credits[trajectory.key] for trajectory in self.trajectories]
        tokens = self._tokens(np.array([credit_K is not None for credit_K in found], np.bool_))
        per_turn = [
            np.zeros(len(trajectory.turns)) if credit_K is None else credit_K
            for trajectory, credit_K in zip(self.trajectories, found, strict=True)
        ]
        result = token_advantages(spec, tokens, joined(per_turn, np.float64), kl_coef, reduce)
        ends = np.cumsum([len(sample.tokens_T) for sample in self.samples])[:-1]

        def split(array_L: NDArray[Scalar] | None) -> Sequence[NDArray[Scalar] | None]:
            return [None] * len(self.samples) if array_L is None else np.split(array_L, ends)

        advantages = np.split(result.advantages_L, ends)
        weights = np.split(result.mask_L.astype(np.float32), ends)
        returns, is_weights = split(result.returns_L), split(result.weights_L)
        old, ref, values = self.old_logprobs, self.ref_logprobs, self.values
        self.samples = [
            replace(
                sample,
                advantages_T=advantages[number],
                weight_T=weights[number],
                returns_T=returns[number],
                is_weights_T=is_weights[number],
                old_logprobs_T=None if old is None else old[number],
                ref_logprobs_T=None if ref is None else ref[number],
                old_values_T=None if values is None else values[number][:-1],
            )
            for number, sample in enumerate(self.samples)
        ]
        return result.metrics

    def value_targets(self) -> ValueTargets:
        """Return the targets of a critic on other pods."""
        pairs = zip(self.trajectories, self._sequences, strict=True)
        return {
            t.key: [(self.samples[s].returns_T, self.samples[s].weight_T) for s in sequences]
            for t, sequences in pairs
        }

    def set_value_targets(self, targets: Sequence[ValueTargets]) -> None:
        """Take the targets that the policy's ranks computed."""
        found = {key: pairs for part in targets for key, pairs in part.items()}
        pairs = [pair for trajectory in self.trajectories for pair in found[trajectory.key]]
        assert self.values is not None
        self.samples = [
            replace(sample, returns_T=returns_T, weight_T=weight_T, old_values_T=values_T1[:-1])
            for sample, (returns_T, weight_T), values_T1 in zip(
                self.samples, pairs, self.values, strict=True
            )
        ]

    def mini_batch_samples(self, version: int | None = None) -> list[list[Sample]]:
        """Return the samples of each optimizer step.

        Args:
            version: of the weights before the first step. Its samples get `current_T`; later steps
                have other weights. None: no step gets it.
        """
        steps = [
            [self.samples[sequence] for index in indices for sequence in self._sequences[index]]
            for indices in self.mini_batches
        ]
        if version is not None:
            current = self._per_sample([t.versions_T == version for t in self.trajectories])
            steps[0] = [
                replace(self.samples[sequence], current_T=current[sequence])
                for index in self.mini_batches[0]
                for sequence in self._sequences[index]
            ]
        return steps

    def _per_sample(self, arrays: list[NDArray[Scalar]]) -> list[NDArray[Scalar]]:
        """Split one array per trajectory, [T], into one per sample."""
        if not arrays:
            return []
        ends = np.cumsum([len(sample.tokens_T) for sample in self.samples])[:-1]
        return np.split(np.concatenate(arrays), ends)

    def _tokens(self, trains_N: np.ndarray) -> Tokens:
        lengths_S = [len(sample.tokens_T) for sample in self.samples]
        lengths_N = [trajectory.num_tokens for trajectory in self.trajectories]
        first_turns = np.concatenate([[0], np.cumsum([len(t.turns) for t in self.trajectories])])[
            : len(self.trajectories)
        ]
        turns = [
            np.where(t.turns_T < 0, -1, t.turns_T + first)
            for t, first in zip(self.trajectories, first_turns, strict=True)
        ]
        bootstrap_N = None
        if self.bootstrap and self.values is not None:
            # The value after the end of each truncated trajectory, 0 for the others.
            ends = [sequences[-1] if len(sequences) else None for sequences in self._sequences]
            bootstrap_N = np.zeros(len(self.trajectories))
            for place, (trajectory, end) in enumerate(zip(self.trajectories, ends, strict=True)):
                if end is not None and trajectory.stop_reason.truncated:
                    bootstrap_N[place] = self.values[end][-1]
        return Tokens(
            cu_seqlens_S1=offsets(lengths_S),
            cu_trajectories_N1=offsets(lengths_N),
            turns_L=joined(turns, np.int32),
            trains_N=trains_N,
            engine_logprobs_L=joined([t.logprobs_T for t in self.trajectories], np.float32),
            old_logprobs_L=None
            if self.old_logprobs is None
            else joined(self.old_logprobs, np.float32),
            ref_logprobs_L=None
            if self.ref_logprobs is None
            else joined(self.ref_logprobs, np.float32),
            values_L=None
            if self.values is None
            else joined([values_T1[:-1] for values_T1 in self.values], np.float32),
            bootstrap_N=bootstrap_N,
        )
