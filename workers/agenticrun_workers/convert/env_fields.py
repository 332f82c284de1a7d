"""ROLL's EnvManagerConfig and the templates of custom_envs."""

from __future__ import annotations

from agenticrun_workers.convert.fields import (
    Fields,
    Section,
    cannot,
    changed,
    dead,
    dropped,
    mapped,
    one_of,
)
from agenticrun_workers.convert.role_fields import role

ENV_MANAGER: Fields = {
    **role("env").fields,
    "llm_proxy": Section(
        {
            "proxy_type": one_of(
                {"policy": "the policy plays, as always"}, "only the policy plays", "policy"
            ),
            "proxy_config": cannot("only the policy plays", None, {}),
        }
    ),
    "num_env_groups": mapped("trainEnvs.groups, valEnvs.groups", 128),
    "group_size": mapped("trainEnvs.groupSize, valEnvs.groupSize", 1),
    "group_size_redundancy": mapped("trainEnvs.groupSizeRedundancy", 0),
    "tags": mapped("trainEnvs.tags, valEnvs.tags", ["SimpleSokoban"]),
    "num_groups_partition": mapped("trainEnvs.partition, valEnvs.partition", kind=list),
    "max_traj_per_env": dropped("rolloutBatchSize and valBatchSize say how many are played", -1),
    "format_penalty": dead(
        "never had an effect in ROLL (C18): set spec.pipeline.envs[].formatPenalty", 0
    ),
    "worker_cls": one_of(
        {"roll.pipeline.agentic.environment_worker.EnvironmentWorker": "env workers"},
        "only ROLL's own EnvironmentWorker has a counterpart",
    ),
    "max_env_num_per_worker": mapped("trainEnvs.maxEnvsPerWorker and spec.roles.env.replicas", 0),
    "group_filter_cls": one_of(
        {
            "roll.pipeline.agentic.agentic_pipeline.GroupFilter": "keeps all groups: no trainEnvs.groupFilter"
        },
        "write the filter as module:function of a list of rewards, in trainEnvs.groupFilter.type",
    ),
}

VAL_ENV_MANAGER: Fields = {
    **ENV_MANAGER,
    "group_size_redundancy": changed("validation waits for every member", 0),
    "max_env_num_per_worker": changed("validation plays on the training's env pods", 0),
    "group_filter_cls": dropped("validation keeps every group"),
    "system_envs": changed("validation plays on the training's env pods"),
}

CUSTOM_ENV: Fields = {
    "env_type": mapped("spec.pipeline.envs[].type"),
    "max_steps": mapped("spec.pipeline.envs[].maxSteps", 10),
    "max_tokens_per_step": mapped(
        "spec.pipeline.envs[].maxTokensPerStep (the smaller of it and max_new_tokens)", 128
    ),
    "env_manager_cls": mapped(
        "spec.pipeline.envs[].agent.type (trajectory managers -> multi_turn, step managers -> step_wise)"
    ),
    "agent_runner_cls": cannot("no agent runners of the proxy manager"),
    "use_thread_lock": dropped(
        "environments own their random numbers: there is nothing to lock (C10)", False
    ),
    "max_env_step_concurrent": cannot(
        "no cap on the steps of one tag: let the environment hold one", 0
    ),
    "agent_system_template": mapped("spec.pipeline.envs[].agent.config.systemTemplate", kind=str),
    "agent_template": mapped(
        "spec.pipeline.envs[].agent.config.agentTemplate, placeholders renamed", kind=str
    ),
    "history_length": mapped("spec.pipeline.envs[].agent.config.historyLength (step managers)", 5),
    "tool_wrapper": Section(
        {},
        rest=cannot(
            "no tool wrapper yet: the environment's step may call tools itself", None, {}, []
        ),
    ),
    "env_config": Section({}, told_elsewhere=True),
}
