"""One YAML trains with a server as its engine and with two ranks of another trainer than fsdp2.

SGLang and Megatron here; tests/integration/driver/test_gpu_examples.py trains with vLLM and with
DeepSpeed, and benchmarks/combinations.py with every engine and every trainer.
"""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from agenticrun_api.names import ExitCode
from preloaded import environment, executable
from waiting import eventually

pytestmark = pytest.mark.timeout(1800)

EXAMPLE = Path(__file__).parents[3] / "examples" / "engines-and-trainers.yaml"
STEPS = 2
MARK = "AGENTICRUN_TEST_RUN"


def train(folder: Path, *settings: str) -> list[dict[str, float]]:
    """Everything that `agenticrun run` logs with these settings of the pipeline.

    Its processes are preloaded ones, except the engine's server.
    """
    overrides = [
        word
        for setting in (*settings, f"maxSteps={STEPS}")
        for word in ("--set", f"spec.pipeline.{setting}")
    ]
    command = [
        *executable(),
        "-m",
        "agenticrun_workers.cli",
        "run",
        "-f",
        str(EXAMPLE),
        "-o",
        str(folder),
        *overrides,
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=1500,
        env=os.environ | environment() | {MARK: str(folder)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def left_behind(folder: Path) -> list[str]:
    """Processes on this machine that `train` has started, servers of engines among them.

    A preloaded process shows the environment of its server, but lives no longer than its client,
    which is found here.
    """
    mark = f"{MARK}={folder}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text().replace("\0", " "))
    return found


def test_a_server_and_two_trainer_ranks_train_as_one(tmp_path: Path) -> None:
    logged = train(
        tmp_path,
        "actorInfer.strategy.name=sglang",
        "actorTrain.strategy.name=megatron",
        "actorTrain.strategy.config.tensor_model_parallel_size=2",
    )
    (gap,) = (line["engine/parity_gap"] for line in logged if "engine/parity_gap" in line)
    assert 0 < gap < 1e-3
    steps = [line for line in logged if "critic/score/mean" in line]
    assert len(steps) == STEPS
    for step in steps:
        assert 0 <= step["engine/logprob_gap"] < 1e-3
        assert step["weight_sync/bytes"] > 0
        assert step["actor/grad_norm"] > 0
        assert step["tokens/response"] > 0
    assert any(tmp_path.glob("engines/*.log")), "the server's log stays with the run"
    with suppress(AssertionError):
        eventually(lambda: not left_behind(tmp_path), 30, "nothing left")
    assert left_behind(tmp_path) == []


def test_what_a_strategy_does_not_have_is_refused_before_anything_is_trained(
    tmp_path: Path,
) -> None:
    setting = "spec.pipeline.actorTrain.strategy.config.zero_stage=3"
    command = [
        *executable(),
        "-m",
        "agenticrun_workers.cli",
        "run",
        "-f",
        str(EXAMPLE),
        "-o",
        str(tmp_path),
        "--set",
        setting,
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | environment() | {"COLUMNS": "400"},
    )
    assert done.returncode == ExitCode.INVALID_CONFIG, done.stdout
    assert (
        "Failed: spec.pipeline.actorTrain.strategy.config: fsdp2 has no option zero_stage; it has "
        in done.stdout
    )
