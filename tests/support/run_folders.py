"""An output folder as a run on this machine leaves it, written by the run's own writers."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

from PIL import Image
from rich.console import Console

from agenticrun_api import Activity, FinalReport, Outcome, Progress, parse_run
from agenticrun_workers.driver.samples import SampleWriter
from agenticrun_workers.reporting.client import rfc3339
from agenticrun_workers.reporting.display import PlainDisplay
from agenticrun_workers.reporting.run_folder import RecordedProgress, RunFolder
from agenticrun_workers.reporting.trackers import JsonlTracker
from rollout_fakes import result
from runs import run_with

SECRET = "tell-nobody"
TRANSCRIPT = """--- turn 1 ---
<|user|>P_<script>alert("x")</script>
--- answer 1: action 'Down', valid, reward 1 ---
Down
--- end: completed, score 1 ---
"""
BEGAN = 1_800_000_000.0


def gif() -> bytes:
    """Two frames of 4 x 4 pixels."""
    frames = [Image.new("RGB", (4, 4), color) for color in ("white", "black")]
    data = io.BytesIO()
    frames[0].save(data, "GIF", save_all=True, append_images=frames[1:])
    return data.getvalue()


def snapshot(step: int, *, final: FinalReport | None = None) -> Progress:
    return Progress(
        run_uid="local",
        submission_id="lake-local",
        attempt=1,
        sequence=step,
        activity=Activity.FINISHED if final else Activity.ROLLOUT,
        step=step,
        max_steps=10,
        policy_version=step,
        time=rfc3339(BEGAN + 10 * step),
        seconds_per_step=2.0,
        reward=step / 10,
        metrics={"rollout/score/mean": step / 10},
        final=final,
    )


def make_run_folder(folder: Path, *, steps: int = 4, finished: bool = True) -> Path:
    """Write the output of a run with a validation before its first step and after its last."""
    run = parse_run(
        run_with(
            ("spec.tracking", {"renderDir": "films", "tensorboard": False}),
            ("spec.roles.driver.env", [{"name": "WANDB_API_KEY", "value": SECRET}]),
            name="lake",
        )
    )
    RunFolder(folder).record_attempt(run, 1, code=folder.parent)
    (attempt,) = RunFolder(folder).attempts()
    began = json.dumps({**attempt, "time": rfc3339(BEGAN), "started": rfc3339(BEGAN)})
    (folder / "attempts.jsonl").write_text(f"{began}\n")
    samples = SampleWriter(folder, run.spec.tracking, run.spec.pipeline)
    episode = replace(result(3, 1, tag="Lake", score=1.0), transcript=TRANSCRIPT, frames=gif())
    tracker = JsonlTracker(folder / "metrics.jsonl", 0)
    progress = RecordedProgress(PlainDisplay(Console(quiet=True)), folder)
    for step in range(steps + 1):
        if step in (0, steps):
            tracker.log(step, {"val/Lake/success": step / 10, "val/success/mean": step / 10})
            samples.write(step, [episode], validation=True)
        if step:
            tracker.log(
                step,
                {
                    "rollout/score/mean": step / 10,
                    "time/step": 2.0,
                    "time/rollout": 1.2,
                    "time/train": 0.6,
                    "stop/completed": 0.75,
                    "stop/max_turns": 0.25,
                    "system/tps": 1500.0,
                },
            )
            samples.write(step, [episode])
        progress.update(snapshot(step))
    tracker.close()
    if finished:
        report = FinalReport(
            outcome=Outcome.SUCCEEDED,
            reason="RunSucceeded",
            message=f"trained {steps} steps",
            retryable=False,
            time=rfc3339(BEGAN),
        )
        progress.update(snapshot(steps, final=report))
    return folder
