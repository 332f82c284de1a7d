"""The values that pass between the driver and the env workers: what to play, and what came of it. Scalars only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from agenticrun_workers.types import BoolArray, EpisodeKey, FloatArray, IntArray, StopReason, Stream, Trajectory


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
    finite: bool = True
    """Whether all rewards and log-probs are finite numbers."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    store: int = -1
    error: str = ""
    transcript: str = ""
    frames: bytes = b""
    """The episode as an animated GIF; empty where the environment has no pictures or nobody asked."""

    @classmethod
    def of(cls, trajectory: Trajectory, *, attempt: int = 0, store: int = -1, transcript: str = "") -> EpisodeResult:
        """The scalars of this trajectory."""
        turns = trajectory.turns
        return cls(
            key=trajectory.key,
            tag=trajectory.tag,
            attempt=attempt,
            stop_reason=trajectory.stop_reason,
            rewards_K=np.array([turn.reward for turn in turns], np.float32),
            valid_K=np.array([turn.valid for turn in turns], np.bool_),
            response_tokens_K=np.array([len(turn.response_T) for turn in turns], np.int32),
            states_K=b"".join(turn.state for turn in turns),
            tokens=trajectory.num_tokens,
            oldest_version=trajectory.oldest_version,
            samples=len(trajectory.sample_lengths),
            finite=all(np.isfinite(turn.reward) and np.isfinite(turn.logprobs_T).all() for turn in turns),
            metrics=dict(trajectory.metrics),
            store=store,
            error=trajectory.error,
            transcript=transcript,
        )

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
