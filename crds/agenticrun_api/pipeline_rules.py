"""Rules over several fields of `spec.pipeline`."""

from __future__ import annotations

from typing import Any

from agenticrun_api.algorithm import ESTIMATORS, LOSSES, cel_list, estimator_of, loss_of
from agenticrun_api.base import Rule, unique

_MINI = "self.actorTrain.training.miniBatchSize"
_ALGORITHM = "self.algorithm"
_IS_OWN_ESTIMATOR = f"{_ALGORITHM}.name.contains(':')"
_IS_OWN_LOSS = f"{_ALGORITHM}.pgVariant.contains(':')"
GROUP_BASELINE = [name for name, row in ESTIMATORS.items() if row.compares_group]
_COMPARES_GROUP = f"({_ALGORITHM}.name in {cel_list(GROUP_BASELINE)})"
_WHITENED = cel_list(name for name, row in ESTIMATORS.items() if row.whitens)
_WEIGHS_ENGINE = (
    f"({_ALGORITHM}.pgVariant in "
    f"{cel_list(name for name, row in LOSSES.items() if row.weighs_engine)})"
)
WITH_RATIO = [name for name, row in LOSSES.items() if row.corrects_from_rollout]
"""Losses that weight a token with the ratio of its probabilities, new to old."""
_NOT_FROM_ROLLOUT = cel_list(
    name for name, row in LOSSES.items() if row.weighs_engine or not row.old
)


def _corrects(p: Any) -> bool:
    correction, loss = p.train_infer_correction, loss_of(p.algorithm.pg_variant)
    return (
        loss.weighs_engine
        or (correction is not None and correction.is_weight is not None)
        or (p.old_log_probs == "Rollout" and loss.corrects_from_rollout)
    )


def _whitens(p: Any) -> bool:
    return bool(
        p.algorithm.whiten_advantages
        or p.algorithm.whiten_rewards
        or estimator_of(p.algorithm.name).whitens
    )


_CORRECTS = (
    f"({_WEIGHS_ENGINE} || "
    "(has(self.trainInferCorrection) && has(self.trainInferCorrection.isWeight)) || "
    f"(self.oldLogProbs == 'Rollout' && ({_ALGORITHM}.pgVariant in {cel_list(WITH_RATIO)} || "
    f"{_IS_OWN_LOSS})))"
)
_WHITENS = (
    f"({_ALGORITHM}.whitenAdvantages || {_ALGORITHM}.whitenRewards || "
    f"{_ALGORITHM}.name in {_WHITENED})"
)
_USES_REFERENCE = f"(has({_ALGORITHM}.rewardKl) || has({_ALGORITHM}.lossKl))"


BATCH_RULES = (
    Rule(
        "self.rolloutBatchSize % self.trainEnvs.groupSize == 0",
        "rolloutBatchSize counts trajectories and must be a multiple of trainEnvs.groupSize",
        ".rolloutBatchSize",
        lambda p: p.rollout_batch_size % p.train_envs.group_size == 0,
    ),
    Rule(
        f"!has({_MINI}) || {_MINI} % self.trainEnvs.groupSize == 0",
        "actorTrain.training.miniBatchSize must be a multiple of trainEnvs.groupSize: groups are "
        "kept whole",
        ".actorTrain.training.miniBatchSize",
        lambda p: (
            not p.actor_train.training.mini_batch_size
            or p.actor_train.training.mini_batch_size % p.train_envs.group_size == 0
        ),
    ),
    Rule(
        f"!has({_MINI}) || self.rolloutBatchSize % {_MINI} == 0",
        "rolloutBatchSize must be a multiple of actorTrain.training.miniBatchSize",
        ".actorTrain.training.miniBatchSize",
        lambda p: (
            not p.actor_train.training.mini_batch_size
            or p.rollout_batch_size % p.actor_train.training.mini_batch_size == 0
        ),
    ),
    Rule(
        "!has(self.valEnvs) || self.valBatchSize % self.valEnvs.groupSize == 0",
        "valBatchSize counts trajectories and must be a multiple of valEnvs.groupSize",
        ".valBatchSize",
        lambda p: p.val_envs is None or p.val_batch_size % p.val_envs.group_size == 0,
    ),
    Rule(
        "self.evalSteps == 0 || has(self.valEnvs)",
        "evalSteps needs valEnvs; set evalSteps: 0 to train without validation",
        ".evalSteps",
        lambda p: p.eval_steps == 0 or p.val_envs is not None,
    ),
)

GROUP_RULES = (
    Rule(
        "self.trainEnvs.groupSize >= 2 || !has(self.trainEnvs.groupFilter) || "
        "self.trainEnvs.groupFilter.type != 'zero_variance'",
        "groupFilter zero_variance rejects each group of one: raise trainEnvs.groupSize, or leave "
        "groupFilter out",
        ".trainEnvs.groupFilter",
        lambda p: (
            p.train_envs.group_size >= 2
            or p.train_envs.group_filter is None
            or p.train_envs.group_filter.type != "zero_variance"
        ),
    ),
    Rule(
        "self.trainEnvs.groupSize >= 2 || !has(self.guards.maxZeroVarianceShare)",
        "maxZeroVarianceShare counts each group of one: raise trainEnvs.groupSize, or leave it out",
        ".guards.maxZeroVarianceShare",
        lambda p: p.train_envs.group_size >= 2 or p.guards.max_zero_variance_share is None,
    ),
)

TAG_RULES = (
    unique(
        "envs", "tag", message="each entry of envs needs a tag of its own, and two have the same"
    ),
    unique(
        "rewards",
        "name",
        message="each entry of rewards needs a name of its own, and two have the same",
    ),
    Rule(
        "self.trainEnvs.tags.all(t, self.envs.exists(e, e.tag == t))",
        "trainEnvs.tags names a tag that no entry of envs has: correct it, or add the entry",
        ".trainEnvs.tags",
        lambda p: {e.tag for e in p.envs} >= set(p.train_envs.tags),
    ),
    Rule(
        "!has(self.valEnvs) || self.valEnvs.tags.all(t, self.envs.exists(e, e.tag == t))",
        "valEnvs.tags names a tag that no entry of envs has: correct it, or add the entry",
        ".valEnvs.tags",
        lambda p: p.val_envs is None or {e.tag for e in p.envs} >= set(p.val_envs.tags),
    ),
    Rule(
        "!has(self.rewards) || self.rewards.all(r, !has(r.tags) || r.tags.all(t, "
        "self.envs.exists(e, e.tag == t)))",
        "tags of an entry of rewards names a tag that no entry of envs has: correct it, or add "
        "the entry",
        ".rewards",
        lambda p: {e.tag for e in p.envs} >= {tag for reward in p.rewards for tag in reward.tags},
    ),
)

DATASET_RULES = (
    Rule(
        "!has(self.valEnvs) || self.envs.all(e, !has(e.dataset) || has(e.dataset.valSplit) || "
        "e.dataset.valShare > 0.0 || !(e.tag in self.valEnvs.tags))",
        "valEnvs has an environment of whose data set nothing is held out: set valShare above 0, "
        "or valSplit",
        ".envs",
        lambda p: (
            p.val_envs is None
            or all(
                e.dataset is None
                or e.dataset.val_split is not None
                or e.dataset.val_share > 0
                or e.tag not in p.val_envs.tags
                for e in p.envs
            )
        ),
    ),
)

ALGORITHM_RULES = (
    Rule(
        f"!{_COMPARES_GROUP} || self.trainEnvs.groupSize >= 2",
        f"{', '.join(GROUP_BASELINE)} compare the trajectories of a group: trainEnvs.groupSize "
        "must be at least 2",
        ".trainEnvs.groupSize",
        lambda p: not estimator_of(p.algorithm.name).compares_group or p.train_envs.group_size >= 2,
    ),
    Rule(
        f"!({_COMPARES_GROUP} || {_IS_OWN_ESTIMATOR}) || !has(self.rewardNormalization)",
        f"{', '.join(GROUP_BASELINE)} and functions of your own have their own normalisation: "
        "remove rewardNormalization, or use another algorithm",
        ".rewardNormalization",
        lambda p: (
            p.reward_normalization is None
            or (p.algorithm.name in ESTIMATORS and p.algorithm.name not in GROUP_BASELINE)
        ),
    ),
    Rule(
        "!has(self.rewardNormalization) || self.rewardNormalization.grouping != 'group' || "
        "self.trainEnvs.groupSize >= 2 || "
        "(self.rewardNormalization.normMeanType != 'group' && "
        "self.rewardNormalization.normStdType != 'group')",
        "rewardNormalization over groups of one leaves nothing: raise trainEnvs.groupSize, or use "
        "grouping batch",
        ".rewardNormalization.grouping",
        lambda p: (
            p.reward_normalization is None
            or p.reward_normalization.grouping != "group"
            or p.train_envs.group_size >= 2
            or "group"
            not in (p.reward_normalization.norm_mean_type, p.reward_normalization.norm_std_type)
        ),
    ),
    Rule(
        "!has(self.rewardNormalization) || (self.rewardNormalization.normMeanType != 'running' && "
        "self.rewardNormalization.normStdType != 'running') || "
        "(self.rewardNormalization.grouping in ['batch', 'tag'] && "
        f"{_ALGORITHM}.name != 'step_reinforce')",
        "running means and deviations are those of trajectories, over all or by tag: use grouping "
        "batch or tag, and no algorithm step_reinforce",
        ".rewardNormalization.grouping",
        lambda p: (
            p.reward_normalization is None
            or "running"
            not in (p.reward_normalization.norm_mean_type, p.reward_normalization.norm_std_type)
            or (
                p.reward_normalization.grouping in ("batch", "tag")
                and p.algorithm.name != "step_reinforce"
            )
        ),
    ),
    Rule(
        "!has(self.rewardNormalization) || self.rewardNormalization.grouping != 'state' || "
        f"{_ALGORITHM}.name == 'step_reinforce'",
        "rewardNormalization.grouping state compares turns at equal states: it needs algorithm "
        "step_reinforce",
        ".rewardNormalization.grouping",
        lambda p: (
            p.reward_normalization is None
            or p.reward_normalization.grouping != "state"
            or p.algorithm.name == "step_reinforce"
        ),
    ),
    Rule(
        f"!{_WHITENS} || self.rolloutBatchSize >= 2",
        "whitening needs at least two trajectories: raise rolloutBatchSize",
        ".rolloutBatchSize",
        lambda p: not _whitens(p) or p.rollout_batch_size >= 2,
    ),
    Rule(
        f"({_ALGORITHM}.name == 'gae') == has(self.critic)",
        "algorithm gae needs critic, and no other algorithm reads it",
        ".critic",
        lambda p: (p.algorithm.name == "gae") == (p.critic is not None),
    ),
    Rule(
        f"self.criticWarmup == 0 || {_ALGORITHM}.name == 'gae'",
        "criticWarmup needs algorithm gae",
        ".criticWarmup",
        lambda p: p.critic_warmup == 0 or p.algorithm.name == "gae",
    ),
    Rule(
        f"!has(self.reference) || {_USES_REFERENCE}",
        "nothing reads reference: set algorithm.rewardKl or algorithm.lossKl, or leave it out",
        ".reference",
        lambda p: p.reference is None or p.uses_reference,
    ),
)

WARMUP_RULES = (
    Rule(
        "!has(self.warmup) || self.warmup.observationWeight == 0.0 || self.envs.exists(e, "
        "e.agent.type != 'step_wise')",
        "step-wise agents see no observation after an answer: leave observationWeight out",
        ".warmup.observationWeight",
        lambda p: (
            p.warmup is None
            or p.warmup.observation_weight == 0
            or any(env.agent.type != "step_wise" for env in p.envs)
        ),
    ),
)

OFF_POLICY_RULES = (
    Rule(
        f"self.staleness.max == 0.0 || self.staleness.offPolicy == 'Ignore' || {_CORRECTS}",
        "rollouts of older policies bias the gradient: set algorithm.pgVariant: decoupled, "
        "trainInferCorrection.isWeight or oldLogProbs: Rollout, or accept it "
        "with offPolicy: Ignore",
        ".staleness.offPolicy",
        lambda p: p.staleness.max == 0 or p.staleness.off_policy == "Ignore" or _corrects(p),
    ),
    Rule(
        "self.modelUpdateFrequency == 1 || double(self.modelUpdateFrequency - 1) <= "
        "self.staleness.max",
        "with modelUpdateFrequency N a rollout is up to N-1 versions behind: raise staleness.max "
        "to at least N-1",
        ".modelUpdateFrequency",
        lambda p: p.model_update_frequency - 1 <= p.staleness.max,
    ),
    Rule(
        f"!{_WEIGHS_ENGINE} || !has(self.trainInferCorrection) || "
        "!has(self.trainInferCorrection.isWeight)",
        "pgVariant decoupled already contains the weight of isWeight: leave one of them out",
        ".trainInferCorrection.isWeight",
        lambda p: (
            not loss_of(p.algorithm.pg_variant).weighs_engine
            or p.train_infer_correction is None
            or p.train_infer_correction.is_weight is None
        ),
    ),
    Rule(
        f"self.oldLogProbs == 'Recompute' || !({_ALGORITHM}.pgVariant in {_NOT_FROM_ROLLOUT})",
        "oldLogProbs Rollout needs a loss that compares with the policy that sampled: vanilla "
        "reads no old log-probs, and decoupled needs those of the batch's start",
        ".oldLogProbs",
        lambda p: (
            p.old_log_probs == "Recompute"
            or (
                loss_of(p.algorithm.pg_variant).old
                and not loss_of(p.algorithm.pg_variant).weighs_engine
            )
        ),
    ),
    Rule(
        "self.oldLogProbs == 'Recompute' || !has(self.trainInferCorrection)",
        "trainInferCorrection compares recomputed log-probs with the recorded ones, which "
        "oldLogProbs Rollout takes in their place: leave one of them out",
        ".oldLogProbs",
        lambda p: p.old_log_probs == "Recompute" or p.train_infer_correction is None,
    ),
    Rule(
        "!self.actorInfer.generating.allowTruncatedSampling || (!has(self.trainInferCorrection) "
        f"&& !{_WEIGHS_ENGINE} && self.oldLogProbs == 'Recompute')",
        "with truncated sampling, the recorded log-probs are not those of the distribution that "
        "was sampled: remove trainInferCorrection, pgVariant decoupled and oldLogProbs Rollout, "
        "which need them",
        ".actorInfer.generating.allowTruncatedSampling",
        lambda p: (
            not p.actor_infer.generating.allow_truncated_sampling
            or (
                p.train_infer_correction is None
                and not loss_of(p.algorithm.pg_variant).weighs_engine
                and p.old_log_probs == "Recompute"
            )
        ),
    ),
)

DETERMINISTIC_RULES = (
    Rule(
        "!self.deterministic || self.staleness.max == 0.0",
        "deterministic runs are synchronous: leave staleness.max at 0",
        ".staleness.max",
        lambda p: not p.deterministic or p.staleness.max == 0,
    ),
    Rule(
        "!self.deterministic || self.trainEnvs.groupSizeRedundancy == 0",
        "deterministic runs need groupSizeRedundancy 0: which episodes of a group finish first "
        "differs from run to run",
        ".trainEnvs.groupSizeRedundancy",
        lambda p: not p.deterministic or p.train_envs.group_size_redundancy == 0,
    ),
    Rule(
        "!self.deterministic || self.envs.all(e, !has(e.stepTimeoutSeconds))",
        "deterministic runs must not depend on the clock: remove envs[].stepTimeoutSeconds",
        ".envs",
        lambda p: not p.deterministic or all(env.step_timeout_seconds is None for env in p.envs),
    ),
    Rule(
        "!self.deterministic || self.actorInfer.strategy.name == 'transformers'",
        "deterministic runs need the engine transformers: the results of the others depend on what "
        "else is in the batch",
        ".actorInfer.strategy.name",
        lambda p: not p.deterministic or p.actor_infer.strategy.name == "transformers",
    ),
)

REPLAY_RULES = (
    Rule(
        "!has(self.record) || !has(self.record.replay) || self.evalSteps == 0",
        "a replay samples no episodes: set evalSteps: 0",
        ".evalSteps",
        lambda p: p.record is None or p.record.replay is None or p.eval_steps == 0,
    ),
    Rule(
        "!has(self.record) || !has(self.record.replay) || !has(self.warmup)",
        "a replay samples no episodes: leave warmup out, and start from the recorded run's first "
        "weights with spec.model.path",
        ".warmup",
        lambda p: p.record is None or p.record.replay is None or p.warmup is None,
    ),
)

PIPELINE_RULES = (
    *BATCH_RULES,
    *GROUP_RULES,
    *TAG_RULES,
    *DATASET_RULES,
    *ALGORITHM_RULES,
    *WARMUP_RULES,
    *OFF_POLICY_RULES,
    *DETERMINISTIC_RULES,
    *REPLAY_RULES,
)
