"""AgenticRun's plug-in for SGLang servers.

It runs inside SGLang's processes and environment, so it imports nothing else of ours. SGLang finds
this package by its entry point on PYTHONPATH and calls `register` in each of its processes.
"""

import multiprocessing
import os


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
