r"""Math problems of a data set in the style of GSM8K and MATH: columns `question` and `answer`.

`math` is a conversation: the policy answers, reads if that was right, and may try again for
as many turns as `maxSteps` says. `math_single_step` is the stateless environment of AReaL's guide,
for agents with queues: it says of each answer whether it is right. The solution's answer is what
follows its last ####, or stands in its last \boxed{}, or all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agenticrun_workers.envs.env import StepResult, register_env
from agenticrun_workers.envs.math.verifier import Verdict, reference_answer, shared_verifier
from agenticrun_workers.envs.service import EnvironmentService, ServiceStep
from agenticrun_workers.types import Stream

INSTRUCTION = "Solve the problem. Reason step by step, and put the final answer in \\boxed{}."
RIGHT = "Congratulations! You are correct!"
WRONG = "Unfortunately your answer is wrong. Let's try again."


class _Problem:
    """The common part of both environments: an item, and the verification of answers.

    Args:
        instruction: system message.
        verify_seconds: computing time of one verification; an answer that takes longer is wrong.
        random_answers: answers of a random policy, for the random baseline and warm-up by random
            play,
            which both need them.
    """

    def __init__(
        self, *, instruction: str, verify_seconds: float, random_answers: Sequence[str]
    ) -> None:
        if verify_seconds <= 0:
            raise ValueError(f"verifySeconds must be more than 0, not {verify_seconds}")
        self.instruction = instruction
        self.question = ""
        self._gold = ""
        self._verify_seconds = verify_seconds
        self._random_answers = list(random_answers)

    def set_item(self, item: Mapping[str, Any]) -> None:
        """Set the problem of the next episode. Raises `ValueError` if a column is missing."""
        missing = [name for name in ("question", "answer") if item.get(name) is None]
        if missing:
            raise ValueError(
                f"the item has no {missing[0]!r}: give the column's name in dataset.columns"
            )
        self.question = str(item["question"])
        self._gold = reference_answer(str(item["answer"]))

    def valid_actions(self) -> list[str]:
        """`random_answers`."""
        return self._random_answers

    async def verdict(self, answer: str) -> Verdict:
        """Judge an answer."""
        return await shared_verifier(self._verify_seconds).verify(self._gold, answer)


@register_env("math")
class MathEnv(_Problem):
    """A conversation about one problem.

    Args:
        right_reward, wrong_reward: of an answer.
        turn_discount: the k-th answer's right_reward is multiplied by turn_discount^(k - 1).
        right_feedback, wrong_feedback: the observation after a right or wrong answer.
        others: see `_Problem`.
    """

    def __init__(
        self,
        *,
        instruction: str = INSTRUCTION,
        right_reward: float = 1.0,
        wrong_reward: float = 0.0,
        turn_discount: float = 1.0,
        right_feedback: str = RIGHT,
        wrong_feedback: str = WRONG,
        verify_seconds: float = 5.0,
        random_answers: Sequence[str] = (),
    ) -> None:
        super().__init__(
            instruction=instruction, verify_seconds=verify_seconds, random_answers=random_answers
        )
        if not 0 <= turn_discount <= 1:
            raise ValueError(f"turnDiscount must be in [0, 1], not {turn_discount}")
        self._right_reward, self._wrong_reward, self._discount = (
            right_reward,
            wrong_reward,
            turn_discount,
        )
        self._right_feedback, self._wrong_feedback = right_feedback, wrong_feedback
        self._turns = 0

    async def reset(self, seed: int, split: Stream) -> str:  # noqa: ARG002
        """Return the question. The data set chooses it, so seed and split change nothing."""
        self._turns = 0
        return self.question

    async def step(self, action: str) -> StepResult:
        """An answer with its reasoning."""
        verdict = await self.verdict(action)
        reward = (
            self._right_reward * self._discount**self._turns
            if verdict.right
            else self._wrong_reward
        )
        self._turns += 1
        metrics = {
            "action_is_valid": float(verdict.readable),
            "num_actions": 1.0,
            "success": float(verdict.right),
            "verify_timeouts": float(verdict.timeout),
        }
        return StepResult(
            self._right_feedback if verdict.right else self._wrong_feedback,
            reward,
            verdict.right,
            metrics=metrics,
        )

    def vocabulary(self) -> list[str]:
        """Return the texts beside the questions, each as one word."""
        return [self._right_feedback, self._wrong_feedback]


class MathSingleStep(_Problem, EnvironmentService):
    """A wrapper around the verification.

    `step((qid, answers))` returns a success, 0 or 1, for each answer.

    Args: see `_Problem`.
    """

    def __init__(
        self,
        *,
        instruction: str = INSTRUCTION,
        verify_seconds: float = 5.0,
        random_answers: Sequence[str] = (),
    ) -> None:
        super().__init__(
            instruction=instruction, verify_seconds=verify_seconds, random_answers=random_answers
        )

    async def reset(
        self,
        seed: int | None = None,  # noqa: ARG002
        options: Mapping[str, Any] | None = None,  # noqa: ARG002
    ) -> str:
        """Return the question."""
        return self.question

    async def step(self, action: tuple[str, Sequence[str]]) -> ServiceStep:
        """Answers to the problem of this episode; `qid` is for the agent's own books."""
        _, answers = action
        verdicts = [await self.verdict(answer) for answer in answers]
        return (
            None,
            [float(verdict.right) for verdict in verdicts],
            True,
            False,
            {"verdicts": verdicts},
        )


register_env("math_single_step")(MathSingleStep)
