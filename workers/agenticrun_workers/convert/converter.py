"""Read a ROLL configuration and convert it to the document of an AgenticRun."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agenticrun_api import InvalidRun, parse_run
from agenticrun_api.names import API_VERSION, KIND, MAX_NAME_LENGTH
from agenticrun_api.yaml_text import BlockDumper
from agenticrun_workers.convert.algorithm import algorithm, correction, sequence_length
from agenticrun_workers.convert.environments import environments, groups, train_groups
from agenticrun_workers.convert.fields import ConvertError, Fate, Line, Notes, View, report_lines
from agenticrun_workers.convert.mapping import AGENTIC
from agenticrun_workers.convert.models import (
    actor_infer,
    actor_train,
    batch_size,
    critic,
    model,
    placement,
    roles,
    run_sizes,
)

_VARIABLE = re.compile(r"\$\{([^${}:]+)\}")
_SHELL_VARIABLE = re.compile(r"\$\{oc\.env:([A-Za-z_]\w*)\}")


@dataclass(frozen=True)
class Composition:
    """A ROLL configuration with defaults composed and interpolations resolved."""

    config: dict[str, Any]
    variables: frozenset[str]
    """Names that interpolations (`${name}`) read. Such a key has a use even if ROLL has no such
    field."""
    unset: frozenset[str] = frozenset()
    """Environment variables that the file reads and that are not set. Their value is `<name>`."""


def compose(file: Path, config_dir: Path | None = None) -> Composition:
    """Read a file with Hydra's composition, without network access.

    Args:
        file: the YAML that ROLL's launcher takes as --config_name.
        config_dir: additional folder to search for the entries of `defaults:`.

    Raises:
        ConvertError: the file is not YAML, a default is missing, or an interpolation fails.
    """
    file = _target(file)
    overrides = [f"hydra.searchpath=[file://{config_dir.resolve()}]"] if config_dir else []
    try:
        with (
            warnings.catch_warnings(),
            initialize_config_dir(str(file.parent.resolve()), version_base="1.3"),
        ):
            warnings.simplefilter("ignore")  # Hydra's, about _self_: a file's own values win
            composed = hydra_compose(file.stem, overrides)
            text = OmegaConf.to_yaml(composed, resolve=False)
            variables = _VARIABLE.findall(text)
            # Before the variables are set to their names below.
            unset = frozenset(_SHELL_VARIABLE.findall(text)) - os.environ.keys()
            with _set_to_their_names(unset):
                config = OmegaConf.to_container(composed, resolve=True)
    except MissingConfigException as error:
        raise ConvertError(
            f"{file}: its defaults name {error.missing_cfg_file}, which is not there: "
            "name a folder beside which it is found (--config-dir ROLL/examples/config), or remove "
            "that entry if ROLL's repository has no such file"
        ) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError) as error:
        raise ConvertError(f"{file}: {error}") from error
    if not isinstance(config, dict) or not config:
        raise ConvertError(
            f"{file}: holds no settings. Where ROLL's repository has a symbolic link, name the "
            "file that it points to"
        )
    # Hydra's own settings are about its output folders.
    settings = {str(key): value for key, value in config.items() if key != "hydra"}
    names = frozenset(variable.split(".")[0] for variable in variables)
    return Composition(settings, names, unset)


def _target(file: Path) -> Path:
    """Return the file that `file` stands for.

    A checkout without symbolic links has files in their place that hold the path of their target.
    """
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return file
    # A file of settings has several lines, or a colon.
    if "\n" in text or not text.endswith((".yaml", ".yml")) or ":" in text:
        return file
    target = file.parent / text
    if not target.is_file():
        raise ConvertError(
            f"{file}: is a symbolic link to {text}, which is not there: name the file itself"
        )
    return target


@contextmanager
def _set_to_their_names(names: Iterable[str]) -> Iterator[None]:
    """Set environment variables to `<name>` until the context ends.

    Most are secrets, which are neither needed nor written here.
    """
    os.environ.update({name: f"<{name}>" for name in names})
    try:
        yield
    finally:
        # They were not set before, so they are removed and not restored.
        for name in names:
            os.environ.pop(name, None)


Spec = dict[str, Any]

MAX_STALENESS = 64
MAX_KEPT = 1000
MAX_BUCKET = 16 * 2**30
"""Largest `weightSync.bucketBytes`."""


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion."""

    document: dict[str, Any]
    """The AgenticRun, as in YAML."""
    lines: list[Line]
    """The report: one line per field of the file, and more where several fields act together."""

    @property
    def undecided(self) -> list[Line]:
        """Lines that need a decision."""
        return [line for line in self.lines if line.fate is Fate.DECISION]


def convert(composition: Composition, name: str) -> Conversion:
    """Convert a configuration.

    Args:
        composition: the resolved configuration.
        name: name of the run if the file has no exp_name.

    Raises:
        ConvertError: it is not one of the agentic pipeline, a value has a type that ROLL rejects,
            or a device_mapping is invalid.
    """
    if not any(key in composition.config for key in ("custom_envs", "train_env_manager")):
        raise ConvertError(
            "neither custom_envs nor train_env_manager: only files of ROLL's agentic pipeline can "
            "be converted (not RLVR, SFT, DPO or distillation)"
        )
    notes = Notes()
    # First, so that everything below knows one name of each field.
    config = _with_todays_names(composition.config, notes)
    top = View(config, AGENTIC)
    train, env_pods = train_groups(top, notes)
    run_name = _dns_name(top["exp_name"] or name)
    pods = roles(top, env_pods, notes)
    spec = {
        "model": model(top, notes),
        "placement": placement(top),
        "roles": pods,
        "pipeline": _pipeline(top, train, notes),
        "checkpoint": _checkpoint(top, pods, notes),
        "tracking": _tracking(top, run_name, notes),
    }
    document = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": run_name},
        "spec": _without_none(spec),
    }
    # After the document: only the report depends on it.
    _judge(top, notes)
    for variable in sorted(composition.unset):
        if f"<{variable}>" in str(document):
            notes.undecided(
                f"${{oc.env:{variable}}}",
                "",
                "not set here: set it in the shell, and convert again",
            )
    _refused(document, notes)
    lines = report_lines(config, AGENTIC, composition.variables)
    # Fields of a section that is dropped as a whole need no lines of their own.
    left_out = tuple(f"{line.field}." for line in notes.lines if line.fate is Fate.DROPPED)
    rest = [line for line in lines if not line.field.startswith(left_out)]
    return Conversion(document, _one_fate_each(rest + notes.lines))


def _one_fate_each(lines: list[Line]) -> list[Line]:
    """Keep, for each field, the lines of its most important outcome."""
    # Several lines may be about one field: a decision must not be hidden by a mere note.
    order = list(Fate)
    first = {
        name: min((line.fate for line in lines if line.field == name), key=order.index)
        for name in {line.field for line in lines}
    }
    return [line for line in lines if line.fate is first[line.field]]


def _refused(document: Spec, notes: Notes) -> None:
    """Report the errors of a result that is not a valid run, unless a line explains them."""
    try:
        parse_run(document)
    except InvalidRun as error:
        for line in error.errors:
            # A line of the report explains such an error better.
            if not line.startswith(tuple(notes.covered)):
                notes.undecided("(result)", "", f"refused: {line}")


OF_MANAGERS = {"env_groups": "num_env_groups", "n_groups": "num_groups_partition"}
OF_ENVIRONMENTS = {"max_steps_per_traj": "max_steps", "max_actions_per_traj": "max_steps"}
"""Fields in earlier versions of ROLL -> today's. The first one that a file sets counts."""


def _with_todays_names(config: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """Return the configuration with the names that ROLL's fields have today."""
    renamed = dict(config)
    for role in ("train_env_manager", "val_env_manager"):
        if isinstance(config.get(role), dict):
            renamed[role] = _renamed(config[role], role, OF_MANAGERS, notes)
    envs = config.get("custom_envs")
    if isinstance(envs, dict):
        renamed["custom_envs"] = dict(envs)
        for tag, env in envs.items():
            if not isinstance(env, dict):
                continue
            path = f"custom_envs.{tag}"
            today = renamed["custom_envs"][tag] = _renamed(env, path, OF_ENVIRONMENTS, notes)
            text = today.pop("env_instruction", None)
            if text is not None:
                notes.adapted(f"{path}.env_instruction", text, "read as env_config.env_instruction")
                today["env_config"] = {"env_instruction": text, **(today.get("env_config") or {})}
    return renamed


def _renamed(
    section: dict[str, Any], path: str, names: dict[str, str], notes: Notes
) -> dict[str, Any]:
    renamed = {key: value for key, value in section.items() if key not in names}
    for old, new in names.items():
        if old in section:
            notes.adapted(
                f"{path}.{old}", section[old], f"read as {new}: today's ROLL ignores this name"
            )
            # Today's name wins if the file sets both, because ROLL reads only that.
            renamed.setdefault(new, section[old])
    return renamed


def as_yaml(document: dict[str, Any]) -> str:
    """Return the document as YAML, with multi-line texts as blocks and flat lists on one line."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(BlockDumper):
    """YAML style: lists of scalars in brackets, multi-line texts as blocks."""


def _represent_list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.SequenceNode:
    return dumper.represent_sequence(
        "tag:yaml.org,2002:seq",
        values,
        flow_style=all(not isinstance(value, dict) for value in values),
    )


_Dumper.add_representer(list, _represent_list)


def _pipeline(top: View, train: Spec, notes: Notes) -> Spec:
    corrects = correction(top, notes)
    if "actor_train" not in top:
        notes.changed(
            "actor_train",
            None,
            "not given: ROLL's rollout pipeline only plays, and this run trains. `agenticrun eval` "
            "only plays",
        )
    if "sequence_length" not in top:
        notes.adapted("sequence_length", None, f"not given: {sequence_length(top)}")
    return {
        "seed": top["seed"],
        "maxSteps": top["max_steps"],
        "saveSteps": max(0, top["save_steps"]),
        "loggingSteps": max(0, top["logging_steps"]),
        "sequenceLength": sequence_length(top),
        "modelUpdateFrequency": top.section("actor_train")["model_update_frequency"],
        "criticWarmup": top["critic_warmup"] if top["adv_estimator"] == "gae" else 0,
        **algorithm(top, notes),
        "trainInferCorrection": corrects,
        "staleness": _staleness(top, corrects, notes),
        "record": _record(top, notes),
        "envs": environments(top, notes),
        "trainEnvs": train,
        **_batches(top, notes),
        "weightSync": (
            None
            if "model_update_buffer_size_mb" not in top
            else {"bucketBytes": min(top["model_update_buffer_size_mb"] * 2**20, MAX_BUCKET)}
        ),
        "actorTrain": actor_train(top, notes),
        "actorInfer": actor_infer(top, corrects=corrects is not None, notes=notes),
        "critic": critic(top),
    }


def _batches(top: View, notes: Notes) -> Spec:
    if top["rollout_batch_size"] < 0:
        notes.undecided(
            "rollout_batch_size",
            top["rollout_batch_size"],
            f"a step needs a number of trajectories: {batch_size(top)} is written",
        )
    if batch_size(top) < 2 and (top["whiten_advantages"] or top["whiten_rewards"]):
        notes.undecided(
            "rollout_batch_size",
            batch_size(top),
            "whitening needs at least two trajectories: raise it, or remove whiten_advantages and "
            "whiten_rewards",
            covers="spec.pipeline.rolloutBatchSize",
        )
    validates = max(0, top["eval_steps"])
    if _replays(top):
        validates = 0  # nothing is played
    spec: Spec = {"rolloutBatchSize": batch_size(top), "evalSteps": validates}
    if "val_env_manager" not in top:
        notes.adapted(
            "val_env_manager",
            None,
            "not given: no validation (ROLL would play its default environment, SimpleSokoban)",
        )
        return {**spec, "evalSteps": 0}
    val, trajectories = groups(top, "val_env_manager", notes), top["val_batch_size"]
    if trajectories < 0:
        trajectories = val["groups"] * val["groupSize"]
        notes.undecided(
            "val_batch_size",
            top["val_batch_size"],
            f"validation plays a number of episodes: {trajectories} is written",
        )
    return {**spec, "valBatchSize": trajectories, "valEnvs": val}


def _staleness(top: View, corrects: Spec | None, notes: Notes) -> Spec | None:
    ahead, frequency = (
        top["async_generation_ratio"],
        top.section("actor_train")["model_update_frequency"],
    )
    bound = max(ahead, frequency - 1)
    if bound <= 0:
        return None
    if bound > MAX_STALENESS:
        notes.undecided(
            "async_generation_ratio",
            ahead,
            f"at most {MAX_STALENESS} steps ahead, which is written",
        )
        bound = MAX_STALENESS
    if frequency - 1 > ahead:
        notes.changed(
            "actor_train.model_update_frequency",
            frequency,
            f"trains on older policies: staleness.max {bound}",
        )
    notes.adapted(
        "staleness.partialRollout",
        False,
        "as in ROLL, which samples an interrupted response again; true continues the response",
    )
    if corrects and "isWeight" in corrects:
        return {"max": bound, "partialRollout": False}
    notes.changed(
        "async_generation_ratio",
        ahead,
        f"staleness {{max: {bound}, offPolicy: Ignore}}: no correction, as in ROLL (C37). Groups "
        "that grow too old run again; ROLL discards them, finished ones too (C36)",
    )
    return {"max": bound, "partialRollout": False, "offPolicy": "Ignore"}


def _replays(top: View) -> bool:
    mock = top.section("rollout_mock")
    return bool(mock["enable"]) and mock["mode"] == "mock"


def _record(top: View, notes: Notes) -> Spec | None:
    mock = top.section("rollout_mock")
    if not mock["enable"]:
        return None
    given = mock["dump_dir"] or "rollouts"
    folder = given
    if not given.startswith("/") and "://" not in given:
        folder = f"{_checkpoint_uri(top) or CLAIM}/{Path(given).name}"
        notes.adapted("rollout_mock.dump_dir", given, f"{folder}, which outlives the pods")
    if _replays(top):
        notes.undecided(
            "rollout_mock.dump_dir",
            given,
            "recordings of ROLL cannot be read: record with spec.pipeline.record.to first, and "
            "write that folder into record.replay",
        )
        return {"replay": folder}
    return {"to": folder}


def _judge(top: View, notes: Notes) -> None:
    """Report a judge model, which ROLL starts if it has devices."""
    given = top["reward"]
    if given is None:
        return
    if isinstance(given, dict) and given.get("device_mapping"):
        notes.undecided(
            "reward",
            (given.get("model_args") or {}).get("model_name_or_path", ""),
            "a judge model on GPUs of its own: serve it behind an OpenAI-compatible endpoint, and "
            "describe that in spec.pipeline.rewards, type llm_judge (docs/rewards.md)",
        )
    else:
        notes.dropped("reward", given, "without devices ROLL starts no judge")


CLAIM = "/checkpoints"


def _checkpoint_uri(top: View) -> str | None:
    """Return the file's folder for checkpoints if pods can access it, else None."""
    given: str | None = top.section("checkpoint_config")["output_dir"]
    return given if given is not None and (given.startswith("/") or "://" in given) else None


def _checkpoint(top: View, pods: Spec, notes: Notes) -> Spec:
    resume = top["resume_from_checkpoint"]
    if isinstance(resume, str):
        notes.undecided(
            "resume_from_checkpoint",
            resume,
            "ROLL's checkpoints cannot be read: convert it to a Hugging Face folder, and write "
            "that into spec.model.path",
        )
    keep = top["max_ckpt_to_keep"] or MAX_KEPT
    given, uri = top.section("checkpoint_config")["output_dir"], _checkpoint_uri(top)
    if uri is not None:
        if uri.startswith("/"):
            notes.changed(
                "checkpoint_config.output_dir",
                uri,
                "a folder of the pods: mount it in roles.driver and roles.trainer (volumes, "
                "volumeMounts), or checkpoints end with the pods; or name object storage",
            )
        return {"uri": uri, "keep": keep}
    sizes = run_sizes(top, together=False)
    saved = 1 + (ceil(top["max_steps"] / top["save_steps"]) if top["save_steps"] > 0 else 0)
    gib = max(LEAST_CLAIM_GIB, sizes.claim_gib(min(keep, saved)) if sizes else 0)
    size = f"{gib}Gi"
    notes.adapted(
        "checkpoint_config.output_dir",
        given,
        f"pods cannot access the launcher's folder: {CLAIM} on a volume claim of {size}",
    )
    # A claim that only one node can mount is refused for trainers on several pods, and for a
    # reference or critic on GPUs of its own.
    own = (pods.get(role) for role in ("reference", "critic"))
    trainer = pods.get("trainer", {})
    several_nodes = (trainer.get("gpus") and trainer.get("replicas", 1) > 1) or any(
        pod and pod.get("gpus") for pod in own
    )
    mode = {"accessMode": "ReadWriteMany"} if several_nodes else {}
    return {"uri": CLAIM, "volumeClaim": {"size": size} | mode, "keep": keep}


LEAST_CLAIM_GIB = 100


def _tracking(top: View, name: str, notes: Notes) -> Spec:
    if top["track_with"] != "wandb":
        return {"tensorboard": top["track_with"] == "tensorboard"}
    given = top.section("tracker_kwargs")
    if given["mode"] != "offline":
        notes.changed(
            "track_with",
            "wandb",
            "mode: offline is written, because keys are not copied. For online: put WANDB_API_KEY "
            "of a Secret into roles.driver.envFrom, and set spec.tracking.wandb.mode: online",
        )
    wandb = {
        "project": given["project"] or name,
        "entity": given["entity"],
        "group": given["group"],
        "tags": given["tags"],
        "mode": "offline",
    }
    return {"tensorboard": False, "wandb": wandb}


def _dns_name(text: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", str(text).lower()).strip("-")
    named = name if name[:1].isalpha() else f"run-{name}"
    return named[:MAX_NAME_LENGTH].rstrip("-")


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value
