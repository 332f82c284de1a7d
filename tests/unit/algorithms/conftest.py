"""Kernels are tested compiled and in NumPy at once."""

import pytest

import numpy_kernels


@pytest.fixture
def both_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares each call of a kernel with its definition in NumPy."""
    numpy_kernels.compare_with_numpy(monkeypatch)
