"""`spec.pipeline.{envs,trainEnvs,valEnvs}` from ROLL's custom_envs and env managers."""

from __future__ import annotations

from math import ceil
from typing import Any

from agenticrun_workers.convert.env_configs import env_config, translated
from agenticrun_workers.convert.fields import View
from agenticrun_workers.convert.notes import Notes

Spec = dict[str, Any]

AGENTS = {
    "TrajEnvManager": "multi_turn",
    "StepEnvManager": "step_wise",
    "StepConcatEnvManager": "step_wise",
}
ANSWER_TAGS = r"<answer>(.*?)</answer>"
"""What ROLL's environments look for where a file gives no action_pattern."""
MAX_ENVS_PER_WORKER = 256
"""Our default."""


def environments(top: View, notes: Notes) -> list[Spec]:
    """One entry per tag that is played."""
    played = {
        tag
        for manager in ("train_env_manager", "val_env_manager")
        if manager in top
        for tag in top.section(manager)["tags"]
    }
    entries = []
    described = top.sections("custom_envs")
    for tag, env in described.items():
        if tag in played:
            entries.append(_environment(tag, env, _max_new_tokens(top), notes))
        else:
            notes.dropped(f"custom_envs.{tag}", "", "no env manager plays it: left out")
    for tag in sorted(played - described.keys()):
        notes.cannot(
            "custom_envs", tag, "an env manager plays this tag, which custom_envs does not describe"
        )
    return entries


def is_step_wise(top: View) -> bool:
    """Whether a sample is a turn: then optimizer batches are not counted in trajectories."""
    return any(
        AGENTS.get(_class_of(env["env_manager_cls"])) == "step_wise"
        for env in top.sections("custom_envs").values()
    )


def _class_of(path: Any) -> str:
    return str(path or "TrajEnvManager").rsplit(".", 1)[-1]


def _max_new_tokens(top: View) -> int:
    return int(top.section("actor_infer").section("generating_args")["max_new_tokens"])


def _environment(tag: str, env: View, max_new_tokens: int, notes: Notes) -> Spec:
    path = f"custom_envs.{tag}"
    kind = str(env["env_type"]).replace("-", "_")
    manager = _class_of(env["env_manager_cls"])
    if manager not in AGENTS:
        notes.cannot(
            f"{path}.env_manager_cls",
            env["env_manager_cls"],
            "no such manager yet: multi_turn takes its place",
        )
    agent = AGENTS.get(manager, "multi_turn")
    if manager == "StepConcatEnvManager":
        notes.changed(
            f"{path}.env_manager_cls", manager, "step_wise: the history is written by its template"
        )
    given = env.section("env_config").given
    penalty = float(given.get("format_penalty") or 0)
    if penalty > 0:
        notes.cannot(
            f"{path}.env_config.format_penalty", penalty, "a penalty is zero or negative: left out"
        )
    return {
        "tag": tag,
        "type": kind,
        "config": env_config(kind, given, f"{path}.env_config", notes),
        "maxSteps": env["max_steps"],
        "maxTokensPerStep": min(env["max_tokens_per_step"], max_new_tokens),
        "formatPenalty": min(penalty, 0.0),
        "agent": {
            "type": agent,
            "config": _agent(env, agent == "step_wise", given.get("action_pattern"), path, notes),
        },
    }


def _agent(env: View, step_wise: bool, pattern: str | None, path: str, notes: Notes) -> Spec:
    system = translated(
        env["agent_system_template"] or "",
        f"{path}.agent_system_template",
        step_wise=step_wise,
        notes=notes,
    )
    config: Spec = {"systemTemplate": system}
    if step_wise:
        config["historyLength"] = env["history_length"]
        notes.changed(
            f"{path}.history_length",
            env["history_length"],
            "agent.config.historyLength: that many past turns, valid and invalid ones (C2)",
        )
    else:
        config["systemTemplate"] = f"{system}\n{{instruction}}".lstrip("\n")
        notes.changed(
            f"{path}.agent_system_template",
            system,
            "agent.config.systemTemplate, env_instruction after it: in ROLL that opens the first user message",
        )
    if "agent_template" in env:
        config["agentTemplate"] = translated(
            env["agent_template"], f"{path}.agent_template", step_wise=step_wise, notes=notes
        )
    if pattern is None:
        notes.changed(
            f"{path}.env_config.action_pattern", None, f"not given: actionPattern {ANSWER_TAGS}"
        )
    config["actionPattern"] = ANSWER_TAGS if pattern is None else pattern
    return config


def groups(top: View, manager: str, notes: Notes) -> Spec:
    """`trainEnvs`, or what `valEnvs` has of it."""
    view = top.section(manager)
    tags, partition, count = view["tags"], view["num_groups_partition"], view["num_env_groups"]
    if partition is not None and (sum(partition) != count or len(partition) != len(tags)):
        notes.cannot(
            f"{manager}.num_groups_partition",
            partition,
            f"must be {len(tags)} numbers that add up to num_env_groups, {count}",
        )
    if partition is None and count % len(tags):
        notes.cannot(
            f"{manager}.num_env_groups",
            count,
            f"does not divide over {len(tags)} tags: set num_groups_partition",
        )
    return {"groups": count, "groupSize": view["group_size"], "tags": tags, "partition": partition}


def train_groups(top: View, notes: Notes) -> tuple[Spec, int]:
    """`trainEnvs`, and how many env pods play side by side what ROLL plays in as many processes."""
    view = top.section("train_env_manager")
    episodes = view["num_env_groups"] * (view["group_size"] + view["group_size_redundancy"])
    per_worker = view["max_env_num_per_worker"] or max(episodes, MAX_ENVS_PER_WORKER)
    spec = groups(top, "train_env_manager", notes)
    spec |= {"groupSizeRedundancy": view["group_size_redundancy"], "maxEnvsPerWorker": per_worker}
    return spec, ceil(episodes / per_worker)
