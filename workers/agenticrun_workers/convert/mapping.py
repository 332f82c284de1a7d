"""Table of all fields of ROLL's AgenticConfig: ROLL's default and our counterpart of each.

`role_fields` holds the fields of the roles. `converter`, `algorithm`, `environments` and `models`
compute the values of the fields that are mapped or changed here.
"""

from __future__ import annotations

from agenticrun_workers.convert.fields import (
    Field,
    Fields,
    Section,
    adapted,
    cannot,
    changed,
    dead,
    dropped,
    mapped,
    one_of,
)
from agenticrun_workers.convert.role_fields import (
    NO_DISTILLATION,
    VALIDATION_GENERATING_ARGS,
    only,
    role,
    with_clip_range,
    without_clip,
    without_clip_range,
    without_distillation,
    without_kl_loss,
    without_normalization,
    without_target_kl,
    without_token_kl,
)

ENV_MANAGER: Fields = {
    **role("env").fields,
    "llm_proxy": Section(
        {
            "proxy_type": one_of(
                {"policy": "the policy plays, as always"},
                "another model plays: here only the policy does; remove llm_proxy",
                "policy",
            ),
            "proxy_config": cannot("settings of another model: remove llm_proxy", None, {}),
        }
    ),
    "num_env_groups": mapped("trainEnvs.groups, valEnvs.groups", 128, kind=int),
    "group_size": mapped("trainEnvs.groupSize, valEnvs.groupSize", 1, kind=int),
    "group_size_redundancy": mapped("trainEnvs.groupSizeRedundancy", 0, kind=int),
    "tags": mapped("trainEnvs.tags, valEnvs.tags", ["SimpleSokoban"]),
    "num_groups_partition": mapped("trainEnvs.partition, valEnvs.partition", kind=list),
    "max_traj_per_env": dropped("rolloutBatchSize and valBatchSize set the number of episodes", -1),
    "format_penalty": dead(
        "never had an effect in ROLL (C18): set spec.pipeline.envs[].formatPenalty", 0
    ),
    "worker_cls": one_of(
        {"roll.pipeline.agentic.environment_worker.EnvironmentWorker": "env workers"},
        "a worker class of your own: move what it does into an environment or an agent "
        "(docs/agents.md)",
    ),
    "max_env_num_per_worker": mapped("trainEnvs.maxEnvsPerWorker and spec.roles.env.replicas", 0),
    "group_filter_cls": one_of(
        {
            "roll.pipeline.agentic.agentic_pipeline.GroupFilter": (
                "keeps all groups: no trainEnvs.groupFilter"
            )
        },
        "a filter of your own: write it as module:function of a list of rewards, in "
        "spec.pipeline.trainEnvs.groupFilter.type",
    ),
}

VAL_ENV_MANAGER: Fields = {
    **ENV_MANAGER,
    "group_size_redundancy": adapted("validation waits for every trajectory", 0),
    "max_env_num_per_worker": adapted("validation plays on the training's env pods", 0),
    "generating_args": Section(VALIDATION_GENERATING_ARGS),
    "group_filter_cls": dropped("validation keeps every group"),
    "system_envs": adapted("validation plays on the training's env pods"),
}

CUSTOM_ENV: Fields = {
    "env_type": mapped("spec.pipeline.envs[].type"),
    "max_steps": mapped("spec.pipeline.envs[].maxSteps", 10),
    "max_tokens_per_step": mapped(
        "spec.pipeline.envs[].maxTokensPerStep (the smaller of it and max_new_tokens)", 128
    ),
    "env_manager_cls": mapped(
        "spec.pipeline.envs[].agent.type "
        "(trajectory managers -> multi_turn, step managers -> step_wise)"
    ),
    "agent_runner_cls": adapted("the agent drives the environment without a runner"),
    "use_thread_lock": dropped(
        "environments have their own random generators: there is nothing to lock (C10)", False
    ),
    "max_env_step_concurrent": adapted(
        "no limit for the steps of one tag: a service that needs one must be asked through one "
        "(asyncio.Semaphore in the environment)",
        0,
    ),
    "agent_system_template": mapped("spec.pipeline.envs[].agent.config.systemTemplate", kind=str),
    "agent_template": mapped(
        "spec.pipeline.envs[].agent.config.agentTemplate, placeholders renamed", kind=str
    ),
    "history_length": mapped("spec.pipeline.envs[].agent.config.historyLength (step managers)", 5),
    "tool_wrapper": Section(
        {},
        rest=adapted("the environment calls the tools: see the environment's own line"),
    ),
    "pre_step_template": mapped(
        "spec.pipeline.envs[].agent.config.agentTemplate, before the observation", kind=str
    ),
    "next_step_template": mapped(
        "spec.pipeline.envs[].agent.config.agentTemplate, after the observation", kind=str
    ),
    "env_config": Section({}, reported_elsewhere=True),
}


_A = "spec.pipeline.algorithm"
_OTHER = "read by ROLL's other pipelines, not by the agentic one"
_TOKEN_RETURNS = ("gae", "reinforce", "grpo", "agentic_reinforce")

REWARD_NORMALIZATION: Fields = {
    "grouping": one_of(
        {
            "batch": "spec.pipeline.rewardNormalization.grouping: batch",
            "traj_group_id": "rewardNormalization.grouping: group (or the estimator's own group)",
            "tags": "spec.pipeline.rewardNormalization.grouping: tag",
            "state_group_id": "spec.pipeline.rewardNormalization.grouping: state",
        },
        "no trajectory of ROLL has such a key: batch is written",
        "batch",
        without_normalization,
    ),
    "method": mapped(
        "normMeanType and normStdType, if they are not set "
        "(asym_clip is the same as mean_std in ROLL too)",
        "identity",
    ),
    "norm_mean_type": mapped("rewardNormalization.normMeanType, or algorithm.normMeanType (gigpo)"),
    "norm_std_type": mapped(
        "rewardNormalization.normStdType, or algorithm.normStdType (grpo, gigpo)"
    ),
    "global_scale_factor": dead(),
    "global_shift_value": dead(),
}

IS_WEIGHT: Fields = {
    "enabled": mapped("presence of spec.pipeline.trainInferCorrection.isWeight", False),
    "weight_type": mapped("trainInferCorrection.isWeight.level", "token"),
    "upper_bound": mapped("trainInferCorrection.isWeight.upperBound (null -> 1e6)", 1.2),
    "detach": cannot(
        "the weight is a constant of the loss here: remove detach: false, or write a loss of "
        "your own (docs/how-to-add.md)",
        True,
    ),
}
FILTERS: Fields = {
    "enabled": mapped("presence of the filter", False),
    "agg_type": mapped("trainInferCorrection.filters[].level", "token"),
    "ratio_enabled": mapped("presence of ratioLow and ratioHigh", True),
    "ratio_low": mapped("trainInferCorrection.filters[].ratioLow", 0.8),
    "ratio_high": mapped("trainInferCorrection.filters[].ratioHigh", 1.2),
    "diff_enabled": mapped("presence of diffLow and diffHigh", False),
    "diff_low": mapped("trainInferCorrection.filters[].diffLow", -0.2),
    "diff_high": mapped("trainInferCorrection.filters[].diffHigh", 0.2),
}

_OWN: dict[str, Field | Section] = {
    "pipeline_cls": one_of(
        {"roll.pipeline.agentic.agentic_pipeline.AgenticPipeline": "what AgenticRun is"},
        "another pipeline of ROLL: only the agentic one has a counterpart",
    ),
    "custom_envs": Section(CUSTOM_ENV, "by name"),
    "train_env_manager": Section(ENV_MANAGER),
    "val_env_manager": Section(VAL_ENV_MANAGER),
    "render_save_dir": dead("never had an effect in ROLL (C18): set spec.tracking.renderDir"),
    "reward": Section(
        {},
        reported_elsewhere=True,
    ),
    "reward_normalization": Section(REWARD_NORMALIZATION),
    "env_monitor": Section(
        {},
        rest=adapted(
            "ROLL logs hung environments; here a step may take envs[].stepTimeoutSeconds (60)"
        ),
    ),
    "dirty_data_mask": dead(default=False),
    "open_feedback_turn": dead(default=False),
    "use_token_reward": dead(default=False),
    "batch_adjust_mode": changed(
        "batches are filled with zero-weight samples: nothing is duplicated or thrown away (C17)",
        "copy",
    ),
    "episode_reward_weight": mapped(f"{_A}.episodeRewardWeight", 1.0, only("gigpo")),
    "step_reward_weight": mapped(f"{_A}.stepRewardWeight", 1.0, only("gigpo")),
    "step_reward_gamma": mapped(f"{_A}.stepRewardGamma", 0.95, only("gigpo", "step_reinforce")),
    "ratio_type": mapped(f"{_A}.ratioType", "token"),
    "exp_mode": dead(default="train"),
    "partial_gpu_mode": adapted(
        "trainers and engines share all GPUs (spec.placement: Colocated) or none", True
    ),
    "parse_tool_call_parameter_to_dict": adapted(
        "the agent or environment parses the calls of its tools", False
    ),
    "skip_mock_system_prompt": dropped(
        "the conversation's tokens are the chat template's own rendering (C5)", False
    ),
}

_ALGORITHM: dict[str, Field | Section] = {
    "adv_estimator": mapped(f"{_A}.name (grpo: see the line below)", "gae"),
    "gamma": mapped(f"{_A}.gamma", 1.0, only(*_TOKEN_RETURNS)),
    "lambd": mapped(f"{_A}.lambd", 0.95, only("gae")),
    "ppo_epochs": mapped(f"{_A}.ppoEpochs (the critic makes as many passes; one in ROLL)", 1),
    "pg_clip": mapped(f"{_A}.pgClipLow, pgClipHigh", 0.2, with_clip_range),
    "use_pg_clip_range": mapped(
        "whether pg_clip_low and pg_clip_high are read", False, without_clip
    ),
    "pg_clip_low": mapped(f"{_A}.pgClipLow", 0.2, without_clip_range),
    "pg_clip_high": mapped(f"{_A}.pgClipHigh", 0.2, without_clip_range),
    "dual_clip_loss": mapped(f"{_A}.dualClip: 1 + 2 pg_clip", False, without_clip),
    "value_clip": mapped("spec.pipeline.critic.valueClip", None, only("gae")),
    "kl_penalty": one_of(
        {
            "kl": f"{_A}.rewardKl.kind: k1",
            "abs": f"{_A}.rewardKl.kind: abs",
            "mse": f"{_A}.rewardKl.kind: k2",
            "k3": f"{_A}.rewardKl.kind: k3",
        },
        "needs whole distributions, and crashed in ROLL (C11): k1 is written",
        "kl",
        without_token_kl,
    ),
    "init_kl_coef": mapped(f"{_A}.rewardKl.coef", 0.2, without_token_kl),
    "target_kl": mapped(f"{_A}.rewardKl.targetKl", None, without_token_kl),
    "kl_horizon": mapped(f"{_A}.rewardKl.horizon", 10_000, without_target_kl),
    "add_token_level_kl": mapped(f"presence of {_A}.rewardKl", False),
    "use_kl_loss": mapped(f"presence of {_A}.lossKl (kind k3)", False),
    "kl_loss_coef": mapped(f"{_A}.lossKl.coef", 0.0, without_kl_loss),
    "entropy_loss_coef": mapped(f"{_A}.entropyLossCoef", 0.0),
    "reward_clip": changed(
        f"{_A}.rewardClip: before normalisation, where ROLL clips after it (C30)"
    ),
    "advantage_clip": mapped(f"{_A}.advantageClip"),
    "whiten_rewards": mapped(f"{_A}.whitenRewards", False, only(*_TOKEN_RETURNS)),
    "whiten_advantages": mapped(f"{_A}.whitenAdvantages", False),
    "loss_agg_mode": mapped(
        f"{_A}.lossAggMode (seq-mean-token-sum-norm: lossAggNorm = sequence_length)",
        "seq-mean-token-mean",
    ),
    "critic_warmup": mapped("spec.pipeline.criticWarmup", 0, only("gae")),
    "enable_reference": dropped("the reference exists exactly when a KL penalty needs it", False),
    "enable_old_logprobs_recompute": adapted(
        "old log-probs are recomputed exactly when something reads them "
        "(spec.pipeline.oldLogProbs: Recompute)",
        False,
    ),
    "force_disable_old_logprobs_recompute": adapted(
        "old log-probs are recomputed exactly when something reads them "
        "(spec.pipeline.oldLogProbs: Recompute)",
        False,
    ),
    "train_infer_correction": Section(
        {"is_weight": Section(IS_WEIGHT), "filters": Section(FILTERS, "in a list")}
    ),
    "is_pure_opd": cannot(NO_DISTILLATION, False),
    "use_opd": cannot(NO_DISTILLATION, False),
    "pure_opd_pipeline_type": cannot(NO_DISTILLATION, unread=without_distillation),
    **{
        key: Section({}, rest=cannot(NO_DISTILLATION, unread=without_distillation))
        for key in ("teacher", "student_train", "student_infer")
    },
    **{
        key: dead(f"{_OTHER}: use reward_normalization")
        for key in ("norm_mean_type", "norm_std_type")
    },
    **{key: dead() for key in ("l2", "use_reward_scaling", "use_reward_norm", "add_len_reward")},
}

_MODELS: dict[str, Field | Section] = {
    "pretrain": mapped("spec.model.path; thinking is off for Qwen3, as in ROLL"),
    "reward_pretrain": mapped("spec.pipeline.critic.path", None, only("gae")),
    "actor_train": role("actor_train"),
    "actor_infer": role("actor_infer"),
    "critic": role("critic"),
    "reference": role("reference"),
    "async_generation_ratio": mapped("spec.pipeline.staleness.max", 0),
    "max_grad_norm": mapped(
        "spec.pipeline.actorTrain.training.maxGradNorm (critic: spec.pipeline.critic.training)", 1.0
    ),
}

_SCHEDULE: dict[str, Field | Section] = {
    "exp_name": mapped("metadata.name"),
    "seed": mapped("spec.pipeline.seed", 42),
    "max_steps": mapped("spec.pipeline.maxSteps", 500),
    "save_steps": mapped("spec.pipeline.saveSteps", 50),
    "logging_steps": adapted(
        "spec.pipeline.loggingSteps: sample episodes; metrics are logged at every step", 1
    ),
    "eval_steps": mapped("spec.pipeline.evalSteps", 10),
    "max_ckpt_to_keep": mapped("spec.checkpoint.keep (0, all -> 1000)", 0),
    "rollout_batch_size": mapped("spec.pipeline.rolloutBatchSize", 128),
    "val_batch_size": mapped("spec.pipeline.valBatchSize", 128),
    "sequence_length": mapped("spec.pipeline.sequenceLength", kind=int),
    "resume_from_checkpoint": adapted(
        "spec.checkpoint.resume: Auto resumes from the newest complete checkpoint "
        "of the same run (C7)",
        False,
    ),
    "checkpoint_config": Section(
        {
            "type": one_of(
                {"file_system": "spec.checkpoint.uri, a folder"},
                "checkpoints go to a folder or to object storage: set spec.checkpoint.uri",
            ),
            "output_dir": mapped(
                "spec.checkpoint.uri (a relative one -> /checkpoints on a volume claim)", kind=str
            ),
            "async_upload": dropped("a checkpoint is complete when saving it returns", True),
        }
    ),
    "track_with": one_of(
        {
            "tensorboard": "spec.tracking.tensorboard",
            "wandb": "spec.tracking.wandb",
            "stdout": "spec.tracking.console",
        },
        "no such tracker here: tensorboard, wandb, or read metrics.jsonl",
        "tensorboard",
    ),
    "tracker_kwargs": Section(
        {
            "project": mapped("spec.tracking.wandb.project"),
            "entity": mapped("spec.tracking.wandb.entity"),
            "group": mapped("spec.tracking.wandb.group"),
            "tags": mapped("spec.tracking.wandb.tags"),
            "mode": adapted("spec.tracking.wandb.mode: offline, until a Secret has the key"),
            "api_key": adapted(
                "never in a YAML: WANDB_API_KEY of a Secret in spec.roles.driver.envFrom"
            ),
            "log_dir": dropped("curves are in the run's output folder"),
            "name": dropped("the run's own name"),
        },
        rest=dropped("the tracker's own setting"),
    ),
    "rollout_mock": Section(
        {
            "enable": mapped("presence of spec.pipeline.record", False),
            "mode": mapped(
                "spec.pipeline.record.to (dump) or .replay (mock), in a format of its own", "dump"
            ),
            "dump_dir": mapped("spec.pipeline.record.to or .replay", kind=str),
        }
    ),
    "system_envs": mapped("spec.roles.*.env (without what names a secret: use envFrom)"),
    "num_gpus_per_node": adapted(
        "GPUs of one pod (ROLL overwrote it with the driver's own count)", 8
    ),
    "num_nodes": dropped("pods are scheduled by Kubernetes: spec.roles.*.replicas", 1),
}

_NOT_NEEDED: dict[str, Field | Section] = {
    "rpc_timeout": dropped("there are no call timeouts: lost actors are detected", 3600),
    **{
        key: dropped("`agenticrun run -o`, or spec.checkpoint.uri on a cluster")
        for key in ("output_dir", "base_dir", "logging_dir")
    },
    "rollout_dump_dir": dropped(
        "whole episodes as text: spec.tracking.sampleLogs; batches: spec.pipeline.record"
    ),
    "max_running_requests": dropped("trainEnvs.groups limits the number of running episodes", 128),
    "prompt_length": dropped("ROLL's agentic pipeline reads sequence_length only", 1024),
    "response_length": dropped("ROLL's agentic pipeline reads sequence_length only"),
    "val_prompt_length": dead(_OTHER),
    "val_sequence_length": dead(_OTHER),
    "profiler_timeline": dropped("no profiler yet", False),
    "profiler_memory": dropped("no profiler yet", False),
    "profiler_output_dir": dropped("no profiler yet"),
    **{
        key: dead(_OTHER)
        for key in ("report_length_and_rewards", "length_profiler_dir", "local_rank")
    },
    **{
        key: dead(default=False)
        for key in ("is_offload_states", "is_offload_optimizer_states_in_train_step")
    },
    "otlp_output_dir": dropped("no OpenTelemetry: Prometheus reads the metrics"),
    "model_update_buffer_size_mb": mapped("spec.pipeline.weightSync.bucketBytes", kind=int),
    "model_download_type": adapted("names are looked up on the Hugging Face hub"),
    "transfer_backend": Section({}, rest=dropped("trajectories never pass through the driver")),
    "router_args": Section(
        {},
        rest=dropped(
            "requests go to the least loaded engine, those of a conversation to its last one"
        ),
    ),
    **{
        key: dead(_OTHER)
        for key in (
            "generate_opt_level",
            "is_num_return_sequences_expand",
            "is_use_additional_prompts",
            "max_additional_running_prompts",
            "user_defined_rollout_loop_cls",
        )
    },
}

AGENTIC: Fields = {**_OWN, **_ALGORITHM, **_MODELS, **_SCHEDULE, **_NOT_NEEDED}
"""The top level."""
