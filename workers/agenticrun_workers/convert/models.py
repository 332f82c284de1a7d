"""`spec.model` and `spec.pipeline.{actorTrain,actorInfer,critic}`: models, optimizers, sampling."""

from __future__ import annotations

from typing import Any

from agenticrun_workers.convert.algorithm import sequence_length
from agenticrun_workers.convert.environments import is_step_wise
from agenticrun_workers.convert.fields import View
from agenticrun_workers.convert.notes import Notes
from agenticrun_workers.convert.placement import devices
from agenticrun_workers.convert.role_fields import PARALLEL_SIZES, SCHEDULES
from agenticrun_workers.convert.strategies import infer_strategy, lora, train_strategy

Spec = dict[str, Any]

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
MAX_TOKENS_PER_MICRO_BATCH = 16_777_216


def model(top: View, notes: Notes) -> Spec:
    """`spec.model`."""
    arguments = top.section("actor_train").section("model_args")
    path = top["pretrain"] or arguments["model_name_or_path"]
    if path is None:
        notes.cannot("pretrain", None, "names no model: set spec.model.path")
    return {"path": path, "dtype": DTYPES.get(arguments["dtype"], "bfloat16")}


def actor_train(top: View, notes: Notes) -> Spec:
    """`actorTrain`, with ROLL's optimizer batches counted in trajectories."""
    mini_batch = _mini_batch(top, notes)
    return {
        "strategy": train_strategy(top, notes),
        "training": {**_training(top, "actor_train", mini_batch), "miniBatchSize": mini_batch},
        "lora": lora(top, notes),
    }


def critic(top: View) -> Spec | None:
    """`critic`, of gae."""
    if top["adv_estimator"] != "gae":
        return None
    path = (
        top["reward_pretrain"] or top.section("critic").section("model_args")["model_name_or_path"]
    )
    return {
        "path": None if path == top["pretrain"] else path,
        "training": _training(top, "critic", _mini_batch(top, Notes())),
        "valueClip": top["value_clip"],
    }


def _training(top: View, role: str, mini_batch: int | None) -> Spec:
    worker, given = top.section(role), top.section(role).section("training_args")
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
    """Trajectories of a step."""
    envs = top.section("train_env_manager")
    given = int(top["rollout_batch_size"])
    return given if given > 0 else int(envs["num_env_groups"] * envs["group_size"])


def _mini_batch(top: View, notes: Notes) -> int | None:
    """Trajectories of an optimizer step: per-device batch x accumulation x ranks, rounded to whole groups that divide the batch."""
    given = top.section("actor_train").section("training_args")
    per_rank = given["per_device_train_batch_size"] * given["gradient_accumulation_steps"]
    wanted, batch = per_rank * _data_parallel(top), batch_size(top)
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
    """ROLL's data-parallel ranks."""
    worker = top.section("actor_train")
    ranks = int(len(devices(top, "actor_train")) or worker["world_size"] or 1)
    backend = worker.section("strategy_args").section("strategy_config")
    model_parallel = int(worker.section("model_args")["ulysses_size"])
    for key in PARALLEL_SIZES:
        model_parallel *= int(backend[key])
    return max(1, ranks // model_parallel)


def actor_infer(top: View, *, corrects: bool, notes: Notes) -> Spec:
    """`actorInfer`: ROLL samples training and validation alike."""
    given = top.section("actor_infer").section("generating_args")
    temperature, top_p, top_k = given["temperature"], given["top_p"], max(0, given["top_k"])
    path = "actor_infer.generating_args"
    validation = {
        "temperature": temperature if given["do_sample"] else 0.0,
        "topP": top_p,
        "topK": top_k,
    }
    notes.changed(
        f"{path} (validation)",
        temperature,
        "ROLL validates with training's sampling: validationGenerating says so; 0 is greedy (C20)",
    )
    if temperature == 0:
        notes.cannot(
            f"{path}.temperature", 0, "greedy training has nothing to learn from: temperature 1"
        )
        temperature = 1.0
    sampling: Spec = {"temperature": temperature}
    if top_p < 1 or top_k > 0:
        cut = f"top_p {top_p}, top_k {top_k}"
        if corrects:
            notes.changed(
                path,
                cut,
                "train_infer_correction needs the full distribution: top_p and top_k are left out (C20)",
            )
        else:
            notes.changed(
                path,
                cut,
                "allowTruncatedSampling: true; log-probs are recorded at temperature 1 over the full vocabulary (C20)",
            )
            sampling |= {"topP": top_p, "topK": top_k, "allowTruncatedSampling": True}
    return {
        "strategy": infer_strategy(top, notes),
        "generating": sampling,
        "validationGenerating": validation,
    }
