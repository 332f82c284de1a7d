"""One attempt of a run, on a RayCluster and in local mode alike."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from agenticrun_api import Activity, AgenticRun, FinalReport
from agenticrun_workers.driver.checkpoints import CheckpointStore
from agenticrun_workers.driver.loop import Loop
from agenticrun_workers.driver.outcome import ended_by, succeeded
from agenticrun_workers.driver.parts import check_plugins, loop_parts
from agenticrun_workers.driver.progress import AttemptId, ProgressReporter, Requests
from agenticrun_workers.driver.start_up import running_actors
from agenticrun_workers.launch import Launcher
from agenticrun_workers.reporting.client import ProgressSink
from agenticrun_workers.reporting.run_folder import RunFolder


@dataclass(frozen=True)
class AttemptRunner:
    """Starts the actors, resumes from a checkpoint, trains, and reports the outcome.

    Args:
        output: folder of metrics.jsonl and TensorBoard's events.
        checkpoints: path or URI of the run's checkpoints; None saves nothing.
        resume: the value of `spec.checkpoint.resume`.
        launcher: starts the actors.
        code: folder of the user's modules, in local mode.
    """

    run: AgenticRun
    attempt: AttemptId
    output: Path
    checkpoints: str | None
    resume: str
    sink: ProgressSink
    requests: Requests
    launcher: Launcher
    code: Path | None = None

    async def execute(self) -> FinalReport:
        """Train to the last step and report the outcome to the sink.

        Cancelling this ends the attempt at once, without saving.

        Returns:
            the report, also after a failure: this raises nothing.
        """
        progress = ProgressReporter(
            self.sink,
            self.attempt,
            self.run.spec.pipeline.max_steps,
            self.run.metadata.generation,
        )
        progress.activity(Activity.STARTING, "starting actors")
        try:
            # Checks that need no actor come first: a wrong setting should not cost a start-up.
            await asyncio.to_thread(
                RunFolder(self.output).record_attempt, self.run, self.attempt.number, self.code
            )
            await asyncio.to_thread(check_plugins, self.run)
            report = succeeded(await self._train(progress), progress)
        except (Exception, asyncio.CancelledError) as error:  # every failure becomes a report
            report = ended_by(error, progress.step)
        await progress.finish(report)
        return report

    async def _train(self, progress: ProgressReporter) -> Loop:
        storage, restarted = self.run.spec.storage, self.attempt.number > 1
        keep = storage.keep if storage else 1
        store = (
            CheckpointStore(self.checkpoints, self.run.metadata.uid or "local", keep)
            if self.checkpoints
            else None
        )
        async with AsyncExitStack() as running:
            # A stop request during the start-up must not wait for pods that may never come.
            actors = await self.requests.unless_stopped(
                running.enter_async_context(
                    running_actors(self.run, self.launcher, self.requests.changed.set)
                )
            )
            # Replicas may change while a checkpoint is restored, which takes minutes for large
            # models.
            following = asyncio.create_task(actors.pools.follow(self.requests, progress))
            # Before the actors end, or it would start engines and env workers while they do.
            running.callback(following.cancel)
            state = None
            if store:
                restored = await store.restore(
                    self.resume, actors.trainers.loaders, restarted=restarted
                )
                await actors.trainers.reserve_snapshots()
                if restored:
                    checkpoint, state = restored
                    progress.resumed(state.step, checkpoint.status)
            parts = await running.enter_async_context(
                loop_parts(
                    self.run,
                    self.output,
                    actors,
                    state,
                    checkpoints=store,
                    progress=progress,
                    requests=self.requests,
                    restarted=restarted,
                    failures=[*actors.failures, following],
                )
            )
            loop = Loop(parts, state)
            await loop.run()
        return loop
