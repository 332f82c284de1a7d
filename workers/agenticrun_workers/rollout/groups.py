"""Values of rollout: what a group consists of, and what driver and env workers exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol

import numpy as np

from agenticrun_api import Pipeline
from agenticrun_api.base import clean_text
from agenticrun_workers.algorithms.normalization import zero_variance_share
from agenticrun_workers.envs import EnvFault
from agenticrun_workers.envs.calls import number
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.inference.client import RequestServer
from agenticrun_workers.launch import ActorHandle
from agenticrun_workers.plugins import PluginError, Registry
from agenticrun_workers.rollout.trajectory_store import Stores
from agenticrun_workers.types import (
    BoolArray,
    EpisodeKey,
    FloatArray,
    IntArray,
    StopReason,
    Trajectory,
)


@dataclass(frozen=True, slots=True)
class EpisodeTask:
    """One episode to run."""

    key: EpisodeKey
    tag: str
    attempt: int = 0
    """Number of earlier runs of this member, which failed or grew too old."""
    engine_version: int = 0
    """Policy version of the engines when the task was made. They may have a later one by now."""
    random_policy: bool = False
    """Sample uniformly random valid actions instead of asking the policy."""
    transcript: bool = False
    """Return the episode as text."""
    frames: bool = False
    """Return frames of the episode if its environment can render."""
    demonstration: bool = False
    """Use item number `key.group` of the warm-up data set instead of running an episode."""


@dataclass(frozen=True, slots=True)
class VersionBounds:
    """Policy versions that matter to running episodes. Both only grow."""

    oldest: int = 0
    """Tokens of older versions can no longer be trained on within `staleness.max`."""
    newest: int = 0
    """Version that the engines have."""

    def later(self, other: VersionBounds) -> VersionBounds:
        """Return the later bounds of both."""
        return VersionBounds(max(self.oldest, other.oldest), max(self.newest, other.newest))


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeResult:
    """Scalars of one finished trajectory.

    Its tokens are in trajectory store number `store` (-1 = not stored).
    """

    key: EpisodeKey
    tag: str
    attempt: int
    stop_reason: StopReason
    rewards_K: FloatArray
    """Reward of each turn, judges included, float32 [K]."""
    valid_K: BoolArray
    response_tokens_K: IntArray
    states_K: bytes
    """State hashes of the turns, `STATE_BYTES` each, joined."""
    tokens: int
    oldest_version: int
    samples: int = 1
    """Training samples: turns of a step-wise agent, else 1."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    store: int = -1
    error: str = ""
    transcript: str = ""
    frames: bytes = b""
    """The episode as an animated GIF; empty unless requested and rendered."""
    memory_wait: float = 0.0
    """Seconds that the episode waited for memory of its env worker's pod before it began."""
    others: tuple[EpisodeResult, ...] = ()
    """Further trajectories of the same episode. This one is trainable if any of them is."""

    @classmethod
    def of(
        cls,
        trajectory: Trajectory,
        *,
        attempt: int = 0,
        store: int = -1,
        transcript: str = "",
        frames: bytes = b"",
    ) -> EpisodeResult:
        """Return the scalars of a trajectory. Numbers that float32 cannot hold become env_error."""
        turns = trajectory.turns
        problem = _unusable_number(trajectory)
        return cls(
            key=trajectory.key,
            tag=trajectory.tag,
            attempt=attempt,
            stop_reason=StopReason.ENV_ERROR if problem else trajectory.stop_reason,
            rewards_K=np.zeros(len(turns), np.float32)
            if problem
            else np.array([turn.reward for turn in turns], np.float32),
            valid_K=np.array([turn.valid for turn in turns], np.bool_),
            response_tokens_K=np.array([len(turn.response_T) for turn in turns], np.int32),
            states_K=b"".join(turn.state for turn in turns),
            tokens=trajectory.num_tokens,
            oldest_version=trajectory.oldest_version,
            samples=len(trajectory.sample_lengths),
            metrics={} if problem else dict(trajectory.metrics),
            store=store,
            error=problem or clean_text(trajectory.error),
            transcript=transcript,
            frames=frames,
        )

    @property
    def trajectories(self) -> tuple[EpisodeResult, ...]:
        """All trajectories of the episode, this one first."""
        return (self, *self.others)

    @property
    def episode_version(self) -> int:
        """Oldest policy version in the trainable trajectories of the episode."""
        return min(each.oldest_version for each in self.trajectories if each.trainable)

    @property
    def turns(self) -> int:
        return len(self.rewards_K)

    @property
    def score(self) -> float:
        """Sum of the turns' rewards."""
        return float(self.rewards_K.sum(dtype=np.float64))

    @property
    def response_tokens(self) -> int:
        return int(self.response_tokens_K.sum())

    @property
    def trainable(self) -> bool:
        """True if it counts in group statistics and in the loss."""
        return self.stop_reason.trainable and self.response_tokens > 0


def _unusable_number(trajectory: Trajectory) -> str:
    """Return which number of an episode float32 cannot hold; an empty text if there is none."""
    try:
        for turn in trajectory.turns:
            number(turn.reward, "a reward is not a finite number:")
        number(trajectory.score, "the sum of the rewards is not a finite number:")
        for name, value in trajectory.metrics.items():
            number(value, f"a metric is not a finite number: {name} =")
    except EnvFault as fault:
        return str(fault)
    if not all(np.isfinite(turn.logprobs_T).all() for turn in trajectory.turns):
        return "a log-prob is not a finite number"
    return ""


def every_trajectory(episodes: Iterable[EpisodeResult]) -> list[EpisodeResult]:
    """Return all trajectories of these episodes, in order."""
    return [result for episode in episodes for result in episode.trajectories]


def failures(kind: str, results: Iterable[EpisodeResult]) -> list[str]:
    """Return a line for each trajectory that failed: an error, a time limit, or a judge's failure.

    Args:
        kind: of the episodes, such as "validation"; "" for training.
        results: of failed and other episodes.
    """
    episodes = f"{kind} episodes".lstrip()
    return [
        f"{episodes} of {result.tag!r} end with {result.stop_reason}: {result.error}"
        for result in results
        if not result.trainable
    ]


def as_episode(results: Sequence[EpisodeResult]) -> EpisodeResult:
    """Combine the trajectories of one episode (at least one) into a single result."""
    first, *others = sorted(results, key=lambda result: not result.trainable)
    return replace(first, others=tuple(others))


def tag_cycle(shares: Mapping[str, int]) -> tuple[str, ...]:
    """Return the cycle of tags for groups: each tag as often as its share, spread evenly.

    The tag of a group is `cycle[group % len(cycle)]`: a function of the group's number only.
    """
    marks = (
        [((2 * place + 1) / (2 * share), order, tag) for place in range(share)]
        for order, (tag, share) in enumerate(shares.items())
    )
    return tuple(tag for _, _, tag in sorted(chain.from_iterable(marks)))


class RolloutBackend(Protocol):
    """Backend that runs episodes."""

    async def run(self, task: EpisodeTask) -> EpisodeResult:
        """Run an episode to its end.

        Raises:
            RolloutFailed: the workers can no longer run episodes.
        """
        ...


class TrainingBackend(RolloutBackend, Protocol):
    """Backend that also stops episodes that are no longer of use."""

    def set_bounds(self, bounds: VersionBounds) -> None:
        """Stop training episodes with a token older than `bounds.oldest`; they end as `STALE`."""
        ...

    def abort(self, group: int) -> None:
        """Stop all episodes of a training group; they end as `ABORTED`.

        Episodes whose worker has died are reported without tokens.
        """
        ...


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Engines by id and trajectory stores that env workers talk to.

    Ray does not order the calls of an async actor, so the highest `number` wins. 0 = none yet.
    """

    number: int = 0
    engines: Mapping[str, ActorHandle[RequestServer]] = field(default_factory=dict)
    stores: Stores = ()
    worker: int = 0
    """Number of the env worker that gets them, by which the stores know it."""
    retired: frozenset[str] = frozenset()
    """Engines that have left alive: their requests did not kill them."""


Refuses = Callable[[list[float]], bool]
"""Return True if a group with these scores must not be trained on."""

FILTER_FIELD = "spec.pipeline.trainEnvs.groupFilter.type"

_filters: Registry[bool] = Registry("group filter", "agenticrun.group_filters")


@_filters.register("zero_variance")
def zero_variance(scores: list[float]) -> bool:
    """Return True if all scores are equal up to rounding: the group has no advantage to learn from.

    Source: DAPO, Yu et al. 2025, arXiv 2503.14476.
    """
    return zero_variance_share(np.array(scores, np.float64), np.zeros(len(scores), np.int64)) > 0


@dataclass(frozen=True)
class GroupFilter:
    """A group filter. Rejected groups are replaced, at most `max_rejected` per batch."""

    name: str
    refuses: Refuses
    max_rejected: int


@dataclass(frozen=True)
class GroupPlan:
    """Size, tags, re-rolls and filter of training groups.

    Args:
        tags: the cycle in which groups take tags (`groups.tag_cycle`).
        group_size: members that make a group.
        redundancy: extra members that start too; the first `group_size` to finish count.
        max_rerolls: how often an untrainable episode runs again.
        transcripts: episodes per batch that are returned as text; with `frames` also as GIF.
        evicts: leave environments out that always fail (`eviction`). Deterministic runs do not:
            when it happens depends on which group ends first.
    """

    tags: tuple[str, ...]
    group_size: int
    redundancy: int = 0
    max_rerolls: int = 2
    filter: GroupFilter | None = None
    transcripts: int = 0
    frames: bool = False
    evicts: bool = True

    @classmethod
    def of(cls, pipeline: Pipeline, *, transcripts: int = 0, frames: bool = False) -> GroupPlan:
        """Return the plan of `pipeline.trainEnvs`. Raises `InvalidConfig` for an unknown filter."""
        envs, spec = pipeline.train_envs, pipeline.train_envs.group_filter
        kept: GroupFilter | None = None
        try:
            if spec is not None:
                kept = GroupFilter(spec.type, _filters.find(spec.type), spec.max_rejected)
        except PluginError as error:
            raise InvalidConfig(FILTER_FIELD, str(error)) from error
        return cls(
            tags=tag_cycle(envs.shares()),
            group_size=envs.group_size,
            redundancy=envs.group_size_redundancy,
            max_rerolls=envs.max_rerolls,
            filter=kept,
            transcripts=transcripts,
            frames=frames,
            evicts=not pipeline.deterministic,
        )

    def tag(self, group: int) -> str:
        return self.tags[group % len(self.tags)]
