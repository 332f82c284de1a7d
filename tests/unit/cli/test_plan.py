"""`agenticrun plan`: its table, its JSON and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agenticrun_api import AgenticRun
from agenticrun_api.overrides import load_run_with
from agenticrun_workers.cli import app
from agenticrun_workers.cli import plan as command
from agenticrun_workers.cli.doctor.cluster import PRODUCT, PRODUCT_MIB, gpu_of
from agenticrun_workers.cli.doctor.placement import Node
from agenticrun_workers.cli.plan import plan_finding
from agenticrun_workers.findings import Verdict
from agenticrun_workers.sizing.gpus import GPUS
from agenticrun_workers.sizing.published import PUBLISHED

ROOT = Path(__file__).parents[3]
ONE_GPU = str(ROOT / "examples/gpu/one-gpu.yaml")
PAIR = str(ROOT / "examples/gpu/two-plus-two.yaml")


@pytest.fixture(autouse=True)
def a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "gpus", list)


def plan(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *words])
    assert not isinstance(result.exception, Exception), result.exception
    return result.exit_code, result.output


def as_json(*words: str) -> tuple[int, Any]:
    code, output = plan(*words, "-o", "json")
    return code, json.loads(output)


def test_a_run_that_fits_shows_its_arithmetic_and_ends_with_zero() -> None:
    code, output = plan("-f", ONE_GPU, "--gpu", "l4")
    assert code == 0
    assert "qwen-one-gpu: Qwen/Qwen2.5-0.5B-Instruct, 494 M parameters, bfloat16, on l4" in output
    for shown in (
        "trainer: the GPU of the rank",
        "494 M x 8 bytes",
        "of 22.0 GiB: fits",
        "rollout",
        "a checkpoint: 5.5 GiB; 3 of them (keep + 1): 16.6 GiB",
        "The run fits.",
    ):
        assert shown in output


def test_a_run_that_does_not_fit_ends_with_64_and_commands_that_fit() -> None:
    code, output = plan("-f", PAIR, "--set", "model.path=Qwen/Qwen3-32B")
    assert code == 64
    assert "on h100 (79.1 GiB, assumed: set --gpu)" in output
    refused = next(line for line in output.splitlines() if line.startswith("spec.roles.trainer"))
    assert "spec.roles.trainer.gpus: trainer: the GPU of each of 2 ranks needs 290.4" in refused
    suggested = [line for line in output.splitlines() if line.startswith("with ")]
    assert suggested
    words = suggested[0].partition("agenticrun plan ")[2].split()
    assert plan(*words)[0] == 0


def test_json_has_everything_in_bytes_and_seconds() -> None:
    code, found = as_json("-f", PAIR, "--set", "model.path=Qwen/Qwen3-32B", "--gpu", "h200")
    assert (code, found["fits"]) == (64, False)
    assert found["model"] == {
        "name": "Qwen/Qwen3-32B",
        "parameters": 32_762_123_264,
        "activeParameters": 32_762_123_264,
    }
    assert found["gpu"]["name"] == "h200"
    trainer = found["places"][0]
    assert trainer["needed"] == sum(item["bytes"] for item in trainer["items"])
    assert found["step"]["phases"]["training"]["limit"] == "compute"
    assert all(change["set"] for change in found["changes"])


def test_shorter_trajectories_take_less_time() -> None:
    seconds = [
        as_json("-f", PAIR, "--tokens", tokens)[1]["step"]["seconds"] for tokens in ("1024", "4096")
    ]
    assert seconds[0] < seconds[1] / 2


def test_a_config_stands_in_for_a_model_that_is_not_here(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(PUBLISHED["Qwen/Qwen3-8B"]))
    arguments = ("-f", PAIR, "--set", "model.path=/models/ours", "--gpu", "b200")
    code, output = plan(*arguments)
    assert code == 64
    assert "/models/ours is no folder here" in output
    assert "--config config.json" in output
    _, found = as_json(*arguments, "--config", str(file))
    assert found["model"]["parameters"] == 8_190_735_360


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no JSON", "cannot be read"),
        ("[]", "has no model_type"),
        ('{"model_type": "nothing"}', "is no config that transformers knows"),
        ('{"model_type": "t5"}', "describes no causal language model"),
    ],
)
def test_a_wrong_config_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    code, output = plan("-f", PAIR, "--config", str(file))
    assert (code, message in output) == (64, True)


def test_a_mixture_of_experts_is_sized_and_not_refused() -> None:
    words = ("-f", PAIR, "--set", "model.path=Qwen/Qwen3-30B-A3B")
    _, output = plan(*words)
    assert "30.53 B parameters (3.35 B for each token)" in output
    assert "spec.model.path" not in output


def test_a_mixture_that_no_trainer_takes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "deepseek_v4", "num_hidden_layers": 4, "vocab_size": 1000}')
    code, output = plan("-f", PAIR, "--config", str(file))
    assert code == 64
    assert "is a mixture of experts (deepseek_v4)" in " ".join(output.split())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("pipeline.actorTrain.strategy.config.fsdp_size=all", "fsdp_size: must be a number"),
        (
            "pipeline.actorTrain.strategy.config.ulysses_sequence_parallel_size=0",
            "ulysses_sequence_parallel_size: must be a number of at least 1, not 0",
        ),
        ("pipeline.actorInfer.strategy.config.mem_fraction_static=80", "at most 1, not 80"),
    ],
)
def test_an_option_that_is_no_number_is_named(change: str, message: str) -> None:
    code, output = plan("-f", PAIR, "--set", change)
    assert (code, message in output) == (64, True)
    assert plan_finding(a_run(change), pods=True).verdict is Verdict.FAILED


def test_an_unknown_gpu_is_a_usage_error_that_lists_the_known_ones() -> None:
    code, output = plan("-f", PAIR, "--gpu", "h1000")
    assert code == 2
    assert "rtx4090" in output


def test_a_laptop_run_needs_no_gpu() -> None:
    code, found = as_json("-f", str(ROOT / "examples/frozen-lake.yaml"))
    assert (code, found["gpu"], found["step"]) == (0, None, None)


def test_the_help_lists_every_gpu() -> None:
    _, output = plan("--help")
    text = " ".join(output.replace("│", " ").split())
    assert all(name in text for name in GPUS)


def a_run(*changes: str) -> AgenticRun:
    return load_run_with(Path(PAIR), changes, local=True)


def test_doctor_says_whether_a_run_fits() -> None:
    assert plan_finding(a_run(), pods=True).verdict is Verdict.OK
    large = plan_finding(a_run("model.path=Qwen/Qwen3-32B"), pods=True)
    assert large.verdict is Verdict.FAILED
    assert "290.4 GiB" in large.found
    assert "--set roles.trainer.gpus=8" in large.advice
    small_pods = a_run("roles.trainer.shmSize=500Mi")
    assert plan_finding(small_pods, pods=True).verdict is Verdict.FAILED
    assert plan_finding(small_pods, pods=False).verdict is Verdict.OK
    assert plan_finding(a_run("roles.trainer.shmSize=1Gi"), pods=True).verdict is Verdict.WARNING
    unknown = plan_finding(a_run("model.path=/models/ours"), pods=True)
    assert unknown.verdict is Verdict.NOT_CHECKED
    laptop = load_run_with(ROOT / "examples/frozen-lake.yaml", (), local=True)
    assert plan_finding(laptop, pods=False).verdict is Verdict.NOT_CHECKED


def test_doctor_takes_the_smallest_gpu_of_the_nodes() -> None:
    def node(**labels: str) -> Node:
        return Node("node", labels, [], {}, {})

    h100 = node(**{PRODUCT: "NVIDIA-H100-80GB-HBM3", PRODUCT_MIB: "81559"})
    l4 = node(**{PRODUCT: "NVIDIA-L4", PRODUCT_MIB: "23034"})
    found = gpu_of([h100, l4, node()])
    assert found is not None
    assert (found.name, found.memory) == ("l4", 23_034 * 2**20)
    assert gpu_of([node()]) is None
