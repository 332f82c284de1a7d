"""Shared parts of the grid worlds (FrozenLake, Sokoban).

Words for actions, symbols for cells, the validation holdout, and shapes for pictures. Pictures are
drawn with Pillow: no display and no image files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

MAX_DRAWS = 10_000
"""Random levels tried for one episode.

A configuration without levels for a split is an error, not a hang.
"""


class NoLevel(ValueError):
    """The configuration gives no level of a split."""

    def __init__(self, split: str, keys: str) -> None:
        super().__init__(
            f"no {split} level in {MAX_DRAWS} random ones: choose another {keys} or holdoutShare"
        )


def action_numbers(actions: Sequence[str], count: int) -> dict[str, int]:
    """Return the number of each action by its lower-case word.

    Raises `ValueError` unless there are `count` different words.
    """
    numbers = {action.lower(): number for number, action in enumerate(actions)}
    if isinstance(actions, str) or len(actions) != count or len(numbers) != count:
        raise ValueError(
            f"actions must be {count} different words, not "
            f"{actions if isinstance(actions, str) else list(actions)}"
        )
    return numbers


def check_symbols(symbols: str, count: int) -> None:
    """Raise `ValueError` unless there is one character per kind of cell, all different."""
    if len(symbols) != count or len(set(symbols)) != count or "\n" in symbols:
        raise ValueError(f"symbols must be {count} different characters, not {symbols!r}")


def check_holdout_share(share: float) -> None:
    """Raise `ValueError` if a split would be empty."""
    if not 0 < share < 1:
        raise ValueError(f"holdoutShare must be in (0, 1), not {share}")


def in_holdout(level: bytes, share: float) -> bool:
    """Return whether a level belongs to the validation holdout.

    The answer is the same on every machine and in every release.
    """
    return int.from_bytes(hashlib.sha256(level).digest()[:8], "big") < share * 2**64


def step_metrics(valid: bool, effective: bool, success: bool) -> dict[str, float]:
    """Return the metrics that every step of a grid world reports; the names are ROLL's."""
    return {
        "action_is_valid": 1.0 if valid else 0.0,
        "action_is_effective": 1.0 if effective else 0.0,
        "num_actions": 1.0,
        "success": 1.0 if success else 0.0,
    }


CELL = 48
"""Pixels of a cell's side."""
SMOOTH = 4
"""Pictures are drawn this many times larger and scaled down, so that edges are smooth."""
SIDE = CELL * SMOOTH
"""Pixels of a cell's side while it is drawn."""

PLAYER, OUTLINE, LOST = "#f2a33a", "#5b3a12", "#8d99a3"


def canvas(rows: int, columns: int, colour: str) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """Return an empty picture of that many cells, to draw on; see `pixels`."""
    image = Image.new("RGB", (columns * SIDE, rows * SIDE), colour)
    return image, ImageDraw.Draw(image)


def pixels(image: Image.Image) -> NDArray[np.uint8]:
    """Return the finished picture: RGB, uint8 [rows * CELL, columns * CELL, 3]."""
    return np.asarray(image.reduce(SMOOTH), np.uint8)


def draw_player(draw: ImageDraw.ImageDraw, x: int, y: int, *, sunk: bool = False) -> None:
    """Draw a head over a body; in a hole only a grey head is visible."""
    width = SIDE // 24
    if not sunk:
        draw.rounded_rectangle(
            box(x, y, 0.28, 0.5, 0.72, 0.88), SIDE // 6, fill=PLAYER, outline=OUTLINE, width=width
        )
    top = 0.34 if sunk else 0.14
    draw.ellipse(
        box(x, y, 0.31, top, 0.69, top + 0.38),
        fill=LOST if sunk else PLAYER,
        outline=OUTLINE,
        width=width,
    )
    for eye in (0.42, 0.54):
        draw.ellipse(box(x, y, eye, top + 0.13, eye + 0.06, top + 0.2), fill=OUTLINE)


def at(x: int, y: int, across: float, down: float) -> tuple[float, float]:
    """Return a point in the cell with corner (x, y), given as fractions of the cell's side."""
    return x + across * SIDE, y + down * SIDE


def box(
    x: int, y: int, left: float, top: float, right: float, bottom: float
) -> tuple[float, float, float, float]:
    """Return a rectangle in that cell, given as fractions of the cell's side."""
    return (*at(x, y, left, top), *at(x, y, right, bottom))
