"""Progress in Prometheus' text format: a handful of gauges, and the snapshot's bounded set of metrics under one name."""

from __future__ import annotations

from agenticrun_api import Progress


def exposition(progress: Progress | None) -> str:
    """The text that `GET /metrics` answers. Empty before the first snapshot."""
    if progress is None:
        return ""
    gauges: dict[str, tuple[str, float | None]] = {
        "agenticrun_step": ("Completed training steps.", progress.step),
        "agenticrun_max_steps": ("Training steps of the whole run.", progress.max_steps),
        "agenticrun_attempt": ("Number of the driver's attempt.", progress.attempt),
        "agenticrun_policy_version": ("Version of the newest weights.", progress.policy_version),
        "agenticrun_reward": ("Mean score of the newest step's trajectories.", progress.reward),
        "agenticrun_tokens_per_second": (
            "Tokens of trained trajectories per second.",
            progress.tokens_per_second,
        ),
        "agenticrun_staleness": (
            "Mean age of the newest batch in policy versions.",
            progress.staleness,
        ),
        "agenticrun_seconds_per_step": (
            "Median seconds of the newest steps.",
            progress.seconds_per_step,
        ),
    }
    lines: list[str] = []
    for name, (text, value) in gauges.items():
        if value is not None:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge", f"{name} {value}"]
    lines += [
        "# HELP agenticrun_metric The newest step's metrics.",
        "# TYPE agenticrun_metric gauge",
    ]
    lines += [
        f'agenticrun_metric{{name="{name}"}} {value}'
        for name, value in sorted(progress.metrics.items())
    ]
    lines += [
        "# HELP agenticrun_activity What the driver does now.",
        "# TYPE agenticrun_activity gauge",
    ]
    lines.append(f'agenticrun_activity{{activity="{progress.activity}"}} 1')
    return "\n".join(lines) + "\n"
