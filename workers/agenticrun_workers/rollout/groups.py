"""The values that pass between the driver and the env workers: what to play, and what came of it. Scalars only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

from agenticrun_workers.types import EpisodeKey, StopReason, Stream


@dataclass(frozen=True, slots=True)
class GroupTask:
    """Members of one group to play: all of them at first, single ones when they are re-rolled."""

    stream: Stream
    group: int
    tag: str
    members: tuple[int, ...]
    attempt: int = 0
    """Which re-roll this is; 0 = the first try."""
    random_policy: bool = False
    """Play uniformly random valid actions instead of asking the policy."""
    transcript: bool = False
    """Return the text of the first member's episode, for people."""

    def key(self, member: int) -> EpisodeKey:
        return EpisodeKey(self.stream, self.group, member)


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """The scalars of one finished trajectory. Its tokens lie in store number `store` (-1: they were not kept)."""

    key: EpisodeKey
    tag: str
    attempt: int
    stop_reason: StopReason
    score: float
    tokens: int
    response_tokens: int
    turns: int
    oldest_version: int
    finite: bool = True
    """Whether all rewards and log-probs are finite numbers."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    store: int = -1
    error: str = ""
    transcript: str = ""

    @property
    def trainable(self) -> bool:
        """Whether it counts in group statistics and in the loss (rl-semantics, unusual trajectories)."""
        return self.stop_reason.trainable and self.finite and self.response_tokens > 0


@dataclass(frozen=True, slots=True)
class Group:
    """The trainable members of one group, by member number."""

    group: int
    tag: str
    results: tuple[EpisodeResult, ...]

    @property
    def oldest_version(self) -> int:
        return min(result.oldest_version for result in self.results)


def tag_cycle(shares: Mapping[str, int]) -> tuple[str, ...]:
    """The order in which groups take tags: every tag as often as its share, spread evenly.

    The tag of a group is `cycle[group % len(cycle)]`, so it depends on nothing but the group's number.
    """
    marks = ([((2 * place + 1) / (2 * share), order, tag) for place in range(share)] for order, (tag, share) in enumerate(shares.items()))
    return tuple(tag for _, _, tag in sorted(chain.from_iterable(marks)))
