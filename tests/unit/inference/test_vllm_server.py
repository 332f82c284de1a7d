"""The command line and environment of a vLLM server."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agenticrun_workers.inference.vllm.engine import VllmEngine
from agenticrun_workers.inference.vllm.server import (
    OWNED,
    max_requests,
    server_environment,
    server_flags,
)


def flags(
    config: dict[str, Any] | None = None,
    *,
    dtype: str = "float32",
    gpu: bool = False,
    shared: bool = False,
    trust: bool = False,
    formats: bool = False,
) -> list[str]:
    return server_flags(
        Path("/m"),
        dtype=dtype,
        max_length=64,
        trust_remote_code=trust,
        config=config or {},
        gpu=gpu,
        shares_gpus=shared,
        enforces_formats=formats,
    )


def test_the_users_options_reach_the_server_under_their_own_names() -> None:
    words = flags(
        {
            "gpu_memory_utilization": 0.5,
            "enable-prefix-caching": False,
            "kv_cache_dtype": "fp8",
            "max_num_seqs": 8,
        }
    )
    assert "--gpu-memory-utilization=0.5" in words
    assert "--no-enable-prefix-caching" in words
    assert "--kv-cache-dtype=fp8" in words
    assert [word for word in words if word.startswith("--max-num-seqs")] == ["--max-num-seqs=8"]


def test_defaults_can_be_replaced_and_removed() -> None:
    assert "--enforce-eager" in flags()
    assert "--no-enforce-eager" in flags({"enforce_eager": False})
    assert not [
        word for word in flags({"kv_cache_memory_bytes": None}) if "kv-cache-memory" in word
    ]


def test_a_tokenizer_is_loaded_only_to_enforce_formats() -> None:
    assert "--skip-tokenizer-init" in flags()
    assert "--no-skip-tokenizer-init" in flags(formats=True)


@pytest.mark.parametrize(
    ("config", "enforces"),
    [
        ({}, True),
        ({"max_num_seqs": 8}, True),
        ({"skip_tokenizer_init": False}, True),
        ({"skip_tokenizer_init": None}, True),
        ({"structured_outputs_config": None}, True),
        ({"skip_tokenizer_init": True}, False),
        ({"skip-tokenizer-init": True}, False),
        ({"skip_tok": True}, False),
        ({"structured_outputs_config": {"backend": "outlines"}}, False),
        ({"structured-outputs-config.backend": "outlines"}, False),
        ({"reasoning_parser": "qwen3"}, False),
    ],
)
def test_an_engine_enforces_formats_unless_an_option_of_the_run_prevents_it(
    config: dict[str, Any], *, enforces: bool, tmp_path: Path
) -> None:
    engine = partial(
        VllmEngine, tmp_path, dtype="float32", max_length=64, log_folder=tmp_path, config=config
    )
    assert engine(enforces_formats=True).enforces_formats == enforces
    assert not engine().enforces_formats


def test_only_an_engine_that_shares_its_gpus_can_sleep() -> None:
    assert "--enable-sleep-mode" in flags(gpu=True, shared=True)
    assert "--enable-sleep-mode" not in flags(gpu=True)


def test_a_gpu_has_no_defaults_of_cpus() -> None:
    words = flags(gpu=True)
    assert not [
        word
        for word in words
        if "enforce-eager" in word or "kv-cache-memory" in word or "executor" in word
    ]
    assert "OMP_NUM_THREADS" not in server_environment(threads=3, gpu=True)
    assert server_environment(threads=3, gpu=False)["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("option", sorted(OWNED))
def test_an_option_that_another_field_decides_is_refused_with_that_field(option: str) -> None:
    for name in (option, option.replace("_", "-")):
        with pytest.raises(
            ValueError, match=rf"config\.{option} cannot be set: .+ decides it"
        ) as refused:
            flags({name: "x"})
        assert OWNED[option] in str(refused.value)


def test_parallelism_inside_an_engine_is_the_users() -> None:
    assert "--tensor-parallel-size=2" in flags({"tensor_parallel_size": 2}, gpu=True)
    assert "--pipeline-parallel-size=2" in flags({"pipeline_parallel_size": 2}, gpu=True)


def test_a_dtype_that_vllm_cannot_compute_with_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"spec\.model\.dtype float64: vLLM computes with float32 or bfloat16"
    ):
        flags(dtype="float64")


def test_code_of_the_model_runs_only_where_the_run_trusts_it() -> None:
    assert "--trust-remote-code" in flags(trust=True)
    assert "--trust-remote-code" not in flags()


@pytest.mark.parametrize("value", [0, -1, "many", 1.5])
def test_a_number_of_requests_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="max_num_seqs must be a number above 0"):
        max_requests({"max-num-seqs": value})
