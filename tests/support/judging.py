"""Episodes to judge, and judges that do as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from agenticrun_api.environments import RewardSpec
from agenticrun_workers.rollout.rewards import JudgedEpisode, JudgedTurn, Judgement
from agenticrun_workers.types import EpisodeKey, StopReason, Stream, Trajectory, Turn


def trajectory(*rewards: float, tag: str = "A", member: int = 0) -> Trajectory:
    """One turn of three tokens per reward."""
    ones = np.ones(3, np.int32)
    turns = tuple(
        Turn(ones, ones, np.zeros(3, np.float32), np.zeros(3, np.int32), reward)
        for reward in rewards
    )
    return Trajectory(
        EpisodeKey(Stream.TRAIN, 0, member),
        tag,
        turns,
        StopReason.COMPLETED,
        metrics={"success": 1.0},
    )


def episode(
    answer: str = "yes", *, tag: str = "A", item: Mapping[str, Any] | None = None
) -> JudgedEpisode:
    return JudgedEpisode(tag, (JudgedTurn("really?", answer, 0.0),), item or {}, {"success": 1.0})


def spec(**changes: Any) -> RewardSpec:
    return RewardSpec.model_validate({"name": "style", "type": "x", **changes})


class FakeJudge:
    """Says `score(episode)`; `calls` are the answers of the episodes in each call."""

    episodes_per_call: int | None = None
    calls_at_once = 8

    def __init__(
        self,
        score: Callable[[JudgedEpisode], Judgement] = lambda episode: float(len(episode.answer)),
        seconds: float = 0.0,
    ) -> None:
        self._score = score
        self._seconds = seconds
        self.calls: list[list[str]] = []
        self.most_at_once = 0
        self._at_once = 0

    async def judge(self, episodes: list[JudgedEpisode]) -> list[Judgement]:
        self.calls.append([episode.answer for episode in episodes])
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        await asyncio.sleep(self._seconds)
        self._at_once -= 1
        return list(map(self._score, episodes))
