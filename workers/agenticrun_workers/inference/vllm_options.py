"""The command line and environment of a vLLM server: ours, and what `strategy.config` passes through."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agenticrun_workers.inference.server_command import FIELD, command_line

HERE = Path(__file__).parent
SERVER_PATH = f"{HERE / 'vllm' / 'plugin'}:{HERE / 'server_path'}"
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
SERVED_NAME = "policy"
DTYPES = ("float32", "bfloat16")
MAX_REQUESTS = 256
CPU_CACHE_BYTES = 256 * 2**20


def defaults(*, gpu: bool) -> dict[str, Any]:
    """Options that `strategy.config` may replace.

    Without a GPU: no compilation, whose warm-up takes longer than a small model ever gains; the worker inside the engine's process;
    and a fixed cache, because vLLM would take whole GiBs and write zeros over them at the start.
    """
    common = {
        "skip_tokenizer_init": True,
        "disable_uvicorn_access_log": True,
        "max_num_seqs": MAX_REQUESTS,
    }
    if gpu:
        return common | {"enable_sleep_mode": True}
    return common | {
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
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
) -> list[str]:
    """All but host and port. Raises ValueError for an option that another field decides, and for a dtype that vLLM cannot compute with."""
    if dtype not in DTYPES:
        raise ValueError(f"spec.model.dtype {dtype}: vLLM computes with {' or '.join(DTYPES)}")
    passed = command_line(config, OWNED, defaults(gpu=gpu), negatable=True)
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
    """How many requests the server computes at once. Raises ValueError."""
    return _number(config, "max_num_seqs", MAX_REQUESTS)


def parallel_ranks(config: Mapping[str, Any]) -> int:
    """How many workers the model is divided among. Raises ValueError."""
    return _number(config, "tensor_parallel_size", 1) * _number(config, "pipeline_parallel_size", 1)


def _number(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name, config.get(name.replace("_", "-"), default))
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{FIELD}.{name} must be a number above 0, not {value!r}")
    return value


def server_environment(*, threads: int, gpu: bool) -> dict[str, str]:
    """Variables of the server's processes."""
    common = {
        "PYTHONPATH": SERVER_PATH,
        # Mounts pause, resume, collective_rpc: without authentication, so the server listens on the loopback only.
        "VLLM_SERVER_DEV_MODE": "1",
        # Our sampler stands in for that of the first model runner.
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
        # Lets the executor `uni` stand: one process and 0.7 GB less.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Or the first request would wait for the compiler, even with enforce_eager.
        "TORCHDYNAMO_DISABLE": "1",
    }
