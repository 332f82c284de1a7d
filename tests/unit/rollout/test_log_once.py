"""A thousand failures are one line, and another failure is another line."""

from __future__ import annotations

import pytest

from agenticrun_workers.log_once import MAX_KINDS, LogOnce

CELL = "episodes of 'lake4' end with env_error: KeyError: cell {} is none of 16 (maze.py:31)"


def told(*messages: str) -> list[str]:
    lines: list[str] = []
    once = LogOnce(lines.append)
    passed = [message for message in messages if once(message)]
    assert passed == lines
    return lines


def test_messages_that_differ_in_a_number_only_are_told_once() -> None:
    assert told(*(CELL.format(number) for number in (7, -1, 2.5, 1000))) == [CELL.format(7)]
    assert len(told(*(f"<Env object at {hex(number)}> failed" for number in (1, 0xABCDEF)))) == 1


@pytest.mark.parametrize(
    ("part", "other"),
    [("'lake4'", "'lake8'"), ("maze.py:31", "maze.py:77"), ("KeyError", "ValueError")],
)
def test_other_environments_lines_and_errors_are_told(part: str, other: str) -> None:
    assert len(told(CELL, CELL.replace(part, other))) == 2


def test_there_is_an_end() -> None:
    assert len(told(*(f"{chr(65 + number)} is missing" for number in range(50)))) == MAX_KINDS
