"""An SGLang server: its command line, its environment and its HTTP API."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agenticrun_workers.inference.engine import (
    STEP_SECONDS,
    EngineError,
    InvalidRequest,
    SampledTokens,
)
from agenticrun_workers.inference.server_process import (
    HOST,
    UPDATE_SECONDS,
    ServerClient,
    ServerSpec,
    command_line,
    cuda_toolkit,
    find_engine,
    gpu_environment,
    leaves,
    raise_refusal,
    with_our_plugin,
)
from agenticrun_workers.types import FinishReason, GenerationRequest

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
    "incremental_streaming_output": "AgenticRun (it keeps the tokens that have come)",
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
PRIORITIES: Mapping[str, Any] = {
    "enable_priority_scheduling": True,
    "schedule_low_priority_values_first": True,
    "priority_scheduling_preemption_threshold": (1 << 31) - 1,
}
"""The smallest `GenerationRequest.priority` first. What runs is never preempted for it, because its
keys and values would have to be computed again."""
POLICIES_WITH_PRIORITIES = ("fcfs", "lof")
"""SGLang does not start with priorities and another `schedule_policy`."""
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
SHARED_GPU_DEFAULTS: Mapping[str, Any] = {"enable_memory_saver": True}
"""`enable_memory_saver`: lets `sleep` free the memory for a trainer."""
FORMATS: Mapping[str, Any] = {"grammar_backend": "xgrammar"}
"""Options that the server needs to enforce formats, besides a tokenizer. Other backends do not have
xgrammar's structural tags."""
DTYPES = ("float32", "bfloat16", "float16")
UNLIMITED = 1 << 30
FLUSH_SECONDS = 30
"""Longest wait for idle schedulers. Below `STEP_SECONDS`, after which a server counts as frozen."""
LOADS = "/v1/loads?include=core"
"""Path of the server's load: requests, tokens, and their limits."""
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
    shares_gpus: bool = False
    trust_remote_code: bool = False
    enforces_formats: bool = False
    """True if formats are wanted and no option of `config` prevents them."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for options that we own, or a dtype that SGLang does not support."""
        enforces = self.enforces_formats and leaves(self.config, FORMATS)
        object.__setattr__(self, "enforces_formats", enforces)
        if self.dtype not in DTYPES:
            raise ValueError(
                f"spec.model.dtype is {self.dtype}, but SGLang computes with {' or '.join(DTYPES)}"
            )
        # A wrong option should fail when the run is checked, and not when the engine starts.
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
        policy = self.config.get("schedule_policy", self.config.get("schedule-policy", "fcfs"))
        common = PRIORITIES if policy in POLICIES_WITH_PRIORITIES else {}
        if self.gpus:
            # Pipeline stages divide the GPUs, tensor parallelism takes the rest.
            size = self.gpus // int(self.config.get("pp_size", 1))
            shared = SHARED_GPU_DEFAULTS if self.shares_gpus else {}
            return {**common, **shared, "tp_size": size}
        tokens = max(CPU_CACHED_TOKENS, 4 * self.max_length)
        return {**common, **CPU_DEFAULTS, "max_total_tokens": tokens}

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
            # Prompts and responses are token ids. Only formats are about text.
            "skip_tokenizer_init": not self.enforces_formats,
            "incremental_streaming_output": True,
            "skip_server_warmup": True,
            "grammar_backend": FORMATS["grammar_backend"] if self.enforces_formats else "none",
            "trust_remote_code": self.trust_remote_code,
        }
        return [*command_line(ours, {}), *command_line(self.config, OWNED, self._defaults)]

    def spec(self) -> ServerSpec:
        """Return how to start the server. Raises `EngineStartError` if SGLang is not installed."""
        python = find_engine("sglang", ["sglang"], VERSIONS, self.gpus)
        return ServerSpec(
            "sglang",
            lambda port: [str(python), "-m", "sglang.launch_server", *self.flags(port)],
            self.log_folder,
            environment=self.environment(python),
            # On SIGTERM it drains for seconds, and there is nothing to save.
            stop_seconds=0,
        )

    def environment(self, python: Path) -> dict[str, str]:
        """Return the variables of the server. `python` is that of SGLang's environment."""
        paths = [
            HERE.parent / "server_path",
            HERE / "plugin",
            *([] if self.gpus else [HERE / "cpu_stubs"]),
        ]
        environment = {
            **with_our_plugin("SGLANG_PLUGINS"),
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            # We check `max_length` against the model's own limit. The positions that SGLang adds
            # are never used.
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if self.gpus:
            environment |= gpu_environment(python)
            toolkit = cuda_toolkit(python)
            if toolkit and (toolkit / "bin" / "nvcc").exists() and "CUDA_HOME" not in os.environ:
                # SGLang compiles kernels when it starts, for which it looks for nvcc here first.
                environment["CUDA_HOME"] = str(toolkit)
        else:
            # Compilation takes longer than a small model ever computes.
            environment |= {
                "SGLANG_USE_CPU_ENGINE": "1",
                "OMP_NUM_THREADS": str(self.threads),
                "TORCHDYNAMO_DISABLE": "1",
            }
        return environment


GENERATE = "/generate"
GROUP = "agenticrun"
SEED_BITS = 63


def generate_body(request: GenerationRequest, rid: str, interval: int) -> dict[str, Any]:
    """Return the body of /generate.

    Args:
        request: the request.
        rid: its id in the server.
        interval: number of new tokens after which the server sends them.
    """
    sampling = request.sampling
    record = (
        sampling.record_temperature
        if sampling.record_temperature is not None
        else sampling.temperature or 1.0
    )
    tag = sampling.structural_tag
    formats = {} if tag is None else {"structural_tag": tag}
    return {
        "rid": rid,
        "input_ids": request.prompt_tokens.tolist(),
        "priority": request.priority,
        "return_logprob": True,
        "stream": True,
        "sampling_params": {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "stop_token_ids": list(sampling.stop_token_ids),
            "stream_interval": interval,
            **formats,
            "custom_params": {
                "record_temperature": record,
                "seed": request.seed % 2**SEED_BITS,
                "sampled": request.sampled,
            },
        },
    }


def read_event(
    request: GenerationRequest, event: Mapping[str, Any], sampled: SampledTokens
) -> FinishReason | None:
    """Add the new tokens of an event to those of the request. Returns how the response has ended.

    Raises:
        InvalidRequest: the server refused the request.
        EngineError: the server failed.
    """
    meta = event["meta_info"]
    reason = meta["finish_reason"]
    # Before the tokens: a refused request may have one, without its log-prob.
    if reason is not None and (status := reason.get("status_code")) is not None:
        raise_refusal(GENERATE, status, reason["message"])
    # After an abort SGLang repeats tokens behind the new ones.
    new = meta["completion_tokens"] - len(sampled)
    logprobs = [entry[0] for entry in (meta.get("output_token_logprobs") or ())[:new]]
    sampled.extend(event["output_ids"][:new], logprobs, meta.get("weight_versions") or ())
    if reason is None:
        return None
    finish = FinishReason(reason["type"])
    if finish is FinishReason.LENGTH and sampled.tokens[-1] in request.sampling.stop_token_ids:
        return FinishReason.STOP  # SGLang checks the length before the stop tokens
    return finish


def computed_prompt_tokens(event: Mapping[str, Any]) -> int:
    """Return the number of prompt tokens that were not in the prefix cache."""
    meta = event["meta_info"]
    return int(meta.get("prompt_tokens", 0) - meta.get("cached_tokens", 0))


@dataclass(frozen=True)
class Load:
    """Use of a server, over all its schedulers."""

    seats: int
    """Largest number of requests that are computed at once."""
    kv_used: float
    """Share of the KV cache that is in use."""
    kv_tokens: int
    """Tokens in that share."""


def read_load(answer: bytes) -> Load:
    """Read the answer of `LOADS`."""
    loads = json.loads(answer)["loads"]
    return Load(
        sum(load["max_running_requests"] for load in loads),
        sum(load["token_usage"] for load in loads) / len(loads),
        sum(load["num_used_tokens"] for load in loads),
    )


class SglangControl:
    """Control of a server. Methods return when it is done, and raise `EngineError` if it fails."""

    def __init__(self, http: ServerClient) -> None:
        self._http = http

    async def pause(self) -> None:
        """Stop sampling; requests keep their keys and values."""
        await self._post("/pause_generation", {"mode": "in_place"}, STEP_SECONDS)

    async def retract(self) -> None:
        """Stop sampling; requests keep their tokens, and lose their keys and values."""
        await self._post("/pause_generation", {"mode": "retract"}, STEP_SECONDS)

    async def resume(self) -> None:
        await self._post("/continue_generation", {}, STEP_SECONDS)

    async def abort(self, rid: str) -> None:
        """End every request with an id that begins with `rid`.

        The server ignores the call if it has not read the request yet.
        """
        await self._post("/abort_request", {"rid": rid}, STEP_SECONDS)

    async def abort_all(self) -> None:
        await self._post("/abort_request", {"abort_all": True}, STEP_SECONDS)

    async def load_folder(self, folder: Path, version: int) -> None:
        """Load all weights from safetensors files, and drop the cache."""
        await self._update("/update_weights_from_disk", {"model_path": str(folder)}, version)

    async def join_group(self, host: str, port: int, first_rank: int, world: int) -> None:
        """Join the collective of the trainer: see `plugin`, broadcast."""
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": first_rank,
            "world_size": world,
            "group_name": GROUP,
        }
        await self._post("/init_weights_update_group", body)

    async def receive(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        version: int,
    ) -> None:
        """Load all weights from the collective, and drop the cache."""
        body = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": GROUP}
        await self._post("/begin_weight_update", {})
        try:
            await self._update("/update_weights_from_distributed", body, version)
        finally:
            # Also after a failure: the server refuses a second session while one is open.
            await self._post("/end_weight_update", {})

    async def flush(self) -> None:
        """Wait until the schedulers are idle, and drop the cache. No request may be in flight.

        The end of a request reaches its client before a scheduler is idle.
        """
        await self._http.check(f"/flush_cache?timeout={FLUSH_SECONDS}")

    async def release_memory(self) -> None:
        """Free the memory of weights and cache. SGLang ends if a scheduler is not idle: `flush`."""
        await self._post("/release_memory_occupation", {})

    async def resume_memory(self) -> None:
        await self._post("/resume_memory_occupation", {})

    async def _update(self, path: str, body: Mapping[str, Any], version: int) -> None:
        await self._post(path, {**body, "weight_version": str(version), "flush_cache": True})

    async def _post(
        self, path: str, body: Mapping[str, Any], seconds: float = UPDATE_SECONDS
    ) -> None:
        try:
            answer = await self._http.post(path, body, seconds=seconds)
        except InvalidRequest as error:
            # A refusal of a control call is no mistake of a request: the engine has failed.
            raise EngineError(str(error)) from error
        # SGLang answers some failures with 200.
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"SGLang refused {path}: {answer.get('message')}")
