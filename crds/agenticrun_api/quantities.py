"""Quantities of Kubernetes as numbers: `500m`, `2`, `4Gi`, `1e3`."""

from __future__ import annotations

from collections.abc import Callable
from decimal import ROUND_CEILING, Decimal
from typing import Any

from agenticrun_api.base import Rule, camel

_UNITS = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9),
    "T": Decimal(10**12), "P": Decimal(10**15), "E": Decimal(10**18),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30),
    "Ti": Decimal(2**40), "Pi": Decimal(2**50), "Ei": Decimal(2**60),
}  # fmt: skip
MOST_CPUS = "10k"


def some_bytes(field: str, resource: str = "") -> Rule:
    """Return a rule that a quantity of bytes is not 0.

    Args:
        field: a quantity, or a map of quantities.
        resource: its key in the map.
    """
    return _amount_rule(
        field,
        resource,
        "must be more than 0: write 4Gi, or leave it out",
        "> quantity('0')",
        lambda amount: amount > 0,
    )


def possible_cpus(field: str, resource: str = "") -> Rule:
    """Return a rule that a number of CPUs is no number of bytes. See `some_bytes`."""
    return _amount_rule(
        field,
        resource,
        f"is a number of processors, at most {MOST_CPUS}: write 500m or 2",
        f"<= quantity('{MOST_CPUS}')",
        lambda amount: amount <= quantity(MOST_CPUS),
    )


def _amount_rule(
    field: str, resource: str, message: str, comparison: str, check: Callable[[float], bool]
) -> Rule:
    """Return a rule that compares a quantity, if there is one, with a bound."""
    name = camel(field)
    value = f"self.{name}"
    absent = f"!has({value})"
    if resource:
        absent += f" || !('{resource}' in {value})"
        value += f"['{resource}']"
    sign, bound = comparison.split(" ")

    def holds(model: Any) -> bool:
        given = getattr(model, field)
        text = given.get(resource) if resource else given
        return text is None or check(quantity(text))

    # As text, because the field is an integer or a text in the schema.
    return Rule(
        f"{absent} || quantity(string({value})).compareTo({bound}) {sign} 0",
        f"{f'{resource} in ' if resource else ''}{name} {message}",
        f".{name}",
        holds,
        added=True,
    )


def quantity(text: str) -> float:
    """Return a quantity in its base unit (CPUs, bytes)."""
    return float(_exact(text))


def whole_number(text: str) -> int:
    """Return a quantity in its base unit (CPUs, bytes), rounded up."""
    return int(_exact(text).to_integral_value(ROUND_CEILING))


def _exact(text: str) -> Decimal:
    # Decimal, because an error of binary fractions could be rounded up to one more.
    number = text if text[-1:].isdigit() else text.rstrip("".join(_UNITS))
    return Decimal(number) * _UNITS[text[len(number) :]]
