"""Sums: two numbers are given, and the right answer is JSON with their total."""

import json
import random
import string

from agenticrun_workers.envs import StepResult

CALL = ('<tool_call>\n{"name": "add", "arguments": {"a": ', ', "b": ', "}}\n</tool_call>")
ANSWER = ('{"total": ', "}")


class Sums:
    """The right total earns 1."""

    blocking = False  # steps take microseconds, so they need no thread
    instruction = "Add the numbers with the tool. Then give the total."

    def __init__(self, below: int = 1000):
        self.below = below

    def reset(self, seed: int, split: str) -> str:
        draws = random.Random(seed)
        a, b = draws.randrange(self.below), draws.randrange(self.below)
        self.total = a + b
        return f"{a} + {b}"

    def step(self, action: str) -> StepResult:
        total = total_of(action)
        right = float(total == self.total)
        metrics = {"success": right, "action_is_valid": float(total is not None)}
        return StepResult("over", reward=right, terminated=True, metrics=metrics)

    def valid_actions(self) -> list[str]:
        return [json.dumps({"total": total}) for total in range(2 * self.below - 1)]

    def vocabulary(self) -> list[str]:
        """Return all pieces of text, for the word-level tokenizer of a model made from scratch.

        Frameworks write texts of their own, so all characters are among them.
        """
        return [*CALL, *ANSWER, *string.printable]


def total_of(answer: str) -> int | None:
    """Return the total in an answer such as `{"total": 5}`, or None."""
    try:
        total = json.loads(answer)["total"]
    except (ValueError, KeyError, TypeError):
        return None
    return total if isinstance(total, int) else None
