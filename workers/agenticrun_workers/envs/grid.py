"""What the grid worlds (FrozenLake, Sokoban) have in common: words for actions, symbols for cells, and the holdout."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

MAX_DRAWS = 10_000
"""Random levels looked at for one episode. A configuration that has none of the split asked for is an error, not a hang."""


class NoLevel(ValueError):
    """The configuration gives no level of a split."""

    def __init__(self, split: str, keys: str) -> None:
        super().__init__(
            f"no {split} level in {MAX_DRAWS} random ones: choose another {keys} or holdoutShare"
        )


def action_numbers(actions: Sequence[str], count: int) -> dict[str, int]:
    """Numbers by lower-case word. Raises `ValueError` unless there are `count` different ones."""
    numbers = {action.lower(): number for number, action in enumerate(actions)}
    if isinstance(actions, str) or len(actions) != count or len(numbers) != count:
        raise ValueError(
            f"actions must be {count} different words, not {actions if isinstance(actions, str) else list(actions)}"
        )
    return numbers


def check_symbols(symbols: str, count: int) -> None:
    """Raise `ValueError` unless there is one character per kind of cell, each another one."""
    if len(symbols) != count or len(set(symbols)) != count or "\n" in symbols:
        raise ValueError(f"symbols must be {count} different characters, not {symbols!r}")


def check_holdout_share(share: float) -> None:
    """Raise `ValueError` if a split would be empty."""
    if not 0 < share < 1:
        raise ValueError(f"holdoutShare must be in (0, 1), not {share}")


def in_holdout(level: bytes, share: float) -> bool:
    """Whether a level belongs to the validation holdout: the same answer on every machine and in every release."""
    return int.from_bytes(hashlib.sha256(level).digest()[:8], "big") < share * 2**64


def step_metrics(valid: bool, effective: bool, success: bool) -> dict[str, float]:
    """What every step of a grid world reports; ROLL's names."""
    return {
        "action_is_valid": 1.0 if valid else 0.0,
        "action_is_effective": 1.0 if effective else 0.0,
        "num_actions": 1.0,
        "success": 1.0 if success else 0.0,
    }
