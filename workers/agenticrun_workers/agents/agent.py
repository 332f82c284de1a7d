"""The agent protocol: a coroutine that plays one episode and returns what the policy saw and sampled."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agenticrun_workers.envs.env import Env
from agenticrun_workers.types import EpisodeKey, Generation, GenerationRequest, Trajectory

Generate = Callable[[GenerationRequest], Awaitable[Generation]]
"""Samples one response; load balancing, retries and partial rollout happen behind it."""


@dataclass(frozen=True, slots=True)
class Episode:
    """What an agent is asked to play."""

    key: EpisodeKey
    tag: str
    env_seed: int
    """Equal for all members of a group: they play the same level."""
    sampling_seed: int
    """Different for every member."""
    item: Mapping[str, Any] | None = None
    """What the episode is about, of `envs[].dataset`."""


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """What bounds an episode and how responses are sampled: the run's settings, equal for every kind of agent."""

    max_turns: int
    max_tokens_per_step: int
    sequence_length: int
    """Of the whole trajectory, prompts and responses; of one turn's prompt and answer for step-wise agents."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    record_temperature: float | None = None
    """See `SamplingParams`."""
    step_timeout: float | None = None
    """Seconds that the environment may take for one reset or step (None: any)."""


class Agent(Protocol):
    """Drives environments turn by turn. One instance serves many episodes at once, so it keeps no state of an episode."""

    async def collect_trajectory(self, episode: Episode, env: Env, generate: Generate) -> Trajectory | Sequence[Trajectory]:
        """Play one episode. What the environment does wrong ends as a StopReason, not as an exception.

        Of several trajectories each is a member of the group, with its own score.
        """
        ...
