"""Formats and parses API times; formats durations for messages; delays that grow."""

from __future__ import annotations

from datetime import UTC, datetime


def format_time(moment: datetime) -> str:
    """Return the time in RFC 3339, in UTC, in whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str) -> datetime:
    """Parse an API time. The result has a time zone."""
    return datetime.fromisoformat(text)


def format_span(seconds: float) -> str:
    """Return a duration with at most two units: `45s`, `12m`, `1m30s`, `3h20m`, `2d4h`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86_400
    if hours < 1:
        return f"{minutes}m{whole % 60}s" if whole % 60 else f"{minutes}m"
    if days < 1:
        return f"{hours}h{minutes % 60}m"
    return f"{days}d{hours % 24}h"


def backoff_seconds(failures: int, first: float, longest: float) -> float:
    """Return the delay after so many failures in a row: `first`, doubled each time up to `longest`.

    The exponent is bounded, because a failure may last for days.
    """
    return min(first * 2.0 ** min(failures, 30), longest)
