"""`strategy_args` and adapters of the policy and its engines: ROLL's backends under their names here, and which of their options go on.

The backends' own options keep their names, so most are passed as they are. Their lines of the report are written here, because the
fate of an option depends on its backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agenticrun_workers.convert.fields import View
from agenticrun_workers.convert.notes import Notes

Spec = dict[str, Any]

TRAINERS = {"fsdp2_train": "fsdp2", "megatron_train": "megatron", "deepspeed_train": "deepspeed"}
ENGINES = {"hf_infer": "transformers", "sglang": "sglang", "vllm": "vllm"}

KEPT: Mapping[str, frozenset[str]] = {
    "fsdp2": frozenset({"reshard_after_forward", "offload_policy"}),
    "megatron": frozenset(
        {
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "sequence_parallel",
            "recompute_granularity",
            "recompute_method",
            "recompute_num_layers",
            "recompute_modules",
            "distribute_saved_activations",
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
            "use_distributed_optimizer",
            "overlap_grad_reduce",
            "bucket_size",
        }
    ),
    "deepspeed": frozenset({"zero_optimization"}),
}
"""Options of ROLL's trainers that ours has under the same name."""
ZERO_KEPT = frozenset(
    {
        "stage",
        "overlap_comm",
        "contiguous_gradients",
        "reduce_scatter",
        "reduce_bucket_size",
        "allgather_partitions",
        "allgather_bucket_size",
        "sub_group_size",
        "offload_optimizer",
        "offload_param",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
    }
)
"""Of zero_optimization; ROLL's `auto` is DeepSpeed's default."""
NOT_OFFERED = {
    "virtual_pipeline_model_parallel_size": "no interleaved pipeline stages yet",
    "expert_model_parallel_size": "no mixture-of-experts models yet",
    "expert_tensor_parallel_size": "no mixture-of-experts models yet",
    "optimizer_cpu_offload": "no offloading of Megatron's optimizer yet",
}
DECIDED = {
    "load_format": "weights come from the trainer",
    "sleep_level": "a Colocated run's engines sleep as deep as they can",
    "dtype": "spec.model.dtype",
    "seed": "spec.pipeline.seed",
    "max_model_len": "spec.pipeline.sequenceLength",
    "context_length": "spec.pipeline.sequenceLength",
    "trust_remote_code": "spec.model.trustRemoteCode",
    "data_parallel_size": "spec.roles.inference.replicas: one engine each",
    "dp_size": "spec.roles.inference.replicas: one engine each",
}
"""Options of engines, and what decides them here."""


def trainer(top: View) -> str:
    """The strategy that trains the policy."""
    return TRAINERS.get(
        top.section("actor_train").section("strategy_args")["strategy_name"], "fsdp2"
    )


def engine(top: View) -> str:
    """The strategy that samples."""
    return ENGINES.get(
        top.section("actor_infer").section("strategy_args")["strategy_name"], "transformers"
    )


def train_strategy(top: View, notes: Notes) -> Spec:
    """`actorTrain.strategy`."""
    name, role = trainer(top), top.section("actor_train")
    path = "actor_train.strategy_args.strategy_config"
    config: Spec = {}
    for key, value in role.section("strategy_args").section("strategy_config").given.items():
        if key in NOT_OFFERED and value is not False and not _asks_for_nothing(value):
            notes.cannot(f"{path}.{key}", value, NOT_OFFERED[key])
        elif key not in KEPT[name]:
            notes.dropped(
                f"{path}.{key}",
                value,
                f"only another backend reads it, or nothing: {name} does not need it",
            )
        elif _asks_for_nothing(value):
            notes.dropped(f"{path}.{key}", value, "asks for nothing")
        else:
            config[key] = _zero(value) if key == "zero_optimization" else value
            notes.mapped(f"{path}.{key}", value, f"spec.pipeline.actorTrain.strategy.config.{key}")
    arguments = role.section("model_args")
    if name == "fsdp2" and arguments["ulysses_size"] > 1:
        config["ulysses_sequence_parallel_size"] = arguments["ulysses_size"]
    if name != "megatron" and not arguments["disable_gradient_checkpointing"]:
        config["gradient_checkpointing"] = True
    if name == "megatron":
        _complete(config, path, notes)
    return {"name": name, "config": config or None}


def _asks_for_nothing(value: Any) -> bool:
    """Not set, or parallelism of one."""
    return value is None or (type(value) is int and value == 1)


def _complete(config: Spec, path: str, notes: Notes) -> None:
    """What ROLL's own layer above Megatron fills in, and what Megatron refuses."""
    if config.get("recompute_granularity") == "full":
        config.setdefault("recompute_method", "uniform")
        config.setdefault("recompute_num_layers", 1)
    if config.get("sequence_parallel") and config.get("tensor_model_parallel_size", 1) == 1:
        del config["sequence_parallel"]
        notes.dropped(f"{path}.sequence_parallel", True, "only with tensor parallelism")


def _zero(section: Any) -> Any:
    if not isinstance(section, Mapping):
        return section
    return {key: value for key, value in section.items() if key in ZERO_KEPT and value != "auto"}


def infer_strategy(top: View, notes: Notes) -> Spec:
    """`actorInfer.strategy`."""
    name, role = engine(top), top.section("actor_infer")
    path = "actor_infer.strategy_args.strategy_config"
    config: Spec = {}
    for key, value in role.section("strategy_args").section("strategy_config").given.items():
        if name == "transformers":
            notes.dropped(
                f"{path}.{key}",
                value,
                "only the engines that are servers of their own have options",
            )
        elif key in DECIDED:
            notes.dropped(f"{path}.{key}", value, f"decided elsewhere: {DECIDED[key]}")
        elif value is None or (key.endswith("parallel_size") and _asks_for_nothing(value)):
            notes.dropped(f"{path}.{key}", value, "asks for nothing")
        else:
            config[key] = value
            notes.mapped(f"{path}.{key}", value, f"spec.pipeline.actorInfer.strategy.config.{key}")
    gpus, told = role["num_gpus_per_worker"], "actor_infer.num_gpus_per_worker"
    if gpus > 1 and name == "transformers":
        notes.cannot(
            told,
            gpus,
            "the transformers engine has one GPU: sglang and vllm spread a model over several",
        )
    elif gpus > 1 and "tensor_parallel_size" not in config:
        config["tensor_parallel_size"] = gpus // config.get("pipeline_parallel_size", 1)
    return {"name": name, "config": config or None}


def lora(top: View, notes: Notes) -> Spec | None:
    """`actorTrain.lora`: ROLL trains adapters exactly when lora_target is given."""
    arguments = top.section("actor_train").section("model_args")
    target = arguments["lora_target"]
    if not target:
        return None
    path = "actor_train.model_args"
    if arguments["lora_dropout"]:
        notes.cannot(
            f"{path}.lora_dropout",
            arguments["lora_dropout"],
            "no dropout of adapters: log-probs would not be the policy's",
        )
    if trainer(top) == "megatron":
        notes.cannot(
            f"{path}.lora_target",
            target,
            "megatron trains all parameters: choose fsdp2 or deepspeed for adapters",
        )
        return None
    names = (
        target if isinstance(target, list) else [name.strip() for name in str(target).split(",")]
    )
    rank = arguments["lora_rank"]
    return {
        "rank": rank,
        "alpha": float(arguments["lora_alpha"] or 2 * rank),
        "targetModules": None if names in (["all-linear"], ["all"]) else names,
    }
