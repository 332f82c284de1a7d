"""Where a run's metrics go: metrics.jsonl always, TensorBoard, W&B and the log where `spec.tracking` asks for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from agenticrun_api import AgenticRun, InvalidRun
from agenticrun_workers.reporting.console import ConsoleTracker
from agenticrun_workers.reporting.metrics_log import JsonlTracker, TensorBoardTracker, Tracker
from agenticrun_workers.reporting.wandb_tracker import WandbTracker, run_id

log = logging.getLogger(__name__)


def build_trackers(run: AgenticRun, output: Path, resume_step: int) -> list[Tracker]:
    """The trackers of an attempt. May wait for a server: call it off the event loop.

    Args:
        output: folder of metrics.jsonl, tensorboard/ and wandb/.
        resume_step: step of the checkpoint that the attempt goes on from, 0 at the beginning.

    Raises:
        InvalidRun: `spec.tracking` can never work. Whatever else keeps a tracker from starting is told, and the run trains without.
    """
    tracking = run.spec.tracking
    makers: dict[str, Callable[[], Tracker]] = {
        "metrics.jsonl": lambda: JsonlTracker(output / "metrics.jsonl", resume_step)
    }
    if tracking.console:
        makers["console"] = lambda: ConsoleTracker(run.spec.pipeline.max_steps)
    if tracking.tensorboard:
        makers["TensorBoard"] = lambda: TensorBoardTracker(output / "tensorboard", resume_step)
    if (wandb := tracking.wandb) is not None:
        makers["W&B"] = lambda: WandbTracker(run, wandb, output, run_id(run, output))
    trackers: list[Tracker] = []
    for name, make in makers.items():
        try:
            trackers.append(Tolerated(name, make()))
        except InvalidRun:
            for tracker in trackers:
                tracker.close()
            raise
        except Exception as error:  # a tracker never stops training
            log.warning("the run trains without %s: %s: %s", name, type(error).__name__, error)
    return trackers


class Tolerated:
    """A `Tracker` whose failures never stop training. A failure is told once, until the tracker works again."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name = name
        self._tracker = tracker
        self._works = True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._try(lambda: self._tracker.log(step, metrics))

    def close(self) -> None:
        self._try(self._tracker.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a tracker never stops training
            if self._works:
                log.warning(
                    "%s does not take metrics: %s: %s", self._name, type(error).__name__, error
                )
            self._works = False
        else:
            self._works = True
