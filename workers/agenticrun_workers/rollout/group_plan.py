"""How groups are made: `pipeline.trainEnvs`, with its filter as a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agenticrun_api import Pipeline
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.plugins import PluginError, Registry
from agenticrun_workers.rollout.groups import tag_cycle

Refuses = Callable[[list[float]], bool]
"""Whether a group with these rewards is not trained on."""

FILTER_FIELD = "spec.pipeline.trainEnvs.groupFilter.type"

_filters: Registry[bool] = Registry("group filter", "agenticrun.group_filters")


@_filters.register("zero_variance")
def zero_variance(scores: list[float]) -> bool:
    """All rewards are equal: such a group has no advantage to learn from (DAPO, Yu et al. 2025, arXiv 2503.14476)."""
    return max(scores) == min(scores)


@dataclass(frozen=True)
class GroupFilter:
    """Groups that it refuses are replaced, at most `max_rejected` for one batch."""

    name: str
    refuses: Refuses
    max_rejected: int


@dataclass(frozen=True)
class GroupPlan:
    """What each training group is.

    Args:
        tags: the cycle in which groups take tags (`groups.tag_cycle`).
        group_size: members that make a group.
        redundancy: members beyond them that begin with it; the first `group_size` to finish count.
        max_rerolls: how often an episode that cannot be trained on is played again.
        transcripts: episodes of each batch that are told as text; with `frames` also as pictures.
    """

    tags: tuple[str, ...]
    group_size: int
    redundancy: int = 0
    max_rerolls: int = 2
    filter: GroupFilter | None = None
    transcripts: int = 0
    frames: bool = False

    @classmethod
    def of(cls, pipeline: Pipeline, *, transcripts: int = 0, frames: bool = False) -> GroupPlan:
        """As `pipeline.trainEnvs` says. Raises `InvalidConfig` for a filter that is not there."""
        envs = pipeline.train_envs
        return cls(
            tags=tag_cycle(envs.shares()),
            group_size=envs.group_size,
            redundancy=envs.group_size_redundancy,
            max_rerolls=envs.max_rerolls,
            filter=_filter_of(pipeline),
            transcripts=transcripts,
            frames=frames,
        )

    def tag(self, group: int) -> str:
        return self.tags[group % len(self.tags)]


def _filter_of(pipeline: Pipeline) -> GroupFilter | None:
    spec = pipeline.train_envs.group_filter
    if spec is None:
        return None
    try:
        return GroupFilter(spec.type, _filters.find(spec.type), spec.max_rejected)
    except PluginError as error:
        raise InvalidConfig(FILTER_FIELD, str(error)) from error
