"""`spec.pipeline`: the RL run itself. Names follow ROLL's AgenticConfig; see docs/reference.md."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agenticrun_api.algorithm import (
    Algorithm,
    Guards,
    RewardNormalization,
    TrainInferCorrection,
)
from agenticrun_api.base import Count, Model, Positive, Rule
from agenticrun_api.environments import EnvGroups, EnvSpec, Path, RewardSpec, TrainEnvGroups
from agenticrun_api.pipeline_rules import PIPELINE_RULES
from agenticrun_api.training import (
    ActorInfer,
    ActorTrain,
    Critic,
    Eval,
    Reference,
    Warmup,
    WeightSync,
)


class Staleness(Model):
    """Limit on how far rollout may run ahead of training."""

    RULES = (
        Rule(
            "self.max > 0.0 || self.partialRollout",
            "partialRollout has no effect with staleness.max 0, where weights never change during "
            "generation: leave it out",
            ".partialRollout",
            lambda s: s.max > 0 or s.partial_rollout,
        ),
    )

    max: Annotated[float, Field(ge=0, le=64)] = 0.0
    """Policy versions that a rollout may be behind, may be fractional. 0: synchronous."""
    partial_rollout: bool = True
    """True: a response continues with new weights, and each token records its version. False: it
    starts again."""
    off_policy: Literal["Refuse", "Ignore"] = "Refuse"
    """Ignore: accept the bias of rollouts of older policies. Refuse: require a correction
    (pgVariant decoupled, isWeight, or oldLogProbs Rollout with a ratio)."""


class Record(Model):
    """Recorded rollouts, to debug training without engines and environments."""

    RULES = (
        Rule(
            "has(self.to) != has(self.replay)",
            "set exactly one of to (write the batches of this run) and replay (train on batches "
            "that another run wrote)",
            ".to",
            lambda r: (r.to is None) != (r.replay is None),
        ),
    )

    to: Path | None = None
    """Folder or fsspec URL to write the batch of every step to."""
    replay: Path | None = None
    """Folder or fsspec URL of recorded batches to train on, in order. No episodes are run."""


LIVE_FIELDS = ("max_steps", "eval_steps", "save_steps", "guards")
"""Fields of the pipeline that may change while the run trains, but not
guards.maxSkippedSteps."""


class Pipeline(Model):
    """The RL run. `rolloutBatchSize` trajectories make one step."""

    RULES = PIPELINE_RULES

    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 42
    """All seeds of the run are derived from this one."""
    deterministic: bool = False
    """Make the run reproducible bit for bit, also across restarts: responses are computed one by
    one, and batches are sorted. Slower."""
    max_steps: Positive
    """Training steps of the run. May change while the run trains; the learning rate's schedule then
    ends at the new one."""
    rollout_batch_size: Annotated[int, Field(ge=1, le=1_048_576)]
    """Trajectories of one training step."""
    val_batch_size: Annotated[int, Field(ge=1, le=1_048_576)] = 128
    """Trajectories of one validation."""
    eval_steps: Count = 10
    """Validate every N steps, at step 0 and at the end; 0 = never. May change while the run
    trains."""
    save_steps: Count = 50
    """Save a checkpoint every N steps and at the end; 0 = only at the end and when stopped. May
    change while the run trains."""
    logging_steps: Count = 1
    """Write sample episodes (tracking.sampleLogs, tracking.renderDir) every N steps; 0 = never.
    Metrics are logged at every step."""
    sequence_length: Annotated[int, Field(ge=8, le=16_777_216)] = 4096
    """Token limit of a whole trajectory; for step-wise agents, of the prompt and answer of one
    turn."""
    model_update_frequency: Annotated[int, Field(ge=1, le=1000)] = 1
    """Load new weights into the engines every N steps."""
    critic_warmup: Count = 0
    """Steps at the start that train only the critic."""
    algorithm: Algorithm = Algorithm()
    reward_normalization: RewardNormalization | None = None
    train_infer_correction: TrainInferCorrection | None = None
    old_log_probs: Literal["Recompute", "Rollout"] = "Recompute"
    """The old policy of ratios and of rewardKl. Recompute: the policy at the start of the batch.
    Rollout: the policies that sampled, by the engines' log-probs; clips then act on older rollouts,
    and a forward pass is saved."""
    staleness: Staleness = Staleness()
    guards: Guards = Guards()
    warmup: Warmup | None = None
    eval: Eval = Eval()
    record: Record | None = None
    envs: Annotated[list[EnvSpec], Field(min_length=1, max_length=64)]
    """The environments. `trainEnvs`, `valEnvs` and `rewards` refer to them by tag."""
    rewards: Annotated[list[RewardSpec], Field(max_length=16)] = []
    """Judges of finished episodes, in addition to the environments' own rewards."""
    train_envs: TrainEnvGroups
    val_envs: EnvGroups | None = None
    actor_train: ActorTrain = ActorTrain()
    actor_infer: ActorInfer = ActorInfer()
    weight_sync: WeightSync = WeightSync()
    reference: Reference | None = None
    critic: Critic | None = None

    def env(self, tag: str) -> EnvSpec:
        """Return the environment with this tag."""
        return next(env for env in self.envs if env.tag == tag)

    @property
    def groups_per_batch(self) -> int:
        """Groups that a training step takes."""
        return self.rollout_batch_size // self.train_envs.group_size

    @property
    def uses_reference(self) -> bool:
        """True if a KL penalty needs the reference policy."""
        return self.algorithm.reward_kl is not None or self.algorithm.loss_kl is not None

    @property
    def uses_critic(self) -> bool:
        """True if the algorithm needs a value model."""
        return self.algorithm.name == "gae"
