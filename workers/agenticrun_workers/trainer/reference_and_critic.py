"""The reference and the critic on pods of their own (`roles.reference`, `roles.critic`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agenticrun_api import Role
from agenticrun_workers.driver.batch_plan import RankPlan
from agenticrun_workers.models.source import ModelSources
from agenticrun_workers.serialization import pack, unpack
from agenticrun_workers.trainer.rank import CRITIC, REFERENCE, Metrics, RankActor, combine
from agenticrun_workers.trainer.reference_update import TakesReference

if TYPE_CHECKING:
    from agenticrun_workers.trainer.batch import RankBatch


class ReferenceActor(TakesReference):
    """One rank of the frozen policy."""

    role = Role.REFERENCE

    def setup(self, sources: ModelSources, rendezvous: tuple[str, int], threads: int) -> None:
        """Join the other ranks and load the model. Raises `InvalidConfig`."""
        from agenticrun_workers.trainer.strategies import build_reference

        self._join(rendezvous, threads)
        self._reference = build_reference(self._pipeline, sources.reference, shared=False)

    def score(self, packed: bytes) -> bytes:
        """Log-probs of a batch (a packed `RankPlan`) as packed `Said`. Collective."""
        from agenticrun_workers.trainer.batch import RankBatch

        plan: RankPlan = unpack(packed)
        batch = RankBatch(self._fetch(plan.items))
        batch.ref_logprobs = self._reference.compute_log_probs(batch.samples)
        return pack(batch.said())

    def _part(self, name: str) -> Any:
        return {REFERENCE: self._reference}[name]


class CriticActor(RankActor):
    """One rank of the value model."""

    role = Role.CRITIC

    def setup(self, sources: ModelSources, rendezvous: tuple[str, int], threads: int) -> None:
        """Join the other ranks and load the model. Raises `InvalidConfig`."""
        from agenticrun_workers.trainer.config_translation import value_loss_spec
        from agenticrun_workers.trainer.strategies import build_critic

        self._join(rendezvous, threads)
        self._critic = build_critic(self._pipeline, sources.critic, shared=False)
        self._value_loss = value_loss_spec(self._pipeline)
        self._batch: RankBatch | None = None

    def score(self, packed: bytes) -> bytes:
        """Values of a batch (a packed `RankPlan`) as packed `Said`. Collective."""
        from agenticrun_workers.trainer.batch import RankBatch

        self._plan: RankPlan = unpack(packed)
        batch = self._batch = RankBatch(
            self._fetch(self._plan.items), self._pipeline.algorithm.bootstrap_truncated
        )
        batch.ask_critic(self._critic.compute_values)
        return pack(batch.said())

    def train(self, *targets: bytes) -> Metrics:
        """All optimizer steps of the scored batch towards these packed `Targets`. Collective; metrics equal on every rank."""
        batch, self._batch = self._batch, None
        assert batch is not None, "score comes first"
        batch.aim([unpack(part) for part in targets])
        mini_batches = [batch.chosen(indices) for indices in self._plan.mini_batches]
        return combine(
            [dict(self._critic.train_step(samples, self._value_loss)) for samples in mini_batches]
        )

    def _part(self, name: str) -> Any:
        return {CRITIC: self._critic}[name]
