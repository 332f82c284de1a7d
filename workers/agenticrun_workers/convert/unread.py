"""When ROLL reads a field only beside certain others."""

from __future__ import annotations

from agenticrun_workers.convert.fields import Unread, View
from agenticrun_workers.convert.strategies import engine, trainer


def only(*estimators: str) -> Unread:
    """Read by these adv_estimators."""

    def reason(top: View) -> str:
        return (
            ""
            if top["adv_estimator"] in estimators
            else f"adv_estimator {top['adv_estimator']} does not read it"
        )

    return reason


def only_trainer(*names: str) -> Unread:
    """Read by these strategies that train."""

    def reason(top: View) -> str:
        return (
            ""
            if trainer(top) in names
            else f"only for {' and '.join(names)}: not read by {trainer(top)}"
        )

    return reason


def without_lora(top: View) -> str:
    return (
        ""
        if top.section("actor_train").section("model_args")["lora_target"]
        else "read with lora_target only"
    )


def told_by_config(top: View) -> str:
    """An engine's GPUs, where its own options say them, or where it can have one only."""
    config = top.section("actor_infer").section("strategy_args").section("strategy_config").given
    if engine(top) == "transformers" or top.section("actor_infer")["num_gpus_per_worker"] == 1:
        return "asks for nothing"
    return (
        "strategy_config.tensor_parallel_size says it: only read without"
        if config.get("tensor_parallel_size", 1) > 1
        else ""
    )


def without_token_kl(top: View) -> str:
    return "" if top["add_token_level_kl"] else "read with add_token_level_kl: true only"


def without_target_kl(top: View) -> str:
    return without_token_kl(top) or (
        "" if top["target_kl"] is not None else "read with target_kl only"
    )


def without_kl_loss(top: View) -> str:
    return "" if top["use_kl_loss"] else "read with use_kl_loss: true only"


def without_clip(top: View) -> str:
    variant = variant_of(top)
    return "" if variant == "ppo" else f"pg_variant {variant} does not clip"


def with_clip_range(top: View) -> str:
    return without_clip(top) or (
        "pg_clip_low and pg_clip_high take its place"
        if top["use_pg_clip_range"] and not top["dual_clip_loss"]
        else ""
    )


def without_clip_range(top: View) -> str:
    return without_clip(top) or (
        "" if top["use_pg_clip_range"] else "read with use_pg_clip_range: true only"
    )


def without_distillation(top: View) -> str:
    return "" if top["use_opd"] or top["is_pure_opd"] else "on-policy distillation is off"


def without_topr(top: View) -> str:
    return "" if variant_of(top) == "topr" else "read by pg_variant topr only"


def without_variants(top: View) -> str:
    return (
        ""
        if has_variants(top)
        else "read by agentic_actor_pg_worker.ActorWorker only: set worker_cls"
    )


def variant_of(top: View) -> str:
    """The loss that ROLL would compute: pg_variant counts with one worker class only."""
    return (top.section("actor_train")["pg_variant"] or "ppo") if has_variants(top) else "ppo"


def has_variants(top: View) -> bool:
    """Whether the actor's worker reads pg_variant."""
    return "agentic_actor_pg_worker" in str(top.section("actor_train")["worker_cls"])
