"""`spec.pipeline.algorithm`: advantage estimators and the actor's loss.

The formulas are in docs/algorithms.md.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from agenticrun_api.base import Coefficient, Model, Open, PlugIn, Rule, Share, camel

Bound = Annotated[float, Field(gt=0, le=1e6)]
Over = Literal["batch", "group", "none"]

REFERENCE = "^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*$"
"""`module:function` or `module:Class` of your own."""


@dataclass(frozen=True)
class EstimatorFacts:
    """Facts about an advantage estimator that rules are made of."""

    reads: tuple[str, ...] = ()
    """Fields of `Algorithm` that not every estimator reads."""
    compares_group: bool = False
    """The baseline and the normalisation are those of the group: needs groups of at least 2."""
    whitens: bool = False
    """Always whitens the advantages."""


_ON_TOKENS = ("gamma", "reward_placement", "whiten_rewards")
"""Read by estimators that assign rewards to tokens and discount them over tokens."""
ESTIMATORS = {
    "gae": EstimatorFacts((*_ON_TOKENS, "lambd", "turn_level", "bootstrap_truncated")),
    "reinforce": EstimatorFacts(_ON_TOKENS),
    "agentic_reinforce": EstimatorFacts(_ON_TOKENS),
    "step_reinforce": EstimatorFacts(("step_reward_gamma",)),
    "reinforce_plus_plus": EstimatorFacts(_ON_TOKENS, whitens=True),
    "reinforce_plus_plus_baseline": EstimatorFacts(_ON_TOKENS, compares_group=True, whitens=True),
    "grpo": EstimatorFacts(("norm_std_type",), compares_group=True),
    "rloo": EstimatorFacts(compares_group=True),
    "dr_grpo": EstimatorFacts(compares_group=True),
    "gigpo": EstimatorFacts(
        (
            "step_reward_gamma",
            "episode_reward_weight",
            "step_reward_weight",
            "norm_mean_type",
            "norm_std_type",
        ),
        compares_group=True,
    ),
}
OWN_ESTIMATOR = EstimatorFacts(("reward_placement", "estimator_config"))
"""A function of your own."""


@dataclass(frozen=True)
class LossFacts:
    """Facts about a loss of the actor that rules are made of."""

    reads: tuple[str, ...] = ()
    """Fields of `Algorithm` that not every loss reads."""
    old: bool = True
    """Compares the policy with the old log-probs."""
    weighs_engine: bool = False
    """Weights tokens with the ratio of old and engine's log-probs, which corrects for the policies
    that sampled."""

    @property
    def corrects_from_rollout(self) -> bool:
        """Return True if the probability ratio corrects, where it is that to the engine."""
        return "ratio_type" in self.reads and not self.weighs_engine


_CLIPS = ("ratio_type", "pg_clip_low", "pg_clip_high", "dual_clip")
LOSSES = {
    "vanilla": LossFacts(old=False),
    "ppo": LossFacts(_CLIPS),
    "tis": LossFacts(("ratio_type", "tis")),
    "topr": LossFacts(("ratio_type", "topr")),
    "cispo": LossFacts(("ratio_type", "cispo")),
    "kimi15": LossFacts(("kimi15",)),
    "decoupled": LossFacts((*_CLIPS, "decoupled"), weighs_engine=True),
}
OWN_LOSS = LossFacts(("ratio_type", "loss_config"))
"""A function of your own."""


def estimator_of(name: str) -> EstimatorFacts:
    """Return the facts about the estimator of this name."""
    return ESTIMATORS.get(name, OWN_ESTIMATOR)


def loss_of(name: str) -> LossFacts:
    """Return the facts about the loss of this name."""
    return LOSSES.get(name, OWN_LOSS)


def cel_list(names: Iterable[str]) -> str:
    """Return a list of texts in CEL."""
    return "[" + ", ".join(f"'{name}'" for name in names) + "]"


def _is_known(field: str, table: Collection[str]) -> Rule:
    """Return a rule that a field names a row of its table, or a function."""
    return Rule(
        f"self.{camel(field)} in {cel_list(table)} || self.{camel(field)}.matches('{REFERENCE}')",
        f"{camel(field)} is one of {', '.join(table)}, or module:function of your own",
        f".{camel(field)}",
        lambda algorithm: (
            getattr(algorithm, field) in table
            or re.fullmatch(REFERENCE, getattr(algorithm, field)) is not None
        ),
        value_cel=f"self.{camel(field)}",
        value=lambda algorithm: str(getattr(algorithm, field)),
    )


def _read_by(field: str, default: Any, *, of: str = "name") -> Rule:
    """Return a rule for a field that only some estimators read, or some losses (`of` pg_variant).

    With any other one, the field must have its default.
    """
    table: Mapping[str, EstimatorFacts | LossFacts] = ESTIMATORS if of == "name" else LOSSES
    own: EstimatorFacts | LossFacts = OWN_ESTIMATOR if of == "name" else OWN_LOSS
    readers = [
        name for name, row in (*table.items(), ("module:function", own)) if field in row.reads
    ]
    named = [name for name in readers if name in table]
    unset = (
        f"!has(self.{camel(field)})"
        if default is None
        else f"self.{camel(field)} == "
        + (f"'{default}'" if isinstance(default, str) else str(default).lower())
    )
    conditions = [
        *([f"self.{camel(of)} in {cel_list(named)}"] if named else []),
        *([f"self.{camel(of)}.contains(':')"] if field in own.reads else []),
        unset,
    ]
    words = {"name": "algorithm", "pg_variant": "pgVariant"}[of]
    return Rule(
        " || ".join(conditions),
        f"{camel(field)} is read by {words} {', '.join(readers)} only: leave it out",
        f".{camel(field)}",
        lambda algorithm: (
            field in table.get(getattr(algorithm, of), own).reads
            or getattr(algorithm, field) == default
        ),
    )


class RewardKl(Model):
    """KL penalty to the reference, as a part of the reward."""

    RULES = (
        Rule(
            "has(self.targetKl) || self.horizon == 10000",
            "horizon belongs to the adaptive controller: set targetKl too",
            ".horizon",
            lambda k: k.target_kl is not None or k.horizon == 10_000,
        ),
    )

    kind: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Estimator per token, with d = logprob(old policy) - logprob(reference). k1: d. k2: d^2/2.
    k3: exp(-d) + d - 1. abs: |d|."""
    coef: Annotated[float, Field(gt=0, le=1e6)] = 0.2
    """Coefficient; if `targetKl` is set, its initial value."""
    target_kl: Bound | None = None
    """Target of the adaptive controller: mean KL per response token. Without it, the coefficient is
    constant."""
    horizon: Annotated[int, Field(ge=1, le=1_000_000_000)] = 10_000
    """Trajectories over which the adaptive controller corrects an error."""


class LossKl(Model):
    """KL penalty to the reference, as a part of the loss."""

    kind: Literal["k2", "k3"] = "k3"
    """Estimator per token, with d = logprob(reference) - logprob(policy). k2: d^2/2.
    k3: exp(d) - d - 1."""
    coef: Annotated[float, Field(gt=0, le=1e6)] = 0.001
    """Coefficient."""


class Truncated(Model):
    """Treatment of truncated trajectories (max_turns, max_tokens, context_overflow)."""

    RULES = (
        Rule(
            "self.mode == 'soft_penalty' || self.penalty == 1.0",
            "penalty is read by mode soft_penalty only: leave it out",
            ".penalty",
            lambda t: t.mode == "soft_penalty" or t.penalty == 1.0,
        ),
        Rule(
            "self.mode != 'soft_penalty' || (has(self.limit) && has(self.buffer) && self.buffer <= "
            "self.limit)",
            "mode soft_penalty needs limit (response tokens of a trajectory) and buffer (the last "
            "ones of them, where the penalty grows)",
            ".mode",
            lambda t: (
                t.mode != "soft_penalty"
                or (t.limit is not None and t.buffer is not None and t.buffer <= t.limit)
            ),
        ),
        Rule(
            "self.mode == 'soft_penalty' || (!has(self.limit) && !has(self.buffer))",
            "limit and buffer are read by mode soft_penalty only: leave them out",
            ".limit",
            lambda t: t.mode == "soft_penalty" or (t.limit is None and t.buffer is None),
        ),
    )

    mode: Literal["train", "mask", "zero_reward", "soft_penalty"] = "train"
    """train: train on them as they are. mask: keep them in the statistics but not in the loss.
    zero_reward: set the environment's reward to 0. soft_penalty: DAPO's overlong shaping of every
    trajectory by its length."""
    limit: Annotated[int, Field(ge=1, le=16_777_216)] | None = None
    """Response tokens of a trajectory at which soft_penalty reaches `penalty`."""
    buffer: Annotated[int, Field(ge=1, le=16_777_216)] | None = None
    """Response tokens before `limit` over which soft_penalty grows from 0."""
    penalty: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Amount subtracted from the reward at `limit`."""


class Tis(Model):
    """Truncated importance sampling: -A logprob, weighted with the clamped and detached ratio."""

    lower_bound: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Lower bound of the ratio."""
    upper_bound: Bound = 1.0
    """Upper bound of the ratio."""


class Topr(Model):
    """Tapered off-policy REINFORCE: full weight for good trajectories, the clamped ratio for bad
    ones.
    """

    positive_weight: Coefficient = 1.0
    """Weight of trajectories with a positive score."""
    negative_weight: Coefficient = 1.0
    """Factor of the clamped ratio, which is the weight of all other trajectories."""


class Cispo(Model):
    """Clipped importance weights on -A logprob: every token keeps its gradient."""

    epsilon_low: Share = 0.1
    """The weight is at least 1 - epsilonLow."""
    epsilon_high: Annotated[float, Field(ge=0, le=10)] = 0.1
    """The weight is at most 1 + epsilonHigh."""
    unified_mask: bool = False
    """Set the loss of the tokens that PPO would clip to 0."""


class Kimi15(Model):
    """-A logprob + tau/2 (logprob - old)^2."""

    tau: Coefficient = 0.1
    """Coefficient of half the squared difference."""


class Decoupled(Model):
    """AReaL's decoupled PPO: clips around the policy at the start of the batch; a weight corrects
    for the policy that sampled.
    """

    cap: Bound = 2.0
    """Upper bound of the weight."""


class VarianceFilter(Model):
    """StarPO-S: train on the groups whose rewards differ most."""

    keep: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of a batch's groups to keep."""

    def kept(self, groups: int) -> int:
        """Return the number of groups to keep, at least one."""
        return max(1, round(self.keep * groups))


class Algorithm(Model):
    """The advantage estimator and the actor's loss."""

    RULES = (
        _is_known("name", ESTIMATORS),
        _is_known("pg_variant", LOSSES),
        _read_by("gamma", 1.0),
        _read_by("lambd", 0.95),
        _read_by("turn_level", False),
        _read_by("bootstrap_truncated", False),
        _read_by("reward_placement", "trajectory"),
        _read_by("whiten_rewards", False),
        _read_by("step_reward_gamma", 0.95),
        _read_by("episode_reward_weight", 1.0),
        _read_by("step_reward_weight", 1.0),
        _read_by("norm_mean_type", "group"),
        _read_by("norm_std_type", "group"),
        _read_by("estimator_config", None),
        _read_by("ratio_type", "token", of="pg_variant"),
        _read_by("pg_clip_low", 0.2, of="pg_variant"),
        _read_by("pg_clip_high", 0.2, of="pg_variant"),
        _read_by("dual_clip", None, of="pg_variant"),
        _read_by("tis", None, of="pg_variant"),
        _read_by("topr", None, of="pg_variant"),
        _read_by("cispo", None, of="pg_variant"),
        _read_by("kimi15", None, of="pg_variant"),
        _read_by("decoupled", None, of="pg_variant"),
        _read_by("loss_config", None, of="pg_variant"),
        Rule(
            "self.lossAggMode != 'seq-mean-token-sum-norm' || has(self.lossAggNorm)",
            "lossAggMode seq-mean-token-sum-norm needs lossAggNorm, the constant that it divides "
            "by (for example sequenceLength)",
            ".lossAggMode",
            lambda a: a.loss_agg_mode != "seq-mean-token-sum-norm" or a.loss_agg_norm is not None,
        ),
        Rule(
            "self.lossAggMode == 'seq-mean-token-sum-norm' || !has(self.lossAggNorm)",
            "lossAggNorm is read by lossAggMode seq-mean-token-sum-norm only: leave it out",
            ".lossAggNorm",
            lambda a: a.loss_agg_mode == "seq-mean-token-sum-norm" or a.loss_agg_norm is None,
        ),
        Rule(
            "self.name != 'dr_grpo' || self.lossAggMode == 'seq-mean-token-sum-norm'",
            "dr_grpo divides by a constant instead of lengths: set lossAggMode: "
            "seq-mean-token-sum-norm and lossAggNorm",
            ".lossAggMode",
            lambda a: a.name != "dr_grpo" or a.loss_agg_mode == "seq-mean-token-sum-norm",
        ),
    )

    name: PlugIn = "grpo"
    """The estimator: gae (PPO with a critic), reinforce, agentic_reinforce, step_reinforce,
    reinforce_plus_plus, reinforce_plus_plus_baseline, grpo, rloo, dr_grpo, gigpo, or
    module:function of your own. StarPO is any of them on whole trajectories."""
    estimator_config: Open | None = None
    """Keyword arguments of your own estimator."""
    gamma: Share = 1.0
    """Discount per response token (agentic_reinforce, and gae with turnLevel: per turn)."""
    lambd: Share = 0.95
    """gae's lambda."""
    turn_level: bool = False
    """gae: apply gamma and lambda only at turn boundaries."""
    bootstrap_truncated: bool = False
    """gae: continue a truncated trajectory with the critic's value of its end instead of 0."""
    reward_placement: Literal["trajectory", "turn"] = "trajectory"
    """trajectory: the sum of the rewards on the last response token. turn: each turn's reward on
    the last token of the turn."""
    step_reward_gamma: Share = 0.95
    """Discount of the step returns, per turn."""
    episode_reward_weight: Coefficient = 1.0
    """gigpo: weight of the advantage among the group's trajectories."""
    step_reward_weight: Coefficient = 1.0
    """gigpo: weight of the advantage among the group's turns at equal states."""
    norm_mean_type: Over = "group"
    """gigpo: the set whose mean is subtracted."""
    norm_std_type: Over = "group"
    """grpo and gigpo: the set of which the standard deviation is the divisor. none: no division."""
    whiten_rewards: bool = False
    """Scale the rewards of the batch's response tokens to mean 0 and std 1, before the returns."""
    whiten_advantages: bool = False
    """Scale the advantages of the batch's response tokens to mean 0 and std 1. reinforce_plus_plus
    always does this."""
    reward_clip: Bound | None = None
    """Rewards are limited to [-c, c]."""
    advantage_clip: Bound | None = None
    """Advantages are limited to [-c, c], after whitening."""
    truncated: Truncated = Truncated()
    variance_filter: VarianceFilter | None = None
    reward_kl: RewardKl | None = None
    loss_kl: LossKl | None = None
    pg_variant: PlugIn = "ppo"
    """The actor's loss: vanilla, ppo, tis, topr, cispo, kimi15, decoupled, or module:function of
    your own."""
    loss_config: Open | None = None
    """Keyword arguments of your own loss."""
    tis: Tis | None = None
    topr: Topr | None = None
    cispo: Cispo | None = None
    kimi15: Kimi15 | None = None
    decoupled: Decoupled | None = None
    ratio_type: Literal["token", "segment", "sequence"] = "token"
    """The probability ratio of each token, of its turn (geometric mean), or of its sample
    (GSPO)."""
    pg_clip_low: Share = 0.2
    """The ratio is clipped below 1 - pgClipLow."""
    pg_clip_high: Annotated[float, Field(ge=0, le=10)] = 0.2
    """The ratio is clipped above 1 + pgClipHigh."""
    dual_clip: Annotated[float, Field(gt=1, le=100)] | None = None
    """Bound c of the dual clip for negative advantages. Not set: no dual clip."""
    ppo_epochs: Annotated[int, Field(ge=1, le=64)] = 1
    """Passes of actor and critic over a batch."""
    entropy_loss_coef: Coefficient = 0.0
    """Coefficient of the entropy bonus. 0: no bonus."""
    loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "seq-mean-token-mean"
    """Aggregation of token losses. A sequence is a sample: a trajectory, or a turn of a step-wise
    agent."""
    loss_agg_norm: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Constant that lossAggMode seq-mean-token-sum-norm divides by, for example sequenceLength."""


RunningOver = Literal["batch", "group", "running", "none"]


class RewardNormalization(Model):
    """Normalisation of rewards, for estimators without their own baseline. running: all
    trajectories trained on so far, this batch included (of the tag, with grouping tag); kept in
    checkpoints.
    """

    grouping: Literal["batch", "group", "tag", "state"] = "batch"
    """The meaning of `group` below: the batch, the trajectory's group, its tag, or (step_reinforce)
    equal states of its group."""
    norm_mean_type: RunningOver = "none"
    """The set whose mean is subtracted."""
    norm_std_type: RunningOver = "none"
    """The set whose standard deviation is the divisor."""


Level = Literal["token", "segment", "geometric", "sequence"]
"""Level of a train-inference ratio: each token, the turn's geometric mean, the sample's geometric
mean, the sample's product."""


class IsWeight(Model):
    """Weight of each token's loss: the detached ratio of the trainer's and the engine's
    probability.
    """

    level: Level = "token"
    """Level of the ratio: token, segment (a turn's geometric mean), geometric (the sample's
    geometric mean) or sequence (the sample's product)."""
    upper_bound: Bound = 1.2
    """Upper bound of the weight."""


class RatioFilter(Model):
    """Removes tokens from the loss if the trainer's and the engine's probabilities differ too
    much.
    """

    RULES = (
        Rule(
            "has(self.ratioLow) || has(self.ratioHigh) || has(self.diffLow) || has(self.diffHigh)",
            "a filter needs at least one bound: ratioLow, ratioHigh, diffLow or diffHigh",
            "",
            lambda f: any(
                bound is not None for bound in (f.ratio_low, f.ratio_high, f.diff_low, f.diff_high)
            ),
        ),
        Rule(
            "self.level == 'sequence' || ((!has(self.diffLow) || "
            "(self.diffLow >= -1.0 && self.diffLow <= 1.0)) && (!has(self.diffHigh) || "
            "(self.diffHigh >= -1.0 && self.diffHigh <= 1.0)))",
            "diffLow and diffHigh must be between -1 and 1, except with level sequence, where the "
            "difference is a sum",
            "",
            lambda f: (
                f.level == "sequence"
                or all(abs(bound) <= 1 for bound in (f.diff_low or 0.0, f.diff_high or 0.0))
            ),
        ),
    )

    level: Level = "token"
    """Level of the ratio, as in isWeight."""
    ratio_low: Coefficient | None = None
    """Smallest ratio exp(trainer - engine) to keep."""
    ratio_high: Coefficient | None = None
    """Largest ratio exp(trainer - engine) to keep."""
    diff_low: Annotated[float, Field(ge=-1e6, le=1e6)] | None = None
    """Smallest difference of probabilities (trainer - engine) to keep: the token's, the mean of the
    turn (segment) or sample (geometric), or the sample's sum (sequence)."""
    diff_high: Annotated[float, Field(ge=-1e6, le=1e6)] | None = None
    """Largest difference of probabilities (trainer - engine) to keep."""


class TrainInferCorrection(Model):
    """Correction of the mismatch between the trainer's and the engine's probabilities."""

    RULES = (
        Rule(
            "has(self.isWeight) || (has(self.filters) && size(self.filters) > 0)",
            "set isWeight or filters, or leave trainInferCorrection out",
            ".isWeight",
            lambda c: c.is_weight is not None or bool(c.filters),
        ),
    )

    is_weight: IsWeight | None = None
    filters: Annotated[list[RatioFilter], Field(max_length=8)] = []
    """Filters of tokens. A token stays in the loss if all filters keep it."""


class Guards(Model):
    """Alarms. An alarm sets the metric guard/<name> to 1, logs a line and sets a message of the
    run.
    """

    max_skipped_steps: Annotated[int, Field(ge=1, le=10_000)] = 10
    """Consecutive optimizer steps that may be skipped because the gradient is not finite,
    before the run fails."""
    max_logprob_gap: Bound = 0.1
    """Alarm above this mean |trainer's log-prob - engine's log-prob| with the same weights. Above
    its default, it is also the gap before the first step at which a run stops."""
    min_entropy: Bound | None = None
    """Alarm below this mean entropy of the sampled tokens, in nats: the policy has collapsed."""
    max_zero_variance_share: Share | None = None
    """Alarm above this share of groups with equal rewards, which give no gradient. For algorithms
    that compare the trajectories of a group."""
    patience: Annotated[int, Field(ge=1, le=10_000)] = 3
    """Consecutive steps in which the condition of an alarm must hold."""
    action: Literal["Report", "Fail"] = "Report"
    """Report: report the alarm only. Fail: also fail the run."""
