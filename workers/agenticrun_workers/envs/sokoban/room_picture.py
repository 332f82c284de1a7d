"""Sokoban as a picture."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray
from PIL import ImageDraw

from agenticrun_workers.envs.grid_picture import SIDE, at, box, canvas, draw_player, pixels

MORTAR, BRICK, BRICK_LIGHT = "#4d4a52", "#8a6f66", "#9b7f74"
FLOOR, SEAM = "#e9e2d3", "#d8cfbb"
TARGET, TARGET_LIGHT = "#c8453b", "#f0b7ae"
CRATE, PLANK = "#c48a4a", "#8a5a26"
CRATE_DONE, PLANK_DONE = "#7fae5a", "#47702b"

WALL, FLOOR_CELL, TARGET_CELL, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)


def draw_room(kinds: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The board with its boxes and its player.

    Args:
        kinds: uint8 [rows, columns], 0 to 6 in the order wall, floor, target, box on target, box, player, player on target.

    Returns:
        RGB, uint8 [rows * CELL, columns * CELL, 3].
    """
    image, draw = canvas(kinds.shape[0], kinds.shape[1], SEAM)
    for row, column in np.ndindex(kinds.shape):
        _draw_cell(draw, column * SIDE, row * SIDE, int(kinds[row, column]))
    return pixels(image)


def _draw_cell(draw: ImageDraw.ImageDraw, x: int, y: int, kind: int) -> None:
    if kind == WALL:
        _draw_bricks(draw, x, y)
        return
    draw.rectangle(box(x, y, 0.01, 0.01, 0.98, 0.98), fill=FLOOR)
    if kind in (TARGET_CELL, BOX_ON_TARGET, PLAYER_ON_TARGET):
        _draw_target(draw, x, y)
    if kind in (BOX, BOX_ON_TARGET):
        _draw_crate(draw, x, y, done=kind == BOX_ON_TARGET)
    if kind in (PLAYER, PLAYER_ON_TARGET):
        draw_player(draw, x, y)


def _draw_bricks(draw: ImageDraw.ImageDraw, x: int, y: int) -> None:
    """Three courses, each shifted by half a brick."""
    draw.rectangle(box(x, y, 0, 0, 1, 1), fill=MORTAR)
    for course in range(3):
        edges = (0, 0.5, 1) if course % 2 else (0, 0.25, 0.75, 1)
        for left, right in itertools.pairwise(edges):
            fill = BRICK if (course + round(4 * left)) % 2 else BRICK_LIGHT
            draw.rectangle(
                box(x, y, left + 0.02, course / 3 + 0.025, right - 0.02, (course + 1) / 3 - 0.025),
                fill=fill,
            )


def _draw_target(draw: ImageDraw.ImageDraw, x: int, y: int) -> None:
    for inset, fill in ((0.06, TARGET), (0.14, TARGET_LIGHT), (0.3, TARGET), (0.38, TARGET_LIGHT)):
        draw.ellipse(box(x, y, inset, inset, 1 - inset, 1 - inset), fill=fill)


def _draw_crate(draw: ImageDraw.ImageDraw, x: int, y: int, *, done: bool) -> None:
    """A crate with a cross of planks; a green one stands on its target, whose rim looks out behind it."""
    fill, plank = (CRATE_DONE, PLANK_DONE) if done else (CRATE, PLANK)
    width = SIDE // 16
    draw.rectangle(box(x, y, 0.14, 0.14, 0.86, 0.86), fill=fill, outline=plank, width=width)
    draw.line([at(x, y, 0.18, 0.18), at(x, y, 0.82, 0.82)], fill=plank, width=width)
    draw.line([at(x, y, 0.18, 0.82), at(x, y, 0.82, 0.18)], fill=plank, width=width)
