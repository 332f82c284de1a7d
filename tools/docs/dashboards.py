"""Draw a dashboard of the chart from a Prometheus, as Grafana lays it out.

    python tools/docs/dashboards.py URL run --set namespace=runs --set run=frozen-lake OUT.png

Shows whether each query draws what its title says, where there is no Grafana.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

FOLDER = Path(__file__).parents[2] / "charts/agenticrun/files/dashboards"
COLUMNS = 24
"""Width of the grid of Grafana."""
COLUMN_INCHES, ROW_INCHES = 0.75, 0.36
POINTS = 240
MOST_NAMES = 6
"""A longer legend would cover the curves."""

Series = dict[str, Any]


def query(url: str, expression: str, seconds: float) -> list[Series]:
    """Return the series of an expression in the last seconds, with labels and values.

    With 0 seconds: now.
    """
    end = time.time()
    step = max(2.0, seconds / POINTS)
    words = {"query": expression, "start": end - seconds, "end": end, "step": step}
    address = f"{url}/api/v1/query_range?{urllib.parse.urlencode(words)}"
    with urllib.request.urlopen(address, timeout=60) as answer:
        found: list[Series] = json.load(answer)["data"]["result"]
    return found


def name_of(template: str, labels: Mapping[str, str]) -> str:
    """Return the name of a series: `{{label}}` stands for the label's value."""
    return re.sub(r"{{\s*(\w+)\s*}}", lambda match: labels.get(match[1], ""), template)


def text_of(value: float, unit: str | None) -> str:
    """Return a value as Grafana writes it."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "bytes":
        return f"{value / 2**20:.4g} MiB"
    if unit == "s" and value >= 120:
        return f"{value / 60:.3g} min"
    return f"{value:.4g}" + (" s" if unit == "s" else "")


def draw_stat(axes: Axes, panel: Mapping[str, Any], named: list[tuple[str, Series]]) -> None:
    """Write the newest values, or with text mode `name` the names of the series."""
    unit = panel["fieldConfig"]["defaults"].get("unit")
    words = [
        name
        if panel["options"].get("textMode") == "name"
        else text_of(float(series["values"][-1][1]), unit)
        for name, series in named
    ]
    axes.text(0.5, 0.45, " / ".join(words) or "No data", ha="center", va="center", fontsize=17)
    axes.set_axis_off()


def draw_curves(axes: Axes, panel: Mapping[str, Any], named: list[tuple[str, Series]]) -> None:
    """Draw each series over the minutes until now."""
    now = time.time()
    unit = panel["fieldConfig"]["defaults"].get("unit")
    for name, series in named:
        times = [(float(at) - now) / 60 for at, _ in series["values"]]
        axes.plot(times, [float(value) for _, value in series["values"]], label=name, lw=1.3)
    if not named:
        axes.text(0.5, 0.5, "No data", transform=axes.transAxes, ha="center", va="center")
    elif len(named) <= MOST_NAMES:
        axes.legend(fontsize=7, loc="best", framealpha=0.6)
    else:
        handles = axes.get_lines()[:MOST_NAMES]
        title = f"and {len(named) - MOST_NAMES} more"
        axes.legend(handles=handles, fontsize=6, loc="best", framealpha=0.6, title=title)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text_of(value, unit)))
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)


def draw(url: str, dashboard: str, variables: Mapping[str, str], seconds: float, out: Path) -> None:
    """Draw all panels of a dashboard into a file."""
    document = json.loads((FOLDER / f"{dashboard}.json").read_text())
    panels = [panel for panel in document["panels"] if panel["type"] != "row"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = plt.figure(figsize=(COLUMNS * COLUMN_INCHES, rows * ROW_INCHES))
    margin = 1 / rows
    grid = figure.add_gridspec(
        rows, COLUMNS, left=0.03, right=0.99, top=1 - margin, bottom=margin, hspace=2.2, wspace=2.0
    )
    for panel in panels:
        place = panel["gridPos"]
        axes = figure.add_subplot(
            grid[place["y"] : place["y"] + place["h"] - 1, place["x"] : place["x"] + place["w"]]
        )
        axes.set_title(panel["title"], fontsize=10, loc="left")
        named = []
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in variables.items():
                expression = expression.replace(f"${name}", value)
            named += [
                (name_of(target["legendFormat"], series["metric"]), series)
                for series in query(url, expression, 0.0 if target.get("instant") else seconds)
            ]
        (draw_stat if panel["type"] == "stat" else draw_curves)(axes, panel, named)
    figure.savefig(out, dpi=70)


def main() -> None:
    """Draw what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url", help="of the Prometheus, as http://127.0.0.1:9090")
    parser.add_argument("dashboard", choices=sorted(file.stem for file in FOLDER.glob("*.json")))
    parser.add_argument("out", type=Path)
    parser.add_argument("--set", action="append", default=[], help="a variable: namespace=runs")
    parser.add_argument("--minutes", type=float, default=10.0, help="how far back")
    options = parser.parse_args()
    variables = dict(word.split("=", 1) for word in options.set)
    draw(options.url, options.dashboard, variables, 60 * options.minutes, options.out)


if __name__ == "__main__":
    main()
