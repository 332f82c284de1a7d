"""A quiz about the words of words.jsonl.

The environment only asks; a reward function rewards the answers.
"""

from collections.abc import Mapping
from typing import Any

from agenticrun_workers.envs import StepResult
from agenticrun_workers.rollout.rewards import JudgedEpisode

WORDS = ["hot", "cold", "day", "night", "up", "down"]


class Quiz:
    """One question and one answer, without a reward of the environment."""

    blocking = False  # steps take microseconds, so they need no thread
    instruction = "Say the opposite."

    def set_item(self, item: Mapping[str, Any]) -> None:
        """Set the row of the data set for the next episode."""
        self.item = item

    def reset(self, seed: int, split: str) -> str:
        return str(self.item["word"])

    def step(self, action: str) -> StepResult:
        metrics = {
            "success": float(action == self.item["solution"]),
            "action_is_valid": float(action in WORDS),
        }
        return StepResult("over", reward=0.0, terminated=True, metrics=metrics)

    def valid_actions(self) -> list[str]:
        return WORDS

    def vocabulary(self) -> list[str]:
        """Return all pieces of text, for the word-level tokenizer of a model made from scratch."""
        return [*WORDS, "over"]


def right(episode: JudgedEpisode, *, partly: float = 0.0) -> float:
    """Return 1 for the solution, `partly` for any other word of the quiz, else 0."""
    if episode.answer == episode.item["solution"]:
        return 1.0
    return partly if episode.answer in WORDS else 0.0
