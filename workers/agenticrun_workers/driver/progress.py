"""What an attempt tells the operator (progress snapshots) and what it is asked (stop, checkpoint)."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, TypeVar

import numpy as np

from agenticrun_api import Activity, Commands, FinalReport, Progress
from agenticrun_api.status import MAX_METRIC_NAME, MAX_METRICS, CheckpointStatus
from agenticrun_workers.reporting.client import ProgressSink
from agenticrun_workers.reporting.clock import rfc3339

NEWEST_STEPS = 20


@dataclass(frozen=True)
class AttemptId:
    """Who reports."""

    run_uid: str
    submission_id: str
    attempt: int


class ProgressReporter:
    """Every change becomes one snapshot with the next sequence number."""

    def __init__(self, sink: ProgressSink, attempt: AttemptId, max_steps: int) -> None:
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
        self._change(metrics=headline_metrics({**self._progress.metrics, **metrics}))

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
            metrics=headline_metrics({**lasting, **metrics}),
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


TELLING = tuple(
    re.compile(pattern)
    for pattern in (
        "val/[^/]+/success", "val/[^/]+/random_success", "val/[^/]+/warmup_success", "rollout/score/mean", "rollout/success/mean",
        "actor/total_loss", "actor/entropy", "actor/approxkl", "actor/grad_norm", "critic/kl", "critic/loss", "engine/logprob_gap",
        "group/zero_variance_share", "staleness/mean", "system/tps", "time/step", "weight_sync/seconds", "tokens/response_length/mean",
        "val/success/best", "val/.+", "guard/.+", "actor/.+", "critic/.+", "env/[^/]+/success", "engine/.+", "group/.+", "stop/.+",
        "time/.+", "rollout/.+", "env/.+", "tokens/.+",
    )
)  # fmt: skip
"""The first pattern that a name matches is its rank."""
PER_PATTERN = 3
"""Names of one pattern that may come before the next pattern's, so that many environments do not hide the losses."""

NAME = re.compile(rf"[A-Za-z0-9_./@<>-]{{1,{MAX_METRIC_NAME}}}")
"""Names that a snapshot may hold; an environment may have others, which stay in metrics.jsonl."""


def headline_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """At most as many finite metrics as a snapshot may hold, the most headline_metrics first."""
    fits = sorted(
        (_rank(name), name)
        for name, value in metrics.items()
        if np.isfinite(value) and NAME.fullmatch(name)
    )
    seen: Counter[int] = Counter()
    order: list[tuple[bool, int, str]] = []
    for rank, name in fits:
        seen[rank] += 1
        order.append((seen[rank] > PER_PATTERN, rank, name))
    return {name: metrics[name] for _, _, name in sorted(order)[:MAX_METRICS]}


def _rank(name: str) -> int:
    return next(
        (place for place, pattern in enumerate(TELLING) if pattern.fullmatch(name)), len(TELLING)
    )


T = TypeVar("T")


class StopRequested(Exception):
    """Raised inside the loop where the run may stop."""


class Requests:
    """Stop and checkpoint requests."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self._checkpoints_seen: int | None = None
        self._checkpoint_wanted = False

    def apply(self, commands: Commands) -> None:
        """Take the reporter's answer. Its first one only tells how many checkpoints earlier attempts were asked for."""
        if commands.stop:
            self.stop.set()
        if self._checkpoints_seen is not None and commands.checkpoint > self._checkpoints_seen:
            self._checkpoint_wanted = True
        self._checkpoints_seen = commands.checkpoint

    def take_checkpoint(self) -> bool:
        """Whether a checkpoint has been asked for since the last call."""
        wanted, self._checkpoint_wanted = self._checkpoint_wanted, False
        return wanted

    def check_stop(self) -> None:
        """Raise `StopRequested` if so."""
        if self.stop.is_set():
            raise StopRequested

    async def unless_stopped(
        self, work: Coroutine[Any, Any, T], failures: Sequence[asyncio.Future[None]] = ()
    ) -> T:
        """The result of `work`. It is cancelled when a stop is asked for (`StopRequested`) or one of `failures` fails.

        Work that is done gives its result, also when a stop has just been asked for: what a batch has taken would be lost.
        """
        if self.stop.is_set():
            work.close()
            raise StopRequested
        task = asyncio.create_task(work)
        stop = asyncio.create_task(self.stop.wait())
        try:
            waiting: list[asyncio.Future[Any]] = [task, stop, *failures]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for failure in failures:
                if failure.done():
                    failure.result()
            if not task.done():
                self.check_stop()
            return await task
        finally:
            for pending in (task, stop):
                pending.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)
