"""`spec.pipeline.{envs,trainEnvs,valEnvs}` from ROLL's custom_envs and env managers."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

from agenticrun_workers.convert.fields import Notes, View
from agenticrun_workers.convert.role_fields import sampler
from agenticrun_workers.envs import make_env
from agenticrun_workers.plugins import PluginConfigError, PluginError, camel_case

Spec = dict[str, Any]

AGENTS = {
    "TrajEnvManager": "multi_turn",
    "VLTrajEnvManager": "multi_turn",
    "ProxyEnvManager": "multi_turn",
    "StepEnvManager": "step_wise",
    "StepConcatEnvManager": "step_wise",
    "AgentNativeStepEnvManager": "step_wise",
}
ANSWER_TAGS = r"<answer>(.*?)</answer>"
"""Pattern that ROLL's own games use if the file has no action_pattern."""
BOXED = r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}"
CALLS = r"<code>(.*?)</code>|```\n?python(.*?)```"
"""Pattern of the code that ROLL's Python tool runs."""
TOOL_INSTRUCTION = (
    "Solve the problem. You may run Python: write it between <code> and </code>, and you are told "
    "what it prints. When you know the answer, write it within \\boxed{}."
)
MAX_ENVS_PER_WORKER = 256
"""Default of maxEnvsPerWorker."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """An environment of ROLL that has no counterpart of the same name."""

    what: str
    instead: str
    type: str = ""
    """Our environment that takes its place; empty: one that the user must write."""


OWN_CLASS = (
    "write it as a class of your own (docs/environments.md), and its module:Class into "
    "spec.pipeline.envs[].type"
)
GEM = (
    "wrap gem.make in a class of your own, as docs/migrate-from-roll.md shows, and write its "
    "module:Class into spec.pipeline.envs[].type"
)
FOREIGN = {
    "sokoban_sandbox": Foreign(
        "Sokoban in a ROCK sandbox",
        "type sokoban is written, the same game without a sandbox: set config.rows, columns and "
        "boxes as your sandbox has them",
        "sokoban",
    ),
    "sokoban_native_env": Foreign(
        "Sokoban as chat messages",
        "type sokoban is written, the same game: set config.rows, columns and boxes, and write "
        "agent.config.systemTemplate and agentTemplate",
        "sokoban",
    ),
    "sokoban_tool_call": Foreign(
        "Sokoban with moves as tool calls",
        "type sokoban is written: set agent.config.actionPattern to the call that you want",
        "sokoban",
    ),
    "sokoban_mcp": Foreign(
        "Sokoban behind an MCP server",
        "type sokoban is written, the same game without a server: set config.rows, columns and "
        "boxes",
        "sokoban",
    ),
    "rock_tb_native_env": Foreign(
        "software tasks in ROCK sandboxes, solved by a command-line agent",
        "write a class that starts a sandbox and scores its result (docs/environments.md), and "
        "agent.type: outside for the command-line agent (docs/outside-agents.md)",
    ),
    "openreward_env": Foreign("an OpenReward environment with tools over HTTP", OWN_CLASS),
    "atropos_env": Foreign("an Atropos environment", OWN_CLASS),
    "deepeyes": Foreign(
        "questions about images, with image tools",
        "models of several modalities are not offered yet: choose a task in text",
    ),
    "roll_qa": Foreign(
        "questions of a data set",
        "write a class with set_item (docs/datasets.md has one for questions), its module:Class "
        "into spec.pipeline.envs[].type, and the data set into envs[].dataset",
    ),
    "roll_code": Foreign("programming tasks of a data set", OWN_CLASS),
    "game": Foreign("a GEM game", GEM),
    "rg": Foreign("a Reasoning Gym task of GEM", GEM),
    "qa": Foreign("a GEM question answering task", GEM),
    "code": Foreign("a GEM programming task", GEM),
    "logic": Foreign("a GEM logic task", GEM),
}
"""Name in ROLL, or prefix before the colon of a GEM name -> what it is."""


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
            entries.append(
                _environment(
                    tag,
                    env,
                    int(top.section(sampler(top)).section("generating_args")["max_new_tokens"]),
                    notes,
                )
            )
        else:
            notes.dropped(f"custom_envs.{tag}", "", "no env manager plays it: left out")
    for tag in sorted(played - described.keys()):
        notes.undecided(
            "custom_envs",
            tag,
            "an env manager plays this tag, which custom_envs does not describe: add it there",
            covers="spec.pipeline",
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


def _environment(tag: str, env: View, max_new_tokens: int, notes: Notes) -> Spec:
    path = f"custom_envs.{tag}"
    given = env.section("env_config").given
    penalty = float(given.get("format_penalty") or 0)
    if penalty > 0:
        notes.undecided(
            f"{path}.env_config.format_penalty",
            penalty,
            "a penalty is zero or negative here: 0 is written. Give a reward in the environment",
        )
    game = _game(tag, env, notes)
    agent = _agent_type(tag, env, game, notes)
    config = _agent(env, agent == "step_wise", game, path, notes)
    entry: Spec = {"tag": tag, "type": game.type, "config": game.config}
    return {
        **entry,
        "dataset": game.dataset,
        "maxSteps": game.max_steps or env["max_steps"],
        "maxTokensPerStep": min(env["max_tokens_per_step"], max_new_tokens),
        "formatPenalty": min(penalty, 0.0),
        "agent": {"type": agent, "config": config},
    }


@dataclass(frozen=True, slots=True)
class Game:
    """Our environment for one of ROLL."""

    type: str
    config: Spec
    pattern: str | None = None
    """ROLL's search pattern for an answer without action_pattern; None: the whole answer."""
    dataset: Spec | None = None
    max_steps: int | None = None
    """Turn limit, if it is not the entry's."""
    foreign: bool = False
    """True if the user must write or complete the environment."""


GAMES = ("frozen_lake", "sokoban", "webshop")


def _game(tag: str, env: View, notes: Notes) -> Game:
    path, given = f"custom_envs.{tag}", env.section("env_config").given
    name = str(env["env_type"])
    kind = name.replace("-", "_")
    if kind == "roll_math" or name.startswith("math:"):
        return _math(env, path, notes)
    foreign = FOREIGN.get(name) or FOREIGN.get(name.partition(":")[0])
    if foreign is None:
        config = env_config(kind, given, f"{path}.env_config", notes)
        return Game(kind, config, ANSWER_TAGS if kind in GAMES else None)
    covers = "spec.pipeline.envs"
    notes.undecided(f"{path}.env_type", name, f"{foreign.what}: {foreign.instead}", covers=covers)
    if foreign.type:
        for key in given:
            notes.dropped(f"{path}.env_config.{key}", given[key], "see env_type")
        return Game(foreign.type, {}, ANSWER_TAGS, foreign=True)
    config = {camel_case(key): value for key, value in given.items() if key not in COMMON}
    for key, value in given.items():
        if key in COMMON:
            _common(key, value, f"{path}.env_config.{key}", notes)
        else:
            notes.adapted(f"{path}.env_config.{key}", value, "an argument for the class to write")
    words = re.findall(r"[A-Za-z0-9]+", tag)
    class_name = "".join(word[:1].upper() + word[1:] for word in words)
    return Game(f"your_module:{class_name}", config, foreign=True)


def _agent_type(tag: str, env: View, game: Game, notes: Notes) -> str:
    manager, path = _class_of(env["env_manager_cls"]), f"custom_envs.{tag}.env_manager_cls"
    runner = _class_of(env["agent_runner_cls"]) if "agent_runner_cls" in env else ""
    if game.foreign and manager in AGENTS:
        return AGENTS[manager]  # the line about the environment says what to write
    if manager not in AGENTS or manager == "AgentNativeStepEnvManager":
        notes.undecided(
            path,
            manager,
            "a manager that builds its prompts itself: multi_turn is written. Write an agent of "
            "your own (docs/agents.md), or templates for this one",
        )
        return "multi_turn"
    if manager == "VLTrajEnvManager":
        notes.changed(path, manager, "observations are text, not images")
    elif manager == "StepConcatEnvManager":
        notes.changed(
            path, manager, "step_wise: the history also has the actions, in historyTemplate's form"
        )
    elif manager == "ProxyEnvManager" and runner in ("GEMRunner", ""):
        notes.adapted(path, manager, "multi_turn plays the same turns without an HTTP endpoint")
    elif manager == "ProxyEnvManager":
        notes.undecided(
            f"custom_envs.{tag}.agent_runner_cls",
            runner,
            "an agent that calls the policy over HTTP: write agent.type: outside with its command "
            "(docs/outside-agents.md)",
        )
    return AGENTS[manager]


def _math(env: View, path: str, notes: Notes) -> Game:
    """Return our environment for math problems, with Python if the file wraps that tool."""
    given = env.section("env_config").given
    name = given.get("dataset_name")
    if not name:
        notes.undecided(
            f"{path}.env_config.dataset_name",
            name,
            "names no data set: write its path into spec.pipeline.envs[].dataset.path",
            covers="spec.pipeline.envs",
        )
    columns = {
        "question": str(given.get("question_key") or "problem"),
        "answer": str(given.get("answer_key") or "answer"),
    }
    for key, value in given.items():
        field = f"{path}.env_config.{key}"
        if key in ("question_key", "answer_key"):
            notes.mapped(field, value, "spec.pipeline.envs[].dataset.columns")
        elif key == "split" and value:
            notes.mapped(field, value, "spec.pipeline.envs[].dataset.split")
        elif key in COMMON:
            _common(key, value, field, notes)
        elif key != "dataset_name":
            notes.dropped(field, value, "the run's seed and its validation share choose the items")
    dataset = {"path": str(name or "/data/problems.jsonl"), "columns": columns}
    if given.get("split"):
        dataset["split"] = given["split"]
    if name:
        notes.changed(
            f"{path}.env_config.dataset_name",
            name,
            "envs[].dataset, of which a tenth is held out for validation; ROLL validates on all "
            "of it, problems of the training included",
        )
    tools = env.section("tool_wrapper").given.get("tool_configs") or []
    if not tools:
        notes.mapped(f"{path}.env_type", env["env_type"], "spec.pipeline.envs[].type: math")
        notes.adapted(f"{path}.max_steps", env["max_steps"], "one answer ends an episode, as there")
        return Game("math", {"instruction": ""}, dataset=dataset, max_steps=1)
    arguments = {str(tool.get("tool_id")): tool.get("tool_args") or {} for tool in tools}
    others = sorted(arguments.keys() - {"python_code"})
    if others:
        notes.undecided(
            f"{path}.tool_wrapper",
            others,
            "tools that are not offered: python_tool is written. Call other tools in an "
            "environment of your own (docs/environments.md)",
        )
    notes.changed(
        f"{path}.tool_wrapper",
        ["python_code"],
        "type: python_tool, which runs Python in a sandbox: answers are compared as numbers or "
        "texts, maxSteps limits the calls, and a call itself has no reward",
    )
    seconds = arguments.get("python_code", {}).get("timeout")
    config: Spec = {
        "instruction": TOOL_INSTRUCTION,
        "callPattern": CALLS,
        "answerPattern": BOXED,
    }
    if seconds:
        config["seconds"] = float(seconds)
    return Game("python_tool", config, dataset=dataset)


def _agent(env: View, step_wise: bool, game: Game, path: str, notes: Notes) -> Spec:
    # ROLL formats the other templates, and leaves this one as it is.
    given = env["agent_system_template"] or ""
    system = given.replace("{", "{{").replace("}", "}}")
    config: Spec = {"systemTemplate": system}
    names = _PLACEHOLDER.findall(given)
    known = [name for name in dict.fromkeys(names) if name in PLACEHOLDERS or name == "suffix"]
    if known:
        these = ", ".join(f"{{{name}}}" for name in known)
        notes.changed(
            f"{path}.agent_system_template",
            these,
            f"ROLL fills no placeholders in the system message: the model reads {these} as it is, "
            "there and here. Write the text itself into agent.config.systemTemplate",
        )
    if step_wise:
        config["historyLength"] = env["history_length"]
        if not game.foreign:
            notes.changed(
                f"{path}.history_length",
                env["history_length"],
                "that many past turns, valid and invalid ones; ROLL shows invalid ones only (C2)",
            )
    else:
        config["systemTemplate"] = f"{system}\n{{instruction}}".lstrip("\n")
        if game.type in GAMES and not game.foreign:
            notes.changed(
                f"{path}.agent_system_template",
                system,
                "env_instruction ends the system message; in ROLL it opens the first user message",
            )
    before, after = env["pre_step_template"], env["next_step_template"]
    template = env["agent_template"]
    if before or after:  # the two parts around an image
        template = f"{before or ''}{{observation}}\n{after or ''}"
    if template is not None:
        config["agentTemplate"] = translated(
            template, f"{path}.agent_template", step_wise=step_wise, notes=notes
        )
    pattern = env.section("env_config").given.get("action_pattern") or game.pattern
    return config | ({"actionPattern": pattern} if pattern else {})


OURS = {"train_env_manager": "trainEnvs", "val_env_manager": "valEnvs"}


def groups(top: View, manager: str, notes: Notes) -> Spec:
    """Return the fields that `trainEnvs` and `valEnvs` share."""
    view = top.section(manager)
    tags, partition, count = view["tags"], view["num_groups_partition"], view["num_env_groups"]
    if partition is not None and (sum(partition) != count or len(partition) != len(tags)):
        notes.undecided(
            f"{manager}.num_groups_partition",
            partition,
            f"must be {len(tags)} numbers that add up to num_env_groups, {count}: change one",
            covers=f"spec.pipeline.{OURS[manager]}",
        )
    if partition is None and count % len(tags):
        notes.undecided(
            f"{manager}.num_env_groups",
            count,
            f"does not divide over {len(tags)} tags: set num_groups_partition",
            covers=f"spec.pipeline.{OURS[manager]}",
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
_PLACEHOLDER = re.compile(r"(?<!\{)\{(\w+)\}(?!\})")
STEP_ONLY = ("history", "history_length", "step_count")

ARGUMENTS = {
    "frozen_lake": {
        "size": "size",
        "p": "frozenProbability",
        "is_slippery": "isSlippery",
        "env_instruction": "instruction",
    },
    "sokoban": {
        "num_boxes": "boxes",
        "search_depth": "searchDepth",
        "dim_x": "rows",
        "dim_y": "columns",
        "num_gen_steps": "walkSteps",
        "env_instruction": "instruction",
    },
    "webshop": {
        "observation_mode": "observationMode",
        "num_products": "numProducts",
        "show_attrs": "showAttributes",
        "file_path": "items",
        "env_instruction": "instruction",
    },
}
"""Game -> ROLL's argument -> ours."""
DEFAULTS: dict[str, Spec] = {
    "frozen_lake": {"isSlippery": True},
    "sokoban": {"rows": 10, "columns": 10, "boxes": 4},
    "webshop": {"goals": "synthetic"},
}
"""ROLL's defaults that differ from ours."""
UNUSED = {"webshop": {"server": None, "filter_goals": None, "limit_goals": -1}}
"""Arguments that only these values do not use."""


def translated(template: str, path: str, *, step_wise: bool, notes: Notes) -> str:
    """Return a prompt template with our placeholders."""

    def rename(match: re.Match[str]) -> str:
        name = match[1]
        if name == "suffix":
            notes.adapted(
                f"{path} {{suffix}}",
                "",
                "left out: observations are the whole output of an environment",
            )
            return ""
        if name not in PLACEHOLDERS or (name in STEP_ONLY and not step_wise):
            notes.undecided(
                f"{path} {{{name}}}",
                "",
                "no such placeholder here: it is left out. Write the text into "
                "agent.config.agentTemplate",
            )
            return ""
        return f"{{{PLACEHOLDERS[name]}}}"

    return _PLACEHOLDER.sub(rename, template)


def env_config(kind: str, given: dict[str, Any], path: str, notes: Notes) -> dict[str, Any]:
    """Return the `config` of an environment, and report each argument of its constructor."""
    known = ARGUMENTS.get(kind)
    config: dict[str, Any] = dict(DEFAULTS.get(kind, {}))
    for key, value in given.items():
        name = f"{path}.{key}"
        if key in COMMON:
            _common(key, value, name, notes)
        elif key in SPECIAL.get(kind, ()):
            config |= _special(key, value, name, notes)
        elif value == UNUSED.get(kind, {}).get(key, ...):
            notes.dropped(name, value, "no effect at this value")
        elif known is not None and key not in known:
            notes.undecided(name, value, f"our {kind} has no such argument: it is left out")
        elif value is not None:
            ours = (known or {"env_instruction": "instruction"}).get(key) or camel_case(key)
            config[ours] = value
            notes.mapped(name, value, f"spec.pipeline.envs[].config.{ours}")
    if kind == "webshop" and "items" not in config:
        notes.undecided(
            path,
            "no data files",
            "the shop sells 200 made-up products. Write the paths of WebShop's files into "
            "spec.pipeline.envs[].config: items, attributes, humanInstructions (docs/webshop.md)",
        )
    return _checked(kind, config, path, notes)


COMMON = ("format_penalty", "action_pattern", "special_token_list", "max_steps", "render_mode")
TEXTS = ("map_seed", "grid_lookup", "grid_vocab", "map_lookup", "action_lookup")
SPECIAL = {
    "frozen_lake": TEXTS,
    "sokoban": (*TEXTS, "dim_room"),
    "webshop": ("human_goals",),
}
"""Arguments that are not only renamed."""


def _common(key: str, value: Any, name: str, notes: Notes) -> None:
    if key == "format_penalty":
        if float(value or 0) <= 0:
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
        notes.adapted(name, value, "observations are text: see env_manager_cls")
    else:
        notes.dropped(name, value, "observations are text")


def _special(key: str, value: Any, name: str, notes: Notes) -> dict[str, Any]:
    if key == "map_seed":
        if value is not None:
            notes.undecided(
                name,
                value,
                "every group plays a map of its own, and validation always the same ones (C9): "
                "remove it",
            )
    elif key == "dim_room" and isinstance(value, list | tuple) and len(value) == 2:
        notes.mapped(name, value, "spec.pipeline.envs[].config.rows and columns")
        return {"rows": int(value[0]), "columns": int(value[1])}
    elif key == "human_goals":
        goals = "human" if value else "synthetic"
        notes.mapped(name, value, f"spec.pipeline.envs[].config.goals: {goals}")
        return {"goals": goals}
    elif key == "grid_lookup" and isinstance(value, dict):
        symbols = "".join(str(value[place]) for place in sorted(value, key=int))
        notes.mapped(name, value, f"spec.pipeline.envs[].config.symbols: {symbols}")
        return {"symbols": symbols}
    elif key == "action_lookup" and isinstance(value, dict):
        actions = [str(value[place]) for place in sorted(value, key=int)]
        notes.mapped(name, value, f"spec.pipeline.envs[].config.actions: {actions}")
        return {"actions": actions}
    elif key == "dim_room" and value is not None:
        notes.undecided(name, value, "must be [rows, columns]: rows and columns 10 are written")
    else:
        notes.dropped(
            name, value, "words for prompts: write them into env_instruction or the templates"
        )
    return {}


@contextmanager
def _silent() -> Iterator[None]:
    """Keep warnings of environments back: the report says the same."""
    log = logging.getLogger("agenticrun_workers.envs")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _checked(kind: str, config: dict[str, Any], path: str, notes: Notes) -> dict[str, Any]:
    try:
        with _silent():
            make_env(kind, config)
    except PluginConfigError as error:
        notes.undecided(path, config, f"{error}: change spec.pipeline.envs[].config")
    except PluginError as error:
        field = path.removesuffix("env_config") + "env_type"
        notes.undecided(field, kind, f"{error} (docs/environments.md)", covers="spec.pipeline.envs")
    return config
