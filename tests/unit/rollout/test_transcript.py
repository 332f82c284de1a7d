"""Transcripts of long episodes: whole turns, of bounded size."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.agents import ChatFormat
from agenticrun_workers.models.tokenizer import build_task_tokenizer
from agenticrun_workers.rollout.rendering import MAX_CHARACTERS, MAX_PART, transcript
from agenticrun_workers.types import EpisodeKey, StopReason, Stream, Trajectory, Turn

CHAT = ChatFormat(build_task_tokenizer(["a", "b"], 100))


def episode(lengths: list[int], error: str = "") -> str:
    nothing = np.zeros(0, np.float32)
    turns = tuple(
        Turn(
            CHAT.first("", "a" * n),
            CHAT.answer("b"),
            nothing,
            nothing.astype(np.int32),
            0.5,
            action="b",
        )
        for n in lengths
    )
    return transcript(
        Trajectory(EpisodeKey(Stream.TRAIN, 0, 0), "A", turns, StopReason.ENV_ERROR, error=error),
        CHAT,
    )


@given(st.lists(st.integers(0, 6000), max_size=30))
def test_a_transcript_is_bounded_and_holds_whole_turns_from_both_ends(lengths: list[int]) -> None:
    text = episode(lengths)
    assert len(text) <= MAX_CHARACTERS + 200
    turns = [int(part.split()[0]) for part in text.split("--- turn ")[1:]]
    assert turns == [*range(1, len(turns)), *([len(lengths)] if lengths else [])]
    assert text.count("--- answer ") == len(turns)
    left_out = len(lengths) - len(turns)
    assert (f"--- {left_out} turns left out ---" in text) == (left_out > 0)


def test_a_long_observation_loses_its_middle() -> None:
    text = episode([MAX_PART * 3])
    assert "characters ...]" in text
    assert text.count("a") < MAX_PART + 100
    assert text.splitlines()[-1] == "--- end: env_error, score 0.5 ---"


def test_the_end_tells_what_went_wrong() -> None:
    assert episode([1], error="RuntimeError: gone").endswith(
        "--- end: env_error: RuntimeError: gone, score 0.5 ---\n"
    )
