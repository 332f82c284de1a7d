"""An episode for its reader: as text, and as an animated GIF with one frame per state."""

from __future__ import annotations

import functools
import inspect
import io
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from agenticrun_api.base import clean_text
from agenticrun_workers.agents import ChatFormat
from agenticrun_workers.envs import Renders
from agenticrun_workers.log_once import LogOnce
from agenticrun_workers.types import Trajectory, Turn

log = logging.getLogger(__name__)

MAX_FRAMES = 100
"""Frames of one GIF. A longer episode is sampled evenly, including its last state."""
MAX_SIDE = 512
"""Longest side in pixels; larger frames are scaled down."""
MIN_SIDE = 32
MAX_BYTES = 1_048_576
"""Size of one GIF: frames are scaled down until it fits."""
FRAME_MS, LAST_FRAME_MS = 500, 1500

_warn = LogOnce(log.warning)


class FrameRecorder:
    """An environment that records a frame after each `reset` and `step`.

    A failed render loses only its frame, not the episode.
    """

    def __init__(self, env: Renders) -> None:
        self._env = filmed = cast(Any, env)
        self.frames: list[NDArray[np.uint8]] = []
        self.reset = self._then_frame(filmed.reset)
        self.step = self._then_frame(filmed.step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def _then_frame(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        async def async_call(*arguments: Any) -> Any:
            result = await call(*arguments)
            self._take_frame()
            return result

        @functools.wraps(call)
        def sync_call(*arguments: Any) -> Any:
            result = call(*arguments)
            self._take_frame()
            return result

        return async_call if inspect.iscoroutinefunction(call) else sync_call

    def _take_frame(self) -> None:
        try:
            frame = np.asarray(self._env.render())
            if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
                raise TypeError(
                    f"render returned {frame.dtype} {list(frame.shape)}, "
                    "not uint8 [height, width, 3]"
                )
            # A copy, because environments often draw into one array.
            self.frames.append(frame.copy())
        except Exception as error:  # an environment is a user's code and may raise anything
            _warn(f"{type(self._env).__name__} cannot be drawn: {type(error).__name__}: {error}")


def animated_gif(frames: Sequence[NDArray[np.uint8]]) -> bytes:
    """Return the frames as a looping GIF of at most `MAX_BYTES`.

    It is empty without frames, and if even the smallest size is too large.
    """
    if not frames:
        return b""
    chosen = sorted(
        {round(place) for place in np.linspace(0, len(frames) - 1, min(MAX_FRAMES, len(frames)))}
    )
    height, width = frames[0].shape[:2]
    scale = min(1.0, MAX_SIDE / max(height, width))
    # GIF sizes cannot be computed before the encoding.
    while max(height, width) * scale >= MIN_SIDE:
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        content = _encoded([Image.fromarray(frames[place]).resize(size) for place in chosen])
        if len(content) <= MAX_BYTES:
            return content
        scale /= 2
    return b""


def _encoded(pictures: list[Image.Image]) -> bytes:
    buffer = io.BytesIO()
    duration = [FRAME_MS] * (len(pictures) - 1) + [LAST_FRAME_MS]
    pictures[0].save(
        buffer, "GIF", save_all=True, append_images=pictures[1:], duration=duration, loop=0
    )
    return buffer.getvalue()


MAX_CHARACTERS = 32_768
"""Length of a transcript. A longer one loses whole turns from the middle."""
MAX_PART = 4_096
"""Length of one prompt or answer. A longer one loses its middle."""


def transcript(trajectory: Trajectory, chat: ChatFormat) -> str:
    """Return a finished episode as text: its turns, rewards and stop reason."""
    blocks = [_turn(number, turn, chat) for number, turn in enumerate(trajectory.turns, start=1)]
    reason = (
        f"{trajectory.stop_reason}: {clean_text(trajectory.error)}"
        if trajectory.error
        else trajectory.stop_reason.value
    )
    # The last turn, and as many of the first turns as fit.
    room = MAX_CHARACTERS - sum(map(len, blocks[-1:]))
    kept = 0
    while kept < len(blocks) - 1 and len(blocks[kept]) <= room:
        room -= len(blocks[kept])
        kept += 1
    left_out = len(blocks) - 1 - kept
    gap = [f"--- {left_out} turns left out ---\n"] if left_out > 0 else []
    end = f"--- end: {reason}, score {trajectory.score:.4g} ---\n"
    return "".join([*blocks[:kept], *gap, *blocks[-1:], end])


def _turn(number: int, turn: Turn, chat: ChatFormat) -> str:
    action = "none" if turn.action is None else repr(turn.action)
    return (
        f"--- turn {number} ---\n{_shortened(chat.shown(turn.prompt_T))}\n"
        f"--- answer {number}: action {action}, {'valid' if turn.valid else 'not valid'}, "
        f"reward {turn.reward:.4g} ---\n"
        f"{_shortened(chat.shown(turn.response_T))}\n"
    )


def _shortened(text: str) -> str:
    if len(text) <= MAX_PART:
        return text
    half = MAX_PART // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
