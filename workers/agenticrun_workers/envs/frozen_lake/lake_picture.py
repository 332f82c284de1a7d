"""FrozenLake as a picture."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import ImageDraw

from agenticrun_workers.envs.grid_picture import SIDE, at, box, canvas, draw_player, pixels
from agenticrun_workers.types import BoolArray

ICE, SNOW, CRACK = "#d7ebf5", "#eef7fb", "#a9cfe0"
WATER, DEEP = "#2f6f94", "#1d4a66"
POLE, FLAG = "#5b4636", "#d94f3d"


def draw_lake(holes: BoolArray, position: tuple[int, int]) -> NDArray[np.uint8]:
    """The board with its player.

    Args:
        holes: bool [size, size].
        position: row and column of the player; in a hole it is drawn as sunk.

    Returns:
        RGB, uint8 [size * CELL, size * CELL, 3].
    """
    size = len(holes)
    image, draw = canvas(size, size, CRACK)
    for row, column in np.ndindex(size, size):
        _draw_cell(draw, column * SIDE, row * SIDE, hole=bool(holes[row, column]))
    _draw_flag(draw, (size - 1) * SIDE, (size - 1) * SIDE)
    draw_player(draw, position[1] * SIDE, position[0] * SIDE, sunk=bool(holes[position]))
    return pixels(image)


def _draw_cell(draw: ImageDraw.ImageDraw, x: int, y: int, *, hole: bool) -> None:
    draw.rectangle(box(x, y, 0.01, 0.01, 0.98, 0.98), fill=ICE)
    if hole:
        draw.ellipse(box(x, y, 0.12, 0.12, 0.88, 0.88), fill=SNOW)
        draw.ellipse(box(x, y, 0.16, 0.16, 0.84, 0.84), fill=WATER)
        draw.ellipse(box(x, y, 0.26, 0.3, 0.74, 0.8), fill=DEEP)


def _draw_flag(draw: ImageDraw.ImageDraw, x: int, y: int) -> None:
    draw.ellipse(box(x, y, 0.2, 0.76, 0.6, 0.88), fill=CRACK)
    draw.rectangle(box(x, y, 0.37, 0.15, 0.43, 0.82), fill=POLE)
    draw.polygon([at(x, y, 0.43, 0.15), at(x, y, 0.86, 0.29), at(x, y, 0.43, 0.43)], fill=FLAG)
