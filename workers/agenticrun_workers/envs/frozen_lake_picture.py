"""FrozenLake as a picture, drawn from plain shapes: no display and no image files."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from agenticrun_workers.types import BoolArray

CELL = 48
"""Pixels of a cell's side."""
SMOOTH = 4
"""Drawn this many times larger and scaled down, so that edges are smooth."""

ICE, SNOW, CRACK = "#d7ebf5", "#eef7fb", "#a9cfe0"
WATER, DEEP = "#2f6f94", "#1d4a66"
POLE, FLAG = "#5b4636", "#d94f3d"
PLAYER, OUTLINE, LOST = "#f2a33a", "#5b3a12", "#8d99a3"


def draw_lake(holes: BoolArray, position: tuple[int, int]) -> NDArray[np.uint8]:
    """The board with its player.

    Args:
        holes: bool [size, size].
        position: row and column of the player; in a hole it is drawn as sunk.

    Returns:
        RGB, uint8 [size * CELL, size * CELL, 3].
    """
    size = len(holes)
    side = CELL * SMOOTH
    image = Image.new("RGB", (size * side, size * side), CRACK)
    draw = ImageDraw.Draw(image)
    for row, column in np.ndindex(size, size):
        _draw_cell(draw, column * side, row * side, hole=bool(holes[row, column]))
    _draw_flag(draw, (size - 1) * side, (size - 1) * side)
    _draw_player(draw, position[1] * side, position[0] * side, sunk=bool(holes[position]))
    return np.asarray(image.reduce(SMOOTH), np.uint8)


def _draw_cell(draw: ImageDraw.ImageDraw, x: int, y: int, *, hole: bool) -> None:
    draw.rectangle(_box(x, y, 0.01, 0.01, 0.98, 0.98), fill=ICE)
    if hole:
        draw.ellipse(_box(x, y, 0.12, 0.12, 0.88, 0.88), fill=SNOW)
        draw.ellipse(_box(x, y, 0.16, 0.16, 0.84, 0.84), fill=WATER)
        draw.ellipse(_box(x, y, 0.26, 0.3, 0.74, 0.8), fill=DEEP)


def _draw_flag(draw: ImageDraw.ImageDraw, x: int, y: int) -> None:
    draw.ellipse(_box(x, y, 0.2, 0.76, 0.6, 0.88), fill=CRACK)
    draw.rectangle(_box(x, y, 0.37, 0.15, 0.43, 0.82), fill=POLE)
    draw.polygon([_at(x, y, 0.43, 0.15), _at(x, y, 0.86, 0.29), _at(x, y, 0.43, 0.43)], fill=FLAG)


def _draw_player(draw: ImageDraw.ImageDraw, x: int, y: int, *, sunk: bool) -> None:
    """A head over a body; only a grey head looks out of a hole."""
    width = CELL * SMOOTH // 24
    if not sunk:
        draw.rounded_rectangle(_box(x, y, 0.28, 0.5, 0.72, 0.88), CELL * SMOOTH // 6, fill=PLAYER, outline=OUTLINE, width=width)
    top = 0.34 if sunk else 0.14
    draw.ellipse(_box(x, y, 0.31, top, 0.69, top + 0.38), fill=LOST if sunk else PLAYER, outline=OUTLINE, width=width)
    for eye in (0.42, 0.54):
        draw.ellipse(_box(x, y, eye, top + 0.13, eye + 0.06, top + 0.2), fill=OUTLINE)


def _at(x: int, y: int, across: float, down: float) -> tuple[float, float]:
    """A point inside the cell whose corner is (x, y), in shares of its side."""
    return x + across * CELL * SMOOTH, y + down * CELL * SMOOTH


def _box(x: int, y: int, left: float, top: float, right: float, bottom: float) -> tuple[float, float, float, float]:
    return (*_at(x, y, left, top), *_at(x, y, right, bottom))
