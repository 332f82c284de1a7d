"""Read a ROLL configuration and convert it to the document of an AgenticRun."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agenticrun_api import InvalidRun, parse_run
from agenticrun_api.names import API_VERSION, KIND, MAX_NAME_LENGTH
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
)

_VARIABLE = re.compile(r"\$\{([^${}:]+)\}")


@dataclass(frozen=True)
class Composition:
    """A ROLL configuration with defaults composed and interpolations resolved."""

    config: dict[str, Any]
    variables: frozenset[str]
    """Names that interpolations (`${name}`) read. Such a key has a use even if ROLL has no such
    field."""


def compose(file: Path, config_dir: Path | None = None) -> Composition:
    """Read a file with Hydra's composition, without network access.

    Args:
        file: the YAML that ROLL's launcher takes as --config_name.
        config_dir: additional folder to search for the entries of `defaults:`.

    Raises:
        ConvertError: the file is not YAML, a default is missing, or an interpolation fails.
    """
    overrides = [f"hydra.searchpath=[file://{config_dir.resolve()}]"] if config_dir else []
    try:
        with (
            warnings.catch_warnings(),
            initialize_config_dir(str(file.parent.resolve()), version_base="1.3"),
        ):
            warnings.simplefilter("ignore")  # Hydra's, about _self_: a file's own values win
            composed = hydra_compose(file.stem, overrides)
            variables = _VARIABLE.findall(OmegaConf.to_yaml(composed, resolve=False))
            config = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError) as error:
        raise ConvertError(f"{file}: {error}") from error
    if not isinstance(config, dict) or not config:
        raise ConvertError(f"{file}: holds no settings")
    settings = {str(key): value for key, value in config.items() if key != "hydra"}
    return Composition(settings, frozenset(variable.split(".")[0] for variable in variables))


Spec = dict[str, Any]

MAX_STALENESS = 64
MAX_KEPT = 1000


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion."""

    document: dict[str, Any]
    """The AgenticRun, as in YAML."""
    lines: list[Line]
    """The report: one line per field of the file, and more where several fields act together."""


def convert(composition: Composition, name: str) -> Conversion:
    """Convert a configuration.

    Args:
        composition: the resolved configuration.
        name: name of the run if the file has no exp_name.

    Raises:
        ConvertError: a value has a type that ROLL rejects, or a device_mapping is invalid.
    """
    top, notes = View(composition.config, AGENTIC), Notes()
    train, env_pods = train_groups(top, notes)
    run_name = _dns_name(top["exp_name"] or name)
    spec = {
        "model": model(top, notes),
        "placement": placement(top),
        "roles": roles(top, env_pods, notes),
        "pipeline": _pipeline(top, train, notes),
        "checkpoint": _checkpoint(top, notes),
        "tracking": _tracking(top, run_name),
    }
    document = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": run_name},
        "spec": _without_none(spec),
    }
    _refused(document, notes)
    noted = {line.field for line in notes.lines}
    lines = report_lines(composition.config, AGENTIC, composition.variables)
    left_out = tuple(f"{line.field}." for line in notes.lines if line.fate is Fate.DROPPED)
    rest = [
        line
        for line in lines
        if not line.field.startswith(left_out)
        and (line.field not in noted or line.fate not in (Fate.MAPPED, Fate.DROPPED))
    ]
    return Conversion(document, rest + notes.lines)


def _refused(document: Spec, notes: Notes) -> None:
    """Report the errors of a result that is not a valid run."""
    try:
        parse_run(document)
    except InvalidRun as error:
        for line in error.errors:
            notes.cannot("(result)", "", f"the converted run is invalid: {line}")


def as_yaml(document: dict[str, Any]) -> str:
    """Return the document as YAML, with multi-line texts as blocks and flat lists on one line."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """YAML style: lists of scalars in brackets, multi-line texts as blocks."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


def _represent_list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.SequenceNode:
    return dumper.represent_sequence(
        "tag:yaml.org,2002:seq",
        values,
        flow_style=all(not isinstance(value, dict) for value in values),
    )


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(list, _represent_list)


def _pipeline(top: View, train: Spec, notes: Notes) -> Spec:
    corrects = correction(top, notes)
    if "sequence_length" not in top:
        notes.changed("sequence_length", None, f"not given: {sequence_length(top)}")
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
        "record": _record(top),
        "envs": environments(top, notes),
        "trainEnvs": train,
        **_batches(top, notes),
        "actorTrain": actor_train(top, notes),
        "actorInfer": actor_infer(top, corrects=corrects is not None, notes=notes),
        "critic": critic(top),
    }


def _batches(top: View, notes: Notes) -> Spec:
    if top["rollout_batch_size"] < 0:
        notes.cannot(
            "rollout_batch_size",
            top["rollout_batch_size"],
            f"a step needs a number of trajectories: {batch_size(top)}",
        )
    spec: Spec = {"rolloutBatchSize": batch_size(top), "evalSteps": max(0, top["eval_steps"])}
    if "val_env_manager" not in top:
        notes.changed(
            "val_env_manager",
            None,
            "not given: no validation (ROLL would play its default environment, SimpleSokoban)",
        )
        return {**spec, "evalSteps": 0}
    val, trajectories = groups(top, "val_env_manager", notes), top["val_batch_size"]
    if trajectories < 0:
        trajectories = val["groups"] * val["groupSize"]
        notes.cannot(
            "val_batch_size",
            top["val_batch_size"],
            f"validation plays a number of episodes: {trajectories}",
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
        notes.cannot("async_generation_ratio", ahead, f"at most {MAX_STALENESS} steps ahead")
        bound = MAX_STALENESS
    if frequency - 1 > ahead:
        notes.changed(
            "actor_train.model_update_frequency",
            frequency,
            f"trains on older policies: staleness.max {bound}",
        )
    notes.changed(
        "async_generation_ratio",
        ahead,
        "partialRollout: false, as in ROLL, which samples an interrupted response again; "
        "true continues the response",
    )
    if corrects and "isWeight" in corrects:
        return {"max": bound, "partialRollout": False}
    notes.changed(
        "async_generation_ratio",
        ahead,
        f"staleness {{max: {bound}, offPolicy: Ignore}}, as in ROLL; better: "
        "train_infer_correction.is_weight, pgVariant: decoupled or oldLogProbs: Rollout",
    )
    return {"max": bound, "partialRollout": False, "offPolicy": "Ignore"}


def _record(top: View) -> Spec | None:
    mock = top.section("rollout_mock")
    if not mock["enable"]:
        return None
    return {"replay" if mock["mode"] == "mock" else "to": mock["dump_dir"] or "rollouts"}


def _checkpoint(top: View, notes: Notes) -> Spec:
    resume = top["resume_from_checkpoint"]
    if isinstance(resume, str):
        notes.cannot(
            "resume_from_checkpoint",
            resume,
            "ROLL's checkpoints cannot be read: convert it to a Hugging Face folder "
            "and set pretrain to that",
        )
    keep = top["max_ckpt_to_keep"] or MAX_KEPT
    given = top.section("checkpoint_config")["output_dir"]
    if given is not None and (given.startswith("/") or "://" in given):
        return {"uri": given, "keep": keep}
    notes.changed(
        "checkpoint_config.output_dir",
        given,
        "pods cannot access the launcher's folder: /checkpoints on a volume claim of 100Gi",
    )
    return {"uri": "/checkpoints", "volumeClaim": {"size": "100Gi"}, "keep": keep}


def _tracking(top: View, name: str) -> Spec:
    if top["track_with"] != "wandb":
        return {"tensorboard": top["track_with"] == "tensorboard"}
    given = top.section("tracker_kwargs")
    mode = "offline" if given["mode"] == "offline" else "online"
    wandb = {
        "project": given["project"] or name,
        "entity": given["entity"],
        "group": given["group"],
        "tags": given["tags"],
        "mode": mode,
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
