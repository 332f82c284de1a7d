"""`spec.pipeline.{envs,trainEnvs,valEnvs}` from ROLL's custom_envs and env managers."""

from __future__ import annotations

import re
from math import ceil
from typing import Any

from agenticrun_workers.convert.fields import Notes, View
from agenticrun_workers.envs import make_env
from agenticrun_workers.plugins import PluginConfigError, PluginError, camel_case

Spec = dict[str, Any]

AGENTS = {
    "TrajEnvManager": "multi_turn",
    "StepEnvManager": "step_wise",
    "StepConcatEnvManager": "step_wise",
}
ANSWER_TAGS = r"<answer>(.*?)</answer>"
"""Pattern that ROLL's environments use if the file has no action_pattern."""
MAX_ENVS_PER_WORKER = 256
"""Default of maxEnvsPerWorker."""


def environments(top: View, notes: Notes) -> list[Spec]:
    """Return one entry of `envs` per tag that an env manager plays."""
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
    """Return True if a sample is a turn, so that ROLL counts optimizer batches in turns."""
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
            "agent.config.systemTemplate, followed by env_instruction; "
            "in ROLL env_instruction opens the first user message",
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
    """Return the fields that `trainEnvs` and `valEnvs` share."""
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
    """Return `trainEnvs` and the number of env pods, one per environment process of ROLL."""
    view = top.section("train_env_manager")
    episodes = view["num_env_groups"] * (view["group_size"] + view["group_size_redundancy"])
    per_worker = view["max_env_num_per_worker"] or max(episodes, MAX_ENVS_PER_WORKER)
    spec = groups(top, "train_env_manager", notes)
    spec |= {"groupSizeRedundancy": view["group_size_redundancy"], "maxEnvsPerWorker": per_worker}
    return spec, ceil(episodes / per_worker)


PLACEHOLDERS = {
    "turn_idx": "turn",
    "current_step": "turn",
    "observation": "observation",
    "current_observation": "observation",
    "env_instruction": "instruction",
    "actions_left": "turns_left",
    "max_response_length": "max_tokens",
    "history": "history",
    "history_length": "history_length",
    "step_count": "step_count",
}
STEP_ONLY = ("history", "history_length", "step_count")

FROZEN_LAKE = {
    "size": "size",
    "p": "frozenProbability",
    "is_slippery": "isSlippery",
    "env_instruction": "instruction",
}
"""ROLL's argument -> ours."""
FROZEN_LAKE_DEFAULTS = {"isSlippery": True}
"""ROLL's defaults that differ from ours."""


def translated(template: str, path: str, *, step_wise: bool, notes: Notes) -> str:
    """Return a prompt template with our placeholders."""

    def rename(match: re.Match[str]) -> str:
        name = match[1]
        if name == "suffix":
            notes.changed(
                f"{path} {{suffix}}",
                "",
                "left out: observations are the whole output of an environment",
            )
            return ""
        if name not in PLACEHOLDERS or (name in STEP_ONLY and not step_wise):
            notes.cannot(f"{path} {{{name}}}", "", "no such placeholder here: left out")
            return ""
        return f"{{{PLACEHOLDERS[name]}}}"

    return re.sub(r"(?<!\{)\{(\w+)\}(?!\})", rename, template)


def env_config(kind: str, given: dict[str, Any], path: str, notes: Notes) -> dict[str, Any]:
    """Return the `config` of an environment, and report each argument of its constructor."""
    lake = kind == "frozen_lake"
    config: dict[str, Any] = dict(FROZEN_LAKE_DEFAULTS) if lake else {}
    for key, value in given.items():
        name = f"{path}.{key}"
        if key in COMMON:
            _common(key, value, name, notes)
        elif lake and key in LAKE_TEXTS:
            config |= _lake_texts(key, value, name, notes)
        elif lake and key not in FROZEN_LAKE:
            notes.cannot(name, value, "our frozen_lake has no such argument")
        elif value is not None:
            ours = (
                FROZEN_LAKE[key]
                if lake
                else "instruction"
                if key == "env_instruction"
                else camel_case(key)
            )
            config[ours] = value
            notes.mapped(name, value, f"spec.pipeline.envs[].config.{ours}")
    return _checked(kind, config, path, notes)


COMMON = ("format_penalty", "action_pattern", "special_token_list", "max_steps", "render_mode")
LAKE_TEXTS = ("map_seed", "grid_lookup", "grid_vocab", "map_lookup", "action_lookup")


def _common(key: str, value: Any, name: str, notes: Notes) -> None:
    if key == "format_penalty":
        notes.mapped(
            name,
            value,
            "spec.pipeline.envs[].formatPenalty: added to the reward of an answer without "
            "a valid action",
        )
    elif key == "action_pattern":
        notes.mapped(
            name,
            value,
            "spec.pipeline.envs[].agent.config.actionPattern: the last group of the first match",
        )
    elif key == "special_token_list":
        notes.dropped(name, value, "the end-of-turn token is not part of the answer's text")
    elif key == "max_steps":
        notes.dropped(name, value, "the turn limit is the entry's own max_steps, as in ROLL")
    elif value not in (None, "text"):
        notes.cannot(name, value, "observations are text")
    else:
        notes.dropped(name, value, "observations are text")


def _lake_texts(key: str, value: Any, name: str, notes: Notes) -> dict[str, Any]:
    if key == "map_seed":
        if value is not None:
            notes.cannot(
                name,
                value,
                "every group plays a map of its own; the validation maps are always the same (C9)",
            )
    elif key == "grid_lookup" and isinstance(value, dict):
        symbols = "".join(str(value[place]) for place in sorted(value, key=int))
        notes.mapped(name, value, f"spec.pipeline.envs[].config.symbols: {symbols}")
        return {"symbols": symbols}
    elif key == "action_lookup" and isinstance(value, dict):
        actions = [str(value[place]) for place in sorted(value, key=int)]
        notes.mapped(name, value, f"spec.pipeline.envs[].config.actions: {actions}")
        return {"actions": actions}
    else:
        notes.dropped(
            name, value, "words for prompts: write them into env_instruction or the templates"
        )
    return {}


def _checked(kind: str, config: dict[str, Any], path: str, notes: Notes) -> dict[str, Any]:
    try:
        make_env(kind, config)
    except PluginConfigError as error:
        notes.cannot(path, config, str(error))
    except PluginError as error:
        notes.cannot(path.removesuffix("env_config") + "env_type", kind, str(error))
    return config
