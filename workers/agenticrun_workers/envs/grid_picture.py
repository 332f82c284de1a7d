"""Shapes that the pictures of grid worlds share. Everything is drawn with Pillow: no display and no image files."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

CELL = 48
"""Pixels of a cell's side."""
SMOOTH = 4
"""Drawn this many times larger and scaled down, so that edges are smooth."""
SIDE = CELL * SMOOTH
"""Of a cell, while it is drawn."""

PLAYER, OUTLINE, LOST = "#f2a33a", "#5b3a12", "#8d99a3"


def canvas(rows: int, columns: int, colour: str) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """An empty picture of that many cells, to be drawn on; see `pixels`."""
    image = Image.new("RGB", (columns * SIDE, rows * SIDE), colour)
    return image, ImageDraw.Draw(image)


def pixels(image: Image.Image) -> NDArray[np.uint8]:
    """The finished picture, RGB, uint8 [rows * CELL, columns * CELL, 3]."""
    return np.asarray(image.reduce(SMOOTH), np.uint8)


def draw_player(draw: ImageDraw.ImageDraw, x: int, y: int, *, sunk: bool = False) -> None:
    """A head over a body; only a grey head looks out of a hole."""
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
    """A point inside the cell whose corner is (x, y), in shares of its side."""
    return x + across * SIDE, y + down * SIDE


def box(
    x: int, y: int, left: float, top: float, right: float, bottom: float
) -> tuple[float, float, float, float]:
    """A rectangle inside that cell, in shares of its side."""
    return (*at(x, y, left, top), *at(x, y, right, bottom))
