"""Whole attempts about the items of a data set, from the warm-up to a resumed run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from agenticrun_api import FinalReport, Outcome
from agenticrun_workers.rollout.datasets import EpisodeItems
from agenticrun_workers.rollout.recording import Recording
from agenticrun_workers.types import Stream
from quiz_runs import WORDS, quiz_run
from tiny_runs import InProcessAttempt

ROWS = [json.loads(line) for line in WORDS.read_text().splitlines()]


async def execute(session: InProcessAttempt) -> FinalReport:
    return await asyncio.wait_for(session.execute(), 240)


async def test_a_warm_up_from_a_data_set_teaches_its_answers(tmp_path: Path) -> None:
    dataset = {
        "path": str(WORDS),
        "promptColumn": "word",
        "answerColumn": "solution",
        "valSplit": "train",
    }
    warmup = {
        "steps": 60,
        "batchSize": 6,
        "learningRate": 0.02,
        "source": "Dataset",
        "dataset": dataset,
    }
    session = InProcessAttempt(quiz_run(maxSteps=1, warmup=warmup), tmp_path)
    report = await execute(session)
    assert report.outcome is Outcome.SUCCEEDED, report.message
    first = next(s for s in session.sink.snapshots if "val/Quiz/success" in s.metrics)
    assert first.metrics["val/Quiz/success"] >= 0.9
    assert first.metrics["val/Quiz/random_success"] <= 0.5


async def test_a_data_set_that_is_not_there_ends_the_run_at_once(tmp_path: Path) -> None:
    run = quiz_run()
    document = run.document()
    document["spec"]["pipeline"]["envs"][0]["dataset"]["path"] = "/nowhere/items.jsonl"
    report = await execute(InProcessAttempt(type(run).model_validate(document), tmp_path))
    assert (report.outcome, report.reason) == (Outcome.FAILED, "InvalidConfig")
    assert (
        "spec.pipeline.envs[0].dataset.path: no file or folder /nowhere/items.jsonl"
        in report.message
    )


async def test_a_stopped_and_resumed_run_plays_each_item_once_per_epoch(tmp_path: Path) -> None:
    """6 items, 2 groups a step: three steps are an epoch, whatever happens between them."""
    settings: dict[str, Any] = {
        "maxSteps": 6,
        "rolloutBatchSize": 4,
        "evalSteps": 0,
        "warmup": None,
    }
    settings |= {"record": {"to": str(tmp_path / "recording")}}
    stopped = InProcessAttempt(quiz_run(**settings), tmp_path)
    running = asyncio.create_task(execute(stopped))
    while stopped.sink.step < 2 and not running.done():
        await asyncio.sleep(0.01)
    stopped.requests.stop.set()
    assert (await running).outcome is Outcome.STOPPED
    report = await execute(InProcessAttempt(quiz_run(**settings), tmp_path, attempt=2))
    assert report.outcome is Outcome.SUCCEEDED, report.message
    items = EpisodeItems(quiz_run(**settings).spec.pipeline)
    recording = Recording(str(tmp_path / "recording"))
    groups = [
        sorted({t.key.group for t in recording.read(step).trajectories}) for step in range(1, 7)
    ]
    assert groups == [[2 * step, 2 * step + 1] for step in range(6)]
    for epoch in (groups[:3], groups[3:]):
        played = [items.of("Quiz", Stream.TRAIN, group) for step in epoch for group in step]
        assert sorted(item["word"] for item in played if item is not None) == sorted(
            row["word"] for row in ROWS
        )
