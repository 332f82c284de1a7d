"""Quantities of Kubernetes."""

from __future__ import annotations

import pytest

from agenticrun_api.quantities import quantity, whole_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500m", 0.5),
        ("2", 2.0),
        ("1.5", 1.5),
        ("4Gi", 4 * 2**30),
        ("1e3", 1000.0),
        ("3k", 3000.0),
        ("0", 0.0),
        ("100u", 0.0001),
        ("5n", 5e-09),
        ("+2", 2.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("1E", 1e18),
        ("1E3", 1000.0),
        ("1e+18", 1e18),
        ("2Ei", 2.0**61),
    ],
)
def test_quantities_are_numbers(text: str, value: float) -> None:
    assert quantity(text) == value


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("500m", 1),
        ("1", 1),
        ("1500m", 2),
        ("0.5", 1),
        ("2Gi", 2 * 2**30),
        ("1.5Ki", 1536),
        ("3G", 3_000_000_000),
        ("100k", 100_000),
    ],
)
def test_quantities_are_rounded_up(text: str, number: int) -> None:
    assert whole_number(text) == number
