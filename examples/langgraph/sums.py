"""Sums: two numbers are given, and the right answer is JSON with their total."""

import json
import random

from agenticrun_workers.envs import StepResult


class Sums:
    """The right total earns 1."""

    blocking = False  # steps take microseconds, so they need no thread
    instruction = "Add the numbers with the tool. Then give the total."

    def reset(self, seed: int, split: str) -> str:
        draws = random.Random(seed)
        a, b = draws.randrange(1000), draws.randrange(1000)
        self.total = a + b
        return f"{a} + {b}"

    def step(self, action: str) -> StepResult:
        total = total_of(action)
        right = float(total == self.total)
        metrics = {"success": right, "action_is_valid": float(total is not None)}
        return StepResult("over", reward=right, terminated=True, metrics=metrics)

    def valid_actions(self) -> list[str]:
        return [json.dumps({"total": total}) for total in range(1999)]


def total_of(answer: str) -> int | None:
    """Return the total in an answer such as `{"total": 5}`, or None."""
    try:
        total = json.loads(answer)["total"]
    except (ValueError, KeyError, TypeError):
        return None
    return total if isinstance(total, int) else None
