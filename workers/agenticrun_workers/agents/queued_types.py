"""What passes between an agent with queues and the engines: a prompt, bundled outputs, and what the agent makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agenticrun_workers.types import FinishReason, Generation, StopReason, Stream


@dataclass(frozen=True, slots=True)
class Prompt:
    """The task of one episode."""

    qid: str
    """Names the episode; the first part of every request."""
    token_ids: list[int]
    """The conversation up to the first answer, in the policy's chat template. The agent may change it."""
    text: str
    """The first user message."""
    instruction: str
    """The system message; may be empty."""
    item: Mapping[str, Any]
    """The item of `envs[].dataset`; empty without a data set."""
    split: Stream
    seed: int
    """Equal for all members of a group."""


@dataclass(frozen=True, slots=True)
class BundledGenerationOutputs:
    """The n responses to one request, token for token as they were sampled, end-of-turn tokens included."""

    qid: str
    prompt_ids: list[int]
    output_ids: list[list[int]]
    logprobs: list[list[float]]
    """Of each output token, over the full vocabulary at the run's temperature."""
    versions: list[list[int]]
    """The policy version that sampled each output token."""
    no_eos: list[bool]
    """The response was cut at its token limit."""

    @classmethod
    def of(
        cls, qid: str, prompt_ids: list[int], generations: Sequence[Generation]
    ) -> BundledGenerationOutputs:
        """From what the engines sampled."""
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
        """Prompt and response of each sample; new lists, so that they can be extended to the next prompt."""
        return [self.prompt_ids + output for output in self.output_ids]

    @property
    def version_start(self) -> list[int]:
        """The version of each sample's first token."""
        return [versions[0] for versions in self.versions]

    @property
    def version_end(self) -> list[int]:
        """The version of each sample's last token."""
        return [versions[-1] for versions in self.versions]


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """One trajectory, as an agent returns it.

    What the policy sampled is found by the tokens themselves, so nothing is tokenised again and no mask has to be built.
    """

    tokens: Sequence[int]
    """One of the `seqs` of one of the bundles."""
    rewards: float | Sequence[float]
    """Of each trained turn, or one number: of the last turn."""
    trained: Literal["all", "last"] = "all"
    """Train on all responses in these tokens, or on the last one, with all before it as its prompt."""
    valid: bool = True
    """Whether the last answer was one that the environment knows; else `envs[].formatPenalty` applies."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Reported as env/<tag>/<name>; means over an episode's trajectories."""
    stop_reason: StopReason | None = None
    """None: completed, or what the agent was told by `EpisodeEnded`."""


class EpisodeEnded(Exception):
    """Raised by `act_queue.get()`: there will be no more responses.

    `reason` is context_overflow (the prompt leaves no room within `sequenceLength`) or max_turns (more than `envs[].maxSteps`
    requests). An agent may catch it and return what it has.
    """

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason.value)
        self.reason = reason
