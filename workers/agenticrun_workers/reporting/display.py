"""Progress for people: a live display on a terminal, lines in a log."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agenticrun_api import Activity, AgenticRun, Progress

log = logging.getLogger(__name__)

BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 48
SAMPLE_LINES = 14

QUIET_SECONDS = 10.0
"""Shortest time between two lines about one phase outside of steps, such as the warm-up."""


class PlainDisplay:
    """A `ProgressSink` that prints a line per step, and some lines per phase around the steps."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._step = 0
        self._activity = ""
        self._message = ""
        self._told = -math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def update(self, progress: Progress) -> None:
        """See `ProgressSink`."""
        if progress.activity not in (Activity.ROLLOUT, Activity.TRAINING, Activity.VALIDATION):
            self._tell_phase(progress)
        if validated(self._activity, progress):
            self._print(validation_line(progress.step, progress.metrics))
        self._activity = progress.activity
        if progress.step != self._step and progress.last_step_time is not None:
            self._step = progress.step
            self._print(step_line(progress.step, progress.max_steps, progress.metrics))

    def sample(self, transcript: str) -> None:
        """See `ProgressSink`: samples are not printed."""

    async def finish(self, progress: Progress) -> None:
        """See `ProgressSink`."""
        self.update(progress)

    def _tell_phase(self, progress: Progress) -> None:
        goes_on = progress.activity == self._activity
        if goes_on and (
            progress.message == self._message or self._clock() - self._told < QUIET_SECONDS
        ):
            return
        self._message, self._told = progress.message, self._clock()
        self._print(f"[{progress.activity}] {progress.message}".rstrip())

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveDisplay:
    """A `ProgressSink` that keeps a panel of progress, metrics and the newest sample up to date."""

    def __init__(self, console: Console, run: AgenticRun) -> None:
        self._name = run.metadata.name
        self._progress: Progress | None = None
        self._curve: list[float] = []
        self._sample = ""
        self._live = Live(
            self._render(), console=console, refresh_per_second=4, get_renderable=self._render
        )

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, value, trace)

    def update(self, progress: Progress) -> None:
        """See `ProgressSink`."""
        success = [
            value
            for name, value in success_rates(progress.metrics).items()
            if name.endswith("/success")
        ]
        if success and self._progress is not None and validated(self._progress.activity, progress):
            self._curve.append(sum(success) / len(success))
        self._progress = progress

    def sample(self, transcript: str) -> None:
        """See `ProgressSink`."""
        self._sample = transcript

    async def finish(self, progress: Progress) -> None:
        """See `ProgressSink`."""
        self.update(progress)
        self._live.refresh()

    def _render(self) -> RenderableType:
        progress = self._progress
        if progress is None:
            return Panel("starting Ray", title=self._name, title_align="left")
        numbers = Table.grid(padding=(0, 2))
        numbers.add_row("phase", f"{progress.activity}  {progress.message}")
        numbers.add_row("step", _bar(progress))
        numbers.add_row("newest step", newest_step(progress.metrics))
        if up := alarms(progress.metrics):
            numbers.add_row("alarms", Text(", ".join(up), "bold red"))
        for name, value in success_rates(progress.metrics).items():
            numbers.add_row(name.removeprefix("val/"), f"{value:.3f}")
        if self._curve:
            numbers.add_row("validation", curve(self._curve))
        parts: list[RenderableType] = [Panel(numbers, title=self._name, title_align="left")]
        if self._sample:
            shown = "\n".join(self._sample.splitlines()[-SAMPLE_LINES:])
            parts.append(Panel(Text(shown), title="newest sample", title_align="left", style="dim"))
        return Group(*parts)


def validated(before: str, progress: Progress) -> bool:
    """Return True if a validation ended between activity `before` and this snapshot."""
    return before == Activity.VALIDATION and progress.activity != Activity.VALIDATION


def curve(values: list[float]) -> str:
    """Draw values between 0 and 1 as a row of bars, and the last one as a number."""
    newest = values[-CURVE_WIDTH:]
    bars = "".join(BARS[min(len(BARS) - 1, int(value * len(BARS)))] for value in newest)
    return f"{bars} {newest[-1]:.2f}"


def newest_step(metrics: Mapping[str, float]) -> RenderableType:
    """Show the metrics of the newest step, wrapped to the width of the terminal."""
    pieces = [
        Text.assemble((f"{label} ", "dim"), form.format(metrics[name]))
        for label, name, form in COLUMNS
        if name in metrics
    ]
    return Columns(pieces, padding=(0, 3)) if pieces else Text("-")


def _bar(progress: Progress) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    row.add_row(
        ProgressBar(total=progress.max_steps, completed=progress.step, width=40),
        f"{progress.step}/{progress.max_steps}",
    )
    return row


COLUMNS = (
    ("reward", "rollout/score/mean", "{:.3f}"),
    ("success", "rollout/success/mean", "{:.3f}"),
    ("loss", "actor/total_loss", "{:.4f}"),
    ("entropy", "actor/entropy", "{:.3f}"),
    ("kl", "critic/kl", "{:.4f}"),
    ("approxkl", "actor/approxkl", "{:.5f}"),
    ("vloss", "critic/loss", "{:.4f}"),
    ("tok/s", "system/tps", "{:,.0f}"),
    ("s/step", "time/step", "{:.2f}"),
)
"""Label, metric and format; metrics that a step lacks are left out.

kl is the KL to the reference, approxkl the KL between the policies before and after the step's
updates, vloss the critic's loss.
"""


class ConsoleTracker:
    """A `Tracker` that logs one line per step and per validation."""

    def __init__(self, max_steps: Callable[[], int]) -> None:
        self._max_steps = max_steps

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        log.info(
            "%s",
            step_line(step, self._max_steps(), metrics)
            if "time/step" in metrics
            else validation_line(step, metrics),
        )

    def close(self) -> None:
        """Nothing is held open."""


def step_line(step: int, max_steps: int, metrics: Mapping[str, float]) -> str:
    """Format a step.

    `step 12/300  reward 0.250  loss -0.0123  entropy 0.910  tok/s 9,100  s/step 1.20`
    """
    shown = [
        f"{label} {form.format(metrics[name])}" for label, name, form in COLUMNS if name in metrics
    ]
    told = [f"ALARM {name}" for name in alarms(metrics)]
    return "  ".join([f"step {step}/{max_steps}", *shown, *told])


def validation_line(step: int, metrics: Mapping[str, float]) -> str:
    """Format a validation, with scores where success is not measured.

    `[validation] step 10: Lake success 0.650, Lake random_success 0.020`
    """
    rates = success_rates(metrics) or {
        name: value for name, value in metrics.items() if name.endswith("/score")
    }
    shown = (
        f"{name.removeprefix('val/').replace('/', ' ')} {value:.3f}"
        for name, value in rates.items()
    )
    return f"[validation] step {step}: {', '.join(shown)}"


def alarms(metrics: Mapping[str, float]) -> list[str]:
    """Return the names of guards with an alarm that is up."""
    return [
        name.removeprefix("guard/")
        for name, value in metrics.items()
        if name.startswith("guard/") and value
    ]


def success_rates(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return val/<tag>/success and its baselines, by name."""
    endings = ("/success", "/random_success", "/warmup_success")
    return {
        name: value
        for name, value in metrics.items()
        if name.startswith("val/") and name.endswith(endings)
    }
