"""Session of one episode: it answers requests and records the sampled tokens.

A client sends its whole conversation with every request. The longest part that ends with a recorded
answer is replaced by the recorded tokens, and only the rest is tokenised. So no sampled text is
tokenised again, and the answers form a tree: a conversation that is repeated or changed half-way is
a fork, and one with a different beginning is a root.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from agenticrun_workers.agents.agent import AgentLimits, Episode, Generate, answered
from agenticrun_workers.agents.chat import ChatFormat
from agenticrun_workers.agents.outside.api import (
    Choice,
    RequestOptions,
    Response,
    chat_request,
    completion_request,
)
from agenticrun_workers.agents.outside.messages import (
    ApiError,
    ChatMessage,
    answer_message,
    refused,
)
from agenticrun_workers.agents.sampled_tree import Sampled
from agenticrun_workers.envs.calls import one_line
from agenticrun_workers.types import FinishReason, Generation, IntArray, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Text that a tokenizer shows for the first bytes of a character."""

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """One sampled answer."""

    completion: str
    """Id of its response."""
    choice: int
    """Index among the n answers of its response."""
    sampled: Sampled
    parent: Answer | None
    conversation: tuple[ChatMessage, ...]
    """All messages; this answer is the last one."""
    valid: bool
    """True if its tool calls could be parsed."""


class RecordedAnswers:
    """Answers of one episode, in sampling order."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: ChatFormat) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self.answers: list[Answer] = []
        self._of_chats: dict[tuple[Any, ...], Answer] = {}
        self._of_texts: list[tuple[str, Answer]] = []

    def chat_prompt(
        self, messages: Sequence[ChatMessage], tools: Tools
    ) -> tuple[IntArray, Answer | None]:
        """Return the tokens of a conversation, with the sampled tokens of recorded answers.

        Returns:
            The tokens up to the start of the next answer, int32 [T], and the recorded answer that
            the conversation continues, or None.
        """
        templates = [message.for_template for message in messages]
        key = _key(messages, tools)
        for size in range(len(messages), 0, -1):
            before = (
                self._of_chats.get(key[: size + 1])
                if messages[size - 1].role == "assistant"
                else None
            )
            if before is not None:
                tokens_T = before.sampled.generation.tokens_T
                ended = int(tokens_T[-1]) == self._chat.end_of_turn
                added_T = self._chat.going_on(
                    templates[: size - 1], templates[size:], ended=ended, tools=tools
                )
                return np.concatenate([before.sampled.prompt_T, tokens_T, added_T]), before
        return self._chat.conversation(templates, tools), None

    def text_prompt(self, text: str) -> IntArray:
        """Return the tokens of a text, int32 [T].

        The part that repeats a recorded text has the recorded tokens.
        """
        best_T, known = np.zeros(0, np.int32), 0
        for prompt, answer in self._of_texts:
            if text.startswith(prompt):
                tokens_T = answer.sampled.generation.tokens_T
                size, said = self._said_of(text[len(prompt) :], tokens_T)
                if size and len(prompt) + said > known:
                    best_T, known = (
                        np.concatenate([answer.sampled.prompt_T, tokens_T[:size]]),
                        len(prompt) + said,
                    )
        rest = self._tokenizer.encode(text[known:], add_special_tokens=not known)
        return np.concatenate([best_T, np.asarray(rest, np.int32)])

    def _said_of(self, text: str, tokens_T: IntArray) -> tuple[int, int]:
        """Return the longest prefix of the tokens that the text starts with.

        Returns:
            Number of tokens, and number of their characters.
        """

        def goes_too_far(size: int) -> bool:
            return not text.startswith(self._chat.shown(tokens_T[:size]).rstrip(UNFINISHED))

        size = bisect_left(range(len(tokens_T) + 1), True, key=goes_too_far) - 1
        while not text.startswith(said := self._chat.shown(tokens_T[:size])):
            size -= 1  # the last token ends inside a character
        return size, len(said)

    def parent_of(self, prompt_T: IntArray, matched: Answer | None = None) -> Answer | None:
        """Return the answer with the longest token sequence that the prompt starts with.

        Of equally long ones it is `matched`, else the latest. None if there is no such answer.
        """
        fitting = [answer for answer in reversed(self.answers) if answer.sampled.begins(prompt_T)]
        return max(
            fitting, key=lambda answer: (answer.sampled.length, answer is matched), default=None
        )

    def add(self, answer: Answer, tools: Tools = (), text: str | None = None) -> None:
        """Add an answer to a conversation with these tools, or to the prompt `text`."""
        self.answers.append(answer)
        if text is None:
            self._of_chats[_key(answer.conversation, tools)] = answer
        else:
            self._of_texts.append((text, answer))

    def find(self, completion: str, choice: int) -> Answer | None:
        """Return the answer with this response id and index, or None."""
        return next(
            (
                answer
                for answer in self.answers
                if (answer.completion, answer.choice) == (completion, choice)
            ),
            None,
        )

    def branches(self) -> list[list[Answer]]:
        """Return one branch of answers per trajectory, for each answer without a continuation.

        An answer with several continuations is trained once, in the latest of its branches.
        """
        went_on = {id(answer.parent) for answer in self.answers}
        trained: set[int] = set()
        branches: list[list[Answer]] = []
        for leaf in reversed([answer for answer in self.answers if id(answer) not in went_on]):
            branch: list[Answer] = []
            answer: Answer | None = leaf
            while answer is not None and id(answer) not in trained:
                trained.add(id(answer))
                branch.append(answer)
                answer = answer.parent
            branches.append(branch[::-1])
        return branches[::-1]


def _key(messages: Sequence[ChatMessage], tools: Tools) -> tuple[Any, ...]:
    """Return a key of the tools and of each message; equivalent conversations have equal keys."""
    return json.dumps(list(tools), sort_keys=True), *(message.identity for message in messages)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Policy:
    """Tokenizer, limits and formats that all episodes of an agent share."""

    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    limits: AgentLimits
    model: str
    """Model name that clients request."""
    calls: re.Pattern[str]
    """Pattern of tool calls in an answer."""


class Session:
    """Handler of the requests of one episode. Create it inside an event loop."""

    def __init__(self, policy: Policy, episode: Episode, generate: Generate) -> None:
        self.policy = policy
        self.recorded = RecordedAnswers(policy.tokenizer, policy.chat)
        self.reward: float | None = None
        """Posted reward of the episode; the last one counts."""
        self.rewards: dict[Answer, float] = {}
        """Posted rewards of single answers."""
        self.ended: StopReason | None = None
        """Limit at which a request was refused: max_turns or context_overflow."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set to the engines' exception when they fail; the episode is then lost."""
        self.failed.add_done_callback(lambda failed: failed.cancelled() or failed.exception())
        self._episode = episode
        self._generate = generate
        self._turns = 0
        self._numbers = 0

    async def chat(self, body: Any) -> Response:
        """Answer a request to `/v1/chat/completions`. Raises `ApiError`."""
        policy = self.policy
        request = chat_request(body, policy.limits, policy.model)
        if request.tools and not policy.chat.shows_tools(request.tools):
            raise refused(
                "tools", "the chat template of the policy's tokenizer does not show tools"
            )
        prompt_T, matched = _tokenised(
            "messages", lambda: self.recorded.chat_prompt(request.messages, request.tools)
        )

        def message_of(text: str) -> tuple[ChatMessage, bool]:
            return (
                answer_message(text, policy.calls)
                if request.calls
                else (ChatMessage("assistant", text), True)
            )

        def record(answer: Answer) -> None:
            self.recorded.add(answer, request.tools)

        return await self._respond(
            request.options, prompt_T, matched, request.messages, "messages", message_of, record
        )

    async def complete(self, body: Any) -> Response:
        """Answer a request to `/v1/completions`. Raises `ApiError`."""
        policy = self.policy
        request = completion_request(body, policy.limits, policy.model)
        prompt, text = request.prompt, request.prompt if isinstance(request.prompt, str) else None
        if isinstance(prompt, str):
            prompt_T = _tokenised("prompt", lambda: self.recorded.text_prompt(prompt))
        else:
            if not 0 <= min(prompt) <= max(prompt) < len(policy.tokenizer):
                raise refused(
                    "prompt", f"a token is outside of the vocabulary of {len(policy.tokenizer)}"
                )
            prompt_T = np.array(prompt, np.int32)
        shown = (ChatMessage("user", policy.chat.shown(prompt_T) if text is None else text),)

        def message_of(text: str) -> tuple[ChatMessage, bool]:
            return ChatMessage("assistant", text), True

        def record(answer: Answer) -> None:
            self.recorded.add(answer, text=text or shown[0].content)

        return await self._respond(
            request.options, prompt_T, None, shown, "prompt", message_of, record
        )

    def post_reward(self, body: Any) -> None:
        """Store a reward that is posted to `/reward`.

        It is the reward of the episode. With `trajectory` (and `choice`) it is the reward of the
        trajectory that ends with this answer.

        Raises:
            ApiError: the body is invalid or the answer is unknown.
        """
        if not isinstance(body, Mapping) or body.keys() - {"reward", "trajectory", "choice"}:
            raise refused(
                "reward",
                "{reward: number, trajectory: id of a response, choice: its place} is expected",
            )
        reward = body.get("reward")
        if not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise refused("reward", f"must be a finite number, not {reward!r}")
        if body.get("trajectory") is None:
            self.reward = float(reward)
            return
        answer = self.recorded.find(body["trajectory"], body.get("choice", 0))
        if answer is None:
            raise ApiError(
                404,
                f"no answer of this episode has the id {body['trajectory']!r}",
                param="trajectory",
                code="not_found",
            )
        self.rewards[answer] = float(reward)

    async def _respond(
        self,
        options: RequestOptions,
        prompt_T: IntArray,
        matched: Answer | None,
        messages: tuple[ChatMessage, ...],
        param: str,
        message_of: Callable[[str], tuple[ChatMessage, bool]],
        record: Callable[[Answer], None],
    ) -> Response:
        """Sample the answers, record them and build the response. Raises `ApiError`."""
        self._check_room(prompt_T, param)
        parent = self.recorded.parent_of(prompt_T, matched)
        self._numbers += 1
        number = self._numbers
        generations = await self._sample(prompt_T, options, number)
        response = Response(
            f"{self._episode.key}-{number}",
            int(time.time()),
            self.policy.model,
            options,
            len(prompt_T),
        )
        for place, whole in enumerate(generations):
            generation, text = self._stopped(whole, options.stop)
            message, valid = message_of(text)
            sampled = Sampled(prompt_T, generation, parent.sampled if parent else None)
            record(Answer(response.id, place, sampled, parent, (*messages, message), valid))
            response.choices.append(
                Choice(
                    place,
                    message,
                    generation,
                    [self._token(token) for token in generation.tokens_T],
                )
            )
        return response

    def _check_room(self, prompt_T: IntArray, param: str) -> None:
        limits = self.policy.limits
        if len(prompt_T) >= limits.sequence_length:
            self.ended = StopReason.CONTEXT_OVERFLOW
            message = (
                f"{len(prompt_T)} tokens leave no room for an answer within "
                f"sequenceLength {limits.sequence_length}"
            )
            raise refused(param, message, "context_length_exceeded")
        if self._turns >= limits.max_turns:
            self.ended = StopReason.MAX_TURNS
            raise ApiError(
                400,
                f"the episode has had its {limits.max_turns} answers (envs[].maxSteps)",
                code="max_turns",
            )

    async def _sample(
        self, prompt_T: IntArray, options: RequestOptions, number: int
    ) -> list[Generation]:
        """Return n generations. A request that fails or is cancelled does not count as a turn."""
        self._turns += 1
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._sample_one(prompt_T, options, number, choice))
                    for choice in range(options.n)
                ]
        except BaseException as failed:
            self._turns -= 1
            error = failed.exceptions[0] if isinstance(failed, BaseExceptionGroup) else failed
            if isinstance(error, asyncio.CancelledError):
                raise
            if not self.failed.done():
                self.failed.set_exception(error)
            raise ApiError(
                503, f"the engines gave no answer: {error}", code="engine_error"
            ) from error
        return [task.result() for task in tasks]

    async def _sample_one(
        self, prompt_T: IntArray, options: RequestOptions, number: int, choice: int
    ) -> Generation:
        limits = self.policy.limits
        longest = min(
            options.max_tokens or limits.max_tokens_per_step,
            limits.max_tokens_per_step,
            limits.sequence_length - len(prompt_T),
        )
        sampling = limits.sampling(longest, self.policy.chat.stop_tokens)
        # The client's seed is combined with the episode's. So the episodes of a group differ even
        # if their agent always sends the same seed.
        path = [0, number] if options.seed is None else [1, options.seed]
        return answered(
            await self._generate(
                self._episode.request(f"{number}-{choice}", prompt_T, sampling, [*path, choice])
            )
        )

    def _stopped(self, whole: Generation, stops: tuple[str, ...]) -> tuple[Generation, str]:
        """Cut a generation after the token that completes a stop text.

        The cut depends only on earlier tokens, so the log-probs of the remaining tokens stay valid.

        Returns:
            The generation, and its text before the stop text.
        """
        chat = self.policy.chat

        def stopped(size: int) -> bool:
            text = chat.text(whole.tokens_T[:size])
            return any(stop in text for stop in stops)

        size = bisect_left(range(len(whole.tokens_T) + 1), True, key=stopped)
        text = chat.text(whole.tokens_T[:size])
        if size > len(whole.tokens_T):
            return whole, text
        cut = replace(
            whole,
            tokens_T=whole.tokens_T[:size],
            logprobs_T=whole.logprobs_T[:size],
            versions_T=whole.versions_T[:size],
            finish=FinishReason.STOP,
        )
        return cut, text[: min(text.index(stop) for stop in stops if stop in text)]

    def _token(self, token: np.int32) -> str:
        return self.policy.chat.shown(np.array([token], np.int32))


def _tokenised(param: str, make: Callable[[], T]) -> T:
    """Return the result of `make`.

    Raises:
        ApiError: the chat template or the tokenizer rejects the messages.
    """
    try:
        return make()
    except Exception as error:  # jinja, tokenizers and templates may raise anything
        raise refused(
            param, f"cannot be put into the policy's chat template and tokens: {one_line(error)}"
        ) from error
