"""`spec.pipeline.{algorithm,rewardNormalization,trainInferCorrection}` from ROLL's PPOConfig."""

from __future__ import annotations

from typing import Any

from agenticrun_workers.convert.environments import is_step_wise
from agenticrun_workers.convert.fields import Notes, View
from agenticrun_workers.convert.mapping import FILTERS
from agenticrun_workers.convert.role_fields import has_variants, variant_of

GROUPINGS = {"batch": "batch", "traj_group_id": "group", "tags": "tag", "state_group_id": "state"}
DEPRECATED_METHODS = {
    "mean": ("group", None),
    "mean_std": ("group", "group"),
    "asym_clip": ("group", "group"),
}
KL_KINDS = {"kl": "k1", "abs": "abs", "mse": "k2", "k3": "k3"}
ESTIMATORS = ("gae", "reinforce", "grpo", "gigpo", "step_reinforce", "agentic_reinforce")
WITHOUT_RATIO = ("vanilla", "kimi15")
TOKEN_RETURNS = ("gae", "reinforce", "agentic_reinforce")

Spec = dict[str, Any]


def algorithm(top: View, notes: Notes) -> Spec:
    """Return `algorithm`, and `rewardNormalization` if the estimator reads it."""
    name, normalization = _estimator(top, notes)
    spec: Spec = {"name": name}
    if name == "gigpo":
        spec |= normalization | {key: top[roll] for key, roll in _GIGPO.items()}
    elif name == "grpo":
        spec["normStdType"] = normalization["normStdType"]
    if name in ("gigpo", "step_reinforce"):
        by_row = top["adv_estimator"] != name  # see `_rows`
        spec["stepRewardGamma"] = 0.0 if by_row else top["step_reward_gamma"]
        if top["gamma"] != 1:
            notes.changed(
                "gamma",
                top["gamma"],
                "an advantage is constant within its step; ROLL also discounts it over the tokens",
            )
    if name in TOKEN_RETURNS:
        spec |= {"gamma": top["gamma"], "whitenRewards": top["whiten_rewards"]}
        if top["gamma"] != 1 and name != "agentic_reinforce":
            notes.changed(
                "gamma",
                top["gamma"],
                "algorithm.gamma: prompt and observation tokens do not discount (C16)",
            )
    if name == "gae":
        spec["lambd"] = top["lambd"]
    spec |= {
        "whitenAdvantages": top["whiten_advantages"],
        "ppoEpochs": top["ppo_epochs"],
        "entropyLossCoef": top["entropy_loss_coef"],
        "rewardClip": top["reward_clip"],
        "advantageClip": top["advantage_clip"],
        "rewardKl": _reward_kl(top),
        "lossKl": {"kind": "k3", "coef": top["kl_loss_coef"]}
        if top["use_kl_loss"] and top["kl_loss_coef"] > 0
        else None,
        **_loss(top, notes),
    }
    _token_kl(top, name, spec["rewardKl"], notes)
    own = name in ("grpo", "gigpo")
    return {
        "algorithm": spec,
        "rewardNormalization": None
        if own or {normalization["normMeanType"], normalization["normStdType"]} == {"none"}
        else normalization,
    }


_GIGPO = {"episodeRewardWeight": "episode_reward_weight", "stepRewardWeight": "step_reward_weight"}


def _estimator(top: View, notes: Notes) -> tuple[str, Spec]:
    """Return our estimator and the normalization that ROLL applies before it."""
    name, size = top["adv_estimator"], top.section("train_env_manager")["group_size"]
    reward = top.section("reward_normalization")
    mean, std = DEPRECATED_METHODS.get(reward["method"], (None, None))
    grouping = GROUPINGS.get(reward["grouping"], "batch")
    types = {
        "normMeanType": reward["norm_mean_type"] or mean or "none",
        "normStdType": reward["norm_std_type"] or std or "none",
    }
    if name not in ESTIMATORS:
        notes.undecided(
            "adv_estimator",
            name,
            "no such estimator in ROLL's agentic pipeline: reinforce is written",
        )
        name = "reinforce"
    if grouping == "state" and name != "step_reinforce":
        notes.undecided(
            "reward_normalization.grouping",
            reward["grouping"],
            "only step_reinforce compares states: batch is written",
        )
        grouping = "batch"
    if "group" in types.values() and size < 2 and (name == "gigpo" or grouping == "group"):
        notes.undecided(
            "train_env_manager.group_size",
            size,
            "a group of one has nothing to compare, and ROLL's advantages are all 0: set "
            "group_size to at least 2, or reward_normalization.grouping to batch",
            covers="spec.pipeline.rewardNormalization",
        )
    _lone_members(grouping, types, size, name, notes)
    if name == "gigpo":
        return name, _gigpo(grouping, types, size, notes)
    if name == "gae":
        notes.changed(
            "critic",
            "gae",
            "returns and advantages are over response tokens only, and the critic's gradient does "
            "not grow with ranks and micro-batches; in ROLL both (C15, C16)",
        )
    if is_step_wise(top) and name != "step_reinforce":
        return _rows(top, name, notes), {"grouping": grouping, **types}
    if name == "grpo":
        name = _grpo(top, grouping, types, notes)
    return name, {"grouping": grouping, **types}


def _lone_members(grouping: str, types: Spec, size: int, name: str, notes: Notes) -> None:
    """Report sets of one row, whose advantage is 0 in ROLL if there is a deviation."""
    states = grouping == "state" or name == "gigpo"
    lone = states or (grouping == "group" and size < 2)
    if lone and types["normStdType"] != "none" and types["normMeanType"] != "group":
        field = "reward_normalization.norm_std_type"
        notes.changed(
            field,
            types["normStdType"],
            "a set of one row is scaled by the deviation of the batch; ROLL's advantage of it "
            "is 0 (C21)",
        )


def _rows(top: View, name: str, notes: Notes) -> str:
    """Return our estimator for one that scores each turn of a step manager separately.

    In ROLL such a turn is a row of the batch with its own reward; the turns after it do not count.
    """
    if name == "gae" or top["whiten_rewards"]:
        notes.changed(
            "adv_estimator",
            name,
            f"algorithm.name: {name if name == 'gae' else 'reinforce'} over whole trajectories; "
            "ROLL scores each turn by its own reward alone (C24)",
        )
        return name if name == "gae" else "reinforce"
    notes.changed(
        "adv_estimator",
        name,
        "algorithm.name: step_reinforce with stepRewardGamma 0, because ROLL scores each turn of "
        "a step manager by its own reward alone; better: gigpo, or a stepRewardGamma near 1 (C24)",
    )
    return "step_reinforce"


def _gigpo(grouping: str, types: Spec, size: int, notes: Notes) -> Spec:
    notes.changed(
        "adv_estimator",
        "gigpo",
        "algorithm.name: gigpo; states are compared within their group, with the same "
        "normalization types as episodes; each trajectory counts once (C6)",
    )
    if grouping == "tag":
        notes.undecided(
            "reward_normalization.grouping",
            "tags",
            "gigpo compares within a trajectory's group or the batch: group is written",
        )
    if size < 2 and "group" not in types.values():
        notes.undecided(
            "train_env_manager.group_size",
            size,
            "gigpo compares the trajectories of a group: set it to at least 2",
            covers="spec.pipeline",
        )
    return {
        key: "batch" if grouping == "batch" and over == "group" else over
        for key, over in types.items()
    }


def _grpo(top: View, grouping: str, types: Spec, notes: Notes) -> str:
    same = (
        grouping == "group"
        and types["normMeanType"] == "group"
        and top.section("train_env_manager")["group_size"] >= 2
    )
    if same and top["gamma"] == 1 and not top["whiten_rewards"] and not top["add_token_level_kl"]:
        notes.mapped(
            "adv_estimator",
            "grpo",
            "algorithm.name: grpo, the same as ROLL's reinforce with this reward_normalization",
        )
        return "grpo"
    notes.changed(
        "adv_estimator",
        "grpo",
        "algorithm.name: reinforce with rewardNormalization, "
        "which is what ROLL computes under this name",
    )
    return "reinforce"


def _token_kl(top: View, name: str, penalty: Spec | None, notes: Notes) -> None:
    """Report estimators that compute something else from a KL in the reward."""
    if penalty is None:
        return
    if name == "agentic_reinforce":
        notes.changed(
            "add_token_level_kl",
            True,
            "the KL of every token of a turn counts; ROLL keeps that of the last one (C23)",
        )
    elif name in ("gigpo", "step_reinforce"):
        notes.changed(
            "add_token_level_kl",
            True,
            "the summed KL of a turn is subtracted from its reward, before the baseline; ROLL "
            "subtracts it token by token from the normalised reward (C25)",
        )
    if "targetKl" in penalty and is_step_wise(top):
        notes.changed(
            "target_kl",
            penalty["targetKl"],
            "the coefficient adapts by trajectories; ROLL counts turns, so that it adapts faster "
            "with longer episodes (C27)",
        )


def _reward_kl(top: View) -> Spec | None:
    if not top["add_token_level_kl"] or top["init_kl_coef"] <= 0:
        return None
    adaptive = (
        {"targetKl": top["target_kl"], "horizon": top["kl_horizon"]}
        if top["target_kl"] is not None
        else {}
    )
    return {"kind": KL_KINDS.get(top["kl_penalty"], "k1"), "coef": top["init_kl_coef"], **adaptive}


def _loss(top: View, notes: Notes) -> Spec:
    variant, ratio, mode = variant_of(top), top["ratio_type"], top["loss_agg_mode"]
    actor = top.section("actor_train")
    if has_variants(top) and actor["pg_variant"] is None:
        notes.adapted(
            "actor_train.pg_variant", None, "pgVariant: ppo; ROLL raises an error without one (C14)"
        )
    if variant == "topr":
        notes.changed(
            "actor_train.pg_variant",
            variant,
            "the sign is that of the trajectory's score without formatPenalty; ROLL includes it "
            "(C29)",
        )
    if top["adv_estimator"] == "gae" and top["ppo_epochs"] > 1:
        notes.changed("ppo_epochs", top["ppo_epochs"], "the critic's too; one in ROLL (C33)")
    if ratio == "segment" and any(
        one.get("enabled") for one in top.section("train_infer_correction")["filters"] or []
    ):
        notes.changed(
            "ratio_type",
            ratio,
            "a segment is a turn, whatever tokens a filter removes; ROLL cuts it there (C26)",
        )
    if ratio != "token" and variant in WITHOUT_RATIO:
        notes.adapted("ratio_type", ratio, f"pg_variant {variant} has no ratio: token")
        ratio = "token"
    if mode == "token-mean":
        notes.changed(
            "loss_agg_mode",
            mode,
            "lossAggMode: token-mean, over the response mask: ROLL sums masked tokens too (C1)",
        )
    if mode == "seq-mean-token-sum-norm":
        notes.changed(
            "loss_agg_mode",
            mode,
            "lossAggNorm: sequence_length, divided by the number of samples too; "
            "ROLL divides by the padded width alone",
        )
    spec: Spec = {"pgVariant": variant, "ratioType": ratio, "lossAggMode": mode}
    if mode == "seq-mean-token-sum-norm":
        spec["lossAggNorm"] = sequence_length(top)
    if variant == "ppo":
        low, high = (
            (top["pg_clip_low"], top["pg_clip_high"])
            if top["use_pg_clip_range"]
            else (top["pg_clip"], top["pg_clip"])
        )
        spec |= {
            "pgClipLow": low,
            "pgClipHigh": high,
            "dualClip": 1 + 2 * top["pg_clip"] if top["dual_clip_loss"] else None,
        }
    if variant == "topr":
        spec["topr"] = {
            "positiveWeight": actor["topr_positive_weight"],
            "negativeWeight": actor["topr_negative_weight"],
        }
    return spec


def sequence_length(top: View) -> int:
    """Return the token limit of a trajectory."""
    return int(top["sequence_length"] or 4 * top["prompt_length"])


def correction(top: View, notes: Notes) -> Spec | None:
    """Return `trainInferCorrection`, or None if all of it is off."""
    section = top.section("train_infer_correction")
    weight = section.section("is_weight")
    spec: Spec = {}
    if weight["enabled"]:
        unbounded = (
            isinstance(section["is_weight"], dict)
            and section["is_weight"].get("upper_bound", 1.2) is None
        )
        spec["isWeight"] = {
            "level": weight["weight_type"],
            "upperBound": 1e6 if unbounded else weight["upper_bound"],
        }
    filters = [
        _filter(View(one, FILTERS)) for one in section["filters"] or [] if one.get("enabled")
    ]
    if any(filters):
        spec["filters"] = [one for one in filters if one]
        notes.changed(
            "train_infer_correction.filters",
            "",
            "filtered tokens leave loss, gradient, denominators and whitening (C1)",
        )
    return spec or None


def _filter(one: View) -> Spec | None:
    bounds: Spec = {}
    if one["ratio_enabled"]:
        bounds |= {"ratioLow": one["ratio_low"], "ratioHigh": one["ratio_high"]}
    if one["diff_enabled"]:
        bounds |= {"diffLow": one["diff_low"], "diffHigh": one["diff_high"]}
    return {"level": one["agg_type"], **bounds} if bounds else None
