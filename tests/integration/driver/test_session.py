"""Whole attempts on a real Ray with a tiny model: training, failures and resumes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import ray

from agenticrun_api import (
    Activity,
    AgenticRun,
    Commands,
    FinalReport,
    Outcome,
    Reason,
    parse_run,
)
from agenticrun_workers.driver.checkpoints import CheckpointStore
from agenticrun_workers.envs import FrozenLake, StepResult
from agenticrun_workers.inference import UnusableModel
from agenticrun_workers.inference.actor import EngineActor, log_folder
from agenticrun_workers.launch import ActorOptions
from agenticrun_workers.launch.ray_launcher import RayLauncher
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.reporting.run_folder import RunFolder
from agenticrun_workers.rollout.recording import Recording
from agenticrun_workers.types import Stream
from engine_checks import ask, prompt
from tiny_model import tiny_model
from tiny_runs import InProcessAttempt, TinyAttempt, tiny_document, tiny_run
from traces import durations, processes, read_trace
from waiting import eventually_in_loop

pytestmark = pytest.mark.usefixtures("ray_node")

COMPARED = (
    "rollout/score/mean",
    "tokens/response",
    "actor/entropy",
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/lr",
)


@pytest.fixture(autouse=True)
def _see_placements(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def pids(caplog: pytest.LogCaptureFixture, actor: str) -> list[int]:
    """Process ids of actors whose name begins so, in the order in which they came up."""
    placed = [record.args for record in caplog.records if record.msg.startswith("%s runs on")]
    return [
        args[3]
        for args in placed
        if isinstance(args, tuple) and str(args[0]).startswith(actor) and isinstance(args[3], int)
    ]


async def execute(session: TinyAttempt) -> FinalReport:
    return await asyncio.wait_for(session.execute(), 240)


async def kill_after_step(
    session: TinyAttempt, step: int, caplog: pytest.LogCaptureFixture, actor: str
) -> FinalReport:
    """Run the session and kill one of its actors when `step` steps are done."""
    running = asyncio.create_task(execute(session))
    while session.sink.step < step and not running.done():
        await asyncio.sleep(0.01)
    if not running.done():
        os.kill(pids(caplog, actor)[0], signal.SIGKILL)
    return await running


async def test_a_run_trains_validates_saves_and_says_so(tmp_path: Path) -> None:
    session = TinyAttempt(tiny_run(), tmp_path)
    report = await execute(session)
    assert report.outcome is Outcome.SUCCEEDED, report.message
    last = session.sink.snapshots[-1]
    assert (last.step, last.policy_version, last.final) == (3, 3, report)
    assert last.metrics["val/Lake/success"] >= 0
    assert last.metrics["val/Lake/random_success"] >= 0
    assert sorted(session.training_steps()) == [1, 2, 3]
    assert {line["staleness/max"] for line in session.training_steps().values()} == {0.0}
    newest = CheckpointStore(tmp_path / "checkpoints", "tiny-uid", keep=1).newest()
    assert newest is not None
    assert newest.step == 3


async def test_a_run_that_loses_a_pod_in_mid_rollout_resumes_without_losing_a_step(
    tmp_path: Path,
) -> None:
    whole = InProcessAttempt(tiny_run(maxSteps=4), tmp_path / "whole")
    await execute(whole)
    stopped = TinyAttempt(tiny_run(maxSteps=4), tmp_path / "parts")
    running = asyncio.create_task(execute(stopped))
    while not running.done() and not (
        stopped.sink.step >= 2 and stopped.sink.snapshots[-1].activity is Activity.ROLLOUT
    ):
        await asyncio.sleep(0.01)
    stopped.requests.apply(Commands(stop=True, leaving_pod="tiny-trainer-0"))
    report = await running
    assert (report.outcome, report.reason) == (Outcome.STOPPED, Reason.DISRUPTED), report.message
    last = stopped.sink.snapshots[-1]
    assert last.checkpoint is not None
    assert last.checkpoint.step == last.step
    resumed = TinyAttempt(tiny_run(maxSteps=4), tmp_path / "parts", attempt=2)
    assert (await execute(resumed)).outcome is Outcome.SUCCEEDED
    assert sorted(resumed.training_steps()) == [1, 2, 3, 4]
    for step, expected in whole.training_steps().items():
        found = resumed.training_steps()[step]
        assert {k: found[k] for k in COMPARED} == pytest.approx(
            {k: expected[k] for k in COMPARED}, rel=1e-3, abs=1e-5
        ), step


async def test_the_learning_rate_does_not_jump_when_the_run_gets_longer(tmp_path: Path) -> None:
    """The critic's schedule spans all steps, the actor's those after the critic's warm-up."""
    training = {"learningRate": 0.01, "lrSchedulerType": "linear"}
    config: dict[str, Any] = {
        "criticWarmup": 1,
        "evalSteps": 0,
        "warmup": None,
        "algorithm": {"name": "gae"},
        "actorTrain": {"training": {"miniBatchSize": 4} | training},
        "critic": {"training": training},
    }
    short = tiny_run(maxSteps=4, **config)
    first = InProcessAttempt(short, tmp_path)
    running = asyncio.create_task(execute(first))
    while first.sink.step < 2 and not running.done():
        await asyncio.sleep(0.01)
    first.requests.stop.set()
    assert (await running).outcome is Outcome.STOPPED
    done = max(first.training_steps())
    assert done < 4
    longer = InProcessAttempt(tiny_run(maxSteps=done + 4, **config), tmp_path, attempt=2)
    report = await execute(longer)
    assert report.outcome is Outcome.SUCCEEDED, report.message
    steps = longer.training_steps()
    # The rate of a step's last optimizer step: of two for the actor, of one for the critic.
    actor, critic = 0.01 * (1 - (done - 1) / 3), 0.01 * (1 - done / 4)
    for step in range(done + 1, done + 5):
        taken = step - done - 1
        assert steps[step]["actor/lr"] == pytest.approx(actor * (1 - (2 * taken + 1) / 8))
        assert steps[step]["critic/lr"] == pytest.approx(critic * (1 - (2 * taken + 1) / 8))
    again = InProcessAttempt(tiny_run(maxSteps=done + 5, **config), tmp_path, attempt=3)
    report = await execute(again)
    assert report.outcome is Outcome.SUCCEEDED
    assert "actor_train: the schedule has brought the learning rate to 0" in report.message
    assert max(again.training_steps()) == done + 4


async def test_a_killed_rank_ends_the_attempt_and_the_next_one_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = TinyAttempt(tiny_run(maxSteps=4), tmp_path)
    report = await kill_after_step(session, 2, caplog, "trainer")
    assert (report.outcome, report.reason, report.retryable) == (Outcome.FAILED, "WorkerLost", True)
    again = TinyAttempt(tiny_run(maxSteps=4), tmp_path, attempt=2)
    assert (await execute(again)).outcome is Outcome.SUCCEEDED
    assert sorted(again.training_steps()) == [1, 2, 3, 4]


def wide(run: AgenticRun) -> AgenticRun:
    """The same run with two pods of every role."""
    document = run.document()
    document["spec"]["roles"] |= {role: {"replicas": 2} for role in ("trainer", "inference", "env")}
    return parse_run(document)


async def test_two_of_every_role_train_as_one(tmp_path: Path) -> None:
    one = InProcessAttempt(tiny_run(maxSteps=2), tmp_path / "one")
    await execute(one)
    two = TinyAttempt(wide(tiny_run(maxSteps=2)), tmp_path / "two")
    request = RunFolder(tmp_path / "two").ask_for_trace("start", 2)
    report = await execute(two)
    assert report.outcome is Outcome.SUCCEEDED, report.message
    for step, expected in one.training_steps().items():
        found = two.training_steps()[step]
        assert {k: found[k] for k in COMPARED} == pytest.approx(
            {k: expected[k] for k in COMPARED}, rel=1e-3, abs=1e-5
        ), step
    events = read_trace(request.answer)["traceEvents"]
    names = processes(events)
    assert list(names) == [
        "driver",
        *(f"{kind}-{number}" for kind in KINDS for number in range(2)),
    ]
    for name, expected_spans in SPANS.items():
        assert expected_spans <= set(durations(events, names[name])), name
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert {
        "tokens per second",
        "requests in flight",
        "episodes in flight",
        "groups ready",
    } <= counters


KINDS = ("trainer", "engine", "env-worker")
SPANS = {
    "driver": {"step", "sync", "val", "rollout", "old_log_probs_values", "credit", "train"},
    "trainer-0": {"fetch", "score", "train_actor", "forward", "backward", "optimizer_step"},
    "engine-0": {"computing", "idle: weights", "idle: gate"},
    "env-worker-0": {"playing", "idle: gate", "reset", "generate", "step"},
}
"""Spans that a trace has for a process."""


@pytest.mark.parametrize("old", ["Recompute", "Rollout"])
async def test_rollout_ahead_of_training_stays_within_the_limit(tmp_path: Path, old: str) -> None:
    config = {
        "maxSteps": 4,
        "staleness": {"max": 1, "offPolicy": "Ignore"},
        "oldLogProbs": old,
        "actorTrain": {"training": {"learningRate": 0.003}},  # one optimizer step for each batch
        "algorithm": {"entropyLossCoef": 0.1},  # the policy moves without any reward
    }
    session = InProcessAttempt(
        tiny_run(**config, trainEnvs={"groups": 8, "groupSize": 2, "tags": ["Lake"]}), tmp_path
    )
    report = await execute(session)
    assert report.outcome is Outcome.SUCCEEDED, report.message
    steps = session.training_steps().values()
    assert max(step["staleness/max"] for step in steps) == 1.0
    assert all(step.get("engine/logprob_gap", 0.0) < 1e-3 for step in steps), "no stale tokens"
    changed = [
        abs(step["actor/ratio_max"] - 1) > 1e-3 for step in steps if step["staleness/max"] == 1
    ]
    assert set(changed) == {old == "Rollout"}


class SlowLake(FrozenLake):
    """Some training levels take much longer than a training step."""

    blocking = True

    def reset(self, seed: int, split: Stream) -> str:
        self._slow = split is Stream.TRAIN and seed % 4 == 0
        return super().reset(seed, split)

    def step(self, action: str) -> StepResult:
        time.sleep(0.5 * self._slow)
        return super().step(action)


async def test_slow_episodes_that_grow_too_old_run_again_and_are_trained_on(tmp_path: Path) -> None:
    lake = tiny_document()["spec"]["pipeline"]["envs"][0]
    run = tiny_run(
        maxSteps=12,
        evalSteps=0,
        saveSteps=0,
        staleness={"max": 1},
        oldLogProbs="Rollout",
        envs=[{**lake, "type": f"{__name__}:SlowLake"}],
        trainEnvs={"groups": 8, "groupSize": 2, "tags": ["Lake"]},
        record={"to": str(tmp_path / "record")},
    )
    session = InProcessAttempt(run, tmp_path)
    report = await execute(session)
    assert report.outcome is Outcome.SUCCEEDED, report.message
    assert sum(line["rollout/stale"] for line in session.training_steps().values()) > 0
    recording = Recording(str(tmp_path / "record"))
    trained = [(step, t) for step in recording.steps() for t in recording.read(step).trajectories]
    assert all(step - 1 - t.oldest_version <= 1 for step, t in trained)
    newest = CheckpointStore(tmp_path / "checkpoints", "tiny-uid", keep=1).newest()
    assert newest is not None
    state = newest.driver_state()
    numbers = sorted({t.key.group for _, t in trained} | set(state.again))
    assert numbers == list(range(state.next_group)), "no group is lost"
    assert len(trained) == len({t.key for _, t in trained}) == 12 * 8


async def test_an_environment_that_does_not_import_is_a_config_error(tmp_path: Path) -> None:
    document = tiny_document()
    document["spec"]["pipeline"]["envs"][0]["type"] = "no_such_module:Lake"
    report = await execute(TinyAttempt(parse_run(document), tmp_path))
    assert (report.outcome, report.reason, report.retryable) == (
        Outcome.FAILED,
        "InvalidConfig",
        False,
    )
    assert "spec.pipeline.envs[0].type" in report.message
    assert "No module named 'no_such_module'" in report.message


def test_servers_of_engines_log_where_their_own_ray_does() -> None:
    """Not where the latest one on this machine does."""
    found = ray.get(ray.remote(log_folder).remote())
    assert (found.parent.name, found.name) == (ray.get_runtime_context().get_session_name(), "logs")
    assert found.is_dir()


@pytest.mark.parametrize("strategy", ["transformers", "sglang", "vllm"])
async def test_an_engine_that_cannot_read_its_model_says_that_the_model_is_the_cause(
    tmp_path: Path, strategy: str
) -> None:
    """As trainers and env workers do, which fail beside it: a run reports the first error."""
    pipeline = tiny_run(actorInfer={"strategy": {"name": strategy}}).spec.pipeline
    engine = RayLauncher().start(ActorOptions(max_concurrency=2), EngineActor, "engine")
    with pytest.raises(UnusableModel, match=str(tmp_path)):  # `EnginePool` names the field
        await engine.call(lambda actor: actor.start(pipeline, ModelSource(str(tmp_path)), 1))
    engine.kill()


async def test_prometheus_can_read_the_load_of_an_engine_at_the_address_of_its_pod(
    tmp_path: Path,
) -> None:
    model = ModelSource(str(tiny_model(tmp_path)))
    engine = RayLauncher().start(ActorOptions(max_concurrency=2), EngineActor, "engine-7")
    await engine.call(lambda actor: actor.start(tiny_run().spec.pipeline, model, 1))
    request = ask(prompt(5), new=6)
    (generation,) = await engine.call(lambda actor: actor.sample([request]))
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"

    def shown() -> dict[str, float]:
        lines = urllib.request.urlopen(url).read().decode().splitlines()
        own = [line.rpartition(" ") for line in lines if 'engine="engine-7"' in line]
        return {name.partition("{")[0]: float(value) for name, _, value in own}

    tokens = "ray_agenticrun_engine_generated_tokens_total"
    await eventually_in_loop(lambda: tokens in shown(), 60, "Ray shows the load", interval=1.0)
    found = shown()
    assert found[tokens] == len(generation.tokens_T)
    assert found["ray_agenticrun_engine_prompt_tokens_total"] == 5
    assert found["ray_agenticrun_engine_running"] == 0 < found["ray_agenticrun_engine_seats"]
    assert found["ray_agenticrun_engine_busy_seconds_total"] > 0
    engine.kill()


async def test_a_model_that_cannot_be_loaded_is_a_config_error(tmp_path: Path) -> None:
    document = tiny_document()
    document["spec"]["model"] = {"path": str(tmp_path / "nothing")}
    report = await execute(TinyAttempt(parse_run(document, local=True), tmp_path))
    assert (report.outcome, report.reason, report.retryable) == (
        Outcome.FAILED,
        "InvalidConfig",
        False,
    )
    assert "spec.model.path" in report.message
