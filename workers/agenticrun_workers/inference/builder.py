"""Builds the engine that `actorInfer.strategy` names.

Only the engine that runs in this process imports torch: the servers have their own libraries, in
environments of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agenticrun_api import Pipeline
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.inference.engine import InferenceEngine, UnusableModel
from agenticrun_workers.models.devices import claim_device, gpus_of_children
from agenticrun_workers.models.folder import ModelLoadError, check_config, check_weights
from agenticrun_workers.models.source import ModelSource, local_folder
from agenticrun_workers.processes import quick_imports

if TYPE_CHECKING:
    import torch

    from agenticrun_workers.inference.transformers.engine import TransformersEngine

OPTIONS = "spec.pipeline.actorInfer.strategy.config"


def build_engine(
    pipeline: Pipeline,
    source: ModelSource,
    folder: str,
    *,
    owner: str,
    gpus: Sequence[str],
    threads: int,
    logs: Path,
    shares_gpus: bool = False,
    enforces_formats: bool = False,
) -> InferenceEngine:
    """Build the engine of an inference actor, without starting it. Needs a running event loop.

    Args:
        pipeline: names the engine and its options.
        source: where the model comes from, its dtype and whether its code is trusted.
        folder: hub name or folder of the first weights; needed until the engine has started.
        owner: role and name of the engine, for messages.
        gpus: ids of the GPUs of this engine.
        threads: CPU threads of the computation.
        logs: folder for a server's output.
        shares_gpus: a trainer has the GPUs while the engine sleeps (placement Colocated).
        enforces_formats: take requests with a `structural_tag`, if the engine can: the embedded one
            cannot, nor can a server whose options in `config` prevent it.

    Raises:
        InvalidConfig: an option that the engine does not have, or that another field decides.
        MissingGpus: the GPUs are reserved, and this process does not see them.
        UnusableModel: a file of the model is missing or damaged.
    """
    spec = pipeline.actor_infer.strategy
    if spec.name == "transformers":
        if spec.config:
            raise InvalidConfig(
                OPTIONS,
                f"the engine transformers has no options: leave out {', '.join(spec.config)}",
            )
        with quick_imports():
            import torch

        device = claim_device(owner, gpus)
        torch.set_num_threads(threads)
        return transformers_engine(pipeline, source, folder, device)
    # In this process, because a server's own messages about files name no field.
    found = local_folder(folder)
    try:
        check_config(str(found), trust_remote_code=source.trust_remote_code)
        check_weights(str(found))
    except ModelLoadError as error:
        raise UnusableModel(str(error)) from error
    arguments: dict[str, Any] = {
        "folder": found,
        "dtype": source.dtype,
        "max_length": pipeline.sequence_length,
        # Without partial rollout, a response must be of one version.
        "restart_on_update": not pipeline.staleness.partial_rollout,
        "config": spec.config,
        "trust_remote_code": source.trust_remote_code,
        "log_folder": logs,
        "threads": threads,
        "gpus": gpus_of_children(owner, gpus),
        "shares_gpus": shares_gpus,
        "enforces_formats": enforces_formats,
    }
    try:
        if spec.name == "sglang":
            from agenticrun_workers.inference.sglang.engine import SglangEngine

            return SglangEngine(**arguments)
        from agenticrun_workers.inference.vllm.engine import VllmEngine

        return VllmEngine(**arguments)
    # Options that do not fit together are refused by the engine's class.
    except ValueError as error:
        raise InvalidConfig(OPTIONS, str(error)) from error


def transformers_engine(
    pipeline: Pipeline, source: ModelSource, folder: str, device: torch.device | None = None
) -> TransformersEngine:
    """Build the engine that runs inside this process.

    Args:
        pipeline: as in `build_engine`, like source and folder.
        device: of the computation. Default: the CPU.
    """
    with quick_imports():
        import torch

        from agenticrun_workers.inference.transformers.engine import TransformersEngine
        from agenticrun_workers.models.pretrained import load_model

    # The cache supplies the masks of these two. Kernels for flash attention take none.
    attention = "eager" if source.attn_implementation == "eager" else "sdpa"
    load = partial(
        load_model,
        folder,
        getattr(torch, source.dtype),
        device=device or torch.device("cpu"),
        attn_implementation=attention,
        trust_remote_code=source.trust_remote_code,
    )
    return TransformersEngine(
        load,
        max_length=pipeline.sequence_length,
        batch_invariant=pipeline.deterministic,
        restart_on_update=not pipeline.staleness.partial_rollout,
    )
