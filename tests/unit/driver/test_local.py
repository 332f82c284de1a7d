"""Runs that cannot run on this machine as asked are refused before anything is started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from typer.testing import CliRunner

from agenticrun_api import Role, parse_run
from agenticrun_api.names import ExitCode
from agenticrun_workers.cli import app
from agenticrun_workers.driver import local_actors
from agenticrun_workers.driver.local_actors import (
    START_TRIES,
    check_gpus,
    check_in_process,
    embedded_ray,
    with_patience,
)
from agenticrun_workers.errors import CannotStart, InvalidConfig
from tiny_runs import tiny_document, tiny_run

KL = {"algorithm": {"lossKl": {"coef": 0.01}}}


@pytest.mark.parametrize(
    ("spec", "pipeline", "message"),
    [
        (
            {"roles": {"trainer": {"replicas": 2}}},
            {},
            "spec.roles.trainer.replicas: --in-process runs one trainer rank: "
            "set spec.roles.trainer.replicas to 1, or leave out --in-process",
        ),
        (
            {"roles": {"trainer": {"gpus": 2}}},
            {},
            "spec.roles.trainer.gpus: --in-process runs one trainer rank: "
            "set spec.roles.trainer.gpus to 1, or leave out --in-process",
        ),
        (
            {"roles": {"reference": {"replicas": 2}}},
            KL,
            "spec.roles.reference.replicas: --in-process runs one reference rank: ",
        ),
        (
            {"placement": "Colocated"},
            {},
            "spec.placement: engines that take turns with trainers need a process of their own: "
            "set spec.placement to Disaggregated, or leave out --in-process",
        ),
        (
            {},
            {"actorTrain": {"strategy": {"name": "deepspeed"}}},
            "spec.pipeline.actorTrain.strategy.name: deepspeed needs a process of its own: ",
        ),
    ],
)
def test_a_run_that_needs_processes_is_refused_with_its_field(
    spec: dict[str, Any],
    pipeline: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    document = tiny_document(**pipeline)
    document["spec"] |= spec
    file, output = tmp_path / "run.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump(document))
    command = ["run", "-f", str(file), "-o", str(output), "--in-process"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == ExitCode.INVALID_CONFIG
    assert result.output.startswith(message)
    assert not output.exists()


@pytest.mark.parametrize("role", ["trainer", "inference", "env"])
def test_gpus_that_torch_does_not_see_are_refused_in_one_process_too(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    document = tiny_document()
    document["spec"]["roles"] = {role: {"gpus": 1}}
    file, output = tmp_path / "run.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump(document))
    command = ["run", "-f", str(file), "-o", str(output), "--in-process"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == ExitCode.INVALID_CONFIG
    assert result.output.startswith(
        f"spec.roles.{role}.gpus: the run asks for 1 GPUs ({role} 1), and torch sees 0: "
    )
    assert not output.exists()


@pytest.mark.parametrize("options", [[], ["--in-process"]])
def test_a_suspended_run_is_refused(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    document = tiny_document()
    document["spec"]["suspend"] = True
    file, output = tmp_path / "run.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump(document))
    result = CliRunner().invoke(app, ["run", "-f", str(file), "-o", str(output), *options])
    assert result.exit_code == ExitCode.INVALID_CONFIG
    assert result.output.startswith("spec.suspend: a suspended run does not train: ")
    assert not output.exists()


def test_engines_env_workers_and_one_rank_of_each_model_share_a_process() -> None:
    document = tiny_document(**KL, weightSync={"transport": "Broadcast"})
    document["spec"]["roles"] = {
        "inference": {"replicas": 2},
        "env": {"replicas": 3},
        "reference": {},
    }
    check_in_process(parse_run(document))


def test_a_debugger_in_an_environment_runs_into_no_limit() -> None:
    env = tiny_document()["spec"]["pipeline"]["envs"][0]
    limited = tiny_run(envs=[{**env, "stepTimeoutSeconds": 1, "isolated": True}])
    (found,) = with_patience(limited).spec.pipeline.envs
    assert (found.step_timeout_seconds, found.isolated) == (86_400, False)
    (found,) = with_patience(tiny_run(deterministic=True)).spec.pipeline.envs
    assert found.step_timeout_seconds is None


@pytest.mark.parametrize(
    ("roles", "available", "message"),
    [
        ({}, 0, ""),
        ({"trainer": {"gpus": 2}, "inference": {"gpus": 1}}, 3, ""),
        (
            {"trainer": {"gpus": 2, "replicas": 2}, "inference": {"gpus": 1}},
            4,
            "spec.roles.inference.gpus: the run asks for 5 GPUs (inference 1, trainer 4), and this "
            "machine has 4: use a cluster or machine that has them, or take CPUs for a small model "
            "with --set roles.inference.gpus=0 --set roles.trainer.gpus=0",
        ),
    ],
)
def test_a_run_with_more_gpus_than_the_machine_is_refused(
    roles: dict[str, Any], available: int, message: str
) -> None:
    document = tiny_document()
    document["spec"]["roles"] = roles
    pods = {Role.TRAINER, Role.INFERENCE, Role.ENV}
    if not message:
        check_gpus(parse_run(document, local=True), pods, available)
        return
    with pytest.raises(InvalidConfig) as refused:
        check_gpus(parse_run(document, local=True), pods, available)
    assert str(refused.value) == message


@pytest.fixture
def own_environment() -> Iterator[None]:
    with mock.patch.dict(os.environ):
        yield


LATE = "The current node timed out during startup. This could happen because some of the raylet..."


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize(("late", "starts"), [(0, 1), (2, 3), (START_TRIES, START_TRIES)])
def test_ray_gets_another_try_on_a_busy_machine(
    late: int, starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[subprocess.Popen[bytes]] = []

    def start(**_: Any) -> None:
        children.append(subprocess.Popen(["sleep", "600"]))
        if len(children) <= late:
            raise Exception(LATE)

    monkeypatch.setattr("ray.init", start)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    monkeypatch.setattr(local_actors, "PATIENCE_SECONDS", 0.0)
    too_late = pytest.raises(CannotStart, match="this machine is too busy")
    with too_late if late == START_TRIES else nullcontext(), embedded_ray(tiny_run()):
        assert [child.poll() is None for child in children] == [False] * late + [True]
    assert len(children) == starts
    assert all(child.wait(10) == -signal.SIGKILL for child in children)


@pytest.mark.usefixtures("own_environment")
def test_another_error_of_ray_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[object] = []

    def start(**options: Any) -> None:
        tries.append(options)
        raise RuntimeError("Ray cannot be used")

    monkeypatch.setattr("ray.init", start)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    with pytest.raises(RuntimeError, match="cannot be used"), embedded_ray(tiny_run()):
        pass
    assert len(tries) == 1
