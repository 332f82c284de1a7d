"""A fixture for the tests of engines that are servers."""

import pytest

from agenticrun_workers.inference import engine


@pytest.fixture
def short_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers send tokens as often as they may."""
    monkeypatch.setattr(engine, "STREAM_SECONDS", 0.0)
