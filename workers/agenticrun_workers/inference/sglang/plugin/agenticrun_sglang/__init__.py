"""AgenticRun's plug-in for SGLang servers.

It runs inside SGLang's processes and environment, so it imports nothing else of ours. SGLang finds
this package by its entry point on PYTHONPATH and calls `register` in each of its processes.
"""


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from . import broadcast, sampler

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
    HookRegistry.register(f"{updater}.init_weights_update_group", broadcast.join, HookType.REPLACE)
    HookRegistry.register(
        f"{updater}.receive_weights_from_distributed", broadcast.receive, HookType.REPLACE
    )
    HookRegistry.register(
        "sglang.srt.managers.schedule_batch.Req._check_token_based_finish",
        sampler.ends,
        HookType.REPLACE,
    )
