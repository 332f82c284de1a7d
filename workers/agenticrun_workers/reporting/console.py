"""A line per step, for people who read a log."""

from __future__ import annotations

import logging
from collections.abc import Mapping

log = logging.getLogger(__name__)

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
"""Label, metric, format. What a step did not measure is left out. kl is the distance to the reference, approxkl the one that the
step's update went, vloss the critic's loss."""


class ConsoleTracker:
    """A `Tracker` that logs a line per step and per validation."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        log.info(
            "%s",
            step_line(step, self._max_steps, metrics)
            if "time/step" in metrics
            else validation_line(step, metrics),
        )

    def close(self) -> None:
        """Nothing is held open."""


def step_line(step: int, max_steps: int, metrics: Mapping[str, float]) -> str:
    """`step 12/300  reward 0.250  success 0.250  loss -0.0123  entropy 0.910  tok/s 9,100  s/step 1.20`"""
    shown = [
        f"{label} {form.format(metrics[name])}" for label, name, form in COLUMNS if name in metrics
    ]
    told = [f"ALARM {name}" for name in alarms(metrics)]
    return "  ".join([f"step {step}/{max_steps}", *shown, *told])


def validation_line(step: int, metrics: Mapping[str, float]) -> str:
    """`[validation] step 10: Lake success 0.650, Lake random_success 0.020`; scores where success is not measured."""
    rates = success_rates(metrics) or {
        name: value for name, value in metrics.items() if name.endswith("/score")
    }
    shown = (
        f"{name.removeprefix('val/').replace('/', ' ')} {value:.3f}"
        for name, value in rates.items()
    )
    return f"[validation] step {step}: {', '.join(shown)}"


def alarms(metrics: Mapping[str, float]) -> list[str]:
    """Names of the guards whose alarm is up."""
    return [
        name.removeprefix("guard/")
        for name, value in metrics.items()
        if name.startswith("guard/") and value
    ]


def success_rates(metrics: Mapping[str, float]) -> dict[str, float]:
    """val/<tag>/success and what it is compared with, by name."""
    endings = ("/success", "/random_success", "/warmup_success")
    return {
        name: value
        for name, value in metrics.items()
        if name.startswith("val/") and name.endswith(endings)
    }
