"""`agenticrun report`: one page that stands alone."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from agenticrun_api.names import ExitCode
from agenticrun_workers.cli import app
from agenticrun_workers.cli.report import MAX_POINTS, Axes, nice_ticks, size_of, thin
from run_folders import SECRET, make_run_folder

VOID = {"meta", "line", "path", "circle", "img", "br"}


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects text and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.sources, self.counts, self._open = "", [], {}, []  # type: ignore[var-annotated]
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.sources += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def write_report(run: Path, folder: Path, *options: str) -> tuple[str, Page]:
    file = folder / "report.html"
    result = CliRunner().invoke(app, ["report", str(run), "-o", str(file), *options])
    assert result.exit_code == 0, result.output
    text = file.read_text()
    return text, Page(text)


def test_the_page_shows_all_parts_of_a_run(tmp_path: Path) -> None:
    _, page = write_report(make_run_folder(tmp_path / "out"), tmp_path)
    for piece in (
        "lake",
        "Succeeded",
        "trained 4 steps",
        "4 / 10",  # steps
        "0.250",  # mean reward of the last steps
        "rollout/score/mean",
        "max_turns",
        "25.0 %",  # of the episodes end so
        "train",
        "30.0 %",  # of the time is training
        "answer 1: action 'Down', valid, reward 1",
        "torch",
        "maxSteps: 2",  # of the config
    ):
        assert piece in page.text, piece
    assert page.counts["svg"] >= 4
    assert "Not on this page" not in page.text


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    text, page = write_report(make_run_folder(tmp_path / "out"), tmp_path)
    assert page.sources
    assert all(source.startswith("data:image/gif;base64,") for source in page.sources)
    assert re.findall(r"https?://[^\s\"'<]+", text) == []
    assert "@import" not in text


def test_what_the_policy_writes_is_text_and_secrets_stay_home(tmp_path: Path) -> None:
    text, page = write_report(make_run_folder(tmp_path / "out"), tmp_path)
    assert '<script>alert("x")' not in text
    assert 'P_<script>alert("x")</script>' in page.text
    assert SECRET not in text
    assert "WANDB_API_KEY" in text


@pytest.mark.parametrize(("count", "shown"), [(0, []), (1, ["4, validation"]), (2, ["0", "4"])])
def test_samples_come_from_the_whole_run_with_the_newest_one(
    count: int, shown: list[str], tmp_path: Path
) -> None:
    _, page = write_report(make_run_folder(tmp_path / "out"), tmp_path, "--samples", str(count))
    found = re.findall(r"step (\d+(?:, validation)?)", page.text.partition("Samples")[2])
    assert len(found) == len(shown)
    assert all(have.startswith(want) for have, want in zip(found, shown, strict=True))


def test_a_run_without_steps_says_what_is_missing(tmp_path: Path) -> None:
    run = tmp_path / "out"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    _, page = write_report(run, tmp_path)
    assert "run.yaml: the run was made by an older version" in page.text
    assert "No sample episodes" in page.text


def test_one_step_is_enough_for_a_page(tmp_path: Path) -> None:
    _, page = write_report(make_run_folder(tmp_path / "out", steps=1, finished=False), tmp_path)
    assert "agenticrun resume" in page.text


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", f"{tmp_path}/"])
    assert result.exit_code == ExitCode.INVALID_CONFIG
    assert "is not the output folder of a run" in result.output


def test_the_newest_run_below_a_folder_is_taken(tmp_path: Path) -> None:
    for name in ("20260102-000000", "20260101-000000"):
        make_run_folder(tmp_path / "runs" / name)
    _, page = write_report(tmp_path / "runs", tmp_path)
    assert "20260102-000000" in page.text


@pytest.mark.parametrize("values", [[0.0, 0.0], [0.3, 0.1 + 0.2], [1e300, 1e300]])
def test_a_flat_curve_has_axes(values: list[float]) -> None:
    axes = Axes.around([0, 1], values)
    assert axes.y0 < min(values) <= max(values) < axes.y1


FLOATS = st.floats(-1e12, 1e12)


@given(low=FLOATS, span=st.floats(1e-6, 1e12))
def test_ticks_are_round_numbers_between_the_ends(low: float, span: float) -> None:
    high = low + span
    if high - low < 1e-9 * max(abs(low), abs(high)):
        return
    ticks = nice_ticks(low, high)
    assert 2 <= len(ticks) <= 12
    assert ticks == sorted(ticks)
    margin = 1e-6 * (high - low)
    assert low - margin <= ticks[0]
    assert ticks[-1] <= high + margin


@given(st.lists(FLOATS, max_size=4 * MAX_POINTS))
def test_thin_curves_keep_their_newest_step_and_their_range(values: list[float]) -> None:
    points = [(float(step), value) for step, value in enumerate(values)]
    found = thin(points)
    assert len(found) == min(MAX_POINTS, len(points))
    if points:
        assert found[-1][0] == points[-1][0]
        assert min(values) - 1e-3 <= fmean(y for _, y in found) <= max(values) + 1e-3


@pytest.mark.parametrize(
    ("count", "shown"), [(48_000, "48 kB"), (2**20 // 5, "0.2 MiB"), (3 * 2**20, "3.0 MiB")]
)
def test_a_small_page_is_told_in_kilobytes(count: int, shown: str) -> None:
    assert size_of(count) == shown
