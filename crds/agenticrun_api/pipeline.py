"""`spec.pipeline`: the RL run itself. Names follow ROLL's AgenticConfig; meanings are in docs/reference."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agenticrun_api.base import Model, Open, Rule, Tag, Text

Coefficient = Annotated[float, Field(ge=0, le=1e6)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=10_000_000)]
Positive = Annotated[int, Field(ge=1, le=10_000_000)]
PlugIn = Annotated[str, Field(min_length=1, max_length=253)]
"""A registered name, or `module:Class`."""

GROUP_BASELINE = ("grpo", "rloo", "dr_grpo")


class Algorithm(Model):
    """The advantage estimator and the actor's loss."""

    RULES = (
        Rule(
            "self.name == 'grpo' || self.normStdType == 'group'",
            "normStdType is read by grpo only; leave it out, or set rewardNormalization for reinforce",
            ".normStdType",
            lambda a: a.name == "grpo" or a.norm_std_type == "group",
        ),
        Rule(
            "self.name == 'reinforce' || self.gamma == 1.0",
            "gamma is read by reinforce only: grpo, rloo and dr_grpo give every token of a trajectory one advantage",
            ".gamma",
            lambda a: a.name == "reinforce" or a.gamma == 1.0,
        ),
        Rule(
            "self.lossAggMode != 'seq-mean-token-sum-norm' || has(self.lossAggNorm)",
            "lossAggMode seq-mean-token-sum-norm needs lossAggNorm, the constant that it divides by (for example sequenceLength)",
            ".lossAggMode",
            lambda a: a.loss_agg_mode != "seq-mean-token-sum-norm" or a.loss_agg_norm is not None,
        ),
    )

    name: Literal["grpo", "rloo", "dr_grpo", "reinforce"] = "grpo"
    norm_std_type: Literal["group", "batch", "none"] = "group"
    """What grpo divides the group-centred reward by: the std of its group, of the batch, or nothing."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount of reinforce's reward-to-go, per response token."""
    whiten_advantages: bool = False
    """Shift and scale the advantages of the batch's response tokens to mean 0, std 1."""
    reward_clip: Annotated[float, Field(gt=0, le=1e6)] | None = None
    advantage_clip: Annotated[float, Field(gt=0, le=1e6)] | None = None
    pg_clip_low: Share = 0.2
    pg_clip_high: Annotated[float, Field(ge=0, le=10)] = 0.2
    dual_clip: Annotated[float, Field(gt=1, le=100)] | None = None
    """Bound c of the dual clip for negative advantages; off without it."""
    ppo_epochs: Annotated[int, Field(ge=1, le=64)] = 1
    entropy_loss_coef: Coefficient = 0.0
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "seq-mean-token-mean"
    loss_agg_norm: Annotated[float, Field(gt=0, le=1e9)] | None = None


class RewardNormalization(Model):
    """Normalisation of trajectory rewards for reinforce."""

    grouping: Literal["batch", "group", "tag"] = "batch"
    norm_mean_type: Literal["batch", "group", "none"] = "none"
    """The set whose mean is subtracted; `group` means the set named by `grouping`."""
    norm_std_type: Literal["batch", "group", "none"] = "none"


class Staleness(Model):
    """How far rollout may run ahead of training."""

    RULES = (
        Rule(
            "self.max == 0 || self.offPolicy == 'Ignore'",
            "rollouts of older policies bias the gradient and no correction is built in yet: set offPolicy: Ignore to accept that",
            ".offPolicy",
            lambda s: s.max == 0 or s.off_policy == "Ignore",
        ),
    )

    max: Annotated[int, Field(ge=0, le=64)] = 0
    """Policy versions that a rollout may be behind. 0 is the synchronous algorithm."""
    off_policy: Literal["Refuse", "Ignore"] = "Refuse"


class AgentSpec(Model):
    """Who drives an environment."""

    type: PlugIn = "multi_turn"
    config: Open = {}
    """Keyword arguments of the agent."""


class EnvSpec(Model):
    """One kind of environment, named by its tag."""

    tag: Tag
    type: PlugIn
    """A registered environment (frozen_lake) or `module:Class` from spec.code or the image."""
    config: Open = {}
    """Keyword arguments of the environment."""
    max_steps: Annotated[int, Field(ge=1, le=10_000)] = 10
    """Turn limit of an episode."""
    max_tokens_per_step: Annotated[int, Field(ge=1, le=131_072)] = 128
    """Token limit of one response, end-of-turn token included."""
    step_timeout_seconds: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    """A reset or step that takes longer ends the episode with stop reason timeout."""
    agent: AgentSpec = AgentSpec()


class EnvGroups(Model):
    """How many episodes run side by side, and of which environments."""

    RULES = (
        Rule(
            "!has(self.partition) || size(self.partition) == size(self.tags)",
            "partition needs one number per tag",
            ".partition",
            lambda e: e.partition is None or len(e.partition) == len(e.tags),
        ),
        Rule(
            "!has(self.partition) || self.partition.sum() == self.groups",
            "partition must add up to groups",
            ".partition",
            lambda e: e.partition is None or sum(e.partition) == e.groups,
        ),
        Rule(
            "has(self.partition) || self.groups % size(self.tags) == 0",
            "groups does not divide evenly over the tags: set partition",
            ".groups",
            lambda e: e.partition is not None or e.groups % len(e.tags) == 0,
        ),
    )

    groups: Annotated[int, Field(ge=1, le=65_536)]
    """Groups that run at the same time."""
    group_size: Annotated[int, Field(ge=1, le=4096)] = 1
    """Episodes of the same level in a group."""
    tags: Annotated[list[Tag], Field(min_length=1, max_length=64)]
    partition: Annotated[list[Annotated[int, Field(ge=0, le=65_536)]], Field(max_length=64)] | None = None
    """Groups of each tag; without it they are divided evenly."""
    max_envs_per_worker: Annotated[int, Field(ge=1, le=65_536)] = 256
    """Episodes that one env worker process runs at a time."""

    def shares(self) -> dict[str, int]:
        """Groups of each tag."""
        parts = self.partition or [self.groups // len(self.tags)] * len(self.tags)
        return dict(zip(self.tags, parts, strict=True))


class Training(Model):
    """Optimizer and batches of a trained role."""

    learning_rate: Annotated[float, Field(gt=0, le=10)] = 1e-6
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """After `warmupSteps` of linear warm-up: stay, or fall to zero at maxSteps."""
    warmup_steps: Count = 0
    weight_decay: Coefficient = 0.0
    adam_beta1: Share = 0.9
    adam_beta2: Share = 0.999
    max_grad_norm: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    mini_batch_size: Positive | None = None
    """Trajectories of one optimizer step, groups kept whole; default: the whole batch."""
    max_tokens_per_micro_batch: Annotated[int, Field(ge=1, le=16_777_216)] = 16_384
    """Tokens of one forward and backward pass."""


class TrainStrategySpec(Model):
    name: Literal["fsdp2"] = "fsdp2"


class ActorTrain(Model):
    strategy: TrainStrategySpec = TrainStrategySpec()
    training: Training = Training()


class InferStrategySpec(Model):
    name: Literal["transformers"] = "transformers"


class Generating(Model):
    """Sampling during training: the full distribution, so that recorded log-probs are those of the sampling distribution."""

    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0


class ValidationGenerating(Model):
    """Sampling during validation. Temperature 0 is greedy."""

    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] = 0


class ActorInfer(Model):
    strategy: InferStrategySpec = InferStrategySpec()
    generating: Generating = Generating()
    validation_generating: ValidationGenerating = ValidationGenerating()


class Warmup(Model):
    """Supervised warm-up before the first RL step. It teaches the answer format, never the way."""

    steps: Annotated[int, Field(ge=1, le=100_000)]
    batch_size: Annotated[int, Field(ge=1, le=65_536)] = 32
    """Episodes of one step."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] | None = None
    """Default: actorTrain's."""
    observation_weight: Share = 0.0
    """Weight of the loss on what the environment says after an answer: the policy learns to foresee what actions do. 0 = answers only."""
    source: Literal["RandomValidActions"] = "RandomValidActions"
    """Episodes of the training environments, answered with uniformly random valid actions."""


class Pipeline(Model):
    """The RL run. `rolloutBatchSize` trajectories make one step."""

    RULES = (
        Rule(
            "self.rolloutBatchSize % self.trainEnvs.groupSize == 0",
            "rolloutBatchSize counts trajectories and must be a multiple of trainEnvs.groupSize",
            ".rolloutBatchSize",
            lambda p: p.rollout_batch_size % p.train_envs.group_size == 0,
        ),
        Rule(
            "!has(self.actorTrain.training.miniBatchSize) || self.actorTrain.training.miniBatchSize % self.trainEnvs.groupSize == 0",
            "actorTrain.training.miniBatchSize must be a multiple of trainEnvs.groupSize: groups are kept whole",
            ".actorTrain.training.miniBatchSize",
            lambda p: not p.actor_train.training.mini_batch_size or p.actor_train.training.mini_batch_size % p.train_envs.group_size == 0,
        ),
        Rule(
            "!has(self.actorTrain.training.miniBatchSize) || self.rolloutBatchSize % self.actorTrain.training.miniBatchSize == 0",
            "rolloutBatchSize must be a multiple of actorTrain.training.miniBatchSize",
            ".actorTrain.training.miniBatchSize",
            lambda p: not p.actor_train.training.mini_batch_size or p.rollout_batch_size % p.actor_train.training.mini_batch_size == 0,
        ),
        Rule(
            "self.trainEnvs.tags.all(t, self.envs.exists(e, e.tag == t))",
            "trainEnvs.tags names a tag that no entry of envs has",
            ".trainEnvs.tags",
            lambda p: {e.tag for e in p.envs} >= set(p.train_envs.tags),
        ),
        Rule(
            "!has(self.valEnvs) || self.valEnvs.tags.all(t, self.envs.exists(e, e.tag == t))",
            "valEnvs.tags names a tag that no entry of envs has",
            ".valEnvs.tags",
            lambda p: p.val_envs is None or {e.tag for e in p.envs} >= set(p.val_envs.tags),
        ),
        Rule(
            "self.evalSteps == 0 || has(self.valEnvs)",
            "evalSteps needs valEnvs; set evalSteps: 0 to train without validation",
            ".evalSteps",
            lambda p: p.eval_steps == 0 or p.val_envs is not None,
        ),
        Rule(
            "!has(self.valEnvs) || self.valBatchSize % self.valEnvs.groupSize == 0",
            "valBatchSize counts trajectories and must be a multiple of valEnvs.groupSize",
            ".valBatchSize",
            lambda p: p.val_envs is None or p.val_batch_size % p.val_envs.group_size == 0,
        ),
        Rule(
            "!(self.algorithm.name in ['grpo', 'rloo', 'dr_grpo']) || self.trainEnvs.groupSize >= 2",
            "grpo, rloo and dr_grpo compare the members of a group: trainEnvs.groupSize must be at least 2",
            ".trainEnvs.groupSize",
            lambda p: p.algorithm.name not in GROUP_BASELINE or p.train_envs.group_size >= 2,
        ),
        Rule(
            "!(self.algorithm.name in ['grpo', 'rloo', 'dr_grpo']) || !has(self.rewardNormalization)",
            "grpo, rloo and dr_grpo own their normalisation: remove rewardNormalization, or use algorithm reinforce",
            ".rewardNormalization",
            lambda p: p.algorithm.name not in GROUP_BASELINE or p.reward_normalization is None,
        ),
    )

    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 42
    """Every seed of the run derives from it."""
    max_steps: Positive
    rollout_batch_size: Annotated[int, Field(ge=1, le=1_048_576)]
    """Trajectories of one training step."""
    val_batch_size: Annotated[int, Field(ge=1, le=1_048_576)] = 128
    """Trajectories of one validation."""
    eval_steps: Count = 10
    """Validate every N steps, at step 0 and at the end; 0 = never."""
    save_steps: Count = 50
    """Save a checkpoint every N steps and at the end; 0 = only at the end and when stopped."""
    sequence_length: Annotated[int, Field(ge=8, le=16_777_216)] = 4096
    """Token limit of a whole trajectory."""
    algorithm: Algorithm = Algorithm()
    reward_normalization: RewardNormalization | None = None
    staleness: Staleness = Staleness()
    warmup: Warmup | None = None
    envs: Annotated[list[EnvSpec], Field(min_length=1, max_length=64)]
    train_envs: EnvGroups
    val_envs: EnvGroups | None = None
    actor_train: ActorTrain = ActorTrain()
    actor_infer: ActorInfer = ActorInfer()

    def env(self, tag: str) -> EnvSpec:
        """The environment with this tag."""
        return next(env for env in self.envs if env.tag == tag)


__all__ = [
    "ActorInfer", "ActorTrain", "AgentSpec", "Algorithm", "EnvGroups", "EnvSpec", "Generating", "InferStrategySpec", "Pipeline",
    "RewardNormalization", "Staleness", "Text", "TrainStrategySpec", "Training", "ValidationGenerating", "Warmup",
]  # fmt: skip
