"""`agenticrun report`: one HTML page about a run, which needs no network and no other file."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
import yaml
from markupsafe import Markup

from agenticrun_api.version import __version__
from agenticrun_workers.cli.source import (
    Context,
    Namespace,
    Reading,
    RunName,
    open_run,
    or_give_up,
)
from agenticrun_workers.reporting.display import duration, time_shares
from agenticrun_workers.reporting.run_folder import Episode

Line = Mapping[str, float]
"""A line of metrics.jsonl."""
Points = list[tuple[float, float]]
"""Step and value."""

MAX_POINTS = 300
"""Points per curve; with more steps, a point is the mean of neighbours."""
MAX_PICTURE_BYTES = 8 << 20
"""All animations of a page together."""

CURVES: Mapping[str, tuple[str, ...]] = {
    "Reward": ("rollout/score/mean", "val/score/mean"),
    "Success": ("rollout/success/mean", "val/success/mean"),
    "Loss": ("actor/total_loss", "critic/loss"),
    "Entropy of the policy (nats)": ("actor/entropy",),
    "KL (nats)": ("critic/kl", "actor/kl_loss", "actor/approxkl"),
    "Gradient norm": ("actor/grad_norm", "critic/grad_norm"),
    "Response tokens per episode": ("tokens/response_length/mean",),
    "Turns per episode": ("rollout/turns/mean",),
    "Tokens per second": ("system/tps",),
    "Engines' seats in use": ("rollout/utilization",),
    "Staleness (policy versions)": ("staleness/mean", "staleness/max"),
    "Groups of equal rewards": ("group/zero_variance_share",),
    "Trainer against engine (nats)": ("engine/logprob_gap", "actor/train_infer_logprob_gap"),
}
"""Title and metrics of each chart. Metrics and charts without values are left out."""

LEVELS: Mapping[str, str] = {"Success": "/random_success"}
"""Metrics that are measured once, drawn as a dashed level: title and end of the name."""


def report(
    run: RunName,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="The HTML file to write.", dir_okay=False),
    ] = Path("report.html"),
    samples: Annotated[
        int, typer.Option(min=0, max=200, help="Number of sample episodes on the page.")
    ] = 12,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Write one HTML page about a run: curves, config, samples, stop reasons, timings, machine.

    The page needs no network. Values of environment variables are not in it; read the samples
    before you hand it on.
    Exit codes: 0 written, 64 the run cannot be read.
    """
    with or_give_up():
        page = html(
            open_run(run, namespace, context).read(samples=samples), samples, datetime.now(UTC)
        )
    output.write_text(page, encoding="utf-8")
    typer.echo(f"{output}: {size_of(len(page.encode()))}")


def size_of(count: int) -> str:
    """Return a number of bytes with its unit: 48 kB, 1.2 MiB."""
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 / 10 else f"{count / 1000:.0f} kB"


def html(reading: Reading, samples: int, now: datetime) -> str:
    """Return the page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    lines = reading.folder.metrics()
    steps = [line for line in lines if "time/step" in line]
    missing = list(reading.missing)
    if not lines and not missing:
        missing.append("curves and timings: the run has made no step yet")
    episodes, pictures = choose_episodes(reading, samples)
    attempts = reading.folder.attempts()
    environment = Environment(
        loader=PackageLoader("agenticrun_workers.cli", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        reading=reading,
        version=__version__,
        now=now.strftime("%Y-%m-%d %H:%M UTC"),
        tiles=tiles(reading, lines, attempts),
        charts=charts(lines),
        stops=stacked(shares_of(steps, "stop/"), "share of episodes"),
        stop_table=mean_shares(steps, "stop/"),
        times=stacked(_phases(steps), "seconds"),
        time_table=time_shares(steps),
        newest=sorted(reading.view().metrics.items()),
        episodes=episodes,
        pictures=pictures,
        attempts=attempts,
        config=yaml.safe_dump(dict(reading.config), sort_keys=False, allow_unicode=True, width=100)
        if reading.config
        else "",
        missing=missing,
    )


def tiles(
    reading: Reading, lines: Sequence[Line], attempts: Sequence[Any]
) -> list[tuple[str, str, str]]:
    """Return label, number and remark of the headline numbers."""
    found = [("steps", f"{reading.step} / {reading.max_steps}", "")]
    for label, name in (("reward", "rollout/score/mean"), ("success", "val/success/mean")):
        values = [line[name] for line in lines if name in line]
        if values:
            tail = fmean(values[-10:]) if label == "reward" else values[-1]
            remark = "mean of the last 10 steps" if label == "reward" else "last validation"
            found.append((label, f"{tail:.3f}", f"{remark}, first {values[0]:.3f}"))
    if reading.elapsed is not None:
        left = "" if reading.remaining is None else f"{duration(reading.remaining)} remaining"
        found.append(("time", duration(reading.elapsed), left))
    rates = [line["system/tps"] for line in lines if "system/tps" in line]
    if rates:
        found.append(("throughput", f"{fmean(rates):,.0f}", "tokens per second, mean of all steps"))
    if len(attempts) > 1:
        found.append(("attempts", str(len(attempts)), ""))
    return found


def choose_episodes(reading: Reading, count: int) -> tuple[list[Episode], dict[str, str]]:
    """Return episodes from the whole run, with the newest one, and their animations as URLs."""
    files = reading.folder.sample_files()
    if not files or count == 0:
        return [], {}
    taken = sorted({round(n * (len(files) - 1) / max(1, count - 1)) for n in range(count)})
    if count == 1:
        taken = [len(files) - 1]
    nested = [reading.folder.episodes(files[index]) for index in taken]
    # The first episode of each file, then the second ones while there is room.
    order = sorted(
        (rank, index) for index, found in enumerate(nested) for rank in range(len(found))
    )
    chosen = sorted((index, rank) for rank, index in order[:count])
    episodes = [nested[index][rank] for index, rank in chosen]
    pictures: dict[str, str] = {}
    room = MAX_PICTURE_BYTES
    for episode in episodes:
        if episode.picture is not None:
            data = episode.picture.read_bytes()
            if len(data) <= room:
                room -= len(data)
                pictures[str(episode.picture)] = (
                    f"data:image/gif;base64,{base64.b64encode(data).decode()}"
                )
    return episodes, pictures


def charts(lines: Sequence[Line]) -> list[tuple[str, Markup]]:
    """Return title and drawing of each chart that the metrics have values for."""
    found = []
    for title, names in CURVES.items():
        drawn: dict[str, Points] = {
            name: [
                (line["step"], line[name])
                for line in lines
                if name in line and math.isfinite(line[name])
            ]
            for name in names
        }
        drawn = {name: points for name, points in drawn.items() if points}
        ending = LEVELS.get(title)
        levels = {
            name: value
            for line in lines
            for name, value in line.items()
            if ending and name.endswith(ending) and math.isfinite(value)
        }
        if drawn:
            found.append((title, curves(drawn, levels)))
    return found


def _phases(steps: Sequence[Line]) -> dict[str, Points]:
    """Return the seconds of each phase in each step; the rest of a step is `other`."""
    names = [name for name in time_shares(steps) if name != "other"]
    found = {
        name: [(step["step"], step.get(f"time/{name}", 0.0)) for step in steps] for name in names
    }
    rest = [
        (step["step"], max(0.0, step["time/step"] - sum(step.get(f"time/{n}", 0.0) for n in names)))
        for step in steps
    ]
    return {**found, "other": rest} if names else {}


def shares_of(steps: Sequence[Line], prefix: str) -> dict[str, Points]:
    """Return the values of all metrics with a prefix in each step, the largest first."""
    names = mean_shares(steps, prefix)
    return {
        name: [(step["step"], step.get(prefix + name, 0.0)) for step in steps] for name in names
    }


def mean_shares(steps: Sequence[Line], prefix: str) -> dict[str, float]:
    """Return the mean of each metric with a prefix over the steps that measured any of them."""
    measured = [step for step in steps if any(name.startswith(prefix) for name in step)]
    names = {name for step in measured for name in step if name.startswith(prefix)}
    means = {
        name.removeprefix(prefix): fmean(step.get(name, 0.0) for step in measured) for name in names
    }
    return dict(sorted(((k, v) for k, v in means.items() if v), key=lambda item: -item[1]))


WIDTH, HEIGHT = 420, 200
LEFT, RIGHT, TOP, BOTTOM = 52, 8, 8, 24


@dataclass(frozen=True)
class Axes:
    """Two linear axes of a drawing."""

    x0: float
    x1: float
    y0: float
    y1: float

    @classmethod
    def around(cls, xs: Sequence[float], ys: Sequence[float]) -> Axes:
        low, high = min(ys), max(ys)
        if math.isclose(low, high):  # ticks between them would be equal
            low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
        ticks = nice_ticks(low, high)
        step = ticks[1] - ticks[0]
        return cls(
            min(xs),
            max(*xs, min(xs) + 1),
            math.floor(low / step) * step,
            math.ceil(high / step) * step,
        )

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)

    def path(self, points: Points) -> str:
        return "M" + "L".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)

    def frame(self) -> str:
        """Return grid lines and labels."""
        parts = []
        for tick in nice_ticks(self.y0, self.y1):
            y = f"{self.y(tick):.1f}"
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
            label = f"{tick:.3g}" if abs(tick) < 1000 else f"{tick / 1000:,.4g}k"
            parts.append(f'<text x="{LEFT - 6}" y="{y}" dy="3.5" text-anchor="end">{label}</text>')
        for tick in nice_ticks(self.x0, self.x1):
            if tick == int(tick):
                parts.append(
                    f'<text x="{self.x(tick):.1f}" y="{HEIGHT - 6}" '
                    f'text-anchor="middle">{int(tick)}</text>'
                )
        return "".join(parts)


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return round numbers between two numbers: at least two, about `count`."""
    raw = (high - low) / count
    base = 10 ** math.floor(math.log10(raw))
    step = min((m * base for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - raw))
    first = math.ceil(low / step - 1e-9)
    ticks = [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]
    return ticks if len(ticks) > 1 else [low, high]


def curves(series: Mapping[str, Points], levels: Mapping[str, float]) -> Markup:
    """Draw lines over steps, and dashed levels."""
    thinned = {name: thin(points) for name, points in series.items()}
    every = [point for points in thinned.values() for point in points]
    axes = Axes.around([x for x, _ in every], [y for _, y in every] + [*levels.values()])
    drawn = [axes.frame()]
    for number, points in enumerate(thinned.values()):
        colour = f"var(--c{number})"
        drawn.append(f'<path class="line" style="stroke:{colour}" d="{axes.path(points)}"/>')
        if len(points) <= 40:
            drawn += [
                f'<circle r="2.2" style="fill:{colour}" cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}"/>'
                for x, y in points
            ]
    drawn += [
        f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{axes.y(value):.1f}" '
        f'y2="{axes.y(value):.1f}"/>'
        for value in levels.values()
    ]
    names = [(f"var(--c{number})", name) for number, name in enumerate(series)]
    names += [("var(--muted)", f"{name} {value:.3g}") for name, value in levels.items()]
    return _svg("".join(drawn), thinned, axes) + _legend(names)


def stacked(series: Mapping[str, Points], unit: str) -> Markup:
    """Draw areas over steps, one upon the other; empty without values."""
    thinned = {name: thin(points) for name, points in series.items() if points}
    if not thinned:
        return Markup()
    columns = list(zip(*thinned.values(), strict=True))
    sums = [list(accumulate((y for _, y in column), initial=0.0)) for column in columns]
    xs = [column[0][0] for column in columns]
    axes = Axes.around(xs, [0.0, max(total[-1] for total in sums)])
    drawn = []
    for number in range(len(thinned)):
        upper = [(x, total[number + 1]) for x, total in zip(xs, sums, strict=True)]
        lower = [(x, total[number]) for x, total in zip(xs, sums, strict=True)]
        if len(xs) == 1:  # one step is a bar
            upper, lower = [*upper, (axes.x1, upper[0][1])], [*lower, (axes.x1, lower[0][1])]
        colour = f"var(--c{number % 8})"
        drawn.append(f'<path style="fill:{colour}" d="{axes.path([*upper, *reversed(lower)])}Z"/>')
    names = [(f"var(--c{number % 8})", name) for number, name in enumerate(thinned)]
    return _svg(axes.frame() + "".join(drawn), thinned, axes, unit) + _legend(names)


def thin(points: Points) -> Points:
    """Return at most `MAX_POINTS` points: means of neighbours."""
    count = min(MAX_POINTS, len(points))
    edges = [round(n * len(points) / count) for n in range(count + 1)] if count else []
    groups = [points[a:b] for a, b in pairwise(edges)]
    return [(group[-1][0], fmean(y for _, y in group)) for group in groups]


def _svg(content: str, series: Mapping[str, Points], axes: Axes, unit: str = "") -> Markup:
    values = json.dumps(
        {
            "x": [axes.x0, axes.x1, LEFT, WIDTH - RIGHT],
            "unit": unit,
            "series": {
                name: [[x, float(f"{y:.4g}")] for x, y in points] for name, points in series.items()
            },
        }
    )
    return Markup(
        '<svg viewBox="0 0 {width} {height}" role="img" data-values="{values}">{content}'
        '<line class="cursor" y1="{top}" y2="{bottom}" visibility="hidden"/></svg>'
    ).format(
        width=WIDTH,
        height=HEIGHT,
        values=values,
        content=Markup(content),  # numbers and our own words only
        top=TOP,
        bottom=HEIGHT - BOTTOM,
    )


def _legend(names: Iterable[tuple[str, str]]) -> Markup:
    entry = Markup('<span><i style="background:{}"></i>{}</span>')
    return Markup('<div class="legend">{}</div>').format(
        Markup("").join(entry.format(colour, name) for colour, name in names)
    )
