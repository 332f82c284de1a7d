"""Kubernetes quantities as numbers."""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal

_UNITS = {
    "m": Decimal("0.001"),
    "": Decimal(1),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
}


def whole_number(quantity: str) -> int:
    """The quantity in its base unit (CPUs, bytes), rounded up. Takes what `agenticrun_api.base.Quantity` accepts."""
    number = quantity.rstrip("".join(_UNITS))
    unit = quantity.removeprefix(number)
    return int((Decimal(number) * _UNITS[unit]).to_integral_value(ROUND_CEILING))
