"""Progress for users: a live display on a terminal, lines in a log."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from types import TracebackType
from typing import Self

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from agenticrun_api import Activity, AgenticRun, Progress
from agenticrun_api.metrics import COLUMNS
from agenticrun_workers.reporting.client import ProgressSink

log = logging.getLogger(__name__)

BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 48
SAMPLE_LINES = 14

QUIET_SECONDS = 10.0
"""Shortest time between two lines about one phase outside of steps, such as the warm-up."""


class RunConsole(Console):
    """A console that falls silent when its reader has gone (`... | head`); the run continues."""

    def on_broken_pipe(self) -> None:
        """Write nothing more."""
        with suppress(SystemExit):
            super().on_broken_pipe()


class PlainDisplay(ProgressSink):
    """A `ProgressSink` that prints a line per step, and some lines per phase around the steps."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._step = 0
        self._activity = ""
        self._message = ""
        self._reported = -math.inf
        self._began = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    @override
    def update(self, progress: Progress) -> None:
        # In a step there are many snapshots: only its end is worth a line.
        if progress.activity not in (Activity.ROLLOUT, Activity.TRAINING, Activity.VALIDATION):
            # A start-up changes its message often, and may take minutes.
            repeated = progress.message == self._message
            if progress.activity != self._activity or not (
                repeated or self._clock() - self._reported < QUIET_SECONDS
            ):
                self._message, self._reported = progress.message, self._clock()
                self._print(f"[{progress.activity}] {progress.message}".rstrip())
        elif progress.message not in ("", self._message):
            self._message = progress.message
            self._print(f"[{progress.activity}] {progress.message}")
        if validated(self._activity, progress):
            self._print(validation_line(progress.step, progress.metrics))
        self._activity = progress.activity
        # A resumed run begins with a step that it has not taken itself.
        if progress.step != self._step and progress.last_step_time is not None:
            self._step = progress.step
            line = step_line(progress.step, progress.max_steps, progress.metrics)
            remaining = remaining_seconds(progress)
            left = "" if remaining is None else f", {duration(remaining)} remaining"
            self._print(f"{line}  ({duration(self._clock() - self._began)} elapsed{left})")

    @override
    def sample(self, transcript: str) -> None:
        """Samples are not printed."""

    @override
    async def finish(self, progress: Progress) -> None:
        self.update(progress)

    def _print(self, line: str) -> None:
        with suppress(OSError):  # a full disk does not end training
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveDisplay(ProgressSink):
    """A `ProgressSink` that keeps a panel of progress, metrics and the newest sample up to date."""

    def __init__(
        self, console: Console, run: AgenticRun, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = run.metadata.name
        self._clock = clock
        self._began = clock()
        self._progress: Progress | None = None
        self._rewards: list[float] = []
        self._validations: list[float] = []
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

    @override
    def update(self, progress: Progress) -> None:
        before = self._progress
        if before is not None:
            measured = validation_result(progress.metrics)
            if measured is not None and validated(before.activity, progress):
                self._validations.append(measured)
            # Snapshots repeat the newest step until the next one.
            if progress.step > before.step and progress.reward is not None:
                self._rewards.append(progress.reward)
        self._progress = progress

    @override
    def sample(self, transcript: str) -> None:
        self._sample = transcript

    @override
    async def finish(self, progress: Progress) -> None:
        self.update(progress)
        self._live.refresh()

    def _render(self) -> RenderableType:
        progress = self._progress
        elapsed = self._clock() - self._began
        if progress is None:
            started = f"starting Ray  {duration(elapsed)}"
            return Panel(started, title=self._name, title_align="left")
        view = RunView(
            name=self._name,
            phase=progress.activity,
            message=progress.message,
            step=progress.step,
            max_steps=progress.max_steps,
            metrics=progress.metrics,
            rewards=self._rewards,
            validations=self._validations,
            elapsed=elapsed,
            remaining=remaining_seconds(progress),
            sample=self._sample,
        )
        return draw(view)


def display_of(run: AgenticRun, console: Console, *, live: bool) -> LiveDisplay | PlainDisplay:
    """Return a panel that is updated in place, or without `live` lines."""
    return LiveDisplay(console, run) if live else PlainDisplay(console)


@dataclass(frozen=True)
class RunView:
    """The view of a run at one moment."""

    name: str
    phase: str
    message: str
    step: int
    max_steps: int
    metrics: Mapping[str, float]
    """Metrics of the newest step and the newest validation."""
    rewards: Sequence[float] = ()
    """Mean score of each step, the oldest first."""
    validations: Sequence[float] = ()
    """`validation_result` of each validation, the oldest first."""
    elapsed: float | None = None
    remaining: float | None = None
    """Seconds since the start, and until the last step is done."""
    facts: Sequence[tuple[str, str]] = ()
    """More rows: name and text."""
    sample: str = ""
    """The text of the newest sample episode."""


def draw(view: RunView) -> RenderableType:
    """Draw a run for a terminal: a table, curves, and the end of the newest sample."""
    rows = Table.grid(padding=(0, 2))
    rows.add_row("phase", Text(f"{view.phase}  {view.message}".rstrip()))
    row = Table.grid(padding=(0, 1))
    row.add_row(
        ProgressBar(total=view.max_steps, completed=view.step, width=40),
        f"{view.step}/{view.max_steps}",
    )
    rows.add_row("step", row)
    times = {"elapsed": view.elapsed, "remaining": view.remaining}
    known = [f"{duration(value)} {name}" for name, value in times.items() if value is not None]
    if known:
        rows.add_row("time", ", ".join(known))
    for name, text in view.facts:
        rows.add_row(Text(name), Text(text))
    rows.add_row("newest step", newest_step(view.metrics))
    if shares := time_shares([view.metrics]):
        rows.add_row("step time", _pieces(_times(shares)))
    if up := alarms(view.metrics):
        rows.add_row("alarms", Text(", ".join(up), "bold red"))
    if view.rewards:
        rows.add_row("reward", sparkline(view.rewards))
    for name, value in success_rates(view.metrics).items():
        rows.add_row(name.removeprefix("val/"), f"{value:.3f}")
    if failed := failed_shares(view.metrics):
        rows.add_row("failed episodes", Text(", ".join(failed), "bold red"))
    if view.validations:
        rows.add_row("validation", sparkline(view.validations))
    parts: list[RenderableType] = [Panel(rows, title=view.name, title_align="left")]
    if view.sample:
        # The end shows how the episode went; the beginning is the prompt.
        shown = "\n".join(view.sample.splitlines()[-SAMPLE_LINES:])
        parts.append(Panel(Text(shown), title="newest sample", title_align="left", style="dim"))
    return Group(*parts)


def remaining_seconds(progress: Progress) -> float | None:
    """Return the estimated time until the last step is done; None before the first step."""
    if progress.seconds_per_step is None or progress.final is not None:
        return None
    return (progress.max_steps - progress.step) * progress.seconds_per_step


def validation_result(metrics: Mapping[str, float]) -> float | None:
    """Return the mean success of a validation; its mean score if success is not measured."""
    rates = [value for name, value in metrics.items() if re.fullmatch("val/[^/]+/success", name)]
    return sum(rates) / len(rates) if rates else metrics.get("val/score/mean")


def time_shares(steps: Iterable[Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """Return seconds per step and share of each phase, the longest phase first.

    Args:
        steps: metrics of steps; others are ignored. What no phase measures is called `other`.
    """
    timed = [step for step in steps if step.get("time/step")]
    total = sum(step["time/step"] for step in timed)
    spent: dict[str, float] = {}
    for step in timed:
        for name, value in step.items():
            if name.startswith("time/") and name != "time/step":
                phase = name.removeprefix("time/")
                spent[phase] = spent.get(phase, 0.0) + value
    if not total or not spent:
        return {}
    # Clocks of phases may overlap by microseconds.
    spent["other"] = max(0.0, total - sum(spent.values()))
    order = sorted(spent.items(), key=lambda item: -item[1])
    return {name: (value / len(timed), value / total) for name, value in order}


def duration(seconds: float) -> str:
    """Format a time: 8 s, 3 min 20 s, 2 h 05 min, 3 d 4 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def sparkline(values: Sequence[float]) -> str:
    """Draw values as a row of bars between their extremes, and name newest, lowest and highest.

    With more values than bars, each bar is the mean of neighbours.
    """
    # NaN has no height, and infinity would flatten all the others.
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "-"
    count = min(CURVE_WIDTH, len(finite))
    edges = [round(index * len(finite) / count) for index in range(count + 1)]
    means = [fmean(finite[a:b]) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    # A constant curve is a row of the lowest bars.
    span = (high - low) or 1.0
    top = len(BARS) - 1
    bars = "".join(BARS[round((value - low) / span * top)] for value in means)
    return f"{bars} {finite[-1]:.3g} ({min(finite):.3g} to {max(finite):.3g})"


def validated(before: str, progress: Progress) -> bool:
    """Return True if a validation ended between activity `before` and this snapshot."""
    return before == Activity.VALIDATION and progress.activity != Activity.VALIDATION


def newest_step(metrics: Mapping[str, float]) -> RenderableType:
    """Show the metrics of the newest step, wrapped to the width of the terminal."""
    return _pieces(
        (label, form.format(metrics[name])) for label, name, form in COLUMNS if name in metrics
    )


def _pieces(named: Iterable[tuple[str, str]]) -> RenderableType:
    pieces = [Text.assemble((f"{name} ", "dim"), text) for name, text in named]
    return Columns(pieces, padding=(0, 3)) if pieces else Text("-")


def _times(shares: Mapping[str, tuple[float, float]]) -> list[tuple[str, str]]:
    return [
        (name, f"{seconds:.2f} s {share:.0%}")
        for name, (seconds, share) in shares.items()
        if share >= 0.005
    ]


class ConsoleTracker:
    """A `Tracker` that logs one line per step and per validation."""

    def __init__(self, max_steps: Callable[[], int]) -> None:
        self._max_steps = max_steps

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if "time/step" in metrics:
            log.info("%s", step_line(step, self._max_steps(), metrics))
        elif any(name.startswith("val/") for name in metrics):  # not the parity of the engines
            log.info("%s", validation_line(step, metrics))

    def close(self) -> None:
        """Nothing is held open."""


def step_line(step: int, max_steps: int, metrics: Mapping[str, float]) -> str:
    """Format a step.

    `step 12/300  reward 0.250  loss -0.0123  entropy 0.910  tok/s 9,100  s/step 1.20`
    """
    shown = [
        f"{label} {form.format(metrics[name])}" for label, name, form in COLUMNS if name in metrics
    ]
    alarmed = [f"ALARM {name}" for name in alarms(metrics)]
    return "  ".join([f"step {step}/{max_steps}", *shown, *alarmed])


def validation_line(step: int, metrics: Mapping[str, float]) -> str:
    """Format a validation, with scores where success is not measured, and what failed.

    `[validation] step 10: Lake success 0.650, Lake random_success 0.020, Lake env_error 0.10`
    """
    rates = success_rates(metrics) or {
        name: value for name, value in metrics.items() if re.fullmatch("val/[^/]+/score", name)
    }
    shown = [
        *(
            f"{name.removeprefix('val/').replace('/', ' ')} {value:.3f}"
            for name, value in rates.items()
        ),
        *failed_shares(metrics),
    ]
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
    wanted = re.compile("val/[^/]+/(random_|warmup_)?success")
    return {name: value for name, value in metrics.items() if wanted.fullmatch(name)}


FAILED = re.compile(r"val/([^/]+)/(?:stop/)?(env_error|timeout|aborted|stale|random_errors)")


def failed_shares(metrics: Mapping[str, float]) -> list[str]:
    """Return the shares of validation episodes that failed: `Lake env_error 0.10`."""
    found = ((FAILED.fullmatch(name), value) for name, value in metrics.items())
    return [
        f"{name[1]} {name[2]} {value:.2f}" if value >= 0.01 else f"{name[1]} {name[2]} {value:.1g}"
        for name, value in found
        if name and value
    ]
