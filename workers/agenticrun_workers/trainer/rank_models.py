"""The models on a rank of the policy, and how they are loaded."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from agenticrun_api import Pipeline
from agenticrun_workers.algorithms.token_advantages import TokenSpec
from agenticrun_workers.models.source import ModelSource, ModelSources
from agenticrun_workers.trainer.actor_loss import LossSpec
from agenticrun_workers.trainer.config_translation import (
    loss_spec,
    needs_old_logprobs,
    token_spec,
    value_loss_spec,
)
from agenticrun_workers.trainer.critic import CriticTrainer, ValueLossSpec
from agenticrun_workers.trainer.policy_trainer import PolicyTrainer
from agenticrun_workers.trainer.rank import ACTOR, CRITIC, REFERENCE, RankModel
from agenticrun_workers.trainer.reference import ReferencePolicy
from agenticrun_workers.trainer.strategies import build_critic, build_reference, build_strategy


@dataclass(frozen=True)
class RankModels:
    """The models of a rank of the policy, and what the run asks of them."""

    source: ModelSource
    """The policy's."""
    policy: PolicyTrainer
    reference: ReferencePolicy | None
    critic: CriticTrainer | None
    """Reference and critic are None without one, and on pods of their own."""
    loss: LossSpec
    value_loss: ValueLossSpec
    advantages: TokenSpec
    recomputes_old: bool
    """True if old log-probs are the trainer's, not the engines'."""

    @property
    def by_name(self) -> dict[str, RankModel]:
        """The models of this rank, by the names of a checkpoint's modules."""
        models: dict[str, RankModel | None] = {
            ACTOR: self.policy,
            REFERENCE: self.reference,
            CRITIC: self.critic,
        }
        return {name: model for name, model in models.items() if model is not None}

    @staticmethod
    def load(pipeline: Pipeline, sources: ModelSources, hosted: Set[str]) -> RankModels:
        """Load the policy, and the other models that live on its ranks. Collective.

        Args:
            hosted: these other models.

        Raises:
            InvalidConfig: a model or an option of the strategy cannot be used.
        """
        return RankModels(
            source=sources.policy,
            policy=build_strategy(pipeline, sources.policy),
            reference=build_reference(pipeline, sources.reference, shared=True)
            if REFERENCE in hosted
            else None,
            critic=build_critic(pipeline, sources.critic, shared=True)
            if CRITIC in hosted
            else None,
            loss=loss_spec(pipeline),
            value_loss=value_loss_spec(pipeline),
            advantages=token_spec(pipeline),
            recomputes_old=needs_old_logprobs(pipeline),
        )
