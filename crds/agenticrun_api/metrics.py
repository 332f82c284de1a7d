"""Every metric of a run, declared once: its meaning, and the places that show it.

The driver, the operator, the console and docs/metrics.md (`make generate`) read this table. A
metric that is not here is still in metrics.jsonl and at every tracker.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import product


@dataclass(frozen=True)
class Column:
    """A number of the line per step, on the console and in the log."""

    place: int
    """Its place in the line, from the left."""
    label: str
    form: str
    """Format of the value: `{:.3f}`."""


@dataclass(frozen=True)
class Metric:
    """One row of docs/metrics.md. What a row says applies to all its names."""

    name: str
    """`<tag>` stands for any text without a slash, `{mean,max}` for each of its parts."""
    unit: str
    meaning: str
    rank: int | None = None
    """Importance in a progress snapshot, 0 first: `.status.metrics` shows 16, the reporter 64. At
    most three metrics of one rank come before the next rank. None: the rank of its family."""
    series: bool = False
    """Prometheus: the operator serves it for every run. Only for names without `<...>`."""
    column: Column | None = None
    symptoms: tuple[str, ...] = ()
    """Signs of a run that does not learn: which value, its cause, what to do."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names with one part for each brace."""
        parts = [part.split(",") for part in re.split(r"[{}]", self.name)]
        # Texts outside of braces are at even places, and hold no comma.
        return tuple("".join(chosen) for chosen in product(*parts))

    def matches(self, name: str) -> bool:
        """Return True if a metric has one of the names."""
        return _pattern(self).fullmatch(name) is not None


@dataclass(frozen=True)
class Section:
    """A section of docs/metrics.md."""

    title: str
    introduction: str
    metrics: tuple[Metric, ...]


SECTIONS = (
    Section(
        "Rollout",
        "",
        (
            Metric(
                "rollout/score/mean",
                "reward",
                "sum of a trajectory's rewards from environment and judges. Of several "
                "trajectories of one episode, `env/` and `val/` count the mean",
                rank=4,
                column=Column(0, "reward", "{:.3f}"),
            ),
            Metric("rollout/score/{max,min}", "reward", "the largest and the smallest of them"),
            Metric(
                "rollout/success/mean",
                "share",
                "success over the episodes for which the environment measures it",
                rank=5,
                series=True,
                column=Column(1, "success", "{:.3f}"),
            ),
            Metric("rollout/turns/{mean,max,min}", "turns", "length of the batch's episodes"),
            Metric(
                "rollout/discarded",
                "episodes",
                "that ended since the last batch and cannot be trained on (`env_error`, "
                "`timeout`, `aborted`, numbers that are not finite, no answer)",
            ),
            Metric(
                "rollout/aborted_tokens",
                "tokens",
                "sampled and discarded: weights changed (`partialRollout: false`), enough other "
                "members had finished, or the episode was stopped as stale. Tokens of an engine "
                "that was ejected as slow count, too, although the responses continue from them",
            ),
            Metric(
                "rollout/stale",
                "episodes",
                "of these groups: stopped, or finished and discarded, and run again",
            ),
            Metric(
                "rollout/stale_tokens",
                "tokens",
                "that they had sampled, without the response during which they were stopped",
            ),
            Metric(
                "rollout/truncated_sampling",
                "0 or 1",
                "1 if training samples with topP, topK or minP (`allowTruncatedSampling`)",
            ),
            Metric("rollout/queue_depth", "groups", "finished and waiting for the next batch"),
            Metric(
                "rollout/store_bytes",
                "bytes",
                "of memory that finished trajectories take in the trajectory stores",
            ),
            Metric(
                "rollout/spilled_trajectories",
                "trajectories",
                "that the stores wrote to disk since the last step ([what is "
                "bounded](concepts.md#what-is-bounded)). More memory for trainer pods, or a "
                "smaller `staleness.max` or batch, help",
            ),
            Metric("rollout/spilled_bytes", "bytes", "of these on disk"),
            Metric(
                "rollout/unspilled_trajectories",
                "trajectories",
                "that stayed in the stores' memory though it was full, because their disk was "
                "full or frozen",
            ),
            Metric(
                "rollout/lost_episodes",
                "episodes",
                "that were lost since the last step with their env worker, which died, froze, "
                "or left (`replicas`). They run again. Only `engine/<id>/tokens_per_second` "
                "counts their tokens",
            ),
            Metric(
                "rollout/memory_wait_seconds",
                "seconds",
                "in which the next episode waited because 90 % of an env pod's memory was in "
                "use, over all env workers. More memory for env pods, or a smaller "
                "`maxEnvsPerWorker`, help",
            ),
            Metric(
                "rollout/utilization",
                "share",
                "of the engines' seats that computed a request, over the step's time, training "
                "included. A seat is one of the requests that an engine computes at once "
                "(`max_running_requests` of sglang, `max_num_seqs` of vllm, 256 of "
                "transformers)",
                rank=17,
                series=True,
            ),
            Metric(
                "rollout/engine_busy",
                "share",
                "of the step's time in which an engine computes at least one request, mean over "
                "engines",
            ),
            Metric(
                "rollout/idle/few_requests",
                "share",
                "of the engines' seats that were free while others of the engine computed. "
                "`rollout/utilization` and the five `rollout/idle/...` add up to 1",
                rank=21,
                series=True,
            ),
            Metric(
                "rollout/idle/env",
                "share",
                "of the engines' time without a request while episodes were in flight: they "
                "waited for environments, agents, judges, or memory "
                "(`rollout/memory_wait_seconds`). More groups, or faster environments, help",
                rank=19,
                series=True,
            ),
            Metric(
                "rollout/idle/gate",
                "share",
                "of the engines' time without an episode in flight: the trainers computed, or "
                "`staleness.max` allowed no more groups. A larger `staleness.max` helps",
                rank=19,
                series=True,
            ),
            Metric(
                "rollout/idle/weights",
                "share",
                "of the engines' time without a request during a weight sync",
                rank=19,
                series=True,
            ),
            Metric(
                "rollout/idle/lost",
                "share",
                "of the engines' time without an engine: one had died, did not answer or was "
                "too slow, or its replacement was starting",
                rank=21,
                series=True,
            ),
            Metric(
                "rollout/kv_usage",
                "share",
                "of the engines' KV caches that is in use, mean over polls (every 5 s) and "
                "engines. Near 1, requests wait or are preempted",
            ),
            Metric(
                "stop/<reason>",
                "share",
                "of finished episodes, discarded ones included, by stop reason",
                symptoms=(
                    "`max_tokens`, `context_overflow` high: answers or episodes are truncated: "
                    "raise `maxTokensPerStep`, `sequenceLength`",
                ),
            ),
            Metric(
                "env/<tag>/success",
                "share",
                "of the tag's episodes that succeeded, where the environment measures it",
                rank=28,
            ),
            Metric("env/<tag>/score", "reward", "mean score of the tag's episodes"),
            Metric(
                "env/<tag>/action_is_valid",
                "share",
                "of the tag's answers that hold a valid action",
                symptoms=(
                    "low: answers do not parse: look at `samples/`, add `warmup`, set "
                    "`formatPenalty`",
                ),
            ),
            Metric(
                "env/<tag>/<name>",
                "",
                "metric of the environment: mean per episode; `action_*` per action. Judges add "
                "`reward/<judge>` (unweighted) and the next two",
            ),
            Metric(
                "judge/<judge>/{seconds,cached}",
                "s, share",
                "below `env/<tag>/` or `val/<tag>/`: duration of a call; share of cache hits",
            ),
            Metric(
                "judge/<judge>/failures",
                "episodes",
                "without a score from the judge since the last batch; they count as discarded",
            ),
            Metric(
                "staleness/mean",
                "versions",
                "policy version in training, minus the oldest one that sampled a token of the "
                "trajectory",
                rank=14,
            ),
            Metric("staleness/max", "versions", "the largest of them"),
            Metric(
                "staleness/share/<n>",
                "share",
                "of the batch's trajectories that are n versions behind; absent if none is",
            ),
            Metric("tokens/{prompt,response}", "tokens", "of the batch"),
            Metric(
                "tokens/prompt_length/{mean,max,min}",
                "tokens",
                "of a trajectory that the policy did not sample: prompts and observations",
            ),
            Metric(
                "tokens/response_length/mean",
                "tokens",
                "of a trajectory that the policy sampled",
                rank=24,
                series=True,
            ),
            Metric("tokens/response_length/{max,min}", "tokens", "the longest and the shortest"),
            Metric(
                "tokens/turn_response_length/{mean,max,min}",
                "tokens",
                "of one answer; `max` at `maxTokensPerStep` means that answers are truncated",
            ),
        ),
    ),
    Section(
        "Groups",
        "",
        (
            Metric(
                "group/zero_variance_share",
                "share",
                "of groups without a gradient, because their rewards are equal; only with "
                "estimators that compare groups. A guard watches it",
                rank=13,
                series=True,
                symptoms=(
                    "near 1: all members of a group get the same reward, so there is nothing to "
                    "compare",
                ),
            ),
            Metric(
                "group/filtered",
                "groups",
                "refused by `trainEnvs.groupFilter` since the last batch, and left out by "
                "`algorithm.varianceFilter`",
            ),
            Metric(
                "group/rerolled", "episodes", "that failed and were repeated since the last batch"
            ),
            Metric(
                "group/dropped", "groups", "given up: fewer than two members could be trained on"
            ),
            Metric(
                "group/error_rate/<tag>",
                "share",
                "of the tag's episodes since the last batch that cannot be trained on; absent at 0",
            ),
            Metric(
                "group/evicted_envs",
                "environments",
                "left out because their last groups were all dropped "
                "([troubleshooting.md](troubleshooting.md#an-environment-is-left-out))",
            ),
            Metric(
                "group/stale",
                "groups",
                "of which members ran again since the last batch, because they were too old for "
                "`staleness.max`",
            ),
            Metric(
                "group/degenerate",
                "trajectories",
                "not divided by a standard deviation, because their set had one member or no "
                "spread",
            ),
            Metric("group/degenerate_steps", "turns", "the same for turns at equal states (gigpo)"),
            Metric(
                "group/length_bias",
                "tokens",
                "mean length of the kept members minus that of all started ones "
                "(`groupSizeRedundancy`): below 0, short episodes are preferred",
            ),
        ),
    ),
    Section(
        "Credit",
        "",
        (
            Metric(
                "critic/score/{mean,max,min}",
                "reward",
                "scores of trajectories, from environment and judges",
            ),
            Metric(
                "critic/rewards/{mean,max,min}",
                "reward",
                "after clipping and normalisation or the estimator's baseline",
            ),
            Metric("critic/{episode,step}_rewards_norm/{mean,max,min}", "", "gigpo's two parts"),
            Metric(
                "critic/running_{mean,std}",
                "reward",
                "scores of all batches so far, with `running` in `rewardNormalization`",
            ),
            Metric("critic/running_{mean,std}/<tag>", "reward", "the same with grouping `tag`"),
            Metric(
                "critic/{reward,token_reward,advantage}_clip_frac",
                "share",
                "of values that `rewardClip` and `advantageClip` changed",
            ),
            Metric(
                "critic/advantages/{mean,std}",
                "",
                "over response tokens that are trained on, before whitening",
            ),
            Metric("critic/{returns,values}/mean", "", "of `gae`"),
            Metric(
                "critic/kl",
                "nats",
                "`rewardKl`'s distance to the reference per token, mean over trajectories",
                rank=10,
                column=Column(4, "kl", "{:.4f}"),
            ),
            Metric("critic/kl_coef", "", "coefficient that this step used"),
        ),
    ),
    Section(
        "Actor",
        "Losses are as aggregated by `lossAggMode`; the rest are means over the "
        "tokens that are trained on, then over the step's optimizer steps.",
        (
            Metric(
                "actor/{pg_loss,kl_loss}",
                "",
                "policy gradient, and KL to the reference (`lossKl`), whenever there is one",
            ),
            Metric(
                "actor/total_loss",
                "",
                "all terms together",
                rank=6,
                column=Column(2, "loss", "{:.4f}"),
            ),
            Metric(
                "actor/entropy",
                "nats",
                "of the sampling distribution. A guard watches it",
                rank=7,
                series=True,
                column=Column(3, "entropy", "{:.3f}"),
                symptoms=(
                    "rises to the logarithm of the vocabulary while `env/<tag>/action_is_valid` "
                    "falls: invalid answers are rewarded: with rewards below 0, `formatPenalty` "
                    "times `maxSteps` must be worse than the worst ending",
                    "near 0: the policy has collapsed: [see the "
                    "guard](troubleshooting.md#guardtripped)",
                ),
            ),
            Metric(
                "actor/clipfrac",
                "share",
                "of tokens with a clipped ratio",
                symptoms=(
                    "above a third or so, or `actor/ess` far below 1: the policy moves too far in "
                    "one batch: fewer `ppoEpochs`, a smaller learning rate",
                ),
            ),
            Metric(
                "actor/approxkl",
                "nats",
                "distance between the policies before and after the step's own updates (with "
                "`oldLogProbs: Rollout`, from the policies that sampled): mean of (logp - "
                "old)^2 / 2",
                rank=8,
                series=True,
                column=Column(5, "approxkl", "{:.5f}"),
            ),
            Metric("actor/policykl", "nats", "the same as the mean of old - logp"),
            Metric(
                "actor/ratio_{mean,max,min}",
                "",
                "ratio of new and old probability; largest and smallest of the step",
            ),
            Metric("actor/ess", "share", "effective sample size of the ratios: 1 = on policy"),
            Metric("actor/grad_norm", "", "before clipping", rank=9, series=True),
            Metric("actor/lr", "", "learning rate of the last optimizer step"),
            Metric(
                "actor/skipped_steps",
                "steps",
                "optimizer steps skipped since the run began because a gradient was not finite",
                symptoms=("grows: gradients that are not finite",),
            ),
            Metric(
                "router/load_max_over_mean",
                "",
                "of a mixture of experts: tokens of the busiest expert over those of the mean "
                "expert, mean over layers. 1 = balanced; no token is dropped",
                symptoms=(
                    "near the number of experts: the routers send all tokens to few experts",
                ),
            ),
            Metric(
                "router/entropy",
                "nats",
                "of the distribution over all experts from which a router takes the largest ones, "
                "mean over tokens and layers",
            ),
            Metric(
                "actor/train_infer_logprob_gap",
                "nats",
                "mean of abs(trainer - engine) over response tokens of all policy versions",
            ),
            Metric(
                "actor/train_infer_{ratio,diff}_<level>_mean",
                "",
                "ratio and difference of trainer's and engine's probabilities, by level",
            ),
            Metric(
                "actor/train_infer_<level>_{ratio,diff}_mask_mean",
                "share",
                "of tokens that a filter keeps",
            ),
            Metric("actor/train_infer_final_mask_mean", "share", "of tokens that all filters keep"),
            Metric("actor/is_weight_clipfrac", "share", "of tokens with a weight at `upperBound`"),
        ),
    ),
    Section(
        "Critic",
        "",
        (
            Metric("critic/loss", "", "value loss", rank=11, column=Column(6, "vloss", "{:.4f}")),
            Metric("critic/{value,vpred}", "", "mean return and mean predicted value"),
            Metric("critic/error", "", "mean (V - G)^2"),
            Metric("critic/clipfrac", "share", "of tokens with a clipped value"),
            Metric("critic/{grad_norm,lr,skipped_steps}", "", "as for the actor"),
        ),
    ),
    Section(
        "Speed",
        "",
        (
            Metric(
                "time/step",
                "s",
                "the whole step, validation included",
                rank=16,
                series=True,
                column=Column(8, "s/step", "{:.2f}"),
            ),
            Metric("time/sync", "s", "weights to the engines", rank=20, series=True),
            Metric("time/rollout", "s", "waiting for a batch", rank=20, series=True),
            Metric("time/train", "s", "critic and actor", rank=20, series=True),
            Metric(
                "time/<phase>",
                "s",
                "`val` validation, `old_log_probs_values` scoring, `credit`, `handover` of "
                "shared GPUs to the trainers, `checkpoint` (in the next step), while ranks "
                "copy their state and the last write ends",
            ),
            Metric(
                "checkpoint/seconds",
                "s",
                "from a save to its complete checkpoint",
            ),
            Metric(
                "train/idle/<phase>",
                "share",
                "of the step in which the trainer ranks waited: `rollout` for the batch, `val` "
                "for a validation. High: engines or environments are too slow "
                "(`rollout/idle/...` says which), or `staleness.max` is 0. Each rank alone: "
                "[`agenticrun trace`](trace.md)",
                rank=21,
            ),
            Metric(
                "system/tps",
                "tokens/s",
                "prompt and response tokens of the batch over the step's time without validation",
                rank=15,
                column=Column(7, "tok/s", "{:,.0f}"),
            ),
            Metric("system/samples", "samples", "trajectories, or turns of step-wise agents"),
            Metric(
                "system/{engines,env_workers}",
                "",
                "at work at the end of the step, without engines that are [ejected because they "
                "are slow](troubleshooting.md#slow-engines)",
            ),
            Metric(
                "system/handovers",
                "",
                "how often trainers and engines have passed the GPUs to each other "
                "([Colocated](colocated.md))",
            ),
            Metric("weight_sync/seconds", "s", "as `time/sync`", rank=18, series=True),
            Metric(
                "weight_sync/pause_seconds",
                "s",
                "of them, in which an engine sampled nothing: the longest pause of an engine; "
                "absent with transport `Broadcast`",
            ),
            Metric(
                "weight_sync/bytes",
                "bytes",
                "sent to the nodes of engines in this step's sync; with transport Broadcast, to "
                "each engine",
            ),
            Metric(
                "weight_sync/changed_share",
                "share",
                "of the elements that differ from the last sync; 1 without `weightSync.delta`",
            ),
            Metric(
                "weight_sync/<transport>",
                "0 or 1",
                "1 for the transport that was used",
            ),
            Metric(
                "weight_sync/lora_merged",
                "0 or 1",
                "only with `actorTrain.lora`: 0 if only adapters were sent, 1 if whole merged "
                "weights; the driver's log gives the reason",
            ),
            Metric("engine/<id>/tokens_per_second", "tokens/s", "sampled by the engine"),
            Metric("engine/<id>/queue", "requests", "waiting"),
            Metric("engine/<id>/kv_usage", "share", "as `rollout/kv_usage`, of one engine"),
            Metric(
                "engine/logprob_gap",
                "nats",
                "mean of abs(trainer - engine) over the tokens that were sampled with the "
                "trainer's current weights: 0 but for rounding. A guard watches it",
                rank=12,
                series=True,
            ),
            Metric(
                "engine/parity_gap",
                "nats",
                "the same before the first step of an attempt, of the engine that differs most. "
                "The run stops if rounding does not explain it: "
                "[engines.md](engines.md#engine-against-trainer)",
            ),
            Metric(
                "engine/<id>/logprob_gap",
                "nats",
                "the same for one engine, where log-probs are recomputed before training",
            ),
            Metric(
                "train/tokens_per_second", "tokens/s", "of the batch, while critic and actor train"
            ),
            Metric("train/padding_waste", "share", "of a micro-batch's tokens that are padding"),
            Metric(
                "train/token_imbalance",
                "ratio",
                "tokens of the fullest rank divided by the mean of the ranks (1: even)",
            ),
        ),
    ),
    Section(
        "Validation",
        "At step 0, every `evalSteps` and at the end, over `valBatchSize` episodes on "
        "fixed levels.",
        (
            Metric("val/<tag>/success", "share", "of episodes that succeeded", rank=0),
            Metric(
                "val/<tag>/{score,turns,response_length}",
                "reward, turns, tokens",
                "means per episode",
            ),
            Metric(
                "val/<tag>/stop/{env_error,timeout,aborted,stale}",
                "share",
                "of episodes that failed, by stop reason; absent if no episode ended with it",
                rank=3,
            ),
            Metric("val/<tag>/stop/<reason>", "share", "of the other episodes, by stop reason"),
            Metric("val/<tag>/<name>", "", "as `env/<tag>/<name>`"),
            Metric(
                "val/<tag>/random_errors",
                "share",
                "of the episodes of `random_success` that failed; absent if none did",
                rank=3,
            ),
            Metric(
                "val/<tag>/random_success",
                "share",
                "a uniformly random valid policy on the same levels, measured once",
                rank=1,
            ),
            Metric(
                "val/<tag>/warmup_success", "share", "the policy before its first RL step", rank=2
            ),
            Metric("val/success/mean", "share", "success over tags", rank=23, series=True),
            Metric("val/score/mean", "reward", "score over episodes"),
            Metric(
                "val/success/best", "share", "best `val/success/mean` so far", rank=23, series=True
            ),
        ),
    ),
    Section(
        "Warm-up and guards",
        "",
        (
            Metric(
                "warmup/{loss,grad_norm,lr}",
                "",
                "of the supervised step (shown live, not in metrics.jsonl)",
            ),
            Metric(
                "warmup/discarded", "episodes", "that the warm-up collected but could not train on"
            ),
            Metric(
                "guard/{logprob_gap,entropy,zero_variance}",
                "0 or 1",
                "1 while the alarm of `pipeline.guards` is up",
                rank=22,
                series=True,
            ),
        ),
    ),
)

METRICS = tuple(metric for section in SECTIONS for metric in section.metrics)
FAMILIES = tuple(dict.fromkeys(metric.name.partition("/")[0] for metric in METRICS))
"""First parts of the names."""
FAMILY_RANKS = {
    "val": 25,
    "actor": 26,
    "critic": 27,
    "engine": 29,
    "group": 30,
    "stop": 31,
    "time": 32,
    "rollout": 33,
    "env": 34,
    "tokens": 35,
}
"""Ranks of metrics without a rank of their own."""
LAST_RANK = 36
STEP_METRICS = tuple(name for metric in METRICS if metric.series for name in metric.names)
"""Metrics of a step that the operator serves for Prometheus."""
COLUMNS = tuple(
    (column.label, metric.name, column.form)
    for column, metric in sorted(
        ((metric.column, metric) for metric in METRICS if metric.column),
        key=lambda pair: pair[0].place,
    )
)
"""Label, metric and format of the line per step; metrics that a step lacks are left out."""


def rank_of(name: str) -> int:
    """Return the importance of a metric by its name, 0 first."""
    ranks = (metric.rank for metric in METRICS if metric.rank is not None and metric.matches(name))
    return min(ranks, default=FAMILY_RANKS.get(name.partition("/")[0], LAST_RANK))


@cache
def _pattern(metric: Metric) -> re.Pattern[str]:
    names = "|".join(re.escape(name) for name in metric.names)
    return re.compile(re.sub(r"<[^/]+?>", "[^/]+", names))
