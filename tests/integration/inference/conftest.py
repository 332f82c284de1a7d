"""Assertions of the shared suite show their values, as those of test modules do."""

import pytest

from agenticrun_workers.inference import engine

pytest.register_assert_rewrite(
    "engine_checks",
    "outside_agents",
    "sampling_conformance",
    "request_conformance",
    "update_conformance",
    "engine_conformance",
)


@pytest.fixture
def short_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers send tokens as often as they may."""
    monkeypatch.setattr(engine, "STREAM_SECONDS", 0.0)
