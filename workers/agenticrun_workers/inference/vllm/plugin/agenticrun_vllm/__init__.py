"""AgenticRun's plug-in for vLLM servers.

It runs inside vLLM's processes and environment, so it imports nothing else of ours. The server
finds it on PYTHONPATH and loads it because of two of its own options,
`--worker-extension-cls agenticrun_vllm.worker.Worker` and
`--logits-processors agenticrun_vllm.sampler:RequestArguments`, and because of its entry point:
vLLM calls `register` in each of its processes.
"""

import multiprocessing
from typing import Any


def register() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.engine import utils

    if current_platform.is_cpu():
        utils.get_mp_context = _fork
    _tell_versions()


def _fork() -> Any:
    """Start the engine's core by fork: it need not import everything once more.

    Only where there is no GPU, whose driver a forked process cannot use.
    """
    return multiprocessing.get_context("fork")


def _tell_versions() -> None:
    """Let each event of a response say which version sampled which token.

    vLLM tells it in the last event only.
    """
    from vllm.v1.engine.output_processor import RequestState

    original = RequestState._new_completion_output

    def with_versions(state: Any, *arguments: Any, **options: Any) -> Any:
        output = original(state, *arguments, **options)
        output.weight_versions = state._weight_version_spans()
        return output

    RequestState._new_completion_output = with_versions
