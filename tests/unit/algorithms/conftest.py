"""Property tests run on shared, busy machines: no deadline per example. Token passes are tested compiled and in NumPy."""

import pytest
from hypothesis import HealthCheck, settings

from agenticrun_workers.algorithms import backend, kernels, plain

settings.register_profile("no-deadline", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.load_profile("no-deadline")


@pytest.fixture(params=[kernels, plain], ids=["compiled", "plain"])
def each_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the test once with numba's kernels and once with NumPy."""
    monkeypatch.setattr(backend, "passes", request.param)
