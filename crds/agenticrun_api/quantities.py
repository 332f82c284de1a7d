"""Quantities of Kubernetes as numbers: `500m`, `2`, `4Gi`, `1e3`."""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal

_UNITS = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9),
    "T": Decimal(10**12), "P": Decimal(10**15), "E": Decimal(10**18),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30),
    "Ti": Decimal(2**40), "Pi": Decimal(2**50), "Ei": Decimal(2**60),
}  # fmt: skip


def quantity(text: str) -> float:
    """Return a quantity in its base unit (CPUs, bytes)."""
    return float(_exact(text))


def whole_number(text: str) -> int:
    """Return a quantity in its base unit (CPUs, bytes), rounded up."""
    return int(_exact(text).to_integral_value(ROUND_CEILING))


def _exact(text: str) -> Decimal:
    number = text if text[-1:].isdigit() else text.rstrip("".join(_UNITS))
    return Decimal(number) * _UNITS[text[len(number) :]]
