"""What AgenticRun adds to an SGLang server: runs inside SGLang's processes and environment, so it imports nothing else of ours.

SGLang finds this package by its entry point on PYTHONPATH, and calls `register` in each of its processes.
"""


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from . import batch, sampler

    HookRegistry.register("sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo", batch.RequestBatch, HookType.REPLACE)
    HookRegistry.register("sglang.srt.layers.sampler.Sampler.forward", sampler.forward, HookType.AROUND)
    HookRegistry.register("sglang.srt.layers.sampler.Sampler._sample_from_probs", sampler.sample_from_probs, HookType.REPLACE)
