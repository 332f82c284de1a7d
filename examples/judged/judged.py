"""A quiz about the words of words.jsonl.

The environment only asks; a reward function judges the answers.
"""

from agenticrun_workers.envs import StepResult

WORDS = ["hot", "cold", "day", "night", "up", "down"]


class Quiz:
    """One question, one answer, no reward of its own."""

    blocking = False  # steps take microseconds, so they need no thread
    instruction = "Say the opposite."

    def set_item(self, item):
        """The row of the data set that the next episode is about."""
        self.item = item

    def reset(self, seed, split):
        return self.item["word"]

    def step(self, action):
        metrics = {
            "success": float(action == self.item["solution"]),
            "action_is_valid": float(action in WORDS),
        }
        return StepResult("over", reward=0.0, terminated=True, metrics=metrics)

    def valid_actions(self):
        return WORDS

    def vocabulary(self):
        """All pieces of text, for the word-level tokenizer of a model made from scratch."""
        return [*WORDS, "over"]


def right(episode, *, partly=0.0):
    """The reward function: 1 for the solution, `partly` for any other word of the quiz."""
    if episode.answer == episode.item["solution"]:
        return 1.0
    return partly if episode.answer in WORDS else 0.0
