"""Watches the progress of runs that train, by long polls of their reporters.

A reporter holds a question until the driver has news or falls silent. So a run that trains is
looked at when something has happened, and otherwise about every 20 s for what only Ray tells. Each
such run has one task. It ends as soon as the run does anything but train: then the looks ask the
head themselves, as often as the plan says. They alone read a final report, because a reporter
keeps it until a look has asked for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from agenticrun_api import AgenticRun, Phase, Progress
from agenticrun_api.progress import QUIET_SECONDS
from agenticrun_operator.cluster import Head, HeadAddress
from agenticrun_operator.observed import Job, NoJob, NoReport, Observed, Unreachable
from agenticrun_operator.workqueue import Key

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 1.0
"""Shortest time between two questions: changes that follow each other are one piece of news, and a
reporter of an earlier version, which holds no question, is not asked more often."""
JOB_SECONDS = 15.0
"""Age at which Ray's answer about the job is too old. The reporter tells sooner that a driver has
ended."""
AGAIN_SECONDS = 60.0
"""Time without a watch after a reporter has not answered a question that it was to hold."""
UNSEEN_SECONDS = 60.0
"""Time without a look after which a watch ends: another operator leads now."""


@dataclass
class _Watch:
    """The newest answers of the head of a run that trains. Times are those of the event loop."""

    head: HeadAddress
    job: Job
    job_at: float
    """When Ray was asked about the job."""
    progress: Progress
    looked_at: float
    task: asyncio.Task[None] | None = None
    silence: Unreachable | None = None
    """Set once the reporter has not answered. The next look reports it."""

    @property
    def asks(self) -> bool:
        """True while its task asks the reporter."""
        return self.task is not None and not self.task.done()


class ProgressWatches:
    """The open questions to reporters, one for each run that trains."""

    def __init__(self, head: Head, look: Callable[[Key], None]):
        """Create the collection.

        Args:
            head: the head pods.
            look: called with a run that has news, or that no longer just trains.
        """
        self._head = head
        self._look = look
        self._watches: dict[str, _Watch] = {}
        """By the run's uid."""
        self._again_at: dict[str, float] = {}
        """Times before which runs are not watched, by uid."""

    async def job(self, head: HeadAddress, submission_id: str) -> Job | NoJob | Unreachable:
        """Return the job as `Head.job` does, at most `JOB_SECONDS` old while the run is watched."""
        watch = self._answering(head)
        if watch is None or watch.progress.submission_id != submission_id:
            return await self._head.job(head, submission_id)
        # A silence is shown at once: Ray may hang as well, and the look would wait for it.
        known = watch.silence or _now() < watch.job_at + JOB_SECONDS
        if known or watch.task is None:
            return watch.job
        asking = asyncio.create_task(self._head.job(head, submission_id))
        await asyncio.wait({asking, watch.task}, return_when=asyncio.FIRST_COMPLETED)
        if watch.silence and not asking.done():
            asking.cancel()
            return watch.job
        return await asking

    async def progress(self, head: HeadAddress) -> Progress | NoReport | Unreachable:
        """Return the newest snapshot as `Head.progress` does, without a request while watched."""
        if watch := self._answering(head):
            return watch.silence or watch.progress
        return await self._head.progress(head)

    def _answering(self, head: HeadAddress) -> _Watch | None:
        """Return the watch whose answers are those of the head; None: it has to be asked."""
        watch = self._watches.get(head.run_uid)
        if watch is None or watch.head != head:
            return None
        watch.looked_at = _now()
        return watch if watch.silence or watch.asks else None

    def doubt(self, run_uid: str) -> None:
        """Let the next look at a run ask Ray: something has changed."""
        if watch := self._watches.get(run_uid):
            watch.job_at = float("-inf")

    def watch(
        self, run: AgenticRun, head: HeadAddress | Unreachable | None, observed: Observed
    ) -> bool:
        """Watch a run if it just trains, as its head has answered, else end its watch.

        Returns:
            True if the run is watched.
        """
        uid, now = run.metadata.uid, _now()
        silent = self._watches.get(uid)
        # It came while this look waited for Ray: the next look reports it.
        if silent and silent.silence and silent.silence is not observed.progress:
            return False
        answers = _training(run, observed)
        waits = now < self._again_at.get(uid, now)
        if answers is None or waits or not isinstance(head, HeadAddress):
            self._end(uid)
            return False
        job, progress = answers
        watch = self._watches.get(uid)
        if watch is None or watch.head != head or not watch.asks:
            self._end(uid)
            watch = self._watches[uid] = _Watch(head, job, now, progress, now)
            name = f"progress {'/'.join(run.key)}"
            watch.task = asyncio.create_task(self._follow(run.key, watch), name=name)
        elif job is not watch.job:  # the look has asked
            watch.job, watch.job_at = job, now
        return True

    def forget(self, run_uid: str) -> None:
        """Forget a run that is gone or has ended."""
        self._end(run_uid)
        self._again_at.pop(run_uid, None)

    def _end(self, run_uid: str) -> None:
        watch = self._watches.pop(run_uid, None)
        if watch and watch.task:
            watch.task.cancel()

    async def stop(self) -> None:
        """End all watches."""
        tasks = [watch.task for watch in self._watches.values() if watch.task]
        for uid in list(self._watches):
            self._end(uid)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, key: Key, watch: _Watch) -> None:
        """Ask the reporter again and again, until the run no longer just trains."""
        try:
            while _now() < watch.looked_at + UNSEEN_SECONDS:
                before, asked_at = watch.progress, _now()
                answer = await self._head.progress(watch.head, after=before)
                if isinstance(answer, Unreachable):
                    watch.silence = answer
                    self._again_at[watch.head.run_uid] = _now() + AGAIN_SECONDS
                if not isinstance(answer, Progress) or not _goes_on(answer, before):
                    break
                watch.progress = answer
                if answer.sequence != before.sequence:
                    self._look(key)
                await asyncio.sleep(asked_at + INTERVAL_SECONDS - _now())
        except Exception:  # a bug here must not leave the run without looks
            log.exception("the progress of %s cannot be watched", "/".join(key))
            self._again_at[watch.head.run_uid] = _now() + AGAIN_SECONDS
        self._look(key)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _training(run: AgenticRun, observed: Observed) -> tuple[Job, Progress] | None:
    """Return the head's answers if the run just trains, else None."""
    job, progress = observed.job, observed.own_progress(run)
    if run.status.phase is not Phase.RUNNING or run.spec.suspend:
        return None
    if not isinstance(job, Job) or job.status != "RUNNING":
        return None
    return (job, progress) if progress and _goes_on(progress) else None


def _goes_on(progress: Progress, before: Progress | None = None) -> bool:
    """Return True if the driver of this snapshot, the same as before, is alive and trains on."""
    same = before is None or progress.submission_id == before.submission_id
    return same and progress.final is None and (progress.silent_seconds or 0.0) < QUIET_SECONDS
