"""The values of a run: turns, trajectories, generation requests and their results.

All are frozen dataclasses over NumPy arrays: cheap to send between processes, never padded, never
re-tokenised. Array names carry their shape: `_T` is the number of tokens of one piece (ragged).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)


STATE_BYTES = 32
"""Length of a state hash in bytes."""


class StopReason(StrEnum):
    """Reason for the end of a trajectory, reported as the metric `stop/<reason>`."""

    COMPLETED = "completed"
    """The environment terminated the episode."""
    MAX_TURNS = "max_turns"
    """The turn limit of the environment was reached."""
    MAX_TOKENS = "max_tokens"
    """A response was cut at its token limit, and the agent does not continue after that."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The next prompt would not fit into `sequenceLength`."""
    PARSE_ERROR = "parse_error"
    """The agent gave up on an answer that it could not parse."""
    ENV_ERROR = "env_error"
    """The environment raised, or returned something that is not a valid step."""
    TIMEOUT = "timeout"
    """The environment or the episode took longer than allowed."""
    ABORTED = "aborted"
    """The run stopped, or an engine gave the request up."""
    STALE = "stale"
    """Stopped because it could no longer be trained on within `staleness.max`; it runs again."""

    @property
    def trainable(self) -> bool:
        """True if the trajectory counts in group statistics and in the loss."""
        return self not in (
            StopReason.ENV_ERROR,
            StopReason.TIMEOUT,
            StopReason.ABORTED,
            StopReason.STALE,
        )

    @property
    def truncated(self) -> bool:
        """True if the episode was cut before its environment ended it (`algorithm.truncated`)."""
        return self in (StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.CONTEXT_OVERFLOW)


class FinishReason(StrEnum):
    """Reason for the end of a generation."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Stream(StrEnum):
    """Named seed streams. Levels, sampling and order derive from (seed, stream, ...)."""

    TRAIN = "train"
    VALIDATION = "validation"
    WARMUP = "warmup"


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Facts about the chat format that come from the run and the model, not from the template.

    It travels as the attribute `chat_settings` of the tokenizer, so that agents need no more than a
    tokenizer.
    """

    format: str = "auto"
    """`spec.model.chatFormat`."""
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end an answer by the model's generation_config."""
    model: str = ""
    """Name of the model for messages."""
    own_template: bool = False
    """True if the run replaces the model's chat template."""
    head: str = ""
    """Beginning of the template, which sets `spec.model.chatTemplateArgs`."""
    drops_reasoning: bool = False
    """True if reasoning of earlier answers is dropped where the template drops it
    (`spec.model.earlierReasoning: Template`)."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a response. `temperature == 0` is greedy decoding.

    top_k, top_p and min_p truncate the distribution at `temperature`; a token must pass all.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    """Smallest probability relative to that of the likeliest token; 0 = off."""
    stop_token_ids: tuple[int, ...] = ()
    record_temperature: float | None = None
    """Temperature of the recorded log-probs; None = `temperature` (1 for greedy decoding)."""
    structural_tag: str | None = None
    """Format of the response: one of xgrammar's structural tags, as JSON. No token is sampled that
    leaves it, and log-probs are those of the tokens that are left. Only for engines with
    `enforces_formats`."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One response to sample.

    `request_id` is unique among the requests in flight. `session` names the trajectory: its
    requests extend each other's prompts, so an engine may cache the prefix. `seed` makes sampling
    independent of the rest of the batch.
    """

    request_id: str
    session: str
    prompt_tokens: IntArray
    sampling: SamplingParams
    seed: int = 0
    priority: int = 0
    """An engine with more requests than it can run begins with the smallest, then the earliest."""
    sampled: int = 0
    """Tokens at the end of the prompt that another engine sampled for this response, before it was
    lost. The random numbers of `seed` continue after theirs."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A sampled response.

    `tokens_T` includes the stop token. `logprobs_T` is log_softmax(logits / temperature) over the
    full vocabulary, at the temperature of `SamplingParams`. `versions_T` is the policy version of
    each token.
    """

    tokens_T: IntArray
    logprobs_T: FloatArray
    versions_T: IntArray
    finish: FinishReason
    engine: str = ""
    """Id of the engine that sampled it; set by the client."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange: the prompt tokens since the last response, and the response."""

    prompt_T: IntArray
    response_T: IntArray
    logprobs_T: FloatArray
    versions_T: IntArray
    reward: float
    """The environment's reward for this turn; 0 if the action did not reach it."""
    valid: bool = True
    """False if the answer held no action that the environment knows (`envs[].formatPenalty`)."""
    state: bytes = bytes(STATE_BYTES)
    """sha256 of the observation of this turn; gigpo compares equal states of a group."""
    action: str | None = None
    """The action that the agent parsed; None = no action."""
    engine: str = ""
    """Id of the engine that sampled the response."""


@dataclass(frozen=True, slots=True, order=True)
class EpisodeKey:
    """Identity of an episode: a member of a group of a stream. Equal keys have equal seeds.

    `branch` numbers the trajectories of one episode; 0 is the first.
    """

    stream: Stream
    group: int
    member: int
    branch: int = 0

    def __str__(self) -> str:
        name = f"{self.stream}-{self.group}-{self.member}"
        return f"{name}.{self.branch}" if self.branch else name


@dataclass(frozen=True)
class Trajectory:
    """One finished episode, with exactly the tokens that the policy saw and sampled."""

    key: EpisodeKey
    tag: str
    turns: tuple[Turn, ...]
    """With `stepwise` each prompt is complete; else it extends the conversation."""
    stop_reason: StopReason
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Environment metrics, for example success, action_is_valid, num_actions."""
    error: str = ""
    """For env_error and timeout: a one-line message."""
    stepwise: bool = False
    """One sample per turn (gigpo, step_reinforce) instead of one per trajectory (StarPO)."""
    ending_T: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    """Prompt of the turn after a truncated episode. It is not trained on: the critic's value there
    bootstraps the missing return (`bootstrapTruncated`)."""

    @cached_property
    def tokens_T(self) -> IntArray:
        """All tokens in order, int32 [T]."""
        parts = [part for turn in self.turns for part in (turn.prompt_T, turn.response_T)]
        return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)

    @cached_property
    def response_mask_T(self) -> BoolArray:
        """True exactly on tokens that the policy sampled, bool [T]."""
        return self._spread(lambda turn: np.ones(len(turn.response_T), np.bool_), np.bool_)

    @cached_property
    def logprobs_T(self) -> FloatArray:
        """The engine's log-probs, 0 on prompt tokens, float32 [T]."""
        return self._spread(lambda turn: turn.logprobs_T, np.float32)

    @cached_property
    def versions_T(self) -> IntArray:
        """Policy version of each sampled token, -1 on prompt tokens, int32 [T]."""
        return self._spread(lambda turn: turn.versions_T, np.int32, fill=-1)

    @cached_property
    def turns_T(self) -> IntArray:
        """Turn number (from 0) of each sampled token, -1 on prompt tokens, int32 [T]."""
        parts = [np.zeros(0, np.int32)]
        for number, turn in enumerate(self.turns):
            parts += [
                np.full(len(turn.prompt_T), -1, np.int32),
                np.full(len(turn.response_T), number, np.int32),
            ]
        return np.concatenate(parts)

    @property
    def sample_lengths(self) -> list[int]:
        """Tokens of each training sample: the trajectory, or (stepwise) each turn."""
        lengths = [len(turn.prompt_T) + len(turn.response_T) for turn in self.turns]
        return lengths if self.stepwise else [sum(lengths)]

    @property
    def score(self) -> float:
        """Sum of the turns' rewards."""
        return float(sum(turn.reward for turn in self.turns))

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.prompt_T) + len(turn.response_T) for turn in self.turns)

    @property
    def num_response_tokens(self) -> int:
        return sum(len(turn.response_T) for turn in self.turns)

    @property
    def oldest_version(self) -> int:
        """Smallest policy version among the sampled tokens; -1 without any."""
        versions = [int(turn.versions_T.min()) for turn in self.turns if len(turn.versions_T)]
        return min(versions, default=-1)

    def _spread(
        self, values: Callable[[Turn], NDArray[Scalar]], dtype: type[Scalar], fill: float = 0
    ) -> NDArray[Scalar]:
        """Return values at response positions and `fill` at prompt positions, [T]."""
        parts: list[NDArray[Scalar]] = [np.zeros(0, dtype)]
        for turn in self.turns:
            parts += [np.full(len(turn.prompt_T), fill, dtype), values(turn).astype(dtype)]
        return np.concatenate(parts)


@dataclass(frozen=True)
class RolloutPosition:
    """Position saved in a checkpoint.

    Groups below `next_group` were started; those in `pending_groups` must run again.
    """

    next_group: int = 0
    pending_groups: tuple[int, ...] = ()
    requeued_groups: tuple[int, ...] = ()
    """Pending groups that have grown too old and run again: batches wait for them."""
