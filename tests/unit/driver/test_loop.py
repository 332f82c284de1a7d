"""The loop: what happens in which order, on fakes that only write it down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agenticrun_api import Activity, Commands, LiveConfig, Pipeline, Progress
from agenticrun_api.algorithm import Guards
from agenticrun_api.pipeline import LIVE_FIELDS
from agenticrun_api.spec import Tracking
from agenticrun_workers.driver import checkpoints, loop
from agenticrun_workers.driver.checkpoints import (
    CheckpointNotSaved,
    CheckpointStore,
    DriverState,
    IsDurable,
    SaveModule,
)
from agenticrun_workers.driver.evaluation import Validator
from agenticrun_workers.driver.guards import GuardTripped
from agenticrun_workers.driver.loop import Loop
from agenticrun_workers.driver.metrics import Metrics
from agenticrun_workers.driver.outcome import exit_code, report_of, summary
from agenticrun_workers.driver.parts import LoopParts
from agenticrun_workers.driver.progress import AttemptId, ProgressReporter, Requests, StopRequested
from agenticrun_workers.driver.samples import SampleWriter
from agenticrun_workers.driver.trainer_group import Advantages
from agenticrun_workers.errors import InvalidConfig, RolloutFailed, ScheduleEnded
from agenticrun_workers.inference import EngineStats
from agenticrun_workers.rollout.controller import Group, RolloutController
from agenticrun_workers.rollout.groups import EpisodeResult, EpisodeTask
from agenticrun_workers.trainer.batch import ScoredBatch, TurnCredits
from agenticrun_workers.types import RolloutPosition, StopReason, Stream
from agenticrun_workers.weights.sync import SyncReport
from agenticrun_workers.weights.transports import Transport
from module_savers import at_once
from rollout_fakes import FakeBackend
from waiting import eventually_in_loop


class Sink:
    """Keeps every snapshot."""

    def __init__(self) -> None:
        self.snapshots: list[Progress] = []
        self.samples: list[str] = []

    def update(self, progress: Progress) -> None:
        self.snapshots.append(Progress.model_validate_json(progress.model_dump_json(by_alias=True)))

    def sample(self, transcript: str) -> None:
        self.samples.append(transcript)

    async def finish(self, progress: Progress) -> None:
        self.update(progress)


class LoggingBackend(FakeBackend):
    """Notes when a stream begins to play."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    async def run(self, task: EpisodeTask) -> EpisodeResult:
        if task.key.group == 0 or task.key.stream is Stream.TRAIN:
            who = " randomly" if task.random_policy else ""
            event = f"play {task.key.stream}{who}"
            if self.events[-1:] != [event]:
                self.events.append(event)
        return await super().run(task)


class Run:
    """A loop on fakes. `events` is what happened, in order."""

    count = 1
    """Number of engines."""
    ejected_seconds = idle_seconds = 0.0

    def __init__(
        self,
        folder: Path,
        *,
        resume: DriverState | None = None,
        restarted: bool = False,
        devices: Any = None,
        parity: Any = None,
        **changes: Any,
    ) -> None:
        config: dict[str, Any] = {
            "maxSteps": 3,
            "rolloutBatchSize": 4,
            "valBatchSize": 6,
            "evalSteps": 2,
            "saveSteps": 0,
            "envs": [{"tag": "A", "type": "frozen_lake"}],
            "trainEnvs": {"groups": 2, "groupSize": 2, "tags": ["A"]},
            "valEnvs": {"groups": 2, "tags": ["A"]},
        }
        self.pipeline = Pipeline.model_validate(config | changes)
        self.events: list[str] = []
        self.logged: list[tuple[int, Mapping[str, float]]] = []
        self.discarded: list[EpisodeResult] = []
        self.backend = LoggingBackend(self.events)
        self.sink = Sink()
        self.requests = Requests()
        self.savers: dict[str, SaveModule] = {"actor_train": at_once(self.save)}
        self.measured: Metrics = {"actor/pg_loss": 0.0}
        self.schedule_ended = False
        self.kl: float | None = None
        self.rollout = RolloutController.of(
            self.pipeline,
            self.backend,
            discard=self.discard,
            position=resume.position if resume else RolloutPosition(),
        )
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.store = CheckpointStore(folder, "uid", keep=5)
        parts = LoopParts(
            pipeline=self.pipeline,
            trainers=self,
            engines=self,
            rollout=self.rollout,
            validator=Validator(self.backend, self.pipeline, resumed=resume),
            warmup=self,  # type: ignore[arg-type]
            actors=self,
            checkpoints=self.store,
            trackers=[self],
            samples=SampleWriter(folder, Tracking(), self.pipeline),
            progress=ProgressReporter(
                self.sink, AttemptId("uid", "run-1", 1), self.pipeline.max_steps, generation=1
            ),
            requests=self.requests,
            restarted=restarted,
            failures=[self.failure],
            devices=devices,
            parity=parity,
        )
        self.loop = Loop(parts, resume)
        self.warm_up_waits = asyncio.Event()
        self.warm_up_waits.set()

    async def steps(self) -> AsyncGenerator[Metrics, None]:
        if self.pipeline.warmup:
            self.events.append("warm up")
            await self.warm_up_waits.wait()
            yield {"warmup/loss": 1.0}

    async def freeze_reference(self) -> None:
        self.events.append("freeze the reference")

    async def stretch_schedules(self, step: int, max_steps: int) -> None:
        if self.schedule_ended and max_steps > step:
            raise ScheduleEnded("actor_train: the schedule has brought the learning rate to 0")
        self.events.append(f"stretch the schedules at step {step} to {max_steps}")

    async def score(self, groups: tuple[Group, ...], version: int) -> ScoredBatch:
        self.scored = groups
        if self.kl is None:
            return ScoredBatch(None)
        return ScoredBatch(
            {r.key: np.full(r.turns, self.kl) for group in groups for r in group.results}
        )

    async def compute_advantages(self, credits: TurnCredits, kl_coef: float) -> Advantages:
        self.kl_coef = kl_coef
        targets: list[Any] = ["targets"]
        return Advantages({}, targets)

    async def train_critic(self, targets: Sequence[Any]) -> Metrics:
        assert targets == ["targets"]
        return {}

    async def train_actor(self, version: int, *, update: bool) -> Metrics:
        self.events.append(f"train {'' if update else 'the critic of '}version {version}")
        return dict(self.measured)

    @property
    def weights(self) -> Any:
        return "weights"

    async def update_weights(
        self, weights: Any, version: int, handover: Callable[[], Awaitable[None]] | None = None
    ) -> SyncReport:
        assert weights == "weights"
        assert handover is None or self.loop._parts.devices
        self.backend.version = version
        self.events.append(f"sync {version}")
        return SyncReport(Transport.DISK, 64, 0.25, {})

    async def stats(self) -> Mapping[str, EngineStats]:
        return {}

    async def save(self, folder: str) -> None:
        Path(folder).mkdir(parents=True)
        (Path(folder) / "rank-0").touch()
        self.events.append(f"save {Path(folder).parent.name}")

    async def metrics(self) -> Metrics:
        return {"rollout/spilled_trajectories": 0.0}

    async def discard(self, results: list[EpisodeResult]) -> None:
        self.discarded += results

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.logged.append((step, metrics))

    def close(self) -> None: ...


async def test_a_fresh_run_goes_through_its_steps_in_order(tmp_path: Path) -> None:
    run = Run(tmp_path, warmup={"steps": 1})
    await run.loop.run()
    assert run.events == [
        "warm up",
        "freeze the reference",
        "play validation randomly",
        "sync 0",
        "play validation",
        "play train",
        "train version 1",
        "sync 1",
        "play train",
        "train version 2",
        "sync 2",
        "play validation",
        "play train",
        "train version 3",
        "sync 3",
        "play validation",
        "save step-3",
    ]


class Parity:
    """A comparison of engines and trainer; its events are those of the run."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.sampled = False
        self.error: InvalidConfig | None = None

    async def sample(self) -> None:
        self.events.append("sample the probe")
        self.sampled = True

    async def compare(self) -> tuple[Metrics, InvalidConfig | None]:
        if not self.sampled:
            return {}, None
        self.sampled = False
        self.events.append("compare")
        return {"engine/parity_gap": 0.25}, self.error


class Devices:
    handovers = 0

    async def to_trainers(self) -> None: ...

    async def to_engines(self) -> None: ...


@pytest.mark.parametrize("colocated", [False, True])
async def test_engines_are_compared_once_before_the_first_step(
    tmp_path: Path, colocated: bool
) -> None:
    parity = Parity()
    run = Run(tmp_path, parity=parity, devices=Devices() if colocated else None, evalSteps=0)
    parity.events = run.events
    await run.loop.run()
    probed = (
        ["sync 0", "sample the probe", "play train", "compare", "train version 1"]
        if colocated
        else ["sync 0", "sample the probe", "compare", "play train", "train version 1"]
    )
    assert run.events[1:6] == probed
    assert run.events.count("compare") == 1
    assert (0, {"engine/parity_gap": 0.25}) in run.logged


@pytest.mark.parametrize("colocated", [False, True])
async def test_an_engine_of_another_model_ends_the_run_before_its_first_step(
    tmp_path: Path, colocated: bool
) -> None:
    parity = Parity()
    parity.error = InvalidConfig("spec.pipeline.actorInfer.strategy.name", "another model")
    run = Run(tmp_path, parity=parity, devices=Devices() if colocated else None)
    with pytest.raises(InvalidConfig, match="another model"):
        await run.loop.run()
    assert not any(event.startswith(("train", "save")) for event in run.events)
    assert (0, {"engine/parity_gap": 0.25}) in run.logged
    report = report_of(parity.error, 0)
    assert (report.reason, report.retryable) == ("InvalidConfig", False)
    assert exit_code(report) == 64


async def test_every_trajectory_was_sampled_by_the_newest_policy_and_is_freed_after_training(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    await run.loop.run()
    assert [
        metrics["staleness/max"] for _, metrics in run.logged if "staleness/max" in metrics
    ] == [0.0] * 3
    assert len(run.discarded) == 12


async def test_episodes_of_a_validation_that_fail_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, maxSteps=2, warmup={"steps": 1})

    def fate(task: EpisodeTask) -> StopReason:
        if task.key.stream is not Stream.VALIDATION or "train version 2" in run.events:
            return StopReason.COMPLETED
        return StopReason.TIMEOUT if task.random_policy else StopReason.ENV_ERROR

    run.backend.fate = fate
    await run.loop.run()
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "random validation episodes of 'A' end with timeout: ",
        "validation episodes of 'A' end with env_error: ",
    ]
    first, last = (metrics for _, metrics in run.logged if "val/score/mean" in metrics)
    assert (first["val/A/stop/env_error"], first["val/A/random_errors"]) == (1.0, 1.0)
    assert "val/A/stop/env_error" not in last
    snapshots = [snapshot.metrics for snapshot in run.sink.snapshots]
    assert any(metrics.get("val/A/stop/env_error") == 1.0 for metrics in snapshots)
    assert "val/A/stop/env_error" not in snapshots[-1], "the figure of an earlier validation"
    assert snapshots[-1]["val/A/random_errors"] == 1.0


async def test_the_warm_up_says_how_many_episodes_failed(tmp_path: Path) -> None:
    run = Run(tmp_path, maxSteps=1, evalSteps=0, warmup={"steps": 2})

    async def steps() -> AsyncGenerator[Metrics, None]:
        yield {"warmup/loss": 1.0, "warmup/discarded": 0.0}
        yield {"warmup/loss": 0.5, "warmup/discarded": 3.0}

    run.steps = steps  # type: ignore[method-assign]
    await run.loop.run()
    said = [shown.message for shown in run.sink.snapshots if "warm-up step" in shown.message]
    assert list(dict.fromkeys(said)) == [
        "warm-up step 1 of 2, loss 1.000",
        "warm-up step 2 of 2, loss 0.500, 3 episodes failed",
    ]


async def test_a_resumed_run_warms_up_no_more_and_continues_its_numbers(tmp_path: Path) -> None:
    state = DriverState(
        step=2,
        next_group=6,
        again=(4, 5),
        best_success=0.9,
        baselines={"val/A/random_success": 0.02},
    )
    run = Run(tmp_path, resume=state, warmup={"steps": 1})
    await run.loop.run()
    assert run.events == [
        "sync 2",
        "play validation",
        "play train",
        "train version 3",
        "sync 3",
        "play validation",
        "save step-3",
    ]
    keys = [task.key for task in run.backend.tasks]
    assert {key.group for key in keys if key.stream is Stream.TRAIN} == {4, 5}
    assert run.sink.snapshots[-1].metrics["val/A/random_success"] == 0.02
    assert run.logged[-1][1]["val/success/best"] == 0.9


def changed(run: Run, generation: int = 2, **fields: Any) -> Commands:
    """Return the commands that hold changed settings of a run."""
    pipeline = run.pipeline
    config = LiveConfig(
        generation=generation,
        **{name: getattr(pipeline, name) for name in LIVE_FIELDS} | fields,
    )
    return Commands(config=config)


async def test_settings_that_change_take_effect_after_the_current_step(tmp_path: Path) -> None:
    run = Run(tmp_path, maxSteps=3, saveSteps=0, evalSteps=0)
    train_actor = run.train_actor

    async def change_then_train(version: int, *, update: bool) -> Metrics:
        if version == 2:
            run.requests.apply(changed(run, max_steps=6, save_steps=2, eval_steps=5))
        return await train_actor(version, update=update)

    run.train_actor = change_then_train  # type: ignore[method-assign]
    await run.loop.run()
    assert [event for event in run.events if event.startswith("save")] == [
        "save step-4",
        "save step-6",
    ]
    assert [event for event in run.events if event.startswith("stretch")] == [
        "stretch the schedules at step 2 to 6"
    ]
    told = [
        (shown.step, shown.max_steps, shown.observed_generation) for shown in run.sink.snapshots
    ]
    assert (1, 3, 1) in told
    assert told[-1] == (6, 6, 2)
    assert run.sink.snapshots[-1].metrics["val/A/success"] >= 0


@pytest.mark.parametrize(
    ("changes", "stretched"),
    [
        ({}, []),
        ({"saveSteps": 7}, []),
        ({"maxSteps": 9}, ["stretch the schedules at step 3 to 9"]),
        (
            {"maxSteps": 9, "actorTrain": {"training": {"miniBatchSize": 2}}},
            ["stretch the schedules at step 3 to 9"],
        ),
    ],
)
async def test_a_resume_with_another_number_of_steps_stretches_the_schedules(
    tmp_path: Path, changes: dict[str, Any], stretched: list[str]
) -> None:
    await Run(tmp_path, maxSteps=3, evalSteps=0).loop.run()
    saved = CheckpointStore(tmp_path, "uid", keep=5).newest()
    assert saved is not None
    again = Run(
        tmp_path, resume=saved.driver_state(), **({"maxSteps": 3, "evalSteps": 0} | changes)
    )
    await again.loop.run()
    assert [event for event in again.events if event.startswith("stretch")] == stretched
    saved = again.store.newest()
    assert saved is not None
    once_more = Run(
        tmp_path, resume=saved.driver_state(), **({"maxSteps": 3, "evalSteps": 0} | changes)
    )
    await once_more.loop.run()
    assert [event for event in once_more.events if event.startswith("stretch")] == []


async def test_a_run_may_be_shortened_below_the_step_that_it_has_reached(tmp_path: Path) -> None:
    run = Run(tmp_path, maxSteps=9, evalSteps=0)
    train_actor = run.train_actor

    async def shorten_then_train(version: int, *, update: bool) -> Metrics:
        if version == 3:
            run.requests.apply(changed(run, max_steps=2))
        return await train_actor(version, update=update)

    run.train_actor = shorten_then_train  # type: ignore[method-assign]
    await run.loop.run()
    saved = run.store.newest()
    assert saved is not None
    assert saved.step == 3


async def test_steps_that_are_added_during_the_last_validation_are_trained(tmp_path: Path) -> None:
    run = Run(tmp_path, maxSteps=1, evalSteps=0)
    save = run.store.save

    async def extend_then_save(*arguments: Any) -> Any:
        if run.loop._step == 1:
            run.requests.apply(changed(run, max_steps=2))
        return await save(*arguments)

    run.store.save = extend_then_save  # type: ignore[method-assign,assignment]
    await run.loop.run()
    assert run.sink.snapshots[-1].step == 2


@pytest.mark.parametrize("during", ["train_actor", "save"])
async def test_steps_that_are_added_when_the_schedule_has_ended_are_refused_and_the_run_succeeds(
    tmp_path: Path, during: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, maxSteps=2, evalSteps=1)
    place: Any = run if during == "train_actor" else run.store
    before = getattr(place, during)

    async def extend_then(*arguments: Any, **named: Any) -> Any:
        if during == "save" or arguments == (2,):
            run.schedule_ended = True
            run.requests.apply(changed(run, max_steps=5, save_steps=1))
        return await before(*arguments, **named)

    setattr(place, during, extend_then)
    await run.loop.run()
    assert run.events[-4:] == ["train version 2", "sync 2", "play validation", "save step-2"]
    last = run.sink.snapshots[-1]
    assert (last.step, last.max_steps, last.observed_generation) == (2, 5, 2)
    why = "the run ends at step 2, not at maxSteps 5: actor_train: the schedule has brought"
    assert why in caplog.text
    assert any(shown.message.startswith(why) for shown in run.sink.snapshots)
    assert summary(2, 5, run.loop).startswith("trained 2 steps; validation success ")
    assert summary(2, 5, run.loop).endswith("with lrSchedulerType: constant")

    saved = run.store.newest()
    assert saved is not None
    for _ in range(2):  # however often it is restarted
        again = Run(tmp_path, resume=saved.driver_state(), restarted=True, maxSteps=5, evalSteps=1)
        again.schedule_ended = True
        await again.loop.run()
        assert again.events == ["sync 2", "play validation", "save step-2"]
        assert why in summary(2, 5, again.loop)
        saved = again.store.newest()
        assert saved is not None
    first = Run(tmp_path, resume=saved.driver_state(), maxSteps=5, evalSteps=1)
    first.schedule_ended = True
    with pytest.raises(InvalidConfig, match="maxSteps: the run ends at step 2"):
        await first.loop.run()
    constant = Run(tmp_path, resume=saved.driver_state(), maxSteps=5, evalSteps=1)
    await constant.loop.run()
    assert constant.events[0] == "stretch the schedules at step 2 to 5"
    assert constant.events[-1] == "save step-5"
    assert constant.loop.early_end is None


async def test_steps_that_were_refused_are_forgotten_when_they_are_taken_back(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, maxSteps=2, evalSteps=0)
    run.schedule_ended = True
    generation = 1
    save = run.store.save

    async def extend_then_save(*arguments: Any) -> Any:
        nonlocal generation
        generation += 1
        run.requests.apply(changed(run, generation, max_steps=5))
        saved = await save(*arguments)
        assert not await run.loop._has_steps()
        assert run.loop.early_end is not None
        run.requests.apply(changed(run, generation + 1, max_steps=2))
        return saved

    run.store.save = extend_then_save  # type: ignore[method-assign,assignment]
    await run.loop.run()
    assert run.loop.early_end is None
    assert summary(2, 2, run.loop) == "trained 2 steps"
    assert summary(1, 1, run.loop) == "trained 1 step"
    lowered = "trained 184 steps; maxSteps was lowered to 5, which ended the run"
    assert summary(184, 5, run.loop) == lowered


async def test_guards_that_change_keep_their_count(tmp_path: Path) -> None:
    run = Run(tmp_path, maxSteps=4, evalSteps=0, guards={"minEntropy": 1.0, "patience": 9})
    run.measured = {"actor/pg_loss": 0.0, "actor/entropy": 0.5}
    train_actor = run.train_actor

    async def change_then_train(version: int, *, update: bool) -> Metrics:
        if version == 3:
            guards = Guards(min_entropy=1.0, patience=4, action="Fail")
            run.requests.apply(changed(run, guards=guards))
        return await train_actor(version, update=update)

    run.train_actor = change_then_train  # type: ignore[method-assign]
    with pytest.raises(GuardTripped, match="for 4 steps"):
        await run.loop.run()


async def test_a_stop_request_saves_and_leaves(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.backend.hold(2)
    running = asyncio.create_task(run.loop.run())
    while (
        run.backend.tasks[-1:] == []
        or run.backend.tasks[-1].key.group != 3
        or run.backend.tasks[-1].key.stream is not Stream.TRAIN
    ):
        await asyncio.sleep(0.01)
    run.requests.apply(Commands(stop=True))
    with pytest.raises(StopRequested):
        await asyncio.wait_for(running, 60)
    saved = run.store.newest()
    assert saved is not None
    assert saved.driver_state().step == 1
    assert sorted(saved.driver_state().again) == [2, 3]
    assert run.sink.snapshots[-1].checkpoint is not None
    assert Activity.STOPPING in {snapshot.activity for snapshot in run.sink.snapshots}


LEAVE = Commands(stop=True, leaving_pod="lake-trainer-0")


@pytest.mark.parametrize(
    ("activity", "step", "saved"),
    [
        (Activity.WARMUP, 0, None),
        (Activity.VALIDATION, 0, 0),
        (Activity.ROLLOUT, 0, 0),
        (Activity.TRAINING, 0, 1),
        (Activity.ROLLOUT, 1, 1),
        (Activity.VALIDATION, 2, 2),
        (Activity.TRAINING, 2, 3),
    ],
)
async def test_when_a_pod_is_removed_every_completed_step_is_saved(
    activity: Activity, step: int, saved: int | None, tmp_path: Path
) -> None:
    """Only a training step is ended first: everything else is abandoned or not begun."""
    run = Run(tmp_path, maxSteps=4, warmup={"steps": 1})
    update = run.sink.update
    before: list[str] = []

    def leave_then(progress: Progress) -> None:
        begins = not run.sink.snapshots or run.sink.snapshots[-1].activity is not progress.activity
        update(progress)
        if begins and (progress.activity, progress.step) == (activity, step):
            run.requests.apply(LEAVE)
            before.extend(run.events)

    run.sink.update = leave_then  # type: ignore[method-assign]
    with pytest.raises(StopRequested) as stopped:
        await asyncio.wait_for(run.loop.run(), 60)
    assert stopped.value.leaving_pod == "lake-trainer-0"
    found = run.store.newest()
    assert (found and found.step) == saved
    ended = [f"train version {step + 1}"] if activity is Activity.TRAINING else []
    kept = [] if saved is None else [f"save step-{saved}"]
    after = [event for event in run.events[len(before) :] if not event.startswith("play")]
    assert after == [*ended, *kept]


async def test_a_run_that_was_disrupted_continues_with_the_next_step(tmp_path: Path) -> None:
    run = Run(tmp_path, evalSteps=0)
    run.backend.hold(2)
    running = asyncio.create_task(run.loop.run())
    await eventually_in_loop(lambda: "train version 1" in run.events, 60, "a step is done")
    run.requests.apply(LEAVE)
    with pytest.raises(StopRequested):
        await asyncio.wait_for(running, 60)
    saved = run.store.newest()
    assert saved is not None
    resumed = Run(tmp_path, evalSteps=0, resume=saved.driver_state(), restarted=True)
    await resumed.loop.run()
    assert [event for event in resumed.events if event.startswith("train")] == [
        "train version 2",
        "train version 3",
    ]


@pytest.mark.parametrize("staleness", [0, 1, 2])
async def test_a_stop_loses_no_group(staleness: int, tmp_path: Path) -> None:
    """Also where the next batch was ready before the stop."""
    run = Run(
        tmp_path, maxSteps=6, evalSteps=0, staleness={"max": staleness, "offPolicy": "Ignore"}
    )
    trained: set[int] = set()
    train_actor = run.train_actor

    async def train_while_others_play(version: int, *, update: bool) -> Metrics:
        trained.update(group.number for group in run.scored)
        await asyncio.sleep(0.05)
        if version == 2:
            run.requests.stop.set()
        return await train_actor(version, update=update)

    run.train_actor = train_while_others_play  # type: ignore[method-assign]
    with pytest.raises(StopRequested):
        await run.loop.run()
    saved = run.store.newest()
    assert saved is not None
    state = saved.driver_state()
    assert sorted([*trained, *state.again]) == [*range(state.next_group)]
    assert run.rollout.position == state.position


async def test_a_checkpoint_tells_for_which_groups_batches_wait(tmp_path: Path) -> None:
    state = DriverState(step=2, next_group=6, again=(4, 5), parts={"requeued": [5]})
    assert state.position == RolloutPosition(6, pending_groups=(4, 5), requeued_groups=(5,))
    run = Run(tmp_path, resume=state)
    run.backend.hold(4, 5)
    running = asyncio.create_task(run.loop.run())
    while not any(task.key.stream is Stream.TRAIN for task in run.backend.tasks):
        await asyncio.sleep(0.01)
    run.requests.apply(Commands(stop=True))
    with pytest.raises(StopRequested):
        await asyncio.wait_for(running, 60)
    saved = run.store.newest()
    assert saved is not None
    assert saved.driver_state().position == state.position


def test_a_checkpoint_of_an_earlier_version_names_no_groups_for_which_batches_wait() -> None:
    state = DriverState(step=2, next_group=6, again=(4, 5), parts={"kl_coef": 0.1})
    assert state.position == RolloutPosition(6, pending_groups=(4, 5))


async def test_a_stop_during_the_warm_up_saves_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, warmup={"steps": 1})
    run.requests.stop.set()
    with pytest.raises(StopRequested):
        await run.loop.run()
    assert run.store.newest() is None


@pytest.mark.parametrize("ends", ["a stop", "a failure"])
async def test_the_run_ends_while_the_warm_up_waits_for_its_episodes(
    tmp_path: Path, ends: str
) -> None:
    run = Run(tmp_path, warmup={"steps": 1})
    run.warm_up_waits.clear()
    training = asyncio.create_task(run.loop.run())
    await eventually_in_loop(lambda: "warm up" in run.events, 60, "it warms up")
    if ends == "a stop":
        run.requests.stop.set()
    else:
        run.failure.set_exception(RolloutFailed("no engines are left"))
    with pytest.raises((StopRequested, RolloutFailed)):
        await asyncio.wait_for(training, 60)


async def test_checkpoints_come_when_due_and_when_asked_for(tmp_path: Path) -> None:
    run = Run(tmp_path, maxSteps=4, saveSteps=3, evalSteps=0)
    run.requests.apply(Commands(checkpoint=7))
    run.requests.apply(Commands(checkpoint=8))
    await run.loop.run()
    assert [event for event in run.events if event.startswith("save")] == [
        "save step-1",
        "save step-3",
        "save step-4",
    ]


class SlowRanks:
    """Ranks of a run that copy their state at once, and write until `error` or `free`."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.free = False
        self.error: Exception | None = None
        run.savers = {"actor_train": self.save}

    async def save(self, folder: str) -> IsDurable:
        await self.run.save(folder)

        async def is_durable() -> bool:
            if self.error is not None:
                raise self.error
            if self.free:
                self.run.events.append(f"written {Path(folder).parent.name}")
            return self.free

        return is_durable


@pytest.fixture
def fast_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "FIRST_POLL_SECONDS", 0.001)
    monkeypatch.setattr(checkpoints, "LONGEST_POLL_SECONDS", 0.001)


def saved_steps(run: Run) -> list[int]:
    """The checkpoints that the snapshots report, each once."""
    reported = [shown.checkpoint.step for shown in run.sink.snapshots if shown.checkpoint]
    return [*dict.fromkeys(reported)]


@pytest.mark.usefixtures("fast_polls")
async def test_training_continues_while_ranks_write_and_the_next_save_waits_for_them(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, maxSteps=3, saveSteps=2, evalSteps=0)
    ranks = SlowRanks(run)
    running = asyncio.create_task(run.loop.run())
    await eventually_in_loop(lambda: "sync 3" in run.events, 60, "it trains on")
    await asyncio.sleep(0.05)
    assert "save step-3" not in run.events
    assert saved_steps(run) == []
    assert run.sink.snapshots[-1].activity is Activity.CHECKPOINT
    ranks.free = True
    await running
    saves = [event for event in run.events if event.endswith(("step-2", "step-3"))]
    assert saves == ["save step-2", "written step-2", "save step-3", "written step-3"]
    assert run.events.index("save step-2") < run.events.index("train version 3")
    assert run.events.index("train version 3") < run.events.index("written step-2")
    assert saved_steps(run) == [2, 3]


@pytest.mark.usefixtures("fast_polls")
async def test_the_step_in_which_a_checkpoint_is_published_says_how_long_it_took(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, maxSteps=3, saveSteps=1, evalSteps=0)
    ranks = SlowRanks(run)
    train_actor = run.train_actor

    async def write_then_train(version: int, *, update: bool) -> Metrics:
        if version == 2:
            await asyncio.sleep(0.05)
            ranks.free = True
            await eventually_in_loop(lambda: saved_steps(run) == [1], 60, "step 1 is saved")
        return await train_actor(version, update=update)

    run.train_actor = write_then_train  # type: ignore[method-assign]
    await run.loop.run()
    first, second = [metrics for _, metrics in run.logged if "time/step" in metrics][:2]
    assert "checkpoint/seconds" not in first
    assert second["checkpoint/seconds"] > 0.05 > second["time/checkpoint"]


@pytest.mark.usefixtures("fast_polls")
@pytest.mark.parametrize("ends", ["stop", "guard"])
async def test_a_run_that_is_stopped_ends_when_its_checkpoint_is_whole(
    tmp_path: Path, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "FAILED_SAVE_SECONDS", 0.01)  # it has not failed
    guards = {"minEntropy": 0.5, "patience": 2, "action": "Fail"} if ends == "guard" else {}
    save_steps = 2 if ends == "guard" else 0
    run = Run(tmp_path, maxSteps=9, saveSteps=save_steps, evalSteps=0, guards=guards)
    run.measured = {"actor/entropy": 0.1}
    run.backend.hold(5)  # of step 3
    ranks = SlowRanks(run)
    running = asyncio.create_task(run.loop.run())
    await eventually_in_loop(lambda: "sync 2" in run.events or ends == "guard", 60, "step 3")
    if ends == "stop":
        run.requests.stop.set()
    await eventually_in_loop(lambda: "save step-2" in run.events, 60, "it saves")
    await asyncio.sleep(0.05)
    assert not running.done()
    assert run.store.newest() is None
    assert run.sink.snapshots[-1].activity is Activity.CHECKPOINT
    ranks.free = True
    with pytest.raises(StopRequested if ends == "stop" else GuardTripped):
        await running
    assert saved_steps(run) == [2]


@pytest.mark.usefixtures("fast_polls")
async def test_a_write_that_fails_ends_the_run_after_the_step_and_is_retried(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, maxSteps=9, saveSteps=4, evalSteps=0)
    SlowRanks(run).error = OSError(28, "No space left on device")
    with pytest.raises(CheckpointNotSaved, match=r"the checkpoint of step 4 .*No space") as caught:
        await run.loop.run()
    assert "train version 5" in run.events
    assert "train version 7" not in run.events, "it does not wait for the next save"
    report = report_of(caught.value, run.loop._step)
    assert (report.reason, report.retryable) == ("TrainingFailed", True)


@pytest.mark.usefixtures("fast_polls")
@pytest.mark.parametrize("ends", ["stop", "guard"])
async def test_a_write_that_fails_hides_neither_a_stop_nor_a_guard(
    tmp_path: Path, ends: str
) -> None:
    guards = {"minEntropy": 0.5, "patience": 2, "action": "Fail"} if ends == "guard" else {}
    run = Run(tmp_path, maxSteps=9, saveSteps=2, evalSteps=0, guards=guards)
    run.measured = {"actor/entropy": 0.1}
    ranks = SlowRanks(run)
    train_actor = run.train_actor

    async def stop_then_train(version: int, *, update: bool) -> Metrics:
        if version == 3 and ends == "stop":
            run.requests.stop.set()
            ranks.error = OSError(5, "Input/output error")
            await asyncio.sleep(0.05)
            ranks.error, ranks.free = None, True
        return await train_actor(version, update=update)

    run.train_actor = stop_then_train  # type: ignore[method-assign]
    if ends == "guard":
        ranks.error = OSError(5, "Input/output error")
    with pytest.raises(StopRequested if ends == "stop" else GuardTripped):
        await asyncio.wait_for(run.loop.run(), 30)
    assert saved_steps(run) == ([3] if ends == "stop" else [])


@pytest.mark.usefixtures("fast_polls")
@pytest.mark.parametrize("written", [True, False])
async def test_a_run_that_fails_leaves_its_ranks_a_little_time_to_write(
    tmp_path: Path, written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "FAILED_SAVE_SECONDS", 60.0 if written else 0.05)
    run = Run(tmp_path, maxSteps=9, saveSteps=2, evalSteps=0)
    ranks = SlowRanks(run)
    run.backend.hold(5)  # of step 3
    running = asyncio.create_task(run.loop.run())
    await eventually_in_loop(lambda: "save step-2" in run.events, 60, "it saves")
    await asyncio.sleep(0.05)
    run.failure.set_exception(RolloutFailed("engines died"))
    await asyncio.sleep(0.01)
    ranks.free = written
    with pytest.raises(RolloutFailed, match="engines died"):
        await asyncio.wait_for(running, 30)
    newest = run.store.newest()
    assert (newest.step if newest else None) == (2 if written else None)


@pytest.mark.usefixtures("fast_polls")
async def test_a_run_that_is_cancelled_does_not_wait_for_a_write(tmp_path: Path) -> None:
    run = Run(tmp_path, maxSteps=9, saveSteps=2, evalSteps=0)
    SlowRanks(run)
    running = asyncio.create_task(run.loop.run())
    await eventually_in_loop(lambda: "save step-2" in run.events, 60, "it saves")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, 5)
    assert run.store.newest() is None


async def test_a_part_that_cannot_be_kept_alive_ends_the_attempt(tmp_path: Path) -> None:
    run = Run(tmp_path, evalSteps=0)
    run.backend.hold(0)
    running = asyncio.create_task(run.loop.run())
    await asyncio.sleep(0.05)
    run.failure.set_exception(RolloutFailed("engines died"))
    with pytest.raises(RolloutFailed, match="engines died"):
        await asyncio.wait_for(running, 60)


async def test_snapshots_are_what_the_api_accepts_and_grow_in_sequence(tmp_path: Path) -> None:
    run = Run(tmp_path)
    await run.loop.run()
    sequences = [snapshot.sequence for snapshot in run.sink.snapshots]
    assert sequences == sorted(set(sequences))
    last = run.sink.snapshots[-1]
    assert (last.step, last.policy_version, last.reward) == (3, 3, 0.0)
    assert last.metrics["val/A/success"] == 0.0
    assert last.tokens_per_second is not None


async def test_validation_plays_the_same_levels_each_time(tmp_path: Path) -> None:
    run = Run(tmp_path)
    await run.loop.run()
    validated = [task for task in run.backend.tasks if task.key.stream is Stream.VALIDATION]
    assert sorted(task.key.group for task in validated) == sorted([*range(6)] * 4)


async def test_engines_get_new_weights_every_model_update_frequency_steps_and_before_validation(
    tmp_path: Path,
) -> None:
    staleness = {"max": 2, "offPolicy": "Ignore"}
    run = Run(tmp_path, maxSteps=6, modelUpdateFrequency=3, evalSteps=4, staleness=staleness)
    await run.loop.run()
    assert [event for event in run.events if event.startswith("sync")] == [
        "sync 0",
        "sync 3",
        "sync 4",
        "sync 6",
    ]
    moved = [
        metrics["weight_sync/bytes"] for _, metrics in run.logged if "weight_sync/bytes" in metrics
    ]
    assert moved == [64.0, 0.0, 0.0, 64.0, 64.0, 0.0]


async def test_the_critic_trains_alone_during_its_warm_up(tmp_path: Path) -> None:
    run = Run(tmp_path, evalSteps=0, criticWarmup=2, algorithm={"name": "gae"}, critic={})
    await run.loop.run()
    trained = [event for event in run.events if event.startswith("train")]
    assert trained == [
        "train the critic of version 1",
        "train the critic of version 2",
        "train version 3",
    ]


async def test_a_variance_filter_trains_on_the_most_uncertain_groups(tmp_path: Path) -> None:
    run = Run(tmp_path, maxSteps=1, evalSteps=0, algorithm={"varianceFilter": {"keep": 0.5}})
    await run.loop.run()
    assert len(run.scored) == 1
    assert run.logged[-1][1]["group/filtered"] == 1.0
    assert len(run.discarded) == 4


async def test_the_kl_coefficient_adapts_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    algorithm = {"name": "reinforce", "rewardKl": {"coef": 0.1, "targetKl": 0.01, "horizon": 40}}
    run = Run(tmp_path, maxSteps=2, evalSteps=0, saveSteps=1, algorithm=algorithm)
    run.kl = 1.0
    await run.loop.run()
    assert [metrics["critic/kl_coef"] for _, metrics in run.logged] == pytest.approx(
        [0.1, 0.1 * 1.02]
    )
    saved = run.store.newest()
    assert saved is not None
    again = Run(tmp_path, resume=saved.driver_state(), maxSteps=3, evalSteps=0, algorithm=algorithm)
    again.kl = 1.0
    await again.loop.run()
    assert again.kl_coef == pytest.approx(0.1 * 1.02**2)


async def test_a_guard_that_may_fail_the_run_does_so_after_the_step_is_logged(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, evalSteps=0, guards={"minEntropy": 0.5, "patience": 2, "action": "Fail"})
    run.measured = {"actor/entropy": 0.1}
    with pytest.raises(GuardTripped, match="entropy"):
        await run.loop.run()
    assert [metrics["guard/entropy"] for _, metrics in run.logged] == [0.0, 1.0]


async def test_environments_that_are_left_out_are_named_in_every_activity(tmp_path: Path) -> None:
    sink = Sink()
    progress = ProgressReporter(sink, AttemptId("uid", "run-1", 1), 3)
    progress.note("without environments that fail: B (env_error: no)")
    progress.activity(Activity.ROLLOUT)
    progress.activity(Activity.TRAINING, "guard entropy: low")
    progress.note("")
    progress.activity(Activity.ROLLOUT)
    assert [snapshot.message for snapshot in sink.snapshots[-3:]] == [
        "without environments that fail: B (env_error: no)",
        "guard entropy: low; without environments that fail: B (env_error: no)",
        "",
    ]
