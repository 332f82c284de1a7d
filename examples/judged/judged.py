"""A quiz about the words of words.jsonl.

The environment only asks; a reward function rewards the answers.
"""

from agenticrun_workers.envs import StepResult

WORDS = ["hot", "cold", "day", "night", "up", "down"]


class Quiz:
    """One question and one answer, without a reward of the environment."""

    blocking = False  # steps take microseconds, so they need no thread
    instruction = "Say the opposite."

    def set_item(self, item):
        """Set the row of the data set for the next episode."""
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
        """Return all pieces of text, for the word-level tokenizer of a model made from scratch."""
        return [*WORDS, "over"]


def right(episode, *, partly=0.0):
    """Return 1 for the solution, `partly` for any other word of the quiz, else 0."""
    if episode.answer == episode.item["solution"]:
        return 1.0
    return partly if episode.answer in WORDS else 0.0
