"""Trainer ranks: the policy, and reference and critic unless they have pods of their own.

`score`, `compute_advantages`, `train_critic` and `train_actor` are the stages of driver/step.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from agenticrun_api import Pipeline, Role
from agenticrun_api.spec import InitializeModel
from agenticrun_workers.launch import packed
from agenticrun_workers.models.source import ModelSources, TokenizerCorpus
from agenticrun_workers.processes import quick_imports
from agenticrun_workers.tracing import span, traced
from agenticrun_workers.trainer.batch import (
    RankBatch,
    RankPlan,
    ScoredBatch,
    TurnCredits,
    ValueTargets,
)
from agenticrun_workers.trainer.rank import (
    Metrics,
    combine,
)
from agenticrun_workers.trainer.served_policy import ServedPolicy
from agenticrun_workers.types import EpisodeKey

if TYPE_CHECKING:
    from agenticrun_workers.models.shape import Description


class TrainerActor(ServedPolicy):
    """One rank of the policy.

    Args:
        hosted: the other models that live on this rank.
    """

    role = Role.TRAINER

    def __init__(
        self, rank: int, world_size: int, pipeline: Pipeline, hosted: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(rank, world_size, pipeline)
        self._hosted = hosted
        self._batch: RankBatch | None = None

    def make_model(self, model: InitializeModel, corpus: TokenizerCorpus) -> dict[str, bytes]:
        """Make the files of a model with random weights (`spec.model.initialize`).

        Raises:
            InvalidConfig: the fields do not define a model.
        """
        with quick_imports():
            from agenticrun_workers.models.initialize import make_model_files

        return make_model_files(model, corpus, self._pipeline.sequence_length)

    def describe(self, sources: ModelSources) -> Description | None:
        """Return this rank's GPU and the models of the run.

        Returns:
            None without a GPU, and for models that `setup` refuses.
        """
        # No more than this: the other ranks wait until it is known whether the run fits.
        with quick_imports():
            from agenticrun_workers.models.shape import describe

        return describe(self._claim_device(), sources)

    def setup(self, sources: ModelSources, rendezvous: tuple[str, int], threads: int) -> int:
        """Join the other ranks and load the models.

        Args:
            rendezvous: from `rendezvous` of the first rank.
            threads: number of torch threads.

        Returns:
            the share of each batch that this rank gets (`PolicyTrainer.data_rank`).

        Raises:
            InvalidConfig: a model or an option of the strategy cannot be used.
        """
        with quick_imports():
            from agenticrun_workers.trainer.rank_models import RankModels

        self._join(rendezvous, threads)
        self._loaded = RankModels.load(self._pipeline, sources, self._hosted)
        return self._loaded.policy.data_rank

    @traced
    def warm_up(self, keys: list[tuple[EpisodeKey, int]]) -> Metrics:
        """Take a supervised step. Collective.

        Args:
            keys: key and store number of each trajectory.
        """
        from agenticrun_workers.trainer.samples import supervised_samples

        weight = self._pipeline.warmup.observation_weight if self._pipeline.warmup else 0.0
        samples = [
            sample
            for trajectory in self._fetch(keys)
            for sample in supervised_samples(trajectory, weight)
        ]
        return dict(self._models.policy.supervised_step(samples))

    def end_warm_up(self) -> None:
        """Forget the optimizer's state. Call it after the last `warm_up`. Collective."""
        self._models.policy.end_warm_up()

    @packed
    @traced
    def score(self, plan: RankPlan, *scores: ScoredBatch) -> ScoredBatch:
        """Fetch this rank's share of a batch and compute old and reference log-probs and values.

        Collective.

        Args:
            scores: of models on other pods, for all trajectories of the batch.
        """
        models, algorithm = self._models, self._pipeline.algorithm
        batch = self._batch = RankBatch(
            self._fetch(plan.items), algorithm.bootstrap_truncated, plan.mini_batches
        )
        scored = ScoredBatch()
        if models.recomputes_old:
            with span("old_log_probs"):
                batch.old_logprobs = models.policy.compute_log_probs(batch.samples)
            scored = ScoredBatch(gaps=batch.logprob_gaps(models.policy.policy_version))
        elif self._pipeline.old_log_probs == "Rollout":
            batch.old_logprobs = batch.rollout_logprobs()
        if models.reference is not None:
            with span("ref_log_probs"):
                batch.ref_logprobs = models.reference.compute_log_probs(batch.samples)
        if models.critic is not None:
            with span("values"):
                batch.compute_values(models.critic.compute_values)
        batch.merge_scores(scores)
        kl = batch.turn_kl(algorithm.reward_kl.kind) if algorithm.reward_kl else None
        return replace(scored, kl=kl)

    @packed
    @traced
    def compute_advantages(
        self, credits: TurnCredits, kl_coef: float
    ) -> tuple[Metrics, ValueTargets]:
        """Turn the credits of the turns into an advantage per token. Collective.

        Args:
            credits: of the whole batch.
            kl_coef: current coefficient of the KL in the reward.

        Returns:
            metrics, equal on every rank, and the targets of a critic on other pods.
        """
        models, batch = self._models, self._scored_batch()
        metrics = batch.compute_advantages(
            models.advantages, credits, kl_coef, models.policy.sum_over_data
        )
        critic_elsewhere = self._pipeline.uses_critic and models.critic is None
        return dict(metrics), batch.value_targets() if critic_elsewhere else {}

    @traced
    def train_critic(self) -> Metrics:
        """Take all optimizer steps of the batch with the critic that lives on this rank.

        Collective; the metrics are equal on every rank.
        """
        critic, loss = self._models.critic, self._models.value_loss
        assert critic is not None, "the critic lives on other pods"
        return combine(
            [
                dict(critic.train_step(samples, loss))
                for samples in self._scored_batch().mini_batch_samples()
            ]
        )

    @traced
    def train_actor(self, version: int, update: bool = True) -> Metrics:
        """Take all optimizer steps of the batch with the policy, and let go of the batch.

        Collective; the metrics are equal on every rank.

        Args:
            version: the policy version after this step.
            update: False leaves the weights alone, while the critic warms up.
        """
        models, batch, self._batch = self._models, self._scored_batch(), None
        # `score` has measured the gap to the engines if it recomputed log-probs.
        before = None if models.recomputes_old else models.policy.policy_version
        metrics: Metrics = {}
        if update:
            metrics = combine(
                [
                    dict(models.policy.train_step(samples, models.loss))
                    for samples in batch.mini_batch_samples(before)
                ]
            )
        models.policy.policy_version = version
        return metrics

    @traced
    def offload(self) -> None:
        """Move all models to host memory, which frees the device for an engine. Collective."""
        for model in self._models.by_name.values():
            model.offload()

    @traced
    def onload(self) -> None:
        """Move all models back to the device. Collective."""
        for model in self._models.by_name.values():
            model.onload()

    def _scored_batch(self) -> RankBatch:
        assert self._batch is not None, "score comes first"
        return self._batch
