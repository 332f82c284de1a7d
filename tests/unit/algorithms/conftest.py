"""Kernels are tested compiled and in NumPy."""

import pytest

import numpy_kernels


@pytest.fixture(params=["compiled", "numpy"])
def each_definition(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the test once with the product's kernels and once with their NumPy definition."""
    if request.param == "numpy":
        numpy_kernels.use_numpy(monkeypatch)
