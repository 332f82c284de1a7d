"""`type: reasoning_gym`: one question of a procedural data set of reasoning-gym, and its score."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from agenticrun_workers.envs.env import StepResult, register_env
from agenticrun_workers.envs.grid import in_holdout
from agenticrun_workers.envs.remote import checked_package
from agenticrun_workers.plugins import compile_pattern, last_group
from agenticrun_workers.types import Stream

HOLDOUT_SHARE = 0.2
TRIES = 200
"""Questions to draw until one belongs to the split; a data set with fewer has none of it."""

INSTRUCTION = "Answer the question."


@register_env("reasoning_gym")
class ReasoningGym:
    """An environment that plays one episode at a time.

    The seed of an episode makes its question; a hash of the question decides which split it belongs
    to.

    Args:
        dataset: name of a data set of reasoning-gym.
        params: its parameters, such as min_terms; see the library.
        answer_pattern: regular expression; its last group is the answer. Default: the whole text.
        answers: answers of the random policy and of the warm-up by random play. Default: the
            numbers of the question.
        instruction: text of the first prompt.

    Metrics: success (the score is 1), and the usual ones. The reward is the library's score.
    """

    def __init__(
        self,
        *,
        dataset: str,
        params: Mapping[str, Any] | None = None,
        answer_pattern: str = r"(.*)",
        answers: Sequence[Any] = (),
        instruction: str = INSTRUCTION,
    ) -> None:
        self._library = checked_package("reasoning_gym", "reasoning-gym")
        self._dataset = dataset
        self._params = dict(params or {})
        self._pattern = compile_pattern("answerPattern", answer_pattern)
        self._answers = list(map(str, answers))
        self.instruction = instruction
        self._make(0)
        self._source: Any = None
        self._entry: dict[str, Any] = {}

    def reset(self, seed: int, split: Stream) -> str:
        """Ask a question of this split."""
        for number in range(TRIES):
            source = self._make((seed + 104_729 * number) % 2**31)
            entry = source[0]
            question = str(entry["question"])
            if in_holdout(question.encode(), HOLDOUT_SHARE) == (split is Stream.VALIDATION):
                self._source, self._entry = source, entry
                return question
        raise RuntimeError(
            f"{TRIES} questions of {self._dataset} have none for {split.value}: "
            "give it parameters with more questions"
        )

    def step(self, action: str) -> StepResult:
        """Score the answer; see `StepResult`. It ends the episode."""
        match = self._pattern.search(action)
        answer = "" if match is None else last_group(match).strip()
        score, valid = 0.0, bool(answer)
        if valid:
            try:
                score = float(self._source.score_answer(answer, self._entry))
            except Exception:  # scorers of the library raise on answers of another form
                valid = False
        metrics = {
            "action_is_valid": float(valid),
            "num_actions": 1.0,
            "success": float(score >= 1.0),
        }
        return StepResult("", score, True, metrics=metrics)

    def valid_actions(self) -> list[str]:
        """Return some answers: those of the config, or the numbers of the question."""
        numbers = re.findall(r"-?\d+", str(self._entry.get("question", "")))
        return self._answers or list(dict.fromkeys(numbers))

    def vocabulary(self) -> list[str]:
        """Return printable characters, answers, and the words of a first question."""
        words = re.findall(r"\w+", self.reset(0, Stream.TRAIN))
        return [*string.printable, *self._answers, *words]

    def _make(self, seed: int) -> Any:
        """Return a data set with one question. Raises `ValueError` for a bad config."""
        try:
            return self._library.create_dataset(self._dataset, seed=seed, size=1, **self._params)
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(f"dataset {self._dataset!r}: {error}") from error
