"""The agent protocol: a coroutine that runs one episode and returns its trajectories."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from agenticrun_workers.envs import MetricMode, StepResult
from agenticrun_workers.envs.env import Env, EnvFault
from agenticrun_workers.seeds import env_seed, sampling_seed
from agenticrun_workers.types import (
    EpisodeKey,
    FinishReason,
    Generation,
    GenerationRequest,
    IntArray,
    SamplingParams,
    StopReason,
    Trajectory,
)

Generate = Callable[[GenerationRequest], Awaitable[Generation]]
"""Samples one response. It hides load balancing, retries and partial rollout."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode for an agent to run: its identity, its seeds and its data set item."""

    key: EpisodeKey
    tag: str
    env_seed: int
    """Selects the level. Equal for all members of a group."""
    sampling_seed: int
    """Different for every member."""
    item: Mapping[str, Any] | None = None
    """The item of `envs[].dataset` that the episode is about."""
    attempt: int = 0
    """Number of the try; 0 = first."""

    @property
    def session(self) -> str:
        """Name of the session of its requests.

        Each try has its own, because requests of a stopped one may still be in flight.
        """
        return f"{self.key}-try{self.attempt}" if self.attempt else str(self.key)

    @classmethod
    def seeded(
        cls,
        seed: int,
        key: EpisodeKey,
        tag: str,
        attempt: int = 0,
        item: Mapping[str, Any] | None = None,
    ) -> Episode:
        """Return the episode `key` with its seeds derived from `pipeline.seed`."""
        return cls(
            key,
            tag,
            env_seed(seed, key.stream, key.group),
            sampling_seed(seed, key, attempt),
            item,
            attempt,
        )

    def request(
        self, name: str, prompt_T: IntArray, sampling: SamplingParams, seed_path: Sequence[int]
    ) -> GenerationRequest:
        """Return a request. `name` and `seed_path` are unique within the episode."""
        seed = int(
            np.random.SeedSequence([self.sampling_seed, *seed_path]).generate_state(1, np.uint64)[0]
        )
        return GenerationRequest(f"{self.session}-{name}", self.session, prompt_T, sampling, seed)


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """Limits of an episode and sampling settings, the same for all kinds of agents."""

    max_turns: int
    max_tokens_per_step: int
    sequence_length: int
    """Tokens of the whole trajectory; for step-wise agents, of one turn's prompt and answer."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    record_temperature: float | None = None
    """Temperature of the recorded log-probs; None = `temperature` (1 for greedy decoding)."""
    step_timeout: float | None = None
    """Seconds that the environment may take for one reset or step (None: any)."""

    def sampling(self, max_new_tokens: int, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """Return the sampling parameters of a response."""
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop_token_ids=stop_token_ids,
            record_temperature=self.record_temperature,
        )


class Agent(Protocol):
    """Drives environments turn by turn.

    One instance runs many episodes concurrently, so it keeps no state of an episode.
    """

    async def collect_trajectory(
        self, episode: Episode, env: Env, generate: Generate
    ) -> Trajectory | Sequence[Trajectory]:
        """Run one episode. Errors of the environment become a StopReason, not an exception.

        Each of several trajectories has its own score in the group.
        """
        ...


def answered(generation: Generation) -> Generation:
    """Return the generation. Raises `EnvFault` if it was aborted or is empty."""
    if generation.finish is FinishReason.ABORT:
        raise EnvFault(StopReason.ABORTED, "the engine gave the request up")
    if not len(generation.tokens_T):
        raise EnvFault(StopReason.PARSE_ERROR, "the policy's response is empty")
    return generation


LAST_BY_DEFAULT = ("success",)


class EpisodeMetrics:
    """Metrics of one episode. The mode of a name's first value applies to all its values."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self._modes: dict[str, MetricMode] = {}

    def add(self, name: str, value: float, mode: MetricMode | None = None) -> None:
        """Add the value of one step."""
        self._values.setdefault(name, []).append(value)
        self._modes.setdefault(name, mode or ("last" if name in LAST_BY_DEFAULT else "sum"))

    def add_step(self, result: StepResult) -> None:
        """Add all values of one step."""
        for name, value in result.metrics.items():
            self.add(name, float(value), result.modes.get(name))

    def totals(self) -> dict[str, float]:
        """Return one value per name."""
        return {name: _combined(values, self._modes[name]) for name, values in self._values.items()}


def _combined(values: list[float], mode: MetricMode) -> float:
    match mode:
        case "sum":
            return sum(values)
        case "mean":
            return sum(values) / len(values)
        case "min":
            return min(values)
        case "max":
            return max(values)
        case "first":
            return values[0]
        case "last":
            return values[-1]
