"""The episodes and the metrics of `agenticrun eval`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from agenticrun_api import Role, parse_run
from agenticrun_api.names import ExitCode
from agenticrun_workers.cli import app
from agenticrun_workers.cli.evaluate import table
from agenticrun_workers.driver import evaluation, local_actors
from agenticrun_workers.driver.evaluation import evaluate, evaluation_run, pass_at, summarize
from agenticrun_workers.driver.metrics import Metrics, validation_metrics
from agenticrun_workers.errors import InvalidConfig, RolloutFailed
from agenticrun_workers.launch.in_process import InProcessLauncher
from agenticrun_workers.rollout.groups import EpisodeResult, EpisodeTask
from agenticrun_workers.types import EpisodeKey, StopReason, Stream
from tiny_runs import tiny_document


@given(
    st.lists(st.booleans(), min_size=1, max_size=9).flatmap(
        lambda won: st.tuples(st.just(won), st.integers(1, len(won)))
    )
)
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_success(
    case: tuple[list[bool], int],
) -> None:
    won, k = case
    subsets = [any(subset) for subset in combinations(won, k)]
    assert pass_at(k, len(won), sum(won)) == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)


def played(
    group: int,
    member: int,
    *,
    tag: str = "Lake",
    reason: StopReason = StopReason.COMPLETED,
    **metrics: float,
) -> EpisodeResult:
    """An episode of two turns with 3 + 1 response tokens and the score 0.5."""
    return EpisodeResult(
        key=EpisodeKey(Stream.VALIDATION, group, member),
        tag=tag,
        attempt=0,
        stop_reason=reason,
        rewards_K=np.array([0.0, 0.5], np.float32),
        valid_K=np.ones(2, np.bool_),
        response_tokens_K=np.array([3, 1], np.int32),
        states_K=b"",
        tokens=20,
        oldest_version=0,
        metrics=metrics,
    )


def test_levels_are_averaged_after_their_samples() -> None:
    results = [played(0, member, success=float(member == 0)) for member in range(4)] + [
        played(1, member, success=0.0) for member in range(4)
    ]
    found = summarize(results, [1, 2, 4])["Lake"]
    assert (found.levels, found.episodes, found.success) == (2, 8, 0.125)
    assert found.pass_at == {1: pytest.approx(0.125), 2: pytest.approx(0.25), 4: pytest.approx(0.5)}
    assert (found.score, found.turns, found.response_tokens) == (0.5, 2.0, 4.0)


def test_an_episode_that_broke_off_is_a_failure_that_is_told() -> None:
    found = summarize([played(0, 0, success=1.0), played(0, 1, reason=StopReason.ENV_ERROR)], [1])[
        "Lake"
    ]
    assert (found.success, found.errors, found.stop) == (
        0.5,
        1,
        {"completed": 0.5, "env_error": 0.5},
    )


def test_an_environment_that_measures_no_success_has_none() -> None:
    results = summarize([played(0, 0, tag="Talk"), played(1, 0, success=1.0)], [1])
    assert (results["Talk"].success, results["Talk"].pass_at) == (None, {})
    console = Console(width=60)
    with console.capture() as capture:
        console.print(table(results, "a folder"))
    assert "pass@1" in capture.get()


def test_the_table_has_a_row_for_every_metric_of_validation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def with_a_new_one(results: list[EpisodeResult]) -> Metrics:
        return {**validation_metrics(results), f"val/{results[0].tag}/retries": 4.25}

    monkeypatch.setattr(evaluation, "validation_metrics", with_a_new_one)
    results = summarize([played(0, 0, jumps=2.0), played(1, 0, jumps=1.0)], [1])
    assert results["Lake"].metrics == {"jumps": 1.5, "retries": 4.25}
    console = Console(width=60)
    with console.capture() as capture:
        console.print(table(results, "a folder"))
    rows = {line.split("│")[1].strip(): line for line in capture.get().splitlines() if "│" in line}
    assert ("1.500" in rows["jumps"], "4.250" in rows["retries"]) == (True, True)


def run_with(eval_spec: dict[str, Any], **pipeline: Any) -> Any:
    return parse_run(tiny_document(eval=eval_spec, **pipeline))


def test_every_level_of_the_validation_set_is_played_so_often() -> None:
    run = run_with(
        {"samples": 4, "passAt": [1, 4]},
        valBatchSize=12,
        valEnvs={"groups": 6, "groupSize": 2, "tags": ["Lake"]},
    )
    playing = evaluation_run(run, "/models/mine").spec
    assert playing.pipeline.val_envs is not None
    assert playing.pipeline.val_envs.group_size == 4
    assert playing.pipeline.val_batch_size == 24  # six levels, as training validates
    assert (playing.model.path, playing.model.initialize) == ("/models/mine", None)


def test_engines_of_a_colocated_run_have_the_devices_to_themselves() -> None:
    document = tiny_document()
    document["spec"] |= {"placement": "Colocated", "roles": {"trainer": {"cpus": "3"}}}
    playing = evaluation_run(parse_run(document), "x").spec
    assert (playing.colocated, playing.actors(Role.INFERENCE)) == (False, 1)
    assert playing.roles.of(Role.INFERENCE).cpus == "3"


def test_sampling_of_the_evaluation_is_that_of_all_environments() -> None:
    lake = tiny_document()["spec"]["pipeline"]["envs"][0] | {
        "validationGenerating": {"temperature": 0.3}
    }
    run = run_with({"generating": {"temperature": 0.7}}, envs=[lake])
    playing = evaluation_run(run, "x").spec.pipeline
    assert playing.actor_infer.validation_generating.temperature == 0.7
    assert playing.envs[0].validation_generating is None
    kept = evaluation_run(run_with({}, envs=[lake]), "x").spec.pipeline
    assert kept.envs[0].validation_generating is not None


def test_without_a_validation_set_or_weights_there_is_nothing_to_play() -> None:
    with pytest.raises(InvalidConfig, match=r"spec\.pipeline\.valEnvs"):
        evaluation_run(run_with({}, evalSteps=0, valEnvs=None), "x")
    with pytest.raises(InvalidConfig, match=r"spec\.model\.initialize"):
        evaluation_run(run_with({}), None)


async def test_an_evaluation_whose_engines_cannot_be_kept_alive_ends_with_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its episodes would wait for an engine forever."""

    class Waiting:
        async def run(self, task: EpisodeTask) -> EpisodeResult:
            await asyncio.Event().wait()
            raise AssertionError

    @asynccontextmanager
    async def broken_actors(*_: Any) -> AsyncIterator[Any]:
        failure = asyncio.get_running_loop().create_future()
        failure.set_exception(RolloutFailed("5 engines died in a row"))
        yield SimpleNamespace(envs=Waiting(), engines=SimpleNamespace(failure=failure))

    monkeypatch.setattr(evaluation, "playing_actors", broken_actors)
    playing = evaluation_run(run_with({}), "x")
    with pytest.raises(RolloutFailed, match="5 engines died in a row"):
        await asyncio.wait_for(evaluate(playing, InProcessLauncher(), lambda _: None), 20)


@pytest.mark.parametrize(
    ("placement", "roles", "refused"),
    [
        ("Disaggregated", {"trainer": {"gpus": 8}, "inference": {}}, None),
        ("Disaggregated", {"trainer": {}, "inference": {"gpus": 2}}, "inference"),
        ("Colocated", {"trainer": {"gpus": 2}}, "trainer"),
    ],
)
def test_engines_that_need_gpus_are_refused_where_there_are_none(
    placement: str,
    roles: dict[str, Any],
    refused: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray would wait for them. Trainers do not count: an evaluation starts none."""
    document = tiny_document()
    del document["metadata"]["uid"]
    document["spec"] |= {"placement": placement, "roles": roles}
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(document))

    async def play(*_: object) -> dict[str, object]:
        return {}

    monkeypatch.setattr(local_actors, "embedded_ray", nullcontext)
    monkeypatch.setattr(local_actors, "gpus_here", lambda: 0)
    monkeypatch.setattr(evaluation, "evaluate", play)
    done = CliRunner().invoke(app, ["eval", "-f", str(file), "--model", "x"])
    assert done.exit_code == (ExitCode.INVALID_CONFIG if refused else 0), done.output
    if refused:
        assert f"spec.roles.{refused}.gpus: the run asks for 2 GPUs" in done.output
        assert f"--set roles.{refused}.gpus=0" in " ".join(done.output.split())
