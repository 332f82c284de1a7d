"""Trackers of metrics: metrics.jsonl always; others by `spec.tracking`."""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from agenticrun_api import AgenticRun, InvalidRun
from agenticrun_api.spec import Wandb
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.plugins import PluginError, bound
from agenticrun_workers.reporting.display import ConsoleTracker

log = logging.getLogger(__name__)


def build_trackers(
    run: AgenticRun, output: Path, resume_step: int, max_steps: Callable[[], int]
) -> list[Tracker]:
    """Start the trackers of an attempt. May wait for a server: call it off the event loop.

    Args:
        output: folder of metrics.jsonl, tensorboard/ and wandb/.
        resume_step: step of the checkpoint that the attempt resumes from; 0 at the start.
        max_steps: returns the number of steps of the run, which may change.

    Raises:
        InvalidRun: `spec.tracking` can never work. Other failures are logged, and the run
            trains without that tracker.
        InvalidConfig: see `custom_tracker`.
    """
    tracking = run.spec.tracking
    makers: dict[str, Callable[[], Tracker]] = {
        "metrics.jsonl": lambda: JsonlTracker(output / "metrics.jsonl", resume_step)
    }
    if tracking.console:
        makers["console"] = lambda: ConsoleTracker(max_steps)
    if tracking.tensorboard:
        makers["TensorBoard"] = lambda: TensorBoardTracker(output / "tensorboard", resume_step)
    if (wandb := tracking.wandb) is not None:
        makers["W&B"] = lambda: WandbTracker(run, wandb, output, run_id(run, output))
    if (custom := custom_tracker(run)) is not None:
        tracked = TrackedRun(
            run.metadata.name, run_id(run, output), output, _config(run), resume_step
        )
        makers[str(tracking.custom)] = lambda: custom(tracked)
    trackers: list[Tracker] = []
    for name, make in makers.items():
        try:
            trackers.append(Tolerated(name, make()))
        except InvalidRun:
            # A refused run must not leave files or uploads open.
            for tracker in trackers:
                tracker.close()
            raise
        except Exception as error:  # a tracker never stops training
            log.warning("the run trains without %s: %s: %s", name, type(error).__name__, error)
    return trackers


@dataclass(frozen=True)
class TrackedRun:
    """Facts about a run for a tracker of the user's, which gets it as its first argument."""

    name: str
    id: str
    """The same for all attempts of the run: a tracker continues where an attempt ended."""
    folder: Path
    """The output folder of the run, for trackers that write files."""
    config: dict[str, Any]
    """`model` and `pipeline` of the spec, without roles, which may hold secrets."""
    resume_step: int
    """Later steps of an earlier attempt are logged again; 0 at the start."""


def custom_tracker(run: AgenticRun) -> Callable[[TrackedRun], Tracker] | None:
    """Return the class of the user's tracker with its config; None without one.

    Raises:
        InvalidConfig: the class cannot be found, lacks a method, or does not take the config.
    """
    tracking = run.spec.tracking
    if tracking.custom is None:
        return None
    try:
        made = bound(tracking.custom, tracking.custom_config or {}, arguments=1)
    except PluginError as error:
        raise InvalidConfig(CUSTOM_FIELD, str(error)) from error
    lacking = [name for name in ("log", "close") if not hasattr(made.func, name)]
    # If it is a function, only the tracker that it returns can be checked, and there is none yet.
    if isinstance(made.func, type) and lacking:
        raise InvalidConfig(
            CUSTOM_FIELD,
            f"{tracking.custom} has no method {' and no method '.join(lacking)}: a tracker has "
            "log(step, metrics) and close()",
        )
    return made


class Tolerated:
    """Wraps a `Tracker` so that its failures never stop training.

    A failure is logged once, until the tracker works again.
    """

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
                    "%s does not accept metrics: %s: %s", self._name, type(error).__name__, error
                )
            self._works = False
        else:
            self._works = True


class Tracker(Protocol):
    """A receiver of the metrics of each step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlTracker:
    """Writes JSON lines: `{"step": 3, "time": 1700000000.0, "rollout/score/mean": 0.25, ...}`.

    Metrics that are not finite are left out: JSON has no number for them.

    Args:
        path: the file; appended to.
        resume_step: lines of later steps, and the validation of this one, are removed, because
            the attempt computes them again.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
            # A killed driver may leave half a line at the end.
            if not line.endswith("}\n"):
                continue
            values = json.loads(line)
            validation = all(name.startswith("val/") for name in values.keys() - {"step", "time"})
            # The run computes later steps again, and validates again at this one.
            if values["step"] < resume_step or (values["step"] == resume_step and not validation):
                kept.append(line)
        aside = path.with_suffix(".tmp")
        # Rewritten beside it: a crash here must not lose the earlier steps.
        aside.write_text("".join(kept))
        aside.replace(path)
        # Line by line, for readers that follow the file.
        self._file = path.open("a", buffering=1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        line = {"step": step, "time": round(time.time(), 3), **finite}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoardTracker:
    """Scalars for TensorBoard, written without torch or TensorFlow.

    A restart marker hides the values of an earlier attempt for steps that are computed again.
    """

    def __init__(self, folder: Path, resume_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._event, self._summary = Event, Summary
        earlier = any(folder.iterdir())
        self._writer = EventFileWriter(str(folder))
        # TensorBoard would draw two values for each step that is computed again.
        if earlier:
            marker = SessionLog(status=SessionLog.START)
            self._writer.add_event(
                Event(step=resume_step + 1, wall_time=time.time(), session_log=marker)
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()
        ]
        self._writer.add_event(
            self._event(step=step, wall_time=time.time(), summary=self._summary(value=values))
        )

    def close(self) -> None:
        self._writer.close()


INIT_SECONDS = 30.0
"""Wait for the server before the run trains without W&B."""
FINISH_SECONDS = 60
"""Wait for uploads at the end of a run; `wandb sync` sends the rest."""
FIELD = "spec.tracking.wandb"
CUSTOM_FIELD = "spec.tracking.custom"


class WandbTracker:
    """Logs every step as one row to Weights & Biases, with `step` as the x-axis.

    After a resume, rows of steps that are computed again are added, never dropped. All attempts of
    a run share one W&B run. Files go to `<folder>/wandb`; in offline mode `wandb sync` sends them
    from there. Only `model` and `pipeline` of the spec are uploaded, because roles may hold secrets
    in their environment.

    Args:
        run_id: id of the W&B run, the same for all attempts.

    Raises:
        InvalidRun: there is no API key, or the server refuses the key or the project.
        wandb.Error: the server does not answer within `INIT_SECONDS`.
    """

    def __init__(self, run: AgenticRun, spec: Wandb, folder: Path, run_id: str) -> None:
        if spec.mode == "offline":
            os.environ["WANDB_ERROR_REPORTING"] = "false"  # wandb sends telemetry offline too
        import wandb

        wandb.setup(wandb.Settings(silent=True))
        if spec.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise InvalidRun(
                [
                    f"{FIELD}: no API key: put WANDB_API_KEY into roles.driver.env or a secret of "
                    "roles.driver.envFrom, or set mode: offline"
                ]
            )
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run: Any = wandb.init(
                project=spec.project,
                entity=spec.entity,
                group=spec.group,
                tags=spec.tags,
                mode=spec.mode,
                id=run_id,
                name=run.metadata.name,
                resume="allow",
                dir=str(folder),
                config=_config(run),
                allow_val_change=True,
                settings=wandb.Settings(
                    console="off",  # the driver has its own log and display
                    silent=True,
                    init_timeout=INIT_SECONDS,
                    x_disable_meta=True,  # the command line may hold secrets (--set)
                    finish_timeout=FINISH_SECONDS,
                ),
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise InvalidRun([f"{FIELD}: {error}"]) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


def _config(run: AgenticRun) -> dict[str, Any]:
    return {"model": run.spec.model.to_dict(), "pipeline": run.spec.pipeline.to_dict()}


def run_id(run: AgenticRun, output: Path) -> str:
    """Return the run's uid; in local mode, which has none, an id kept in the output folder."""
    if run.metadata.uid:
        return run.metadata.uid
    kept = output / "wandb-run-id"
    if not kept.exists():
        output.mkdir(parents=True, exist_ok=True)
        kept.write_text(secrets.token_hex(8))
    return kept.read_text()
