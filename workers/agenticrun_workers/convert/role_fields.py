"""Table of the fields of ROLL's WorkerConfig (one per role), and when ROLL ignores a field."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

from agenticrun_workers.convert.fields import (
    Fate,
    Field,
    Fields,
    Section,
    Unread,
    View,
    adapted,
    cannot,
    changed,
    dead,
    dropped,
    mapped,
    one_of,
)

TRAINERS = {"fsdp2_train": "fsdp2", "megatron_train": "megatron", "deepspeed_train": "deepspeed"}


ENGINES = {"hf_infer": "transformers", "sglang": "sglang", "vllm": "vllm"}


MIXTURE = re.compile(
    r"-A\d+(\.\d+)?B\b|MoE\b|Mixtral|OLMoE|DeepSeek-V\d|GLM-4\.[5-9]|gpt-oss", re.IGNORECASE
)
"""Names of mixtures of experts."""
NOT_OFFERED = {
    "virtual_pipeline_model_parallel_size": (
        "interleaved pipeline stages: remove it; pipeline_model_parallel_size works"
    ),
    "optimizer_cpu_offload": (
        "Megatron's optimizer in host memory: remove it, or set actorTrain.strategy to fsdp2 with "
        "offload_policy: true"
    ),
}
NO_DISTILLATION = "on-policy distillation: not offered yet. Remove these settings"


def trainer(top: View) -> str:
    """Return the strategy that trains the policy.

    Megatron trains neither adapters nor mixtures of experts here.
    """
    actor = top.section("actor_train")
    name = TRAINERS.get(actor.section("strategy_args")["strategy_name"], "fsdp2")
    adapters = actor.section("model_args")["lora_target"]
    mixture = MIXTURE.search(model_path(top) or "")
    return "fsdp2" if name == "megatron" and (adapters or mixture) else name


def model_path(top: View) -> str | None:
    """Return the name or folder of the policy."""
    path: str | None = (
        top["pretrain"] or top.section("actor_train").section("model_args")["model_name_or_path"]
    )
    return path


def engine(top: View) -> str:
    """Return the strategy of the inference engines."""
    return ENGINES.get(
        top.section("actor_infer").section("strategy_args")["strategy_name"], "transformers"
    )


def sampler(top: View) -> str:
    """Return the section with the sampling of training: actor_infer's, if it has one."""
    given = "generating_args" in top.section("actor_infer")
    manager = "generating_args" in top.section("train_env_manager")
    return "train_env_manager" if manager and not given else "actor_infer"


def validation_sampler(top: View) -> str:
    """Return the section with the sampling of validation."""
    own = "generating_args" in top.section("val_env_manager")
    return (
        "val_env_manager"
        if own and "generating_args" not in top.section("actor_infer")
        else sampler(top)
    )


def with_actor_infers_sampling(top: View) -> str:
    """Return the reason why ROLL ignores the sampling of env managers, or an empty text."""
    given = "generating_args" in top.section("actor_infer")
    return "actor_infer.generating_args replaces it, as in ROLL" if given else ""


def only(*estimators: str) -> Unread:
    """Return the condition of a field that only these adv_estimators read."""

    def reason(top: View) -> str:
        return (
            ""
            if top["adv_estimator"] in estimators
            else f"adv_estimator {top['adv_estimator']} does not read it"
        )

    return reason


def only_trainer(*names: str) -> Unread:
    """Return the condition of a field that only these training strategies read."""

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


def without_text_modules(top: View) -> str:
    """Return the reason why no text model has the frozen modules, or an empty text."""
    prefixes = top.section("actor_train").section("model_args")["freeze_module_prefix"] or ""
    names = prefixes if isinstance(prefixes, list) else str(prefixes).split(",")
    vision = all(str(name).strip().startswith("vision") for name in names)
    return "text models have no vision part" if names and vision else ""


def set_by_config(top: View) -> str:
    """Return the reason why ROLL ignores num_gpus_per_worker, or an empty text."""
    config = top.section("actor_infer").section("strategy_args").section("strategy_config").given
    if engine(top) == "transformers" or top.section("actor_infer")["num_gpus_per_worker"] == 1:
        return "no effect at this value"
    return (
        "strategy_config.tensor_parallel_size sets it: read only without that"
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


def without_normalization(top: View) -> str:
    reward = top.section("reward_normalization")
    types = (reward["norm_mean_type"], reward["norm_std_type"])
    return "nothing is normalised" if reward["method"] == "identity" and not any(types) else ""


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
    """Return the loss that ROLL computes. Only one worker class reads pg_variant."""
    return (top.section("actor_train")["pg_variant"] or "ppo") if has_variants(top) else "ppo"


def has_variants(top: View) -> bool:
    """Return True if the actor's worker class reads pg_variant."""
    return "agentic_actor_pg_worker" in str(top.section("actor_train")["worker_cls"])


_TRAINING = "spec.pipeline.actorTrain.training (critic: spec.pipeline.critic.training)"
_BACKEND = dropped("a setting of ROLL's backend: nothing here needs it")
_ADAPTERS = "spec.pipeline.actorTrain.lora"
_OPTIONS = "spec.pipeline.actorTrain.strategy.config"

PARALLEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)
STRATEGY_CONFIG: Fields = {
    **dict.fromkeys(PARALLEL_SIZES, mapped(f"{_OPTIONS}, of megatron", 1)),
    **dict.fromkeys(
        ("tensor_parallel_size", "pipeline_parallel_size"),
        mapped("spec.pipeline.actorInfer.strategy.config", 1),
    ),
    **dict.fromkeys(
        ("expert_model_parallel_size", "expert_tensor_parallel_size"),
        dropped("fsdp2 spreads the experts over its ranks", 1),
    ),
    **{key: cannot(why, 1, False) for key, why in NOT_OFFERED.items()},
}
"""Keys that ROLL's own code reads. Their fate depends on the backend: see `models`."""

MODEL_ARGS: Fields = {
    "model_name_or_path": adapted(
        "pretrain (critic: reward_pretrain) takes its place, as in ROLL; "
        "without pretrain this is spec.model.path"
    ),
    "adapter_name_or_path": cannot(
        "adapters begin at zero here: merge the trained one into the model, and write that "
        "model's path into spec.model.path"
    ),
    "attn_implementation": mapped(
        "spec.model.attnImplementation (sdpa, auto, fa2: left out, since sdpa has flash attention)",
        unread=lambda top: (
            "megatron has an attention of its own" if trainer(top) == "megatron" else ""
        ),
    ),
    "moe_aux_loss_coef": cannot(
        "auxiliary loss of a mixture of experts: not offered. Set it to 0", 0.0, 0
    ),
    "disable_gradient_checkpointing": mapped(
        f"{_OPTIONS}.gradient_checkpointing (fsdp2, deepspeed)",
        False,
        only_trainer("fsdp2", "deepspeed"),
    ),
    "gradient_checkpointing_use_reentrant": dropped(
        "never reentrant: the same numbers, and less memory"
    ),
    "device_map": dropped("the strategy places the parameters", "balanced"),
    "dtype": one_of(
        {
            "bf16": "spec.model.dtype: bfloat16 (of the actor, for all roles)",
            "fp32": "spec.model.dtype: float32 (of the actor, for all roles)",
        },
        "no float16 here: bfloat16 is written, which needs no loss scaling",
        "bf16",
        otherwise_is=Fate.CHANGED,
    ),
    "model_type": adapted(
        "the critic is the causal language model with a value head; other roles have no such choice"
    ),
    "num_labels": dropped("a value head has one output", 1),
    "model_config_kwargs": cannot(
        "changes of the model's config: write them into config.json of a model folder of your own",
        None,
        {},
    ),
    "freeze_module_prefix": cannot(
        "frozen modules: all parameters are trained here. Remove it, or train adapters "
        "(spec.pipeline.actorTrain.lora)",
        None,
        [],
        "",
        unread=without_text_modules,
    ),
    "ulysses_size": mapped(
        f"{_OPTIONS}.ulysses_sequence_parallel_size (fsdp2)", 1, only_trainer("fsdp2")
    ),
    "lora_rank": mapped(f"{_ADAPTERS}.rank", 8, without_lora),
    "lora_alpha": mapped(
        f"{_ADAPTERS}.alpha (where not given: twice the rank)", None, without_lora, kind=int
    ),
    "lora_dropout": dropped("zero, or see above", 0),
    "lora_target": mapped(f"{_ADAPTERS}.targetModules (all-linear: left out)"),
    "additional_target": cannot(
        "whole modules beside the adapters: only adapters are trained here. Remove it",
        None,
        [],
        "",
        unread=without_lora,
    ),
    "autocast_adapter_dtype": dropped("adapters are always trained in float32", True),
}


def _default(field: Field | Section) -> object:
    return field.default if isinstance(field, Field) else None


OTHERS_MODEL_ARGS: Fields = {
    **MODEL_ARGS,
    "dtype": adapted("spec.model.dtype is actor_train's, for all roles"),
    "attn_implementation": dropped("spec.model.attnImplementation is actor_train's"),
    "freeze_module_prefix": dropped("only actor_train is trained"),
    **{
        key: dropped(
            "actor_train's count: reference and critic are computed the way the policy is",
            _default(MODEL_ARGS[key]),
        )
        for key in ("disable_gradient_checkpointing", "ulysses_size")
    },
    **{
        key: dropped(
            "engines serve the merged weights; only the policy has adapters",
            _default(MODEL_ARGS[key]),
        )
        for key in ("lora_rank", "lora_alpha", "lora_target", "lora_dropout", "additional_target")
    },
}
"""Model arguments of the roles other than actor_train."""

SCHEDULES = {
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine": "cosine",
}
TRAINING_ARGS: Fields = {
    "learning_rate": mapped(f"{_TRAINING}.learningRate", 5e-5),
    "lr_scheduler_type": one_of(
        {name: f"{_TRAINING}.lrSchedulerType: {ours}" for name, ours in SCHEDULES.items()},
        "no such schedule here: linear is written. Choose constant, linear or cosine",
        "linear",
    ),
    "weight_decay": mapped(f"{_TRAINING}.weightDecay", 0.0),
    "adam_beta1": mapped(f"{_TRAINING}.adamBeta1", 0.9),
    "adam_beta2": mapped(f"{_TRAINING}.adamBeta2", 0.999),
    "per_device_train_batch_size": adapted(
        "with gradient_accumulation_steps and the number of ranks it sets "
        "actorTrain.training.miniBatchSize; with sequence_length it sets maxTokensPerMicroBatch",
        8,
    ),
    "gradient_accumulation_steps": adapted("sets actorTrain.training.miniBatchSize", 1),
    "warmup_ratio": mapped(f"{_TRAINING}.warmupSteps (times the number of optimizer steps)", 0.0),
    "warmup_steps": mapped(f"{_TRAINING}.warmupSteps", 0),
    "max_steps": dropped("follows from spec.pipeline.maxSteps, as in ROLL", -1),
    "num_train_epochs": dropped("an RL run has steps, not epochs"),
    "seed": dropped("spec.pipeline.seed is the seed of everything, as in ROLL"),
    "data_seed": dropped("spec.pipeline.seed is the seed of everything"),
    "dataloader_num_workers": dropped("there is no data loader"),
    "fp16": dropped("the precision is model_args.dtype"),
    "bf16": dropped("the precision is model_args.dtype"),
    "tf32": dropped("PyTorch's own default"),
    "save_hf_model": adapted(
        "`agenticrun export` writes a Hugging Face folder from any checkpoint", False
    ),
    "output_dir": dropped("checkpoints go to spec.checkpoint.uri"),
}

_VALIDATION_TOO = (
    "spec.pipeline.actorInfer.generating, and validationGenerating unless val_env_manager has "
    "its own"
)
GENERATING_ARGS: Fields = {
    "do_sample": cannot(
        "greedy training has nothing to learn from: set do_sample: true. "
        "spec.pipeline.actorInfer.validationGenerating is greedy without settings",
        True,
    ),
    "temperature": mapped(f"{_VALIDATION_TOO} (.temperature)", 0.95),
    "top_p": mapped(f"{_VALIDATION_TOO} (.topP)", 0.7),
    "top_k": mapped(f"{_VALIDATION_TOO} (.topK, -1 -> 0)", 50),
    "num_beams": cannot("beam search: samples are drawn here. Remove it", 1),
    "max_length": dropped("max_new_tokens and sequence_length bound a response", 8192),
    "max_new_tokens": mapped(
        "spec.pipeline.envs[].maxTokensPerStep (the smaller of it and max_tokens_per_step)", 8192
    ),
    "repetition_penalty": cannot(
        "its log-probs would not be those of the sampling: remove it", 1, 1.0
    ),
    "length_penalty": dropped("a setting of beam search", 1),
    "num_return_sequences": dropped("always 1, as in ROLL", 1),
    "stop_strings": changed(
        "a response ends with its end-of-turn token or at its token limit: let the environment "
        "ignore what follows the first call (python_tool does)"
    ),
    "include_stop_str_in_output": dropped("no stop strings"),
    "logprobs": dropped("log-probs are always recorded", 0),
}

MANAGERS_GENERATING_ARGS: Fields = {
    key: replace(field, unread=with_actor_infers_sampling)
    for key, field in GENERATING_ARGS.items()
    if isinstance(field, Field)
}
"""Fields of train_env_manager. ROLL reads them if actor_infer has none."""
VALIDATION_GENERATING_ARGS: Fields = {
    **MANAGERS_GENERATING_ARGS,
    **{
        key: mapped(
            f"spec.pipeline.actorInfer.validationGenerating.{ours}",
            _default(GENERATING_ARGS[key]),
            with_actor_infers_sampling,
        )
        for key, ours in (("temperature", "temperature"), ("top_p", "topP"), ("top_k", "topK"))
    },
    "do_sample": mapped(
        "validationGenerating.temperature: 0 without sampling", True, with_actor_infers_sampling
    ),
    "max_new_tokens": adapted(
        "the limit of training holds for validation too", 8192, with_actor_infers_sampling
    ),
}
"""Fields of val_env_manager."""

_LENGTHS = dropped("rows are packed up to maxTokensPerMicroBatch")
_NO_EFFECT = "ROLL's YAML could never set it (C14): spec.pipeline.algorithm"
PACKING_ARGS: Fields = dict.fromkeys(
    (
        "algorithm",
        "max_packed_sequence_length_forward",
        "max_packed_sequence_length_train",
        "min_num_micro_batches_forward",
        "min_num_micro_batches_train",
    ),
    _LENGTHS,
)

_ENGINE = one_of(
    {name: f"spec.pipeline.actorInfer.strategy.name: {ours}" for name, ours in ENGINES.items()},
    "no such engine here: transformers is written. Choose transformers, sglang or vllm",
    "vllm",
)
_TRAINER = one_of(
    {name: f"spec.pipeline.actorTrain.strategy.name: {ours}" for name, ours in TRAINERS.items()},
    "no such trainer here: fsdp2 is written. Choose fsdp2, megatron or deepspeed",
    "fsdp2_train",
)
_CRITICS_TRAINER = dropped("the critic is always trained by fsdp2")
_PODS = {
    "actor_train": mapped("spec.roles.trainer: gpus times replicas"),
    "actor_infer": mapped(
        "spec.roles.inference: gpus times replicas; "
        "if it has the devices of actor_train: spec.placement: Colocated"
    ),
}
_WITH_TRAINER = adapted(
    "its own pods (spec.roles) if its GPUs are not those of actor_train, "
    "else it shares the trainer pods"
)
_OPD = cannot(NO_DISTILLATION, None, [], unread=without_distillation)

_WORKER: Fields = {
    "name": dropped("a name for logs"),
    "data_args": Section({}, rest=dropped("agentic runs read no data_args")),
    "infer_batch_size": dropped("micro-batches are cut by tokens (maxTokensPerMicroBatch)", 16),
    "backend_timeout": dropped("there are no call timeouts", 30),
    "max_concurrency": dropped("actors take any number of calls", 1),
    "use_dynamic_batching_in_infer": dropped("micro-batches are always cut by tokens", False),
    "max_tokens_per_microbatch_in_infer": dropped(
        "log-probs are computed under maxTokensPerMicroBatch too"
    ),
    "sequence_length_round_in_train": dropped("lengths are not rounded", 4),
    "sequence_length_round_in_infer": dropped("lengths are not rounded", 4),
    "sequence_packing_args": Section(PACKING_ARGS),
    "logits_in_fp32": dropped("log-probs are always computed in float32", False),
    "router_replay": Section(
        {
            "mode": cannot(
                "replays the engine's routing in the trainer: not offered. Set mode to disable",
                "disable",
            )
        }
    ),
    "apply_loss_scale": dropped("denominators are global: there is nothing to undo (C15)", True),
    "mtp_training_mode": cannot("multi-token prediction: not offered. Remove it", "disabled"),
    "offload_nccl": dropped("ROLL forces it to false", False),
    "opd_kl_coef": _OPD,
    "tag_included": _OPD,
}
_ACTOR_ONLY: Fields = {
    "model_update_frequency": mapped("spec.pipeline.modelUpdateFrequency", 1),
    "pg_variant": mapped("spec.pipeline.algorithm.pgVariant", unread=without_variants),
    "topr_positive_weight": mapped(
        "spec.pipeline.algorithm.topr.positiveWeight", 1.0, without_topr
    ),
    "topr_negative_weight": mapped(
        "spec.pipeline.algorithm.topr.negativeWeight", 1.0, without_topr
    ),
    "tis_lower_bound": dead(f"{_NO_EFFECT}.tis.lowerBound"),
    "tis_upper_bound": dead(f"{_NO_EFFECT}.tis.upperBound"),
    "cispo_epsilon_low": dead(f"{_NO_EFFECT}.cispo.epsilonLow"),
    "cispo_epsilon_high": dead(f"{_NO_EFFECT}.cispo.epsilonHigh"),
    "cispo_use_unified_mask": dead(f"{_NO_EFFECT}.cispo.unifiedMask"),
    "kimi15_tau": dead(f"{_NO_EFFECT}.kimi15.tau"),
}
_TRAINED: Fields = {
    "training_args": Section(TRAINING_ARGS),
    "use_dynamic_batching_in_train": adapted("micro-batches are always cut by tokens", False),
    "max_tokens_per_microbatch_in_train": mapped(
        f"{_TRAINING}.maxTokensPerMicroBatch, with use_dynamic_batching_in_train", kind=int
    ),
    "use_sequence_packing": mapped(f"{_TRAINING}.sequencePacking", False),
}
_POLICY_WORKERS = {
    "agentic_actor_worker.ActorWorker": "the actor of spec.pipeline.algorithm.pgVariant: ppo",
    "agentic_actor_pg_worker.ActorWorker": "spec.pipeline.algorithm.pgVariant",
    "base_worker.ActorWorker": "the actor of spec.pipeline.algorithm.pgVariant: ppo",
    "base_worker.InferWorker": "the engines of spec.pipeline.actorInfer",
    "base_worker.CriticWorker": "spec.pipeline.critic",
}
_PREFIXES = ("roll.pipeline.", "roll.pipeline.agentic.", "")
WORKER_CLASSES = {
    f"{prefix}{name}": note for prefix in _PREFIXES for name, note in _POLICY_WORKERS.items()
}


def role(name: Literal["actor_train", "actor_infer", "reference", "critic", "env"]) -> Section:
    """Return the table of a role's WorkerConfig. Fields that only other roles read are dropped."""
    trains, samples = name in ("actor_train", "critic"), name == "actor_infer"
    silent = {
        key: dropped("this role does not read it", _default(field))
        for key, field in {**_ACTOR_ONLY, **_TRAINED}.items()
    }
    fields: dict[str, Field | Section] = {**silent, **_WORKER}
    fields["worker_cls"] = one_of(
        WORKER_CLASSES,
        "a worker class of your own: a loss of your own is written as docs/how-to-add.md shows",
    )
    fields["training_args"] = (
        Section(TRAINING_ARGS) if trains else Section({}, rest=dropped("this role does not train"))
    )
    fields["generating_args"] = (
        Section(GENERATING_ARGS)
        if samples
        else Section(MANAGERS_GENERATING_ARGS)
        if name == "env"
        else Section({}, rest=dropped("only those of actor_infer and env managers are read"))
    )
    models = MODEL_ARGS if name == "actor_train" else OTHERS_MODEL_ARGS
    fields["model_args"] = (
        Section(models) if name != "env" else Section({}, rest=dropped("no model here"))
    )
    fields["strategy_args"] = Section(
        {
            "strategy_name": {
                "actor_infer": _ENGINE,
                "actor_train": _TRAINER,
                "critic": _CRITICS_TRAINER,
            }.get(name, _BACKEND),
            "strategy_config": Section(STRATEGY_CONFIG, reported_elsewhere=True)
            if name in _PODS
            else Section({}, rest=_BACKEND),
        }
    )
    pods = _PODS.get(
        name,
        _WITH_TRAINER
        if name != "env"
        else dropped("spec.roles.env.replicas follows from max_env_num_per_worker"),
    )
    fields["device_mapping"] = fields["world_size"] = pods
    fields["num_gpus_per_worker"] = (
        mapped(
            "spec.pipeline.actorInfer.strategy.config.tensor_parallel_size, if that is not set",
            1,
            set_by_config,
        )
        if samples
        else dropped("a rank has one GPU", 1)
    )
    role_of = {"actor_train": "trainer", "actor_infer": "inference", "env": "env"}.get(name)
    fields["system_envs"] = (
        mapped(f"spec.roles.{role_of}.env (without what names a secret: use envFrom)")
        if role_of
        else adapted("spec.roles.<role>.env where it has pods of its own, else actor_train's count")
    )
    if trains:
        fields |= _TRAINED
    if name == "actor_train":
        fields |= _ACTOR_ONLY
    return Section(fields)
