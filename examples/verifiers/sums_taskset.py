"""A taskset of verifiers: sums of two digits. Any other taskset of 0.4 takes its place."""

from collections.abc import Iterator

import verifiers.v1 as vf


class SumData(vf.TaskData):
    total: int


class Sum(vf.Task[SumData]):
    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == str(self.data.total))


class Sums(vf.Taskset[Sum]):
    def load(self) -> Iterator[Sum]:
        for left in range(4):
            for right in range(4):
                yield Sum(SumData(prompt=f"{left} + {right} = ?", total=left + right))


__all__ = ["Sums"]
