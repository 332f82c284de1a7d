"""What the tests of the dev cluster share."""

from pathlib import Path

import pytest

from devcluster.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings whose paths are below the test's own folder."""
    return Settings(
        repository=tmp_path / "repository", cache=tmp_path / "cache", state=tmp_path / "state"
    )
