"""ROLL's environments: their constructors' arguments and prompt templates."""

from __future__ import annotations

import re
from typing import Any

from agenticrun_workers.convert.notes import Notes
from agenticrun_workers.envs import make_env
from agenticrun_workers.plugins import PluginConfigError, PluginError, camel_case

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
"""Where ROLL's default is not ours."""


def translated(template: str, path: str, *, step_wise: bool, notes: Notes) -> str:
    """A prompt template with our placeholders."""

    def rename(match: re.Match[str]) -> str:
        name = match[1]
        if name == "suffix":
            notes.changed(
                f"{path} {{suffix}}", "", "left out: observations hold all that an environment says"
            )
            return ""
        if name not in PLACEHOLDERS or (name in STEP_ONLY and not step_wise):
            notes.cannot(f"{path} {{{name}}}", "", "no such placeholder here: left out")
            return ""
        return f"{{{PLACEHOLDERS[name]}}}"

    return re.sub(r"(?<!\{)\{(\w+)\}(?!\})", rename, template)


def env_config(kind: str, given: dict[str, Any], path: str, notes: Notes) -> dict[str, Any]:
    """The environment's `config`, with a line for each argument that is not the same for all environments."""
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
            "spec.pipeline.envs[].formatPenalty: added to the reward of an answer without a valid action",
        )
    elif key == "action_pattern":
        notes.mapped(
            name,
            value,
            "spec.pipeline.envs[].agent.config.actionPattern: the last group of the first match",
        )
    elif key == "special_token_list":
        notes.dropped(name, value, "the end of the turn is no part of the answer's text")
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
