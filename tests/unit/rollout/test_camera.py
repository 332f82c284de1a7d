"""Pictures of episodes: one frame per state, of bounded size, and never at an episode's cost."""

from __future__ import annotations

import asyncio
import io

import numpy as np
import pytest
from PIL import Image

from agenticrun_workers.envs import FrozenLake
from agenticrun_workers.rollout.rendering import (
    MAX_BYTES,
    MAX_FRAMES,
    MAX_SIDE,
    FrameRecorder,
    animated_gif,
)
from agenticrun_workers.types import Stream


def decoded(content: bytes) -> list[np.ndarray]:
    with Image.open(io.BytesIO(content)) as picture:
        frames = []
        for number in range(picture.n_frames):  # type: ignore[attr-defined]
            picture.seek(number)
            frames.append(np.asarray(picture.convert("RGB")))
        return frames


def test_every_state_becomes_a_frame() -> None:
    lake = FrozenLake(size=3)
    film = FrameRecorder(lake)
    film.reset(4, Stream.TRAIN)
    expected = [lake.render()]
    for action in ("Right", "Left", "Down"):
        film.step(action)
        expected.append(lake.render())
    assert (film.instruction, film.blocking) == (lake.instruction, False)
    np.testing.assert_array_equal(film.frames, expected)
    for frame, picture in zip(expected, decoded(animated_gif(film.frames)), strict=True):
        assert np.abs(frame.astype(int) - picture).mean() < 4  # GIF has 256 colours


class AsyncCounter:
    def __init__(self) -> None:
        self.count = 0

    async def reset(self) -> None:
        self.count += 1

    async def step(self) -> str:
        self.count += 1
        return "seen"

    def render(self) -> np.ndarray:
        return np.full((40, 40, 3), self.count, np.uint8)


def test_async_environments_are_filmed_too() -> None:
    film = FrameRecorder(AsyncCounter())

    async def play() -> str:
        await film.reset()
        return str(await film.step())

    assert asyncio.run(play()) == "seen"
    assert [int(frame[0, 0, 0]) for frame in film.frames] == [1, 2]


@pytest.mark.parametrize("picture", [np.zeros((4, 4, 3)), np.zeros((4, 4), np.uint8), None])
def test_an_environment_that_cannot_draw_loses_its_pictures_and_nothing_else(
    picture: object,
) -> None:
    class Broken(AsyncCounter):
        def render(self) -> np.ndarray:
            if picture is None:
                raise RuntimeError("no display")
            return np.asarray(picture)

    film = FrameRecorder(Broken())
    assert asyncio.run(film.step()) == "seen"
    assert animated_gif(film.frames) == b""


def test_long_episodes_are_thinned_out_up_to_their_last_state_and_large_pictures_made_smaller() -> (
    None
):
    shades = [np.full((30, 1000, 3), number * 250 // 399, np.uint8) for number in range(400)]
    frames = decoded(animated_gif(shades))
    assert len(frames) <= MAX_FRAMES
    assert frames[0].shape[1] == MAX_SIDE
    assert frames[-1].mean() == 250


def test_a_gif_has_a_bounded_size() -> None:
    noise = np.random.default_rng(0).integers(256, size=(8, 512, 512, 3), dtype=np.uint8)
    content = animated_gif(list(noise))
    assert 0 < len(content) <= MAX_BYTES
    assert len(decoded(content)) == 8
