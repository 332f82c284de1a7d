"""Data sets that tests make are not kept in this user's cache."""

from __future__ import annotations

import datasets
import pytest


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets")
