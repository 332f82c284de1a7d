"""Ranks of reference and critic on pods of their own (`roles.reference`, `roles.critic`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agenticrun_api import Pipeline, Role
from agenticrun_workers.launch import packed
from agenticrun_workers.models.source import ModelSources
from agenticrun_workers.processes import quick_imports
from agenticrun_workers.tracing import traced
from agenticrun_workers.trainer.batch import RankBatch, RankPlan, ScoredBatch, ValueTargets
from agenticrun_workers.trainer.rank import (
    CRITIC,
    REFERENCE,
    Metrics,
    RankActor,
    RankModel,
    ReferenceUpdateMixin,
    combine,
)

if TYPE_CHECKING:
    from agenticrun_workers.trainer.critic import CriticTrainer
    from agenticrun_workers.trainer.reference import ReferencePolicy


class ReferenceActor(ReferenceUpdateMixin):
    """One rank of the frozen policy."""

    role = Role.REFERENCE

    def __init__(self, rank: int, world_size: int, pipeline: Pipeline) -> None:
        super().__init__(rank, world_size, pipeline)
        self._reference: ReferencePolicy | None = None
        """None until `setup`."""

    def setup(self, sources: ModelSources, rendezvous: tuple[str, int], threads: int) -> None:
        """Join the other ranks and load the model.

        Raises:
            InvalidConfig: the model cannot be used.
        """
        with quick_imports():
            from agenticrun_workers.trainer.strategies import build_reference

        self._join(rendezvous, threads)
        self._reference = build_reference(self._pipeline, sources.reference, shared=False)

    @packed
    @traced
    def score(self, plan: RankPlan) -> ScoredBatch:
        """Compute log-probs of this rank's share of a batch. Collective."""
        batch = RankBatch(self._fetch(plan.items))
        batch.ref_logprobs = self._reference_model().compute_log_probs(batch.samples)
        return batch.scores()

    def _part(self, name: str) -> RankModel:
        return {REFERENCE: self._reference_model()}[name]

    def _reference_model(self) -> ReferencePolicy:
        assert self._reference is not None, "setup comes first"
        return self._reference


class CriticActor(RankActor):
    """One rank of the value model."""

    role = Role.CRITIC

    def __init__(self, rank: int, world_size: int, pipeline: Pipeline) -> None:
        super().__init__(rank, world_size, pipeline)
        self._critic: CriticTrainer | None = None
        """None until `setup`."""
        self._batch: RankBatch | None = None

    def setup(self, sources: ModelSources, rendezvous: tuple[str, int], threads: int) -> None:
        """Join the other ranks and load the model.

        Raises:
            InvalidConfig: the model cannot be used.
        """
        with quick_imports():
            from agenticrun_workers.trainer.strategies import build_critic

        self._join(rendezvous, threads)
        self._critic = build_critic(self._pipeline, sources.critic, shared=False)

    @packed
    @traced
    def score(self, plan: RankPlan) -> ScoredBatch:
        """Compute values of this rank's share of a batch. Collective."""
        batch = self._batch = RankBatch(
            self._fetch(plan.items), self._pipeline.algorithm.bootstrap_truncated, plan.mini_batches
        )
        batch.compute_values(self._critic_model().compute_values)
        return batch.scores()

    @packed
    @traced
    def train_critic(self, *targets: ValueTargets) -> Metrics:
        """Take all optimizer steps of the scored batch. Collective; metrics equal on every rank.

        Args:
            targets: of the policy's ranks.
        """
        from agenticrun_workers.trainer.config_translation import value_loss_spec

        critic, loss = self._critic_model(), value_loss_spec(self._pipeline)
        batch, self._batch = self._batch, None
        assert batch is not None, "score comes first"
        batch.set_value_targets(targets)
        return combine(
            [dict(critic.train_step(samples, loss)) for samples in batch.mini_batch_samples()]
        )

    def _part(self, name: str) -> RankModel:
        return {CRITIC: self._critic_model()}[name]

    def _critic_model(self) -> CriticTrainer:
        assert self._critic is not None, "setup comes first"
        return self._critic
