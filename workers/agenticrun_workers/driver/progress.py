"""Communication with the operator: progress snapshots out, stop and checkpoint requests in."""

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

from agenticrun_api import Activity, Commands, FinalReport, LiveConfig, PoolStatus, Progress, Role
from agenticrun_api.base import clean_text
from agenticrun_api.metrics import rank_of
from agenticrun_api.status import MAX_METRIC_NAME, MAX_METRICS, CheckpointStatus
from agenticrun_api.version import __version__
from agenticrun_workers.reporting.client import ProgressSink, rfc3339

NEWEST_STEPS = 20


@dataclass(frozen=True)
class AttemptId:
    """One attempt of one run."""

    run_uid: str
    submission_id: str
    number: int


class ProgressReporter:
    """Keeps the progress snapshot of an attempt, and sends each change to the sink."""

    def __init__(
        self, sink: ProgressSink, attempt: AttemptId, max_steps: int, generation: int = 0
    ) -> None:
        self._sink = sink
        self._note = ""
        self._step_times: deque[float] = deque(maxlen=NEWEST_STEPS + 1)
        self._progress = Progress(
            version=__version__,
            run_uid=attempt.run_uid,
            submission_id=attempt.submission_id,
            attempt=attempt.number,
            sequence=0,
            activity=Activity.STARTING,
            step=0,
            max_steps=max_steps,
            policy_version=0,
            time=rfc3339(time.time()),
            observed_generation=generation,
        )

    @property
    def step(self) -> int:
        return self._progress.step

    @property
    def max_steps(self) -> int:
        return self._progress.max_steps

    @property
    def generation(self) -> int:
        """Generation of the run that the settings in use are from."""
        return self._progress.observed_generation or 0

    def configured(self, config: LiveConfig) -> None:
        """Report the settings that are used from now on."""
        self._change(max_steps=config.max_steps, observed_generation=config.generation)

    def pools(self, pools: Mapping[Role, PoolStatus]) -> None:
        """Report the engines and env workers, if they have changed."""
        if pools != self._progress.pools:
            self._change(pools=dict(pools))

    def activity(self, activity: Activity, message: str = "") -> None:
        """Report what the run is doing."""
        said = "; ".join(part for part in (message, self._note) if part)
        self._change(activity=activity, message=clean_text(said)[:1024])

    def note(self, note: str) -> None:
        """Add this to the messages of all activities from now on; empty adds nothing."""
        self._note = note

    def resumed(self, step: int, checkpoint: CheckpointStatus) -> None:
        """Report that the attempt continues from a checkpoint."""
        self._change(step=step, policy_version=step, checkpoint=checkpoint)

    def started(self) -> None:
        """Start the clock of the first step."""
        self._step_times.append(time.monotonic())

    def metrics(self, metrics: Mapping[str, float]) -> None:
        """Report metrics measured between steps, by a validation for example.

        They stay in the snapshots until metrics with the same first word are measured: the next
        validation may have other stop reasons.
        """
        measured = {name.split("/")[0] for name in metrics}
        lasting = {
            name: value
            for name, value in self._progress.metrics.items()
            if name.split("/")[0] not in measured
        }
        self._change(metrics=headline_metrics({**lasting, **metrics}))

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report a completed step."""
        now = time.monotonic()
        self._step_times.append(now)
        times = list(self._step_times)
        # The last validation stays visible between validations.
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
        """Report a saved checkpoint."""
        self._change(checkpoint=status)

    def sample(self, transcript: str) -> None:
        """Pass the text of an episode to the sink."""
        self._sink.sample(transcript)

    async def finish(self, report: FinalReport) -> None:
        """Deliver the last snapshot."""
        self._change(activity=Activity.FINISHED, final=report, message="")
        await self._sink.finish(self._progress)

    def _change(self, **changes: object) -> None:
        # Numbered, because posts may arrive twice or late: the reporter keeps the highest.
        changes |= {"sequence": self._progress.sequence + 1, "time": rfc3339(time.time())}
        self._progress = self._progress.model_copy(update=changes)
        self._sink.update(self._progress)


PER_RANK = 3
"""Names of one rank before the next rank, so that many environments do not hide the losses."""

NAME = re.compile(rf"[A-Za-z0-9_./@<>-]{{1,{MAX_METRIC_NAME}}}")
"""Names that a snapshot may hold; environments may use others, which stay in metrics.jsonl."""


def headline_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Select the metrics of a snapshot: finite ones, the most informative first."""
    fits = sorted(
        (rank_of(name), name)
        for name, value in metrics.items()
        if np.isfinite(value) and NAME.fullmatch(name)
    )
    seen: Counter[int] = Counter()
    order: list[tuple[bool, int, str]] = []
    # The first few names of each rank, then the next: one kind alone cannot fill the snapshot.
    for rank, name in fits:
        seen[rank] += 1
        order.append((seen[rank] > PER_RANK, rank, name))
    return {name: metrics[name] for _, _, name in sorted(order)[:MAX_METRICS]}


T = TypeVar("T")


class StopRequested(Exception):
    """A stop was requested, and the loop has reached a place where the run can stop.

    Args:
        leaving_pod: the pod that is being removed, if that is the cause.
    """

    def __init__(self, leaving_pod: str | None = None) -> None:
        super().__init__(leaving_pod)
        self.leaving_pod = leaving_pod


class Requests:
    """Stop and checkpoint requests from a signal, Ctrl-C, or the reporter."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self._leaving_pod: str | None = None
        """The pod that is being removed, if that is why `stop` is set."""
        self._checkpoints_seen: int | None = None
        self._checkpoint_wanted = False
        self.config: LiveConfig | None = None
        """The newest settings, if the operator sent any."""
        self.changed = asyncio.Event()
        """Set when other settings have come or, by `ActorPools`, when actors join, die or leave."""

    def apply(self, commands: Commands) -> None:
        """Take the commands in an answer of the reporter.

        The first answer only sets the baseline: it counts the checkpoints requested of earlier
        attempts.
        """
        # The first cause stays: it decides whether the attempt counts as disrupted.
        if commands.stop and not self.stop.is_set():
            self._leaving_pod = commands.leaving_pod
            self.stop.set()
        if self._checkpoints_seen is not None and commands.checkpoint > self._checkpoints_seen:
            self.ask_checkpoint()
        self._checkpoints_seen = commands.checkpoint
        if commands.config != self.config:
            self.config = commands.config
            self.changed.set()

    def ask_checkpoint(self) -> None:
        """Request a checkpoint after the current step."""
        self._checkpoint_wanted = True

    def take_checkpoint(self) -> bool:
        """Return True if a checkpoint was requested since the last call."""
        wanted, self._checkpoint_wanted = self._checkpoint_wanted, False
        return wanted

    def check_stop(self) -> None:
        """Raise `StopRequested` if a stop was requested."""
        if self.stop.is_set():
            raise StopRequested(self._leaving_pod)

    async def unless_stopped(
        self, work: Coroutine[Any, Any, T], failures: Sequence[asyncio.Future[None]] = ()
    ) -> T:
        """Wait for `work`, but cancel it when a stop is requested or one of `failures` fails.

        Raises:
            StopRequested: before `work` was done.
        """
        if self.stop.is_set():
            # Python warns of a coroutine that is never awaited.
            work.close()
            self.check_stop()
        task = asyncio.create_task(work)
        stop = asyncio.create_task(self.stop.wait())
        try:
            waiting: list[asyncio.Future[Any]] = [task, stop, *failures]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            # Finished work counts even when a stop was just requested: otherwise the trajectories
            # of a served batch would be lost.
            if not task.done():
                # Before failures: when a node is drained, engines die while a trainer pod still
                # waits for the checkpoint.
                self.check_stop()
            for failure in failures:
                if failure.done():
                    failure.result()
            return await task
        finally:
            for pending in (task, stop):
                pending.cancel()
            # Waited for, so that nothing of `work` runs while the caller saves.
            await asyncio.gather(task, stop, return_exceptions=True)
