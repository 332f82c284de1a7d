"""AgenticRun's plug-in for SGLang servers.

It runs inside SGLang's processes and environment, so it imports nothing else of ours. SGLang finds
this package by its entry point on PYTHONPATH and calls `register` in each of its processes.
"""

import multiprocessing
import os
from typing import Any


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from . import broadcast, sampler

    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        HookRegistry.register(
            "sglang.srt.entrypoints.engine._set_envs_and_config", _fork, HookType.AFTER
        )
    updater = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
    HookRegistry.register(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo",
        sampler.RequestBatch,
        HookType.REPLACE,
    )
    HookRegistry.register(
        "sglang.srt.layers.sampler.Sampler.forward", sampler.forward, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.layers.sampler.Sampler._sample_from_probs",
        sampler.sample_from_probs,
        HookType.REPLACE,
    )
    HookRegistry.register(
        "sglang.srt.managers.scheduler_components.output_streamer"
        "._GenerationStreamAccumulator.accept",
        sampler.accept,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.model_loader.loader._initialize_model", _tie_output_layer, HookType.AFTER
    )
    HookRegistry.register(f"{updater}.init_weights_update_group", broadcast.join, HookType.REPLACE)
    HookRegistry.register(
        f"{updater}.receive_weights_from_distributed", broadcast.receive, HookType.REPLACE
    )
    HookRegistry.register(
        "sglang.srt.managers.schedule_batch.Req._check_token_based_finish",
        sampler.ends,
        HookType.REPLACE,
    )


def _fork(*_: object) -> None:
    """Start the server's other processes by fork: they need not import everything once more.

    Only where there is no GPU, whose driver a forked process cannot use.
    """
    multiprocessing.set_start_method("fork", force=True)


def _tie_output_layer(model: Any, *_: object, **__: object) -> None:
    """Give the output layer the embedding's weights where the config ties them.

    SGLang does so in the classes of some types only. In others (Qwen3-MoE) such a layer would keep
    random weights, because no file has any for it.
    """
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    embedding: Any = getattr(getattr(model, "model", None), "embed_tokens", None)
    head: Any = getattr(model, "lm_head", None)
    # A stage of a pipeline has only one of them.
    if tied and hasattr(embedding, "weight") and hasattr(head, "weight"):
        head.weight = embedding.weight
