"""Token passes are tested compiled and in NumPy."""

import pytest

from agenticrun_workers.algorithms import backend, kernels, plain


@pytest.fixture(params=[kernels, plain], ids=["compiled", "plain"])
def each_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the test once with numba's kernels and once with NumPy."""
    monkeypatch.setattr(backend, "passes", request.param)
