"""A finished episode as text for people: every turn as the policy saw and answered it."""

from __future__ import annotations

from agenticrun_workers.agents import ChatFormat
from agenticrun_workers.types import Trajectory, Turn

MAX_CHARACTERS = 32_768
"""Of one transcript: what does not fit is left out as whole turns from the middle of the episode."""
MAX_PART = 4_096
"""Characters of one prompt or answer; what lies in the middle of a longer one is left out."""


def transcript(trajectory: Trajectory, chat: ChatFormat) -> str:
    """The whole episode, turn by turn, and how it ended."""
    blocks = [_turn(number, turn, chat) for number, turn in enumerate(trajectory.turns, start=1)]
    reason = (
        f"{trajectory.stop_reason}: {trajectory.error}"
        if trajectory.error
        else trajectory.stop_reason.value
    )
    return "".join(
        [*_within_bounds(blocks), f"--- end: {reason}, score {trajectory.score:.4g} ---\n"]
    )


def _turn(number: int, turn: Turn, chat: ChatFormat) -> str:
    action = "none" if turn.action is None else repr(turn.action)
    return (
        f"--- turn {number} ---\n{_shortened(chat.shown(turn.prompt_T))}\n"
        f"--- answer {number}: action {action}, {'valid' if turn.valid else 'not valid'}, reward {turn.reward:.4g} ---\n"
        f"{_shortened(chat.shown(turn.response_T))}\n"
    )


def _shortened(text: str) -> str:
    if len(text) <= MAX_PART:
        return text
    half = MAX_PART // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def _within_bounds(blocks: list[str]) -> list[str]:
    """The first and the last turns, as many as fit: the last one first, then from the beginning."""
    room = MAX_CHARACTERS - sum(map(len, blocks[-1:]))
    kept = 0
    while kept < len(blocks) - 1 and len(blocks[kept]) <= room:
        room -= len(blocks[kept])
        kept += 1
    left_out = len(blocks) - 1 - kept
    gap = [f"--- {left_out} turns left out ---\n"] if left_out > 0 else []
    return [*blocks[:kept], *gap, *blocks[-1:]]
