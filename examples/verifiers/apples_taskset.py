"""A taskset of verifiers: the number in a question. Any other taskset of 0.4 takes its place."""

from collections.abc import Iterator

import verifiers.v1 as vf

NAMES = "Ann Ben Cleo Dan Eve Finn Gus Hal Ida Jon Kim Leo Mia Nat Ola Pam".split()  # noqa: SIM905


class ApplesData(vf.TaskData):
    apples: int


class Apples(vf.Task[ApplesData]):
    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == str(self.data.apples))


class ManyApples(vf.Taskset[Apples]):
    def load(self) -> Iterator[Apples]:
        for name in NAMES:
            for apples in range(2, 6):
                prompt = f"{name} has {apples} apples. How many?"
                yield Apples(ApplesData(prompt=prompt, apples=apples))


__all__ = ["ManyApples"]
