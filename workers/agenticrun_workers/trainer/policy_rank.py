"""Trainer ranks: the policy, and reference and critic unless they have pods of their own.

`score`, `compute_advantages`, `train_critic` and `train_actor` are the stages of driver/step.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from agenticrun_api import Pipeline, Role
from agenticrun_api.spec import InitializeModel
from agenticrun_workers.launch import packed
from agenticrun_workers.models.source import ModelSource, ModelSources, TokenizerCorpus
from agenticrun_workers.processes import quick_imports
from agenticrun_workers.tracing import span, traced
from agenticrun_workers.trainer.batch import (
    LogprobGaps,
    ModelScores,
    RankBatch,
    RankPlan,
    ScoredBatch,
    TurnCredits,
    ValueTargets,
)
from agenticrun_workers.trainer.rank import (
    ACTOR,
    CRITIC,
    REFERENCE,
    Metrics,
    RankModel,
    ReferenceUpdateMixin,
    combine,
)
from agenticrun_workers.types import EpisodeKey
from agenticrun_workers.weights.broadcast import BroadcastFailed
from agenticrun_workers.weights.buckets import Bucket, MergePlan, TensorSpec, WrittenBucket

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

    from agenticrun_workers.algorithms.token_advantages import TokenSpec
    from agenticrun_workers.inference.parity import Parity, ParityProbe, ProbeSample
    from agenticrun_workers.models.lora import Adapters
    from agenticrun_workers.models.shape import ModelShape
    from agenticrun_workers.trainer.actor_loss import LossSpec
    from agenticrun_workers.trainer.critic import CriticTrainer, ValueLossSpec
    from agenticrun_workers.trainer.policy_trainer import PolicyTrainer
    from agenticrun_workers.trainer.reference import ReferencePolicy
    from agenticrun_workers.weights.collective import WeightGroup
    from agenticrun_workers.weights.export import BucketWriter


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


class TrainerActor(ReferenceUpdateMixin):
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
        self._loaded: RankModels | None = None
        """None until `setup`."""
        self._batch: RankBatch | None = None
        self._writers: dict[bool, BucketWriter] = {}
        """On rank 0: that of adapters (True), and that of whole weights (False)."""
        self._group: WeightGroup | None = None

    def make_model(self, model: InitializeModel, corpus: TokenizerCorpus) -> dict[str, bytes]:
        """Make the files of a model with random weights (`spec.model.initialize`).

        Raises:
            InvalidConfig: the fields do not define a model.
        """
        with quick_imports():
            from agenticrun_workers.models.initialize import make_model_files

        return make_model_files(model, corpus, self._pipeline.sequence_length)

    def describe(self, sources: ModelSources) -> tuple[str, int, dict[Role, ModelShape]] | None:
        """Return name and bytes of this rank's GPU, and the shapes of the run's models.

        Returns:
            None without a GPU, and for models that `setup` refuses.
        """
        with quick_imports():
            import torch

            from agenticrun_workers.models.folder import ModelLoadError
            from agenticrun_workers.models.shape import source_shape

        device = self._claim_device()
        if device.type != "cuda":
            return None
        gpu = torch.cuda.get_device_properties(device)
        try:
            shapes = {
                Role.TRAINER: source_shape(sources.policy),
                Role.REFERENCE: source_shape(sources.reference),
                Role.CRITIC: source_shape(sources.critic),
            }
        except ModelLoadError:
            return None
        return gpu.name, gpu.total_memory, shapes

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
            from agenticrun_workers.trainer import config_translation as specs
            from agenticrun_workers.trainer import strategies

        self._join(rendezvous, threads)
        pipeline = self._pipeline
        self._loaded = RankModels(
            source=sources.policy,
            policy=strategies.build_strategy(pipeline, sources.policy),
            reference=strategies.build_reference(pipeline, sources.reference, shared=True)
            if REFERENCE in self._hosted
            else None,
            critic=strategies.build_critic(pipeline, sources.critic, shared=True)
            if CRITIC in self._hosted
            else None,
            loss=specs.loss_spec(pipeline),
            value_loss=specs.value_loss_spec(pipeline),
            advantages=specs.token_spec(pipeline),
            recomputes_old=specs.needs_old_logprobs(pipeline),
        )
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
    def score(self, plan: RankPlan, *scores: ModelScores) -> ScoredBatch:
        """Fetch this rank's share of a batch and compute old and reference log-probs and values.

        Collective.

        Args:
            scores: of models on other pods, for all trajectories of the batch.
        """
        models, algorithm = self._models, self._pipeline.algorithm
        batch = self._batch = RankBatch(
            self._fetch(plan.items), algorithm.bootstrap_truncated, plan.mini_batches
        )
        gaps: LogprobGaps = {}
        if models.recomputes_old:
            with span("old_log_probs"):
                batch.old_logprobs = models.policy.compute_log_probs(batch.samples)
            gaps = batch.logprob_gaps(models.policy.policy_version)
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
        return ScoredBatch(kl, gaps)

    def parity_probe(self) -> ParityProbe:
        """Return prompts that show if engines compute this model."""
        from agenticrun_workers.trainer import config_translation as specs
        from agenticrun_workers.trainer.parity import make_probe

        pipeline = self._pipeline
        return make_probe(
            self._config(), pipeline.sequence_length, specs.loss_temperature(pipeline)
        )

    @packed
    @traced
    def parity(self, engines: Mapping[str, Sequence[ProbeSample]]) -> dict[str, Parity]:
        """Compare what engines sampled with this model. Collective; equal on every rank.

        Args:
            engines: the conversations of each engine.
        """
        import torch

        from agenticrun_workers.models.devices import compute_device
        from agenticrun_workers.trainer.parity import compare, precision_of, quantizes

        precision = precision_of(
            getattr(torch, self._models.source.dtype),
            compute_device(),
            quantized=quantizes(self._pipeline.actor_infer.strategy.config),
        )
        layers = self._config().get_text_config(decoder=True).num_hidden_layers
        return compare(self._models.policy, engines, layers, precision)

    @packed
    @traced
    def compute_advantages(self, credits: TurnCredits) -> tuple[Metrics, ValueTargets]:
        """Turn the credits of the turns into an advantage per token. Collective.

        Args:
            credits: of the whole batch.

        Returns:
            metrics, equal on every rank, and the targets of a critic on other pods.
        """
        models, batch = self._models, self._scored_batch()
        metrics = batch.compute_advantages(models.advantages, credits, models.policy.sum_over_data)
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

    def merge_plan(self) -> MergePlan | str | None:
        """Describe how nodes merge adapters into whole weights. Collective over all ranks.

        Returns:
            on rank 0: the plan, or the reason why nodes cannot merge.
        """
        from agenticrun_workers.weights.lora_merge import plan_merge

        adapters = self._adapters()
        if self._rank == 0:
            return plan_merge(adapters, self._models.source)
        deque(adapters.base(), maxlen=0)
        return None

    def tensor_specs(self, adapters: bool = False) -> list[TensorSpec]:
        """Return the parameters that `export_weights` writes, on rank 0. Collective."""
        from agenticrun_workers.weights.export import tensor_specs

        return tensor_specs(self._exported(adapters))

    def open_buckets(
        self, buckets: tuple[Bucket, ...], folder: str, deltas: bool, adapters: bool = False
    ) -> None:
        """Open the buckets that `export_weights` fills, on rank 0; see `BucketWriter`.

        Whole weights and adapters have separate buckets.
        """
        from agenticrun_workers.weights.export import BucketWriter

        self._writers[adapters] = BucketWriter(Path(folder), buckets, deltas=deltas)

    def close_whole_buckets(self) -> None:
        """Free the memory of whole weights, on rank 0."""
        del self._writers[False]

    def export_weights(self, adapters: bool = False) -> Iterator[WrittenBucket]:
        """Write all parameters, or the adapters, into their buckets, on rank 0.

        Yields each bucket once it is written. Collective with `assist_export`.
        """
        with self.recorder.span("export_weights"):
            for written in self._writers[adapters].write(self._exported(adapters)):
                yield replace(written, policy_version=self._models.policy.policy_version)

    def host_broadcast(self, host: str, port: int, world: int) -> None:
        """Form a process group with the engines, on rank 0, at its last `rendezvous`.

        Raises:
            BroadcastFailed: the group could not be formed.
        """
        from agenticrun_workers.models.devices import compute_device
        from agenticrun_workers.weights.collective import WeightGroup

        self._group = None
        try:
            self._group = WeightGroup(
                host, port, 0, world, compute_device(), self._taken_listener()
            )
        except RuntimeError as error:
            raise BroadcastFailed(str(error)) from error

    @traced
    def broadcast_weights(self) -> None:
        """Send all parameters to the engines, on rank 0. Collective with `assist_export`.

        Raises:
            BroadcastFailed: an engine did not take part to the end.
        """
        group = self._group
        broken: RuntimeError | None = None
        assert group is not None, "host_broadcast comes first"
        # Export to the end even after a failure: it is collective.
        for _, tensor in self._models.policy.export_weights():
            if broken is None:
                try:
                    group.send(tensor)
                except RuntimeError as error:
                    broken = error
                    group.close()
        if broken is not None:
            self._group = None
            raise BroadcastFailed(str(broken)) from broken

    @traced
    def assist_export(self, adapters: bool = False) -> None:
        """Take part in an export of rank 0, on the other ranks."""
        deque(self._exported(adapters), maxlen=0)

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

    def _config(self) -> PretrainedConfig:
        from agenticrun_workers.models.pretrained import load_config

        source = self._models.source
        with source.folder() as folder:
            return load_config(folder, trust_remote_code=source.trust_remote_code)

    def _scored_batch(self) -> RankBatch:
        assert self._batch is not None, "score comes first"
        return self._batch

    def _exported(self, adapters: bool) -> Iterator[tuple[str, Tensor]]:
        return self._adapters().weights() if adapters else self._models.policy.export_weights()

    def _adapters(self) -> Adapters:
        adapters = self._models.policy.adapters
        assert adapters is not None, "the run trains adapters"
        return adapters

    @property
    def _models(self) -> RankModels:
        assert self._loaded is not None, "setup comes first"
        return self._loaded

    def _part(self, name: str) -> RankModel:
        return self._models.by_name[name]

    def _reference_model(self) -> ReferencePolicy:
        assert self._models.reference is not None, "the reference lives on other pods"
        return self._models.reference
