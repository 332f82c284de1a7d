"""Watches the progress of runs that train, by long polls of their reporters.

A reporter holds a question until the driver has news or falls silent. So a run that trains is
looked at when something has happened, and otherwise every `JOB_SECONDS` for what only Ray tells.
Each such run has one task. It ends as soon as the run does anything but train: then the looks ask
the head themselves, as often as the plan says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from agenticrun_api import AgenticRun, Phase, Progress
from agenticrun_api.progress import QUIET_SECONDS
from agenticrun_operator.cluster import Head, HeadAddress
from agenticrun_operator.observed import Job, NoReport, Observed, Unreachable
from agenticrun_operator.workqueue import Key

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 2.0
"""Shortest time between two questions: changes that follow each other are one piece of news, and a
reporter of an earlier version, which holds no question, is not asked more often."""
JOB_SECONDS = 15.0
"""Age at which Ray's answer about the job is too old. The reporter tells sooner that a driver has
ended."""
UNSEEN_SECONDS = 120.0
"""Time without a look after which a watch ends: another operator leads now."""
_NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass
class _Watch:
    """The newest answers of the head of a run that trains."""

    head: HeadAddress
    job: Job
    job_at: datetime
    """When Ray was asked about the job."""
    progress: Progress
    looked_at: datetime
    last: Progress | NoReport | Unreachable | None = None
    """The answer that has ended the watch. The next look uses it: a head may be gone after its
    final report was read."""


class ProgressWatches:
    """The open questions to reporters, one for each run that trains."""

    def __init__(self, head: Head, clock: Callable[[], datetime], look: Callable[[Key], None]):
        """Create the collection.

        Args:
            head: the head pods.
            clock: returns the current time.
            look: called with a run that has news, or that no longer just trains.
        """
        self._head = head
        self._clock = clock
        self._look = look
        self._watches: dict[str, _Watch] = {}
        """By the run's uid."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def answers(
        self, run: AgenticRun, head: HeadAddress
    ) -> tuple[Job | None, Progress | NoReport | Unreachable | None]:
        """Return what the head says about job and progress; None: it has to be asked."""
        watch, job = self._watches.get(run.metadata.uid), run.status.job
        if watch is None or watch.head != head:
            return None, None
        if job is None or job.submission_id != watch.progress.submission_id:
            return None, None
        watch.looked_at = self._clock()
        if isinstance(watch.last, Unreachable):
            # Shown at once: Ray may hang as well, and the look would wait for it.
            return watch.job, watch.last
        if watch.last is not None:
            return None, watch.last
        if self._age(watch.job_at) >= JOB_SECONDS:
            return None, None
        return watch.job, watch.progress

    def doubt(self, run_uid: str) -> None:
        """Let the next look at a run ask its head: something has changed."""
        if watch := self._watches.get(run_uid):
            watch.job_at = _NEVER

    def watch(self, run: AgenticRun, head: HeadAddress, observed: Observed) -> bool:
        """Watch a run if it just trains, as its head has answered, else end its watch.

        Returns:
            True if the run is watched.
        """
        uid, now = run.metadata.uid, self._clock()
        answers = _training(run, observed)
        if answers is None:
            self.forget(uid)
            return False
        job, progress = answers
        known = self._watches.get(uid)
        if known is None or known.head != head or known.last is not None:
            self.forget(uid)
            known = self._watches[uid] = _Watch(head, job, now, progress, now)
            self._tasks[uid] = asyncio.create_task(
                self._follow(run.key, known), name=f"progress {'/'.join(run.key)}"
            )
        elif job is not known.job:  # Ray was asked
            known.job, known.job_at = job, now
        if progress.sequence >= known.progress.sequence:
            known.progress = progress
        return True

    def forget(self, run_uid: str) -> None:
        """End the watch of a run, if there is one."""
        self._watches.pop(run_uid, None)
        if task := self._tasks.pop(run_uid, None):
            task.cancel()

    async def stop(self) -> None:
        """End all watches."""
        tasks = list(self._tasks.values())
        for uid in list(self._tasks):
            self.forget(uid)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, key: Key, watch: _Watch) -> None:
        """Ask the reporter again and again, until the run no longer just trains."""
        try:
            while self._age(watch.looked_at) < UNSEEN_SECONDS:
                before, asked_at = watch.progress, self._clock()
                answer = await self._head.progress(watch.head, after=before)
                if not isinstance(answer, Progress) or not _goes_on(answer, before):
                    watch.last = answer
                    break
                # A look may have asked, and have a newer answer.
                if answer.sequence >= watch.progress.sequence:
                    news = answer.sequence > watch.progress.sequence
                    watch.progress = answer.masked()
                    if news:
                        self._look(key)
                await asyncio.sleep(INTERVAL_SECONDS - self._age(asked_at))
        except Exception:  # a bug here must not leave a run without looks
            log.exception("the progress of %s cannot be watched", "/".join(key))
            watch.job_at = _NEVER
        self._look(key)

    def _age(self, moment: datetime) -> float:
        return (self._clock() - moment).total_seconds()


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
