"""Times as the API writes them, and spans as people read them."""

from __future__ import annotations

from datetime import UTC, datetime


def format_time(moment: datetime) -> str:
    """RFC 3339, UTC, whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str) -> datetime:
    """The moment of an API time, with its time zone."""
    return datetime.fromisoformat(text)


def format_span(seconds: float) -> str:
    """`45s`, `12m`, `3h20m`, `2d4h`: the two leading units at most."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86_400
    if hours < 1:
        return f"{minutes}m"
    if days < 1:
        return f"{hours}h{minutes % 60}m"
    return f"{days}d{hours % 24}h"
