"""What people see on the terminal."""

from __future__ import annotations

import errno
import io
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from agenticrun_api import Activity, Progress, parse_run
from agenticrun_workers.reporting.display import (
    LiveDisplay,
    PlainDisplay,
    RunConsole,
    RunView,
    draw,
    duration,
    remaining_seconds,
    sparkline,
    time_shares,
)

RUN = parse_run(
    {
        "apiVersion": "agenticrun.dev/v1alpha1",
        "kind": "AgenticRun",
        "metadata": {"name": "lake"},
        "spec": {
            "model": {"initialize": {}},
            "pipeline": {
                "maxSteps": 10,
                "rolloutBatchSize": 8,
                "evalSteps": 0,
                "envs": [{"tag": "A", "type": "frozen_lake"}],
                "trainEnvs": {"groups": 4, "groupSize": 2, "tags": ["A"]},
            },
        },
    }
)


def progress(step: int, success: float, activity: Activity = Activity.ROLLOUT) -> Progress:
    return Progress(
        run_uid="uid",
        submission_id="lake-1",
        attempt=1,
        sequence=step,
        activity=activity,
        step=step,
        max_steps=10,
        policy_version=step,
        time="2026-01-01T00:00:00Z",
        last_step_time="2026-01-01T00:00:00Z" if step else None,
        reward=0.25,
        tokens_per_second=9100.4,
        seconds_per_step=1.2,
        metrics={
            "val/A/success": success,
            "val/A/random_success": 0.02,
            "rollout/score/mean": 0.25,
            "actor/entropy": 0.9,
            "critic/kl": 0.0125,
            "system/tps": 9100.4,
            "time/step": 1.2,
            "guard/logprob_gap": 0.0,
        },
    )


def test_without_a_terminal_there_is_one_line_per_step(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    seconds = [0.0]
    with PlainDisplay(console, lambda: seconds[0]) as display:
        for step in (0, 1, 1, 2):
            seconds[0] += 25.0
            if step != 1:
                display.update(progress(step, 0.5, Activity.VALIDATION))
            display.update(progress(step, 0.5))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "[validation] step 0: A success 0.500, A random_success 0.020",
        "step 1/10  reward 0.250  entropy 0.900  kl 0.0125  tok/s 9,100  s/step 1.20"
        "  (50 s elapsed, 11 s remaining)",
        "step 2/10  reward 0.250  entropy 0.900  kl 0.0125  tok/s 9,100  s/step 1.20"
        "  (1 min 40 s elapsed, 10 s remaining)",
        "[validation] step 2: A success 0.500, A random_success 0.020",
    ]


def test_the_panel_of_a_run_names_the_validation_episodes_that_failed() -> None:
    console = Console(file=io.StringIO(), width=200)
    view = RunView("lake", "rollout", "", 1, 10, {"val/A/stop/timeout": 0.25})
    console.print(draw(view))
    assert isinstance(console.file, io.StringIO)
    assert "A timeout 0.25" in console.file.getvalue()


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("output", [Full, Closed])
def test_output_that_nobody_takes_does_not_end_training(
    output: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # Rich closes the standard output
    display = PlainDisplay(RunConsole(file=output()), lambda: 0.0)
    display.update(progress(1, 0.5))
    display.update(progress(2, 0.5))


def test_without_a_terminal_a_long_warm_up_says_now_and_then_how_far_it_is() -> None:
    console = Console(file=io.StringIO(), width=200)
    seconds = [0.0]
    with PlainDisplay(console, lambda: seconds[0]) as display:
        display.update(progress(0, 0.5, Activity.STARTING))
        for step in range(100):
            seconds[0] += 0.3
            display.update(
                progress(0, 0.5, Activity.WARMUP).model_copy(
                    update={"message": f"warm-up step {step} of 100"}
                )
            )
    assert isinstance(console.file, io.StringIO)
    steps = [
        int(found)
        for found in re.findall(r"\[warm-up\] warm-up step (\d+) of 100\n", console.file.getvalue())
    ]
    assert steps == [0, 34, 68]


def test_without_a_terminal_a_message_of_training_is_printed_once() -> None:
    console = Console(file=io.StringIO(), width=200)
    with PlainDisplay(console) as display:
        for step in range(3):
            for activity in (Activity.ROLLOUT, Activity.TRAINING):
                message = "without environments that fail: B" if step else ""
                display.update(
                    progress(step, 0.5, activity).model_copy(update={"message": message})
                )
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("[rollout] without environments that fail: B\n") == 1
    assert console.file.getvalue().count("without environments") == 1


def test_the_live_picture_shows_steps_success_curve_and_sample() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with LiveDisplay(console, RUN) as display:
        for step, success in ((0, 0.0), (5, 0.5)):
            display.update(progress(step, success, Activity.VALIDATION))
            display.update(progress(step, success))
        display.sample("<|user|>P_\n_G<|assistant|>Down")
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    shown = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    for piece in (
        "lake",
        "5/10",
        "A/success",
        "0.500",
        "entropy 0.900",
        "kl 0.0125",
        "▁█ 0.5 (0 to 0.5)",
        "Down",
    ):
        assert piece in shown


def test_the_live_picture_shows_time_reward_and_step_time_without_a_success_metric() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    seconds = [0.0]
    with LiveDisplay(console, RUN, lambda: seconds[0]) as display:
        for step, reward in ((0, 0.0), (1, 0.5), (2, 0.25)):
            seconds[0] += 60.0
            now = progress(step, 0.0)
            metrics = {"time/step": 2.0, "time/rollout": 1.5, "time/train": 0.4}
            display.update(now.model_copy(update={"metrics": metrics, "reward": reward}))
    assert isinstance(console.file, io.StringIO)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())
    for piece in (
        "3 min 00 s elapsed, 10 s remaining",
        "rollout 1.50 s 75%",
        "train 0.40 s 20%",
        "other 0.10 s 5%",
        "█▁ 0.25 (0.25 to 0.5)",
    ):
        assert piece in shown


def test_the_live_picture_shows_alarms_while_they_are_up() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with LiveDisplay(console, RUN) as display:
        up = progress(5, 0.5)
        display.update(up.model_copy(update={"metrics": {**up.metrics, "guard/logprob_gap": 1.0}}))
    assert isinstance(console.file, io.StringIO)
    assert re.search(r"alarms.*logprob_gap", console.file.getvalue())


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([0.0, 0.5, 1.0], "▁▅█ 1 (0 to 1)"),
        ([-3.0], "▁ -3 (-3 to -3)"),
        ([2.0, 2.0], "▁▁ 2 (2 to 2)"),
        ([float("nan"), 1.0], "▁ 1 (1 to 1)"),
        ([], "-"),
    ],
)
def test_a_curve_is_a_row_of_bars_between_its_extremes(values: list[float], drawn: str) -> None:
    assert sparkline(values) == drawn


def test_a_long_curve_has_the_means_of_neighbours() -> None:
    bars = sparkline([float(n // 2) for n in range(96)]).split()[0]
    assert len(bars) == 48
    assert (bars[0], bars[-1]) == ("▁", "█")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.6, "1 min 00 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 05 min"),
        (3 * 86_400 + 4 * 3600, "3 d 4 h"),
    ],
)
def test_times_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("step", "seconds_per_step", "expected"), [(4, 2.0, 12.0), (10, 2.0, 0.0), (4, None, None)]
)
def test_the_remaining_time_is_that_of_the_missing_steps(
    step: int, seconds_per_step: float | None, expected: float | None
) -> None:
    now = progress(step, 0.0).model_copy(update={"seconds_per_step": seconds_per_step})
    assert remaining_seconds(now) == expected


def test_the_time_of_steps_adds_up() -> None:
    shares = time_shares(
        [
            {"time/step": 2.0, "time/rollout": 1.0, "time/train": 0.5},
            {"val/score/mean": 1.0},
            {"time/step": 4.0, "time/rollout": 3.0},
        ]
    )
    assert list(shares) == ["rollout", "other", "train"]
    assert [seconds for seconds, _ in shares.values()] == [2.0, 0.75, 0.25]
    assert [share for _, share in shares.values()] == pytest.approx([4 / 6, 1.5 / 6, 0.5 / 6])
    assert time_shares([{"time/step": 2.0}]) == {}
