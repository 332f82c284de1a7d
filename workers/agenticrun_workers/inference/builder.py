"""Builds the engine that `actorInfer.strategy` names. Imports torch; servers keep their own libraries in environments of their own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from agenticrun_api import Pipeline
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.inference import InferenceEngine, TransformersEngine
from agenticrun_workers.models.pretrained import load_model
from agenticrun_workers.models.source import ModelSource, local_folder

OPTIONS = "spec.pipeline.actorInfer.strategy.config"


def build_engine(
    pipeline: Pipeline, source: ModelSource, folder: str, *, gpus: int, threads: int, logs: Path
) -> InferenceEngine:
    """The engine of this inference actor, not started. Needs a running event loop.

    Args:
        folder: name on the hub or folder with the first weights of `source`; needed until the engine has started.
        gpus: GPUs of this engine.
        logs: folder for what a server prints.

    Raises:
        InvalidConfig: an option that the engine does not have, or that another field decides.
    """
    spec = pipeline.actor_infer.strategy
    restart_on_update = not pipeline.staleness.partial_rollout
    if spec.name == "transformers":
        if spec.config:
            raise InvalidConfig(
                OPTIONS,
                f"the engine transformers has no options: leave out {', '.join(spec.config)}",
            )
        return transformers_engine(pipeline, source, folder)
    arguments: dict[str, Any] = {
        "folder": local_folder(folder),
        "dtype": source.dtype,
        "max_length": pipeline.sequence_length,
        "restart_on_update": restart_on_update,
        "config": spec.config,
        "trust_remote_code": source.trust_remote_code,
        "log_folder": logs,
        "threads": threads,
        "gpus": gpus,
    }
    try:
        if spec.name == "sglang":
            from agenticrun_workers.inference.sglang.engine import SglangEngine

            return SglangEngine(**arguments)
        from agenticrun_workers.inference.vllm.engine import VllmEngine

        return VllmEngine(**arguments)
    except ValueError as error:
        raise InvalidConfig(OPTIONS, str(error)) from error


def transformers_engine(pipeline: Pipeline, source: ModelSource, folder: str) -> TransformersEngine:
    """The engine inside the process; arguments as of `build_engine`."""
    load = partial(
        load_model, folder, getattr(torch, source.dtype), trust_remote_code=source.trust_remote_code
    )
    return TransformersEngine(
        load,
        max_length=pipeline.sequence_length,
        alone=pipeline.deterministic,
        restart_on_update=not pipeline.staleness.partial_rollout,
    )
