"""Values that agents with queues exchange with the engines.

The run owns the sampling distribution, because the recorded log-probs refer to it. An agent may
repeat the run's values; other values are rejected. The agent chooses the number of samples and
their length, up to `envs[].maxTokensPerStep`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

from agenticrun_workers.agents.agent import AgentLimits
from agenticrun_workers.plugins import camel_case, snake_case
from agenticrun_workers.types import FinishReason, Generation, StopReason, Stream

MAX_SAMPLES = 256
"""Limit of responses per prompt; more of them would only wait in the engine's queue."""

OWNED = {
    "temperature": "actorInfer.generating.temperature",
    "top_p": "actorInfer.generating.topP",
    "top_k": "actorInfer.generating.topK",
    "min_p": "actorInfer.generating.minP",
}
"""Settings that the run owns, and the spec field of each."""


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Sampling options of one prompt. None = the run's value."""

    n: int = 1
    """Number of responses, each with its own seed."""
    max_new_tokens: int | None = None
    """Length limit, capped at `envs[].maxTokensPerStep` and the room in `sequenceLength`."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], limits: AgentLimits) -> GenerationConfig:
        """Parse an agent's `config.gconfig`, with camelCase or snake_case keys.

        Missing options get the run's values.

        Raises:
            ValueError: a key is unknown or a value is not allowed.
        """
        known = {field.name for field in fields(cls)}
        values = {snake_case(key): value for key, value in config.items()}
        unknown = [key for key in config if snake_case(key) not in known]
        if unknown:
            raise ValueError(
                f"gconfig has no key {unknown[0]!r} "
                f"(known: {', '.join(map(camel_case, sorted(known)))})"
            )
        return cls(**values).within(limits)

    def new(self, **changes: Any) -> Self:
        """Return a copy with these values, as in AReaL: `gconfig.new(n=1)`."""
        return replace(self, **changes)

    def within(self, limits: AgentLimits) -> GenerationConfig:
        """Return a copy that has the run's values in place of None.

        Raises:
            ValueError: a value is not allowed.
        """
        for name, value in (("n", self.n), ("maxNewTokens", self.max_new_tokens)):
            if value is not None and (
                not isinstance(value, int) or isinstance(value, bool) or value < 1
            ):
                raise ValueError(
                    f"gconfig.{name} must be a whole number of at least 1, not {value!r}"
                )
        if self.n > MAX_SAMPLES:
            raise ValueError(f"gconfig.n must be at most {MAX_SAMPLES}, not {self.n}")
        for name, place in OWNED.items():
            asked, owned = getattr(self, name), getattr(limits, name)
            if asked is not None and asked != owned:
                raise ValueError(
                    f"gconfig.{camel_case(name)} is {asked}, and the run samples with {owned}: "
                    f"leave it out, and set {place}"
                )
        longest = min(self.max_new_tokens or limits.max_tokens_per_step, limits.max_tokens_per_step)
        return replace(
            self, max_new_tokens=longest, **{name: getattr(limits, name) for name in OWNED}
        )


@dataclass(frozen=True, slots=True)
class Prompt:
    """Task of one episode, for the agent."""

    qid: str
    """Id of the episode and first part of each request."""
    token_ids: list[int]
    """Conversation up to the first answer, in the chat template. Agents may change it."""
    text: str
    """The first user message."""
    instruction: str
    """The system message; may be empty."""
    item: Mapping[str, Any]
    """The item of `envs[].dataset`; empty without a data set."""
    split: Stream
    seed: int
    """Equal for all episodes of a group."""


@dataclass(frozen=True, slots=True)
class BundledGenerationOutputs:
    """The n responses to one request, exactly as sampled, including end-of-turn tokens."""

    qid: str
    prompt_ids: list[int]
    output_ids: list[list[int]]
    logprobs: list[list[float]]
    """Log-prob of each output token, over the full vocabulary at the run's temperature."""
    versions: list[list[int]]
    """Policy version of each output token."""
    no_eos: list[bool]
    """True if the response was cut at its token limit."""

    @classmethod
    def of(
        cls, qid: str, prompt_ids: list[int], generations: Sequence[Generation]
    ) -> BundledGenerationOutputs:
        """Build the bundle from the engines' generations."""
        return cls(
            qid,
            prompt_ids,
            [generation.tokens_T.tolist() for generation in generations],
            [generation.logprobs_T.tolist() for generation in generations],
            [generation.versions_T.tolist() for generation in generations],
            [generation.finish is FinishReason.LENGTH for generation in generations],
        )

    @property
    def seqs(self) -> list[list[int]]:
        """Prompt and response of each sample, as new lists that the agent may extend."""
        return [self.prompt_ids + output for output in self.output_ids]

    @property
    def version_start(self) -> list[int]:
        """Policy version of each sample's first token."""
        return [versions[0] for versions in self.versions]

    @property
    def version_end(self) -> list[int]:
        """Policy version of each sample's last token."""
        return [versions[-1] for versions in self.versions]


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """One trajectory, as an agent returns it.

    The responses in it are found by their tokens, so the agent builds no mask.
    """

    tokens: Sequence[int]
    """One of the `seqs` of one of the bundles."""
    rewards: float | Sequence[float]
    """Reward of each trained turn, or one number for the last turn."""
    trained: Literal["all", "last"] = "all"
    """Train on all responses, or only on the last one, with the rest as its prompt."""
    valid: bool = True
    """False if the last answer has a bad format: `envs[].formatPenalty` applies."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Reported as env/<tag>/<name>, averaged over the episode's trajectories."""
    stop_reason: StopReason | None = None
    """None = the reason of a raised `EpisodeEnded`, else completed."""


class EpisodeEnded(Exception):
    """Raised by `act_queue.get()` when there are no more responses.

    An agent may catch it and return its trajectories so far.

    Args:
        reason: context_overflow (no room within `sequenceLength`) or max_turns (more than
            `envs[].maxSteps` requests).
    """

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason.value)
        self.reason = reason
