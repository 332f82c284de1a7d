"""The environment of an agent that finds its task by the seed of the episode."""

import string


class Seeds:
    instruction = ""

    def reset(self, seed: int, split: str) -> str:
        return ""

    def step(self, action: str) -> None:
        raise NotImplementedError("the agent posts its reward")

    def valid_actions(self) -> list[str]:
        return list("0123456")  # of the warm-up by random play

    def vocabulary(self) -> list[str]:
        return list(string.printable)
