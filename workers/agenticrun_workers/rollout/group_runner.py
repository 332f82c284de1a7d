"""Run one group to its end, with re-rolls of untrainable members and redundant members."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from agenticrun_workers.rollout.env_pool import RolloutBackend
from agenticrun_workers.rollout.groups import (
    EpisodeResult,
    Group,
    GroupPlan,
    GroupTask,
    every_trajectory,
)
from agenticrun_workers.types import StopReason, Stream


@dataclass
class FinishedGroup:
    """Outcome of a group."""

    group: Group | None = None
    """None if fewer than two (one, for groups of one) trajectories are trainable."""
    surplus: list[EpisodeResult] = field(default_factory=list)
    """Trainable trajectories that are not in `group`."""
    untrainable: list[EpisodeResult] = field(default_factory=list)
    rerolled: int = 0
    """Episodes that ran again."""
    aborted_tokens: int = 0
    """Tokens sampled for redundant members that were stopped."""


async def run_group(
    backend: RolloutBackend, plan: GroupPlan, number: int, *, transcript: bool = False
) -> FinishedGroup:
    """Run group `number` until `plan.group_size` members are trainable or no re-roll is left."""
    finished = FinishedGroup()
    good: list[EpisodeResult] = []
    late: list[EpisodeResult] = []
    members = tuple(range(plan.group_size + plan.redundancy))
    for attempt in range(plan.max_rerolls + 1):
        needed = plan.group_size - len(good)
        told = transcript and attempt == 0
        task = GroupTask(
            Stream.TRAIN,
            number,
            plan.tag(number),
            members,
            attempt,
            transcript=told,
            frames=told and plan.frames,
            stop_after=needed if needed < len(members) else None,
        )
        results = await backend.run(task)
        good += [result for result in results if result.trainable]
        too_late = _too_late(results) if len(good) >= plan.group_size else []
        late += too_late
        failed = [result for result in results if not result.trainable and result not in too_late]
        finished.untrainable += every_trajectory(failed)
        members = tuple(result.key.member for result in failed)
        if len(good) >= plan.group_size or attempt == plan.max_rerolls:
            break
        finished.rerolled += len(members)
    kept, finished.surplus = (
        _trainable(good[: plan.group_size]),
        _trainable(good[plan.group_size :]),
    )
    finished.untrainable += [result for result in every_trajectory(good) if not result.trainable]
    finished.aborted_tokens = sum(result.response_tokens for result in late)
    if len(kept) < min(2, plan.group_size):
        finished.surplus = _trainable(good)
    else:
        in_order = tuple(sorted(kept, key=lambda result: result.key))
        finished.group = Group(
            number,
            plan.tag(number),
            in_order,
            length_bias=_length_bias(kept, [*finished.surplus, *late]),
        )
    return finished


def _trainable(episodes: list[EpisodeResult]) -> list[EpisodeResult]:
    return [result for result in every_trajectory(episodes) if result.trainable]


def _too_late(results: list[EpisodeResult]) -> list[EpisodeResult]:
    """Return the members that were stopped because enough others had finished."""
    return [result for result in results if result.stop_reason is StopReason.ABORTED]


def _length_bias(kept: list[EpisodeResult], others: list[EpisodeResult]) -> float:
    """Return the mean sampled tokens of the kept members minus the mean of all members.

    Stopped members count with the tokens that they had sampled.
    """
    if not others:
        return 0.0
    return _mean_tokens(kept) - _mean_tokens([*kept, *others])


def _mean_tokens(results: Iterable[EpisodeResult]) -> float:
    return float(np.mean([result.response_tokens for result in results]))
