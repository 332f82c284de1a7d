"""`spec.{model,placement,roles}` and `spec.pipeline.{actorTrain,actorInfer,critic}`.

The options of ROLL's backends keep their names. Their report lines are written here, because the
fate of an option depends on its backend.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from agenticrun_workers.convert.algorithm import sequence_length
from agenticrun_workers.convert.environments import is_step_wise
from agenticrun_workers.convert.fields import ConvertError, Notes, View, is_secret
from agenticrun_workers.convert.resources import Sizes, parameters, sizes
from agenticrun_workers.convert.role_fields import (
    NOT_OFFERED,
    PARALLEL_SIZES,
    SCHEDULES,
    engine,
    model_path,
    sampler,
    trainer,
    validation_sampler,
)

Spec = dict[str, Any]

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
MAX_TOKENS_PER_MICRO_BATCH = 16_777_216


_QUANTIZED = re.compile(r"DeepSeek-(V3|R1$)|gpt-oss|-(FP8|AWQ|GPTQ)\b", re.IGNORECASE)
"""Models of which the hub has quantised weights."""
_SEVERAL = re.compile(r"-(VL|Omni)\b|Vision|LLaVA|Qwen3\.5", re.IGNORECASE)
_SWITCHED = re.compile(r"\bQwen3-[\d.]+B(-A\d+B)?$", re.IGNORECASE)
"""Models whose template reads `enable_thinking`. ROLL's prompts always have it false."""


def model(top: View, notes: Notes) -> Spec:
    """Return `spec.model`."""
    path, field = model_path(top), "pretrain"
    if path is None:
        notes.undecided(
            field, None, "names no model: write it into spec.model.path", covers="spec.model"
        )
    elif _QUANTIZED.search(path):
        notes.undecided(
            field,
            path,
            "its weights are quantised, which is not trained: write a copy in bfloat16 into "
            "spec.model.path, or another model, such as Qwen/Qwen3-30B-A3B",
        )
    elif _SEVERAL.search(path):
        notes.undecided(
            field,
            path,
            "a model of several modalities, which is not offered yet: write a text model into "
            "spec.model.path, such as Qwen/Qwen3-4B",
        )
    # Megatron has kernels of its own, which the setting does not reach.
    given = top.section("actor_train").section("model_args")["attn_implementation"]
    return {
        "path": path,
        "chatTemplateArgs": (
            {"enable_thinking": False} if path and _SWITCHED.search(path) else None
        ),
        "dtype": _dtype(top),
        "attnImplementation": (
            "eager" if given == "eager" and trainer(top) != "megatron" else None
        ),
    }


def _dtype(top: View) -> str:
    return DTYPES.get(top.section("actor_train").section("model_args")["dtype"], "bfloat16")


def actor_train(top: View, notes: Notes) -> Spec:
    """Return `actorTrain`, with ROLL's optimizer batches counted in trajectories."""
    mini_batch = _mini_batch(top, notes)
    return {
        "strategy": train_strategy(top, notes),
        "training": {**_training(top, "actor_train", mini_batch), "miniBatchSize": mini_batch},
        "lora": lora(top, notes),
    }


def critic(top: View) -> Spec | None:
    """Return `critic`, or None unless the estimator is gae."""
    if top["adv_estimator"] != "gae":
        return None
    path = (
        top["reward_pretrain"] or top.section("critic").section("model_args")["model_name_or_path"]
    )
    return {
        # A critic from the policy's own weights is the default.
        "path": None if path == top["pretrain"] else path,
        "training": _training(top, "critic", _mini_batch(top, Notes())),
        "valueClip": top["value_clip"],
    }


def _training(top: View, role: str, mini_batch: int | None) -> Spec:
    worker, given = top.section(role), top.section(role).section("training_args")
    # ROLL counts optimizer steps here, of which a step may have several.
    steps = (
        top["max_steps"] * (batch_size(top) // mini_batch if mini_batch else 1) * top["ppo_epochs"]
    )
    tokens = given["per_device_train_batch_size"] * sequence_length(top)
    if worker["use_dynamic_batching_in_train"] and worker["max_tokens_per_microbatch_in_train"]:
        tokens = worker["max_tokens_per_microbatch_in_train"]
    return {
        "learningRate": given["learning_rate"],
        "lrSchedulerType": SCHEDULES.get(given["lr_scheduler_type"], "linear"),
        "warmupSteps": given["warmup_steps"] or round(given["warmup_ratio"] * steps),
        "weightDecay": given["weight_decay"],
        "adamBeta1": given["adam_beta1"],
        "adamBeta2": given["adam_beta2"],
        "maxGradNorm": top["max_grad_norm"],
        "maxTokensPerMicroBatch": min(tokens, MAX_TOKENS_PER_MICRO_BATCH),
        "sequencePacking": worker["use_sequence_packing"],
    }


def batch_size(top: View) -> int:
    """Return the number of trajectories of a step."""
    envs = top.section("train_env_manager")
    given = int(top["rollout_batch_size"])
    # A size of 0 or less means all environments once.
    return given if given > 0 else int(envs["num_env_groups"] * envs["group_size"])


def _mini_batch(top: View, notes: Notes) -> int | None:
    """Return the trajectories of an optimizer step, or None for the whole batch.

    It is per-device batch x accumulation x ranks, rounded to whole groups that divide the batch.
    """
    given = top.section("actor_train").section("training_args")
    per_rank = given["per_device_train_batch_size"] * given["gradient_accumulation_steps"]
    wanted, batch = per_rank * _data_parallel(top), batch_size(top)
    # ROLL's batch counts turns there, whose number is not known in advance.
    if is_step_wise(top):
        notes.changed(
            "actor_train.training_args",
            f"{wanted} turns",
            "an optimizer step takes whole trajectories: the whole batch (miniBatchSize)",
        )
        return None
    if wanted >= batch:
        return None
    group = top.section("train_env_manager")["group_size"]
    # Only divisors, so that all optimizer steps of a batch have the same size.
    fitting = [size for size in range(group, batch + 1, group) if batch % size == 0]
    nearest = min(fitting or [batch], key=lambda size: (abs(size - wanted), size))
    if nearest != wanted:
        notes.changed(
            "actor_train.training_args",
            f"{wanted} trajectories",
            f"miniBatchSize {nearest}: whole groups that divide the batch",
        )
    return nearest if nearest < batch else None


def _data_parallel(top: View) -> int:
    """Return the number of ROLL's data-parallel ranks."""
    worker = top.section("actor_train")
    ranks = int(len(devices(top, "actor_train")) or worker["world_size"] or 1)
    backend = worker.section("strategy_args").section("strategy_config")
    # Other backends of ROLL only split sequences.
    if trainer(top) != "megatron":
        return max(1, ranks // int(worker.section("model_args")["ulysses_size"]))
    model_parallel = int(worker.section("model_args")["ulysses_size"])
    for key in PARALLEL_SIZES:
        model_parallel *= int(backend[key])
    return max(1, ranks // model_parallel)


def actor_infer(top: View, *, corrects: bool, notes: Notes) -> Spec:
    """Return `actorInfer`. With generating_args of actor_infer ROLL uses them in validation too."""
    role, validating = sampler(top), validation_sampler(top)
    given = top.section(role).section("generating_args")
    temperature, top_p, top_k = given["temperature"], given["top_p"], max(0, given["top_k"])
    path = f"{role}.generating_args"
    validation = _validation(top.section(validating).section("generating_args"))
    if validating == role:
        notes.adapted(
            f"{path} (validation)",
            validation["temperature"],
            "validationGenerating is the sampling of training, as in ROLL; 0 is greedy (C20)",
        )
    if temperature == 0:
        notes.undecided(
            f"{path}.temperature",
            0,
            "greedy training has nothing to learn from: 1 is written",
        )
        temperature = 1.0
    sampling: Spec = {"temperature": temperature}
    if top_p < 1 or top_k > 0:
        cut = f"top_p {top_p}, top_k {top_k}"
        if corrects:
            notes.changed(
                path,
                cut,
                "train_infer_correction needs the full distribution: "
                "top_p and top_k are left out (C20)",
            )
        else:
            notes.changed(
                path,
                cut,
                "allowTruncatedSampling: true; log-probs are recorded at temperature 1 "
                "over the full vocabulary (C20)",
            )
            sampling |= {"topP": top_p, "topK": top_k, "allowTruncatedSampling": True}
    return {
        "strategy": infer_strategy(top, notes),
        "generating": sampling,
        "validationGenerating": validation,
    }


def _validation(given: View) -> Spec:
    return {
        "temperature": given["temperature"] if given["do_sample"] else 0.0,
        "topP": given["top_p"],
        "topK": max(0, given["top_k"]),
    }


KEPT: Mapping[str, frozenset[str]] = {
    "fsdp2": frozenset({"reshard_after_forward", "offload_policy", "fsdp_size"}),
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
"""Options of ROLL's trainers that ours have under the same name."""
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
"""Options of zero_optimization. ROLL's `auto` is DeepSpeed's default."""
DECIDED = {
    "load_format": "weights come from the trainer",
    "sleep_level": "engines of a Colocated run release as much memory as they can",
    "dtype": "spec.model.dtype",
    "seed": "spec.pipeline.seed",
    "max_model_len": "spec.pipeline.sequenceLength",
    "context_length": "spec.pipeline.sequenceLength",
    "trust_remote_code": "spec.model.trustRemoteCode",
    "data_parallel_size": "spec.roles.inference.replicas: one engine each",
    "dp_size": "spec.roles.inference.replicas: one engine each",
}
"""Options of engines -> the setting that decides them here."""


def train_strategy(top: View, notes: Notes) -> Spec:
    """Return `actorTrain.strategy`."""
    name, role = trainer(top), top.section("actor_train")
    path = "actor_train.strategy_args.strategy_config"
    config: Spec = {}
    for key, value in role.section("strategy_args").section("strategy_config").given.items():
        if key in NOT_OFFERED and value is not False and not _asks_for_nothing(value):
            notes.undecided(f"{path}.{key}", value, NOT_OFFERED[key])
        elif key not in KEPT[name]:
            notes.dropped(
                f"{path}.{key}",
                value,
                f"only another backend reads it, or nothing: {name} does not need it",
            )
        elif _asks_for_nothing(value):
            notes.dropped(f"{path}.{key}", value, "no effect at this value")
        else:
            if key == "zero_optimization" and isinstance(value, Mapping):
                kept = {field: each for field, each in value.items() if field in ZERO_KEPT}
                config[key] = {field: each for field, each in kept.items() if each != "auto"}
            else:
                config[key] = value
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
    """Return True if the option is not set, or is a parallel size of one."""
    return value is None or (type(value) is int and value == 1)


def _complete(config: Spec, path: str, notes: Notes) -> None:
    """Add the defaults of ROLL's layer above Megatron, and drop what Megatron rejects."""
    if config.get("recompute_granularity") == "full":
        config.setdefault("recompute_method", "uniform")
        config.setdefault("recompute_num_layers", 1)
    if config.get("sequence_parallel") and config.get("tensor_model_parallel_size", 1) == 1:
        del config["sequence_parallel"]
        notes.dropped(f"{path}.sequence_parallel", True, "only with tensor parallelism")


def infer_strategy(top: View, notes: Notes) -> Spec:
    """Return `actorInfer.strategy`."""
    name, role = engine(top), top.section("actor_infer")
    path = "actor_infer.strategy_args.strategy_config"
    config: Spec = {}
    for key, value in role.section("strategy_args").section("strategy_config").given.items():
        if name == "transformers":
            notes.dropped(
                f"{path}.{key}",
                value,
                "only engines that run as a server have options",
            )
        elif key in DECIDED:
            notes.dropped(f"{path}.{key}", value, f"decided elsewhere: {DECIDED[key]}")
        elif value is None or (key.endswith("parallel_size") and _asks_for_nothing(value)):
            notes.dropped(f"{path}.{key}", value, "no effect at this value")
        else:
            config[key] = value
            notes.mapped(f"{path}.{key}", value, f"spec.pipeline.actorInfer.strategy.config.{key}")
    gpus, path_of_gpus = role["num_gpus_per_worker"], "actor_infer.num_gpus_per_worker"
    if gpus > 1 and name == "transformers":
        notes.undecided(
            path_of_gpus,
            gpus,
            "the transformers engine has one GPU: set actorInfer.strategy.name to sglang or vllm",
        )
    elif gpus > 1 and "tensor_parallel_size" not in config:
        config["tensor_parallel_size"] = gpus // config.get("pipeline_parallel_size", 1)
    return {"name": name, "config": config or None}


def lora(top: View, notes: Notes) -> Spec | None:
    """Return `actorTrain.lora`. ROLL trains adapters exactly when lora_target is set."""
    arguments = top.section("actor_train").section("model_args")
    target = arguments["lora_target"]
    if not target:
        return None
    path = "actor_train.model_args"
    if arguments["lora_dropout"]:
        notes.undecided(
            f"{path}.lora_dropout",
            arguments["lora_dropout"],
            "dropout of adapters: log-probs would not be those of the policy. Set it to 0",
        )
    sharded = top.section("actor_train").section("strategy_args")["strategy_name"]
    if sharded == "megatron_train":
        notes.adapted(
            f"{path}.lora_target",
            target,
            "actorTrain.lora; fsdp2 trains adapters, because megatron does not here",
        )
    names = (
        target if isinstance(target, list) else [name.strip() for name in str(target).split(",")]
    )
    rank = arguments["lora_rank"]
    return {
        "rank": rank,
        "alpha": float(arguments["lora_alpha"] or 2 * rank),
        "targetModules": None if names in (["all-linear"], ["all"]) else names,
    }


MAX_GPUS_PER_POD = 16
MAX_VARIABLES = 32
_ROLE_OF = {
    "trainer": "actor_train",
    "inference": "actor_infer",
    "env": "train_env_manager",
    "reference": "reference",
    "critic": "critic",
}


def roles(top: View, env_pods: int, notes: Notes) -> Spec:
    """Return the pods of each role.

    Reference and critic get their own pods if ROLL gives them GPUs that actor_train does not use.
    """
    trainer, inference = devices(top, "actor_train"), devices(top, "actor_infer")
    together = placement(top) == "Colocated"
    if set(trainer) & set(inference) and not together:
        notes.changed(
            "actor_infer.device_mapping",
            list(inference),
            "shares some GPUs with actor_train, or all of them in an asynchronous run "
            "(async_generation_ratio). A Colocated run shares all GPUs and is synchronous: "
            f"here {len(trainer)} + {len(inference)} GPUs",
        )
    per_pod = min(int(top["num_gpus_per_node"]), MAX_GPUS_PER_POD)
    pods: dict[str, Spec] = {
        "driver": {},
        "trainer": _pods(len(trainer), top.section("actor_train")["world_size"], per_pod),
        "inference": _pods(len(inference), top.section("actor_infer")["world_size"], per_pod),
        "env": {"replicas": env_pods},
    }
    for role, used in (
        ("reference", uses_reference(top)),
        ("critic", top["adv_estimator"] == "gae"),
    ):
        gpus = devices(top, role)
        if used and gpus and not set(gpus) & set(trainer):
            pods[role] = _pods(len(gpus), None, per_pod)
    if together:
        del pods["inference"]
    everywhere = _variables(top["system_envs"], "system_envs", notes)
    _size(pods, top, together=together, notes=notes)
    for role, pod in pods.items():
        section = _ROLE_OF.get(role)
        own = (
            _variables(top.section(section)["system_envs"], f"{section}.system_envs", notes)
            if section
            else {}
        )
        variables = [
            {"name": name, "value": value} for name, value in {**everywhere, **own}.items()
        ]
        if len(variables) > MAX_VARIABLES:
            notes.undecided(
                "system_envs",
                len(variables),
                f"at most {MAX_VARIABLES} variables of a role: the others are left out. Put them "
                "into a ConfigMap, and name it in spec.roles.*.envFrom",
            )
        if variables:
            pod["env"] = variables[:MAX_VARIABLES]
    return {role: pod for role, pod in pods.items() if pod}


def _size(pods: dict[str, Spec], top: View, *, together: bool, notes: Notes) -> None:
    """Write CPU, memory and shared memory into the pods that hold the model."""
    size = run_sizes(top, together=together)
    if size is None and model_path(top) is None:
        return  # another line says so
    if size is None:
        notes.undecided(
            "(resources)",
            model_path(top),
            "neither name nor folder tells the size of the model: write memory and shmSize of "
            "spec.roles.trainer and inference as docs/gpus.md computes them (shmSize: 4 bytes for "
            "each parameter in bfloat16)",
        )
        return
    for role, pod in pods.items():
        gpus, replicas = pod.get("gpus", 0), pod.get("replicas", 1)
        if role in ("trainer", "reference", "critic"):
            pod.update(size.trainer(gpus, replicas))
        elif role == "inference":
            pod.update(size.inference(gpus))
    notes.adapted(
        "(resources)",
        f"{size.count / 1e9:g} billion parameters",
        "cpus, memory and shmSize of spec.roles.* are sized for it (docs/gpus.md); ROLL takes "
        "whole nodes",
    )


def run_sizes(top: View, *, together: bool) -> Sizes | None:
    """Return the sizes of the run's pods, or None if the size of the model is unknown."""
    count = parameters(model_path(top))
    if count is None:
        return None
    strategy = train_strategy(top, Notes())
    placed = "Colocated" if together else None
    return sizes({"strategy": strategy, "placement": placed}, count, _dtype(top))


def placement(top: View) -> str | None:
    """Return `spec.placement`, or None for the default.

    A synchronous run with the engines on exactly the GPUs of the trainers is Colocated.
    """
    trainer = set(devices(top, "actor_train"))
    synchronous = (
        top["async_generation_ratio"] == 0
        and top.section("actor_train")["model_update_frequency"] == 1
    )
    return (
        "Colocated"
        if synchronous and trainer and trainer == set(devices(top, "actor_infer"))
        else None
    )


def uses_reference(top: View) -> bool:
    """Return True if a KL penalty needs the reference policy."""
    return bool(
        (top["add_token_level_kl"] and top["init_kl_coef"] > 0)
        or (top["use_kl_loss"] and top["kl_loss_coef"] > 0)
    )


def devices(top: View, role: str) -> list[int]:
    """Return the GPU numbers of a role. ROLL passes the text to `eval`; here it is only parsed.

    Raises:
        ConvertError: device_mapping is not a list of numbers.
    """
    given = top.section(role)["device_mapping"]
    if given is None or given == "":
        return []
    try:
        return (
            _read(ast.parse(given, mode="eval").body)
            if isinstance(given, str)
            else [int(device) for device in given]
        )
    except (SyntaxError, ValueError, TypeError) as error:
        raise ConvertError(
            f"{role}.device_mapping: {given!r} is not a list of GPU numbers "
            f"such as list(range(0, 8)) ({error})"
        ) from error


def _read(node: ast.expr) -> list[int]:
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _read(left) + _read(right)
        case ast.Call(func=ast.Name(id="list"), args=[inner]):
            return _read(inner)
        case ast.Call(func=ast.Name(id="range"), args=bounds):
            return list(range(*(int(ast.literal_eval(bound)) for bound in bounds)))
        case ast.List() | ast.Tuple():
            return [int(device) for device in ast.literal_eval(node)]
    raise ValueError(f"{ast.unparse(node)} is neither a list nor a range")


def _pods(gpus: int, world_size: int | None, per_pod: int) -> Spec:
    """Return the smallest number of pods of equal size."""
    if not gpus:
        return {"replicas": int(world_size)} if world_size else {}
    size = max(size for size in range(1, min(per_pod, gpus) + 1) if gpus % size == 0)
    return {"gpus": size, "replicas": gpus // size}


def _variables(given: Mapping[str, Any] | None, path: str, notes: Notes) -> dict[str, str]:
    variables = {}
    for name, value in (given or {}).items():
        if is_secret(name):
            notes.adapted(
                f"{path}.{name}",
                "***",
                "a secret: use spec.roles.*.envFrom, never a YAML",
            )
        else:
            variables[str(name)] = str(value)
    return variables
