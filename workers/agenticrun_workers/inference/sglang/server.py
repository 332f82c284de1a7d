"""The command line and the environment of an SGLang server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agenticrun_workers.inference.server_command import command_line, find_engine
from agenticrun_workers.inference.server_process import HOST, ServerSpec

VERSIONS = "==0.5.23"
"""The version we test with.

The HTTP API and the internals that our plug-in hooks into are unstable.
"""
HERE = Path(__file__).parent
OWNED = {
    "model_path": "spec.model",
    "model": "spec.model",
    "tokenizer_path": "spec.model",
    "load_format": "spec.model",
    "trust_remote_code": "spec.model.trustRemoteCode",
    "dtype": "spec.model.dtype",
    "context_length": "spec.pipeline.sequenceLength",
    "host": "AgenticRun (the server listens on the loopback only)",
    "port": "AgenticRun (a free port)",
    "device": "spec.roles.inference.gpus",
    "weight_version": "AgenticRun (the policy version)",
    "skip_tokenizer_init": "AgenticRun (prompts and responses are token ids)",
    "rl_on_policy_target": "AgenticRun (log-probs are of the served precision)",
    "custom_weight_loader": "AgenticRun (weights come from the trainer)",
    "api_key": "AgenticRun (only the engine's own process talks to the server)",
    "admin_api_key": "AgenticRun (only the engine's own process talks to the server)",
    "dp_size": "spec.roles.inference.replicas (one engine each)",
    "data_parallel_size": "spec.roles.inference.replicas (one engine each)",
    "nnodes": "AgenticRun (an engine lives in one pod)",
    "node_rank": "AgenticRun (an engine lives in one pod)",
    "tokenizer_worker_num": "AgenticRun (one process handles aborts and updates)",
}
CPU_DEFAULTS: Mapping[str, Any] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,
    "mem_fraction_static": 0.9,
    "max_running_requests": 64,
}
"""Defaults on CPU.

`sleep_on_idle`: otherwise an idle server takes a whole core. `mem_fraction_static`: the cache has
a fixed size, `max_total_tokens`. A small fraction would only make the start fail for larger models,
or while other processes allocate memory.
"""
GPU_DEFAULTS: Mapping[str, Any] = {"enable_memory_saver": True}
"""`enable_memory_saver`: lets `sleep` free the memory for a trainer."""
DTYPES = ("float32", "bfloat16", "float16")
UNLIMITED = 1 << 30
CPU_CACHED_TOKENS = 16384
"""Smallest KV cache on a CPU, in tokens."""


@dataclass(frozen=True)
class SglangOptions:
    """Start parameters of an SGLang server. The arguments are those of `SglangEngine`."""

    folder: Path
    dtype: str
    max_length: int
    version: int
    log_folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 1
    gpus: int = 0
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        """Raise `ValueError` for options that we own, or a dtype that SGLang does not support."""
        if self.dtype not in DTYPES:
            raise ValueError(
                f"spec.model.dtype is {self.dtype}, but SGLang computes with {' or '.join(DTYPES)}"
            )
        self.flags(port=0)

    @property
    def processes(self) -> int:
        """Number of processes that hold the weights."""
        return int(self._merged.get("tp_size", 1)) * int(self._merged.get("pp_size", 1))

    @property
    def max_requests(self) -> int:
        """Number of requests that the server computes at once."""
        return int(self._merged.get("max_running_requests", UNLIMITED))

    @property
    def _merged(self) -> Mapping[str, Any]:
        return {
            **self._defaults,
            **{name.replace("-", "_"): value for name, value in self.config.items()},
        }

    @property
    def _defaults(self) -> Mapping[str, Any]:
        if self.gpus:
            return {**GPU_DEFAULTS, "tp_size": self.gpus // int(self.config.get("pp_size", 1))}
        return {**CPU_DEFAULTS, "max_total_tokens": max(CPU_CACHED_TOKENS, 4 * self.max_length)}

    def flags(self, port: int) -> list[str]:
        ours: dict[str, Any] = {
            "model_path": str(self.folder),
            "host": HOST,
            "port": port,
            "device": "cuda" if self.gpus else "cpu",
            "dtype": self.dtype,
            # SGLang keeps one position for itself.
            "context_length": self.max_length + 8,
            "weight_version": str(self.version),
            "skip_tokenizer_init": True,
            "skip_server_warmup": True,
            "grammar_backend": "none",
            "trust_remote_code": self.trust_remote_code,
        }
        return [*command_line(ours, {}), *command_line(self.config, OWNED, self._defaults)]

    def spec(self) -> ServerSpec:
        """Return how to start the server. Raises `EngineStartError` if SGLang is not installed."""
        python = find_engine("sglang", ["sglang"], VERSIONS)
        return ServerSpec(
            "sglang",
            lambda port: [str(python), "-m", "sglang.launch_server", *self.flags(port)],
            self.log_folder,
            environment=self._environment(),
            # On SIGTERM it drains for seconds, and there is nothing to save.
            stop_seconds=0,
        )

    def _environment(self) -> dict[str, str]:
        paths = [
            HERE.parent / "server_path",
            HERE / "plugin",
            *([] if self.gpus else [HERE / "cpu_stubs"]),
        ]
        environment = {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            # We check `max_length` against the model's own limit. The positions that SGLang adds
            # are never used.
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if not self.gpus:
            # Compilation takes longer than a small model ever computes.
            environment |= {
                "SGLANG_USE_CPU_ENGINE": "1",
                "OMP_NUM_THREADS": str(self.threads),
                "TORCHDYNAMO_DISABLE": "1",
            }
        return environment
