"""RankBatch: one rank's part of a batch, from trajectories to the samples that it trains on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from agenticrun_workers.algorithms.credit import Kind
from agenticrun_workers.algorithms.kl import KlKind
from agenticrun_workers.algorithms.segments import Floats
from agenticrun_workers.algorithms.token_advantages import (
    TokenAdvantages,
    Tokens,
    TokenSpec,
    token_advantages,
    turn_kl,
)
from agenticrun_workers.algorithms.whitening import Reduce
from agenticrun_workers.trainer.samples import policy_samples
from agenticrun_workers.trainer.strategy import Sample, Values
from agenticrun_workers.types import EpisodeKey, FloatArray, IntArray, Trajectory


@dataclass(frozen=True)
class Said:
    """What models on other pods say about each trajectory's sequences."""

    ref_logprobs: Mapping[EpisodeKey, list[FloatArray]] | None
    values: Mapping[EpisodeKey, list[Values]] | None


Targets = dict[EpisodeKey, list[tuple[FloatArray | None, FloatArray]]]
"""Returns and loss mask of each trajectory's sequences."""


@dataclass
class RankBatch:
    """Trajectories with what the models say about them. Sequences of all trajectories are adjacent, in turn order."""

    trajectories: list[Trajectory]
    bootstrap: bool = False
    """Whether trajectories that were cut go on with the critic's value of their end."""
    old_logprobs: list[FloatArray] | None = None
    ref_logprobs: list[FloatArray] | None = None
    values: list[Values] | None = None
    samples: list[Sample] = field(init=False)
    """One per sequence, with weight 1 on every response token and no advantages yet."""

    def __post_init__(self) -> None:
        parts = [policy_samples(trajectory) for trajectory in self.trajectories]
        self.samples = [sample for part in parts for sample in part]
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        self._sequences = [
            range(end - len(part), end) for part, end in zip(parts, ends.tolist(), strict=True)
        ]

    def ask_critic(self, compute_values: Callable[[list[Sample]], list[Values]]) -> None:
        """Take the critic's values; of trajectories that were cut, the final one is read at the end of what was left unanswered."""
        endings = [t.ending_T if self.bootstrap else t.ending_T[:0] for t in self.trajectories]
        asked = list(self.samples)
        alone: dict[int, int] = {}
        for trajectory, ending_T, sequences in zip(
            self.trajectories, endings, self._sequences, strict=True
        ):
            if len(ending_T) and len(sequences):
                if trajectory.stepwise:
                    alone[sequences[-1]] = len(asked)
                    asked.append(_unanswered(ending_T))
                else:
                    asked[sequences[-1]] = _with_ending(asked[sequences[-1]], ending_T)
        found = compute_values(asked)
        self.values = [
            Values(
                values.values_T[: len(sample.tokens_T)],
                found[alone[number]].final if number in alone else values.final,
            )
            for number, (sample, values) in enumerate(zip(self.samples, found, strict=False))
        ]

    def said(self) -> Said:
        """What the models said here, for ranks elsewhere."""
        pairs = list(zip(self.trajectories, self._sequences, strict=True))
        ref, values = self.ref_logprobs, self.values
        return Said(
            None
            if ref is None
            else {t.key: [ref[sequence] for sequence in sequences] for t, sequences in pairs},
            None
            if values is None
            else {t.key: [values[sequence] for sequence in sequences] for t, sequences in pairs},
        )

    def hear(self, said: Sequence[Said]) -> None:
        """Take what models on other pods said about these trajectories."""
        refs = {key: found for part in said for key, found in (part.ref_logprobs or {}).items()}
        values = {key: found for part in said for key, found in (part.values or {}).items()}
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

    def targets(self) -> Targets:
        """What a critic elsewhere trains towards."""
        pairs = zip(self.trajectories, self._sequences, strict=True)
        return {
            t.key: [(self.samples[s].returns_T, self.samples[s].weight_T) for s in sequences]
            for t, sequences in pairs
        }

    def aim(self, targets: Sequence[Targets]) -> None:
        """Train towards these targets."""
        found = {key: pairs for part in targets for key, pairs in part.items()}
        pairs = [pair for trajectory in self.trajectories for pair in found[trajectory.key]]
        assert self.values is not None
        self.samples = [
            replace(sample, returns_T=returns_T, weight_T=weight_T, old_values_T=values.values_T)
            for sample, (returns_T, weight_T), values in zip(
                self.samples, pairs, self.values, strict=True
            )
        ]

    def turn_kl(self, kind: KlKind) -> list[Floats]:
        """Summed token KL of each trajectory's turns."""
        turns = [len(trajectory.turns) for trajectory in self.trajectories]
        kl_K = turn_kl(self._tokens(np.ones(len(turns), np.bool_)), kind, sum(turns))
        return np.split(kl_K, np.cumsum(turns)[:-1]) if turns else []

    def logprob_gaps(self, version: int) -> dict[str, tuple[float, float]]:
        """By engine, over tokens that it sampled with the weights that are trained now: (sum of |trainer's - its log-prob|, tokens)."""
        gaps: dict[str, tuple[float, float]] = {}
        if self.old_logprobs is None:
            return gaps
        ends = np.cumsum([trajectory.num_tokens for trajectory in self.trajectories])[:-1]
        for trajectory, old_T in zip(
            self.trajectories, np.split(_joined(self.old_logprobs, np.float32), ends), strict=True
        ):
            same_T = (trajectory.turns_T >= 0) & (trajectory.versions_T == version)
            turns, gap = trajectory.turns_T[same_T], np.abs(old_T - trajectory.logprobs_T)[same_T]
            sums_K = np.bincount(turns, gap, minlength=len(trajectory.turns))
            counts_K = np.bincount(turns, minlength=len(trajectory.turns))
            for turn, summed, count in zip(trajectory.turns, sums_K, counts_K, strict=True):
                total, tokens = gaps.get(turn.engine, (0.0, 0.0))
                gaps[turn.engine] = total + float(summed), tokens + float(count)
        return gaps

    def credited(
        self,
        spec: TokenSpec,
        per_turn: Sequence[Floats],
        trains: Sequence[bool],
        kind: Kind,
        kl_coef: float,
        reduce: Reduce,
    ) -> Mapping[str, float]:
        """Put advantages, weights and returns into `samples`; returns metrics over all ranks. Collective through `reduce`."""
        tokens = self._tokens(np.array(trains, np.bool_))
        result = token_advantages(
            spec, tokens, _joined(list(per_turn), np.float64), kind, kl_coef, reduce
        )
        self.samples = self._filled(result)
        return result.metrics

    def chosen(self, trajectories: Sequence[int]) -> list[Sample]:
        """The samples of these trajectories."""
        return [
            self.samples[sequence] for index in trajectories for sequence in self._sequences[index]
        ]

    def _filled(self, result: TokenAdvantages) -> list[Sample]:
        ends = np.cumsum([len(sample.tokens_T) for sample in self.samples])[:-1]

        advantages = np.split(result.advantages_L, ends)
        weights = np.split(result.mask_L.astype(np.float32), ends)
        returns = (
            [None] * len(self.samples)
            if result.returns_L is None
            else np.split(result.returns_L, ends)
        )
        is_weights = (
            [None] * len(self.samples)
            if result.weights_L is None
            else np.split(result.weights_L, ends)
        )
        filled = []
        for sequence, sample in enumerate(self.samples):
            filled.append(
                replace(
                    sample,
                    advantages_T=advantages[sequence],
                    weight_T=weights[sequence],
                    returns_T=returns[sequence],
                    is_weights_T=is_weights[sequence],
                    old_logprobs_T=None
                    if self.old_logprobs is None
                    else self.old_logprobs[sequence],
                    ref_logprobs_T=None
                    if self.ref_logprobs is None
                    else self.ref_logprobs[sequence],
                    old_values_T=None if self.values is None else self.values[sequence].values_T,
                )
            )
        return filled

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
        return Tokens(
            cu_seqlens_S1=_offsets(lengths_S),
            cu_trajectories_N1=_offsets(lengths_N),
            turns_L=_joined(turns, np.int32),
            trains_N=trains_N,
            engine_logprobs_L=_joined([t.logprobs_T for t in self.trajectories], np.float32),
            old_logprobs_L=None
            if self.old_logprobs is None
            else _joined(self.old_logprobs, np.float32),
            ref_logprobs_L=None
            if self.ref_logprobs is None
            else _joined(self.ref_logprobs, np.float32),
            values_L=None
            if self.values is None
            else _joined([v.values_T for v in self.values], np.float32),
            bootstrap_N=self._bootstraps(self.values)
            if self.bootstrap and self.values is not None
            else None,
        )

    def _bootstraps(self, values: list[Values]) -> Floats:
        """The critic's value after each trajectory that was cut, 0 for the others."""
        ends = [sequences[-1] if len(sequences) else None for sequences in self._sequences]
        pairs = zip(self.trajectories, ends, strict=True)
        return np.array(
            [
                values[e].final if e is not None and t.stop_reason.truncated else 0.0
                for t, e in pairs
            ],
            np.float64,
        )


def _with_ending(sample: Sample, ending_T: IntArray) -> Sample:
    """The sample with text after it that nothing is computed for but the value at its end."""
    nothing_T = np.zeros(len(ending_T), np.float32)
    return Sample(
        tokens_T=np.concatenate([sample.tokens_T, ending_T]),
        weight_T=np.concatenate([sample.weight_T, nothing_T]),
        advantages_T=np.concatenate([sample.advantages_T, nothing_T]),
        turns_T=np.concatenate([sample.turns_T, np.full(len(ending_T), -1, np.int32)]),
    )


def _unanswered(prompt_T: IntArray) -> Sample:
    nothing_T = np.zeros(len(prompt_T), np.float32)
    return Sample(prompt_T, nothing_T, nothing_T, np.full(len(prompt_T), -1, np.int32))


def _offsets(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _joined(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)
