"""Where engines live and how many GPUs each takes."""

from __future__ import annotations

from typing import Any

import pytest

from agenticrun_api import AgenticRunSpec, InvalidRun, Role, parse_run
from runs import Change, run_with

ENGINE = "spec.pipeline.actorInfer.strategy"


def a_spec(*changes: Change) -> AgenticRunSpec:
    return parse_run(run_with(*changes)).spec


def engine(name: str, **config: Any) -> Change:
    return (ENGINE, {"name": name, "config": config})


def test_disaggregated_runs_have_inference_pods_also_where_nothing_is_said_about_them() -> None:
    assert a_spec().roles.workers == (Role.TRAINER, Role.INFERENCE, Role.ENV)
    assert a_spec(("spec.roles", {"env": {"replicas": 3}})).roles.replicas(Role.INFERENCE) == 1


def test_colocated_engines_live_on_the_trainers_pods() -> None:
    spec = a_spec(
        ("spec.placement", "Colocated"),
        ("spec.roles", {"trainer": {"gpus": 4, "replicas": 2}}),
        ("spec.checkpoint.none", True),
    )
    assert spec.roles.workers == (Role.TRAINER, Role.ENV)
    assert spec.actors_per_pod(Role.TRAINER) == {Role.TRAINER: 4, Role.INFERENCE: 4}
    assert (spec.actors(Role.TRAINER), spec.actors(Role.INFERENCE)) == (8, 8)
    assert (spec.roles.total_gpus(Role.TRAINER), spec.roles.total_gpus(Role.ENV)) == (8, 0)


def test_what_is_mounted_in_the_pods_reads_back_as_the_same_run() -> None:
    for change in (("spec.placement", "Colocated"), ("spec.placement", "Disaggregated")):
        run = parse_run(run_with(change))
        assert parse_run(run.document()) == run


@pytest.mark.parametrize(
    ("strategy", "engines"),
    [
        (engine("transformers"), 8),
        (engine("sglang"), 8),
        (engine("sglang", tp_size=4), 2),
        (engine("sglang", **{"tp-size": 2, "pp_size": 2}), 2),
        (engine("vllm", tensor_parallel_size=2), 4),
        (engine("vllm", tensor_parallel_size=4, pipeline_parallel_size=2), 1),
    ],
)
def test_an_engine_takes_the_gpus_that_its_own_options_ask_for(
    strategy: Change, engines: int
) -> None:
    spec = a_spec(strategy, ("spec.roles", {"inference": {"gpus": 8, "replicas": 3}}))
    assert spec.actors_per_pod(Role.INFERENCE) == {Role.INFERENCE: engines}
    assert spec.actors(Role.INFERENCE) == 3 * engines


def test_without_gpus_a_pod_carries_one_engine_whatever_its_parallelism() -> None:
    assert a_spec(engine("sglang", tp_size=2)).actors(Role.INFERENCE) == 1


@pytest.mark.parametrize(
    ("placement", "role"),
    [("Disaggregated", "inference"), ("Colocated", "trainer")],
)
def test_gpus_that_are_no_multiple_of_an_engines_are_refused(placement: str, role: str) -> None:
    with pytest.raises(
        InvalidRun,
        match=rf"spec\.roles\.{role}\.gpus: an engine takes 2 GPUs "
        r".* a multiple of that, not 3",
    ):
        a_spec(
            ("spec.placement", placement),
            ("spec.roles", {role: {"gpus": 3}}),
            engine("vllm", tensor_parallel_size=2),
        )


@pytest.mark.parametrize("size", [0, -1, "two", 1.5, True])
def test_a_size_that_is_no_number_of_gpus_is_refused(size: Any) -> None:
    with pytest.raises(
        InvalidRun,
        match=r"spec\.pipeline\.actorInfer\.strategy\.config: "
        r"tp_size must be a whole number of GPUs",
    ):
        a_spec(engine("sglang", tp_size=size))
