"""ProgressBoard: keeps what the run knows about itself and hands snapshots to the sink."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from agenticrun_api import Activity, FinalReport, Progress
from agenticrun_api.status import CheckpointStatus
from agenticrun_workers.driver.headline_metrics import telling
from agenticrun_workers.reporting.clock import rfc3339
from agenticrun_workers.reporting.sink import ProgressSink

NEWEST_STEPS = 20


@dataclass(frozen=True)
class Attempt:
    """Who reports."""

    run_uid: str
    submission_id: str
    attempt: int


class ProgressBoard:
    """Every change becomes one snapshot with the next sequence number."""

    def __init__(self, sink: ProgressSink, attempt: Attempt, max_steps: int) -> None:
        self._sink = sink
        self._step_times: deque[float] = deque(maxlen=NEWEST_STEPS + 1)
        self._progress = Progress(
            run_uid=attempt.run_uid,
            submission_id=attempt.submission_id,
            attempt=attempt.attempt,
            sequence=0,
            activity=Activity.STARTING,
            step=0,
            max_steps=max_steps,
            policy_version=0,
            time=rfc3339(time.time()),
        )

    @property
    def step(self) -> int:
        return self._progress.step

    def activity(self, activity: Activity, message: str = "") -> None:
        """What the run does now."""
        self._change(activity=activity, message=message[:1024])

    def resumed(self, step: int, checkpoint: CheckpointStatus) -> None:
        self._change(step=step, policy_version=step, checkpoint=checkpoint)

    def started(self) -> None:
        """Training begins: time from here to the first step counts as a step."""
        self._step_times.append(time.monotonic())

    def metrics(self, metrics: Mapping[str, float]) -> None:
        """Numbers measured between steps, for example by a validation; they stay until they are measured again."""
        self._change(metrics=telling({**self._progress.metrics, **metrics}))

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.monotonic()
        self._step_times.append(now)
        times = list(self._step_times)
        lasting = {
            name: value for name, value in self._progress.metrics.items() if name.startswith("val/")
        }
        self._change(
            step=step,
            policy_version=step,
            last_step_time=rfc3339(time.time()),
            seconds_per_step=median([b - a for a, b in pairwise(times)])
            if len(times) > 1
            else None,
            reward=metrics["rollout/score/mean"],
            tokens_per_second=metrics["system/tps"],
            staleness=metrics["staleness/mean"],
            metrics=telling({**lasting, **metrics}),
        )

    def checkpoint(self, status: CheckpointStatus) -> None:
        self._change(checkpoint=status)

    def sample(self, transcript: str) -> None:
        self._sink.sample(transcript)

    async def finish(self, report: FinalReport) -> None:
        """Deliver the last snapshot."""
        self._change(activity=Activity.FINISHED, final=report, message="")
        await self._sink.finish(self._progress)

    def _change(self, **changes: object) -> None:
        changes |= {"sequence": self._progress.sequence + 1, "time": rfc3339(time.time())}
        self._progress = self._progress.model_copy(update=changes)
        self._sink.update(self._progress)
