"""Session of one episode: it answers requests and records the sampled tokens.

A client sends its whole conversation with every request. The longest part that ends with a recorded
answer is replaced by the recorded tokens, and only the rest is tokenised. So no sampled text is
tokenised again, except in the prompt of a new sequence. The answers form a tree: a conversation
that is repeated or changed half-way is a fork, and one with a different beginning is a root. So is
one that loses the reasoning of earlier answers (`spec.model.earlierReasoning: Template`). Clients
that name their conversations (`X-Session-ID`) have a tree for each name.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
import time
from bisect import bisect_left, insort, insort_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from agenticrun_workers.agents.agent import AgentLimits, Episode, Generate, answered
from agenticrun_workers.agents.chat import ChatFormat, ChatTemplateError
from agenticrun_workers.agents.chat_families import DEMANDING, ParsedAnswer
from agenticrun_workers.agents.outside import anthropic_messages, responses
from agenticrun_workers.agents.outside.api import (
    ChatRequest,
    Choice,
    RequestOptions,
    Response,
    chat_request,
    completion_request,
)
from agenticrun_workers.agents.outside.formats import AnswerFormat
from agenticrun_workers.agents.outside.messages import (
    ApiError,
    ChatMessage,
    answer_message,
    refused,
    renamed,
)
from agenticrun_workers.agents.outside.template_args import template_args
from agenticrun_workers.agents.outside.token_bytes import UNFINISHED, token_bytes
from agenticrun_workers.agents.sampled_tree import Sampled
from agenticrun_workers.envs import EnvFault
from agenticrun_workers.envs.calls import number, one_line
from agenticrun_workers.types import FinishReason, Generation, IntArray, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

UNFINISHED_BYTES = 3
"""Most bytes of a character that is not finished. More of them are no character."""

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
    """True if its tool calls could be parsed, and it is no draft."""
    draft_of: Answer | None = None
    """The answer that the client got instead, because this one left the request's format."""
    thread: str | None = None
    """Name of its conversation, if the client has one (`X-Session-ID`)."""

    @property
    def sampled_any(self) -> bool:
        """False if the endpoint wrote all that came after the last draft."""
        return len(self.sampled.generation.tokens_T) > 0


@dataclass(frozen=True, slots=True)
class Setting:
    """Properties of a conversation besides its messages. Answers are continued with equal ones."""

    chat: ChatFormat
    """The format with these arguments of the template."""
    tools: Tools = ()
    template_args: Mapping[str, Any] = field(default_factory=dict)
    thread: str | None = None
    """Name of the conversation, if the client has one (`X-Session-ID`)."""

    @property
    def key(self) -> str:
        """Text that is equal for equal settings."""
        return json.dumps([[*self.tools], self.template_args, self.thread], sort_keys=True)


@dataclass(slots=True, eq=False)
class _Beginning:
    """Messages with which recorded conversations begin: a node of a trie."""

    answer: Answer | None = None
    """The latest answer that is the last of these messages."""
    longer: dict[tuple[Any, ...], _Beginning] = field(default_factory=dict)
    """The beginnings with one more message, by its identity."""
    latest: tuple[ChatMessage, _Beginning] | None = None
    """The message after these that was found last. A client sends its messages again in each turn,
    and to compare one costs less than to make its identity."""

    def find(self, message: ChatMessage) -> _Beginning | None:
        """Return the beginning with one more message, or None if none is recorded."""
        if self.latest is not None and self.latest[0] == message:
            return self.latest[1]
        found = self.longer.get(message.identity)
        if found is not None:
            self.latest = message, found
        return found

    def add(self, message: ChatMessage) -> _Beginning:
        """Return the beginning with one more message, recorded if it is not."""
        return self.find(message) or self.longer.setdefault(message.identity, _Beginning())


class RecordedAnswers:
    """Answers of one episode, in sampling order.

    What is known of a conversation is compared with the client's messages, and never rendered,
    tokenised or parsed again.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: ChatFormat) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self.answers: list[Answer] = []
        self._by_length: list[Answer] = []
        """Answers that can be continued, the shortest sequence first."""
        self._of_chats: dict[str, _Beginning] = {}
        """Conversations by the key of their setting."""
        self._of_texts: list[tuple[int, str, Answer]] = []
        """Prompts with their answers, by the number of characters of both, the shortest first."""

    def chat_prompt(
        self, messages: Sequence[ChatMessage], setting: Setting
    ) -> tuple[IntArray, Answer | None]:
        """Return the tokens of a conversation, with the sampled tokens of recorded answers.

        Returns:
            The tokens up to the start of the next answer, int32 [T], and the recorded answer that
            the conversation continues, or None.
        """
        chat, tools = setting.chat, setting.tools
        before, size = self._answered(messages, setting)
        if before is None:
            return chat.conversation([message.for_template for message in messages], tools), None
        tokens_T = before.sampled.generation.tokens_T
        calls = messages[size - 1].for_template.get("tool_calls", ())
        added = [message.for_template for message in messages[size:]]
        added_T = chat.bridge(tokens_T, added, calls=calls, tools=tools)
        continued_T = np.concatenate([before.sampled.prompt_T, tokens_T, added_T])
        if chat.drops_reasoning(added, calls, tools):
            answered = [message.for_template for message in before.conversation]
            try:
                whole_T = chat.conversation([*answered, *added], tools)
            except ChatTemplateError:
                # The template refuses a malformed answer, which stays as it was sampled.
                return continued_T, before
            if chat.shown(whole_T) != chat.shown(continued_T):
                return whole_T, None
        return continued_T, before

    def _answered(
        self, messages: Sequence[ChatMessage], setting: Setting
    ) -> tuple[Answer | None, int]:
        """Return the last recorded answer of a conversation, and its place, counted from 1."""
        begun = self._of_chats.get(setting.key, _Beginning())
        answer, size = None, 0
        for count, message in enumerate(messages, 1):
            found = begun.find(message)
            if found is None:
                break
            begun = found
            if begun.answer is not None:
                answer, size = begun.answer, count
        return answer, size

    def text_prompt(self, text: str, thread: str | None = None) -> IntArray:
        """Return the tokens of a text, int32 [T].

        The part that repeats a recorded text has the recorded tokens.
        """
        best_T, known = np.zeros(0, np.int32), 0
        for longest, prompt, answer in reversed(self._of_texts):
            if longest <= known:
                break
            if answer.thread == thread and text.startswith(prompt):
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

    def parent_of(
        self, prompt_T: IntArray, matched: Answer | None = None, thread: str | None = None
    ) -> Answer | None:
        """Return the answer with the longest token sequence that a prompt of a thread starts with.

        Of equally long ones it is `matched`, else the latest. None if there is no such answer.
        """
        least = matched.sampled.length if matched is not None else 0
        start = bisect_left(self._by_length, least, key=_length)
        for answer in reversed(self._by_length[start:]):
            if matched is not None and matched.sampled_any and _length(answer) == least:
                return matched  # from which the prompt was made
            if answer.thread == thread and answer.sampled.begins(prompt_T):
                return answer
        return None

    def add(
        self,
        answer: Answer,
        drafts: Sequence[Answer] = (),
        *,
        to: Setting | str,
    ) -> None:
        """Add an answer to a conversation with this setting, or to the text of a prompt."""
        self.answers += [*drafts, answer]
        if answer.sampled_any:
            insort(self._by_length, answer, key=_length)
        if not isinstance(to, Setting):
            longest = len(to) + len(self._chat.shown(answer.sampled.generation.tokens_T))
            insort_left(self._of_texts, (longest, to, answer), key=itemgetter(0))
            return
        begun = self._of_chats.setdefault(to.key, _Beginning())
        for message in answer.conversation:
            begun = begun.add(message)
        begun.answer = answer

    def find(self, completion: str, choice: int) -> Answer | None:
        """Return the answer with this response id and index, or None."""
        return next(
            (
                answer
                for answer in self.answers
                if (answer.completion, answer.choice, answer.draft_of) == (completion, choice, None)
            ),
            None,
        )

    def branches(self) -> list[list[Answer]]:
        """Return one branch of answers per trajectory, for each answer without a continuation.

        An answer with several continuations is trained once, in the latest of its branches. A draft
        has no continuation.
        """
        answers = [answer for answer in self.answers if answer.sampled_any]
        went_on = {id(answer.parent) for answer in answers}
        trained: set[int] = set()
        branches: list[list[Answer]] = []
        for leaf in reversed([answer for answer in answers if id(answer) not in went_on]):
            branch: list[Answer] = []
            answer: Answer | None = leaf
            while answer is not None and id(answer) not in trained:
                trained.add(id(answer))
                branch.append(answer)
                answer = answer.parent
            branches.append(branch[::-1])
        return branches[::-1]


def _length(answer: Answer) -> int:
    return answer.sampled.length


T = TypeVar("T")

REDRAWS = 3
"""Draws for one place of an answer that leave its format before the endpoint writes there."""
MAX_DRAFTS = 16
"""Draws of one answer that leave its format before the endpoint writes the rest."""


FIRST_CHUNK = 32
"""Tokens of the draw after a draft. The number doubles after a draw that fits the format. It starts
small because all tokens after one that leaves the format are lost."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One answer, as it came about."""

    prompt_T: IntArray
    """The request's prompt, and what precedes the last draw in the answer."""
    generation: Generation
    """The last draw; empty if the endpoint wrote the end of the answer."""
    whole: Generation
    """The whole answer. Tokens that the endpoint wrote have log-prob 0 and version -1."""
    text: str
    drafts: tuple[tuple[IntArray, Generation], ...] = ()
    """Prompt and generation of each draw that left the request's format, up to the token with which
    it did."""
    stop_text: str | None = None
    """The stop text of the request that ended the answer."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Tokenizer, limits and formats that all episodes of an agent share."""

    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    limits: AgentLimits
    model: str
    """Model name that clients request."""
    enforces_formats: bool = False
    """True if the engine masks the tokens that leave a request's format. Not where answers are
    trained: their log-probs must be those of the whole vocabulary."""


class RequestRefused(Exception):
    """An engine cannot serve a request of a client, who has to change it. The message says why.

    Only engines whose answers are not trained raise it: in a run the endpoint makes the requests
    fit.
    """


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

    async def chat(self, body: Any, thread: str | None = None) -> Response:
        """Answer a request to `/v1/chat/completions`. Raises `ApiError`."""
        return await self._answer(self._request(body), thread)

    async def respond(self, body: Any, thread: str | None = None) -> responses.Responded:
        """Answer a request to `/v1/responses`. Raises `ApiError`."""
        chat = responses.chat_body(body)
        try:
            return responses.Responded(body, await self.chat(chat, thread))
        except ApiError as error:
            raise renamed(error, responses.PARAMS, "input") from error

    async def messages(
        self, body: Any, thread: str | None = None
    ) -> anthropic_messages.AnsweredMessages:
        """Answer a request to `/v1/messages`. Raises `ApiError`."""
        chat, thinks = anthropic_messages.chat_body(body)
        try:
            request = replace(self._request(chat), thinks=thinks)
            return anthropic_messages.AnsweredMessages(await self._answer(request, thread))
        except ApiError as error:
            raise renamed(error, anthropic_messages.PARAMS, "messages") from error

    def count_tokens(self, body: Any, thread: str | None = None) -> int:
        """Return the number of tokens of a prompt to `/v1/messages`. Raises `ApiError`."""
        chat, thinks = anthropic_messages.chat_body(body)
        try:
            request = replace(self._request(chat), thinks=thinks)
            prompt_T, _ = self._prompt(request, self._setting(request, thread))
        except ApiError as error:
            raise renamed(error, anthropic_messages.PARAMS, "messages") from error
        return len(prompt_T)

    def _request(self, body: Any) -> ChatRequest:
        return chat_request(body, self.policy.limits, self.policy.model)

    def _setting(self, request: ChatRequest, thread: str | None) -> Setting:
        """Return the setting of a conversation. Raises `ApiError`."""
        chat = self.policy.chat
        args = template_args(chat, request)
        if args:
            chat = _tokenised("chat_template_kwargs", lambda: chat.with_args(args))
        # Tools that the policy would not see, or that it cannot call.
        if request.tools and not chat.shows_tools(request.tools):
            error = chat.error("does not show tools", "use a model that calls tools")
            raise refused("tools", str(error))
        if request.tools and request.calls and not chat.reads_calls:
            error = chat.error(
                "writes tool calls in a format that is not known", "set spec.model.chatFormat"
            )
            raise refused("tools", str(error))
        return Setting(chat, request.tools, args, thread)

    def _prompt(self, request: ChatRequest, setting: Setting) -> tuple[IntArray, Answer | None]:
        """Return the tokens of a request, and the answer that it continues. Raises `ApiError`."""
        return _tokenised("messages", lambda: self.recorded.chat_prompt(request.messages, setting))

    async def _answer(self, request: ChatRequest, thread: str | None) -> Response:
        """Answer a request for a conversation, of any dialect. Raises `ApiError`."""
        setting = self._setting(request, thread)
        form = self._form(request, setting.chat)
        prompt_T, matched = self._prompt(request, setting)

        def message_of(drawn: Drawn) -> tuple[ChatMessage, bool]:
            parsed = setting.chat.parse(
                drawn.text,
                ended=drawn.whole.finish is FinishReason.STOP,
                tools=request.tools if request.calls else (),
            )
            if request.one_call and len(parsed.calls) > 1:
                parsed = ParsedAnswer(drawn.text, problem="the answer has more than one call")
            if parsed.problem is not None:
                log.debug("%s: invalid answer: %s", self._episode.key, parsed.problem)
            return answer_message(parsed), parsed.problem is None

        async def draw(number: int, choice: int) -> Drawn:
            place = [number, choice]
            if form is None or self.policy.enforces_formats:
                one_call = request.one_call
                return await self._draw(prompt_T, request.options, place, form, one_call=one_call)
            return await self._draw_in_format(prompt_T, request.options, place, form)

        return await self._respond(
            request.options,
            prompt_T,
            matched,
            request.messages,
            "messages",
            draw,
            message_of,
            setting,
            thread,
        )

    def _form(self, request: ChatRequest, chat: ChatFormat) -> AnswerFormat | None:
        """Return the format of the answer, as the policy's family writes it. Raises `ApiError`."""
        form, how = request.form, chat.family.call_text
        if form is None:
            return None
        if form.calls is not None:
            if how is None:
                raise refused(
                    "tool_choice",
                    "must be none, or auto without response_format: calls can be demanded in the "
                    f"formats {', '.join(DEMANDING)}, not in {chat.family.name}",
                )
            if form.schema is not None and how.start.startswith("{"):
                raise refused(
                    "response_format",
                    f"a call in the format {chat.family.name} begins as such an answer does: set "
                    "tool_choice to required or none",
                )
        return replace(form, call_text=how, reasoning=chat.reasoning_texts)

    async def complete(self, body: Any, thread: str | None = None) -> Response:
        """Answer a request to `/v1/completions`. Raises `ApiError`."""
        policy = self.policy
        request = completion_request(body, policy.limits, policy.model)
        prompt, text = request.prompt, request.prompt if isinstance(request.prompt, str) else None
        if isinstance(prompt, str):
            prompt_T = _tokenised("prompt", lambda: self.recorded.text_prompt(prompt, thread))
        else:
            if not 0 <= min(prompt) <= max(prompt) < len(policy.tokenizer):
                raise refused(
                    "prompt", f"a token is outside of the vocabulary of {len(policy.tokenizer)}"
                )
            prompt_T = np.array(prompt, np.int32)
        shown = (ChatMessage("user", policy.chat.shown(prompt_T) if text is None else text),)

        def message_of(drawn: Drawn) -> tuple[ChatMessage, bool]:
            return ChatMessage("assistant", drawn.text), True

        async def draw(number: int, choice: int) -> Drawn:
            return await self._draw(prompt_T, request.options, [number, choice])

        return await self._respond(
            request.options,
            prompt_T,
            None,
            shown,
            "prompt",
            draw,
            message_of,
            shown[0].content,
            thread,
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
        try:
            reward = number(body.get("reward"), "the reward is")
        except EnvFault as fault:
            raise refused("reward", str(fault)) from None
        if body.get("trajectory") is None:
            self.reward = reward
            return
        answer = self.recorded.find(body["trajectory"], body.get("choice", 0))
        if answer is None:
            raise ApiError(
                404,
                f"no answer of this episode has the id {body['trajectory']!r}",
                param="trajectory",
                code="not_found",
            )
        self.rewards[answer] = reward

    async def _respond(
        self,
        options: RequestOptions,
        prompt_T: IntArray,
        matched: Answer | None,
        messages: tuple[ChatMessage, ...],
        param: str,
        draw: Callable[[int, int], Awaitable[Drawn]],
        message_of: Callable[[Drawn], tuple[ChatMessage, bool]],
        to: Setting | str,
        thread: str | None,
    ) -> Response:
        """Sample the answers, record them and build the response. Raises `ApiError`."""
        self._check_room(prompt_T, param)
        parent = self.recorded.parent_of(prompt_T, matched, thread)
        self._numbers += 1
        number = self._numbers
        try:
            answers = await self._sample(options.n, partial(draw, number))
        except RequestRefused as error:
            raise refused(
                param,
                f"the engine refuses the request: {error}. Shorten it, or ask for fewer tokens",
            ) from error
        response = Response(
            f"{self._episode.key}-{number}",
            int(time.time()),
            self.policy.model,
            options,
            prompt_T,
        )
        for place, drawn in enumerate(answers):
            message, valid = message_of(drawn)
            before = parent.sampled if parent else None
            sampled = Sampled(drawn.prompt_T, drawn.generation, before)
            answer = Answer(
                response.id, place, sampled, parent, (*messages, message), valid, thread=thread
            )
            drafts = [
                replace(answer, sampled=Sampled(*draft, before), valid=False, draft_of=answer)
                for draft in drawn.drafts
            ]
            self.recorded.add(answer, drafts, to=to)
            pieces = self._pieces(drawn.whole.tokens_T) if options.logprobs else []
            response.choices.append(Choice(place, message, drawn.whole, pieces, drawn.stop_text))
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

    async def _sample(self, n: int, draw: Callable[[int], Awaitable[Drawn]]) -> list[Drawn]:
        """Return n answers. A request that fails or is cancelled does not count as a turn."""
        self._turns += 1
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_awaited(draw(choice))) for choice in range(n)]
        except BaseException as failed:
            self._turns -= 1
            error = failed.exceptions[0] if isinstance(failed, BaseExceptionGroup) else failed
            if isinstance(error, asyncio.CancelledError):
                raise
            if isinstance(error, ApiError | RequestRefused):
                raise error from None
            if not self.failed.done():
                self.failed.set_exception(error)
            raise ApiError(
                503, f"the engines gave no answer: {error}", code="engine_error"
            ) from error
        return [task.result() for task in tasks]

    async def _generation(
        self,
        prompt_T: IntArray,
        longest: int,
        seed: int | None,
        place: Sequence[int],
        form: AnswerFormat | None = None,
    ) -> Generation:
        """Sample once. `place` is unique: number of the request, choice, draw after the first."""
        sampling = self.policy.limits.sampling(longest, self.policy.chat.stop_tokens)
        if form is not None:
            sampling = replace(sampling, structural_tag=json.dumps(form.structural_tag))
        # The client's seed is combined with the episode's. So the episodes of a group differ even
        # if their agent always sends the same seed.
        number, *rest = place
        path = [0, number] if seed is None else [1, seed]
        name = "-".join(map(str, place))
        request = self._episode.request(name, prompt_T, sampling, [*path, *rest])
        try:
            return answered(await self._generate(request))
        except RequestRefused as error:
            if form is None:
                raise
            raise refused(
                "tools" if form.schema is None else "response_format",
                f"the engine cannot enforce it: {error}. Simplify the schema",
            ) from error

    def _longest(self, prompt_T: IntArray, options: RequestOptions) -> int:
        """Return the largest number of tokens of an answer."""
        limits = self.policy.limits
        return min(
            options.max_tokens or limits.max_tokens_per_step,
            limits.max_tokens_per_step,
            limits.sequence_length - len(prompt_T),
        )

    async def _draw(
        self,
        prompt_T: IntArray,
        options: RequestOptions,
        place: Sequence[int],
        form: AnswerFormat | None = None,
        *,
        one_call: bool = False,
    ) -> Drawn:
        """Sample an answer of any text, or of a format that the engine enforces."""
        longest = self._longest(prompt_T, options)
        whole = await self._generation(prompt_T, longest, options.seed, place, form)
        cut, text, stop_text = self._stopped(whole, options.stop, one_call=one_call)
        return Drawn(prompt_T, cut, cut, text, stop_text=stop_text)

    async def _draw_in_format(
        self, prompt_T: IntArray, options: RequestOptions, place: Sequence[int], form: AnswerFormat
    ) -> Drawn:
        """Sample an answer that has a format.

        The policy samples freely. A draw that leaves the format ends there, as a draft, and is
        trained. The endpoint then draws again, or writes what must follow. So every sampled token
        has the log-prob of the policy's own distribution, and none is dropped because of what was
        sampled. With tokens masked in the engine both would fail.
        """
        longest = self._longest(prompt_T, options)
        answer = _Parts(self.policy.chat, prompt_T)
        form.read("")  # refuses, before anything is sampled, what cannot be enforced
        answer.write(self._encoded(form.opening))
        if answer.size >= longest:
            raise refused("max_tokens", f"{longest} leave no room for the format of the answer")
        drafts: list[tuple[IntArray, Generation]] = []
        misses, chunk = 0, longest
        before_T, start = answer.tokens_T, answer.size
        for count in itertools.count():
            drawn = await self._generation(
                answer.tokens_T,
                min(chunk, longest - answer.size),
                options.seed,
                [*place, *([count] if count else ())],
            )
            answer.add(drawn)
            reading = form.read(answer.text)
            if (stop := _first_of(options.stop, answer.text[: reading.fits])) is not None:
                answer.cut(answer.first(stop.end()))
                return replace(
                    answer.drawn(before_T, start, drafts, stop.start(), FinishReason.STOP),
                    stop_text=stop.group(),
                )
            if reading.complete:
                answer.cut(answer.first(reading.fits))
                return answer.drawn(before_T, start, drafts, reading.fits, FinishReason.STOP)
            if reading.fits == len(answer.text) and drawn.finish is FinishReason.LENGTH:
                if answer.size >= longest:
                    return answer.drawn(before_T, start, drafts, None, FinishReason.LENGTH)
                chunk *= 2
                continue
            kept = max(start, min(answer.first(reading.fits + 1), answer.size) - 1)
            drafts.append((before_T, answer.part(start, kept + 1)))
            chunk = FIRST_CHUNK
            kept = max(start, answer.finished(kept))
            misses = misses + 1 if kept == start else 1
            answer.cut(kept)
            reading = form.read(answer.text)
            while not reading.complete and (
                reading.fixed or misses >= REDRAWS or len(drafts) >= MAX_DRAFTS
            ):
                written_T = self._encoded(reading.next)
                if answer.size + len(written_T) >= longest:
                    return answer.drawn(
                        answer.tokens_T, answer.size, drafts, None, FinishReason.LENGTH
                    )
                answer.write(written_T)
                reading = form.read(answer.text)
                misses = 0
                if len(drafts) < MAX_DRAFTS:
                    break
            if reading.complete:
                return answer.drawn(
                    answer.tokens_T, answer.size, drafts, reading.fits, FinishReason.STOP
                )
            before_T, start = answer.tokens_T, answer.size
        raise AssertionError("the count has no end")

    def _encoded(self, text: str) -> IntArray:
        """Return the tokens of a part of an answer. Raises `ApiError` if it has none."""
        return _tokenised(
            "response_format",
            lambda: np.asarray(
                self.policy.tokenizer.encode(text, add_special_tokens=False), np.int32
            ),
        )

    def _stopped(
        self, whole: Generation, stops: tuple[str, ...], *, one_call: bool = False
    ) -> tuple[Generation, str, str | None]:
        """Cut a generation after the token that completes a stop text, or the first tool call.

        The cut depends only on earlier tokens, so the log-probs of the remaining tokens stay valid.

        Returns:
            The generation, its text before the stop text, and the stop text.
        """
        chat = self.policy.chat

        def end_of(text: str) -> tuple[int, str | None] | None:
            stop = _first_of(stops, text)
            call_end = chat.first_call_end(text) if one_call else None
            if stop is not None and (call_end is None or stop.start() < call_end):
                return stop.start(), stop.group()
            return None if call_end is None else (call_end, None)

        def stopped(size: int) -> bool:
            return end_of(chat.text(whole.tokens_T[:size])) is not None

        size = bisect_left(range(len(whole.tokens_T) + 1), True, key=stopped)
        text = chat.text(whole.tokens_T[:size])
        end = end_of(text)
        if end is None:
            return whole, text, None
        return replace(cut(whole, size), finish=FinishReason.STOP), text[: end[0]], end[1]

    def _pieces(self, tokens_T: IntArray) -> list[bytes]:
        """Return the bytes of each token."""
        policy = self.policy
        return token_bytes(
            policy.tokenizer,
            tokens_T.tolist(),
            lambda tokens: policy.chat.shown(np.array(tokens, np.int32)),
        )


class _Parts:
    """An answer that is put together from what was sampled and what was written."""

    def __init__(self, chat: ChatFormat, prompt_T: IntArray) -> None:
        self._chat = chat
        self._prompt_T = prompt_T
        none_T = np.zeros(0, np.int32)
        self._said = Generation(none_T, np.zeros(0, np.float32), none_T, FinishReason.STOP)

    @property
    def size(self) -> int:
        """Number of tokens of the answer so far."""
        return len(self._said.tokens_T)

    @property
    def tokens_T(self) -> IntArray:
        """The request's prompt and the answer so far, int32 [T]."""
        return np.concatenate([self._prompt_T, self._said.tokens_T])

    @property
    def text(self) -> str:
        """Text of the answer so far, without the first bytes of a character."""
        return self._text(self.size)

    def _text(self, size: int) -> str:
        text = self._chat.text(self._said.tokens_T[:size])
        last = text[-UNFINISHED_BYTES:]
        return text[: len(text) - len(last)] + last.rstrip(UNFINISHED)

    def first(self, characters: int) -> int:
        """Return the smallest number of tokens with so much text; all and one if there is none."""
        return bisect_left(
            range(self.size + 1), True, key=lambda size: len(self._text(size)) >= characters
        )

    def finished(self, size: int) -> int:
        """Return the number of the first `size` tokens that end with a whole character."""
        while size and self._chat.text(self._said.tokens_T[:size]).endswith(UNFINISHED):
            size -= 1
        return size

    def add(self, drawn: Generation) -> None:
        """Add what was sampled."""
        said = self._said
        self._said = replace(
            drawn,
            tokens_T=np.concatenate([said.tokens_T, drawn.tokens_T]),
            logprobs_T=np.concatenate([said.logprobs_T, drawn.logprobs_T]),
            versions_T=np.concatenate([said.versions_T, drawn.versions_T]),
        )

    def write(self, tokens_T: IntArray) -> None:
        """Add what the endpoint writes."""
        count = len(tokens_T)
        self.add(
            replace(
                self._said,
                tokens_T=tokens_T,
                logprobs_T=np.zeros(count, np.float32),
                versions_T=np.full(count, -1, np.int32),
            )
        )

    def part(self, start: int, end: int) -> Generation:
        """Return the tokens from `start` to before `end`."""
        said = self._said
        return replace(
            said,
            tokens_T=said.tokens_T[start:end],
            logprobs_T=said.logprobs_T[start:end],
            versions_T=said.versions_T[start:end],
        )

    def cut(self, size: int) -> None:
        """Keep the first tokens."""
        self._said = cut(self._said, size)

    def drawn(
        self,
        before_T: IntArray,
        start: int,
        drafts: Sequence[tuple[IntArray, Generation]],
        characters: int | None,
        finish: FinishReason,
    ) -> Drawn:
        """Return the answer.

        Args:
            before_T: prompt of the last draw.
            start: place of the last draw in the answer.
            drafts: as in `Drawn`.
            characters: length of the text; None = all of it.
            finish: reason for the end.
        """
        said = self._said
        last = replace(self.part(start, self.size), finish=finish)
        return Drawn(
            before_T, last, replace(said, finish=finish), self.text[:characters], tuple(drafts)
        )


def _first_of(stops: Sequence[str], text: str) -> re.Match[str] | None:
    """Return the place of the first stop text, or None."""
    found = [match for stop in stops if (match := re.search(re.escape(stop), text))]
    return min(found, key=lambda match: match.start(), default=None)


def cut(generation: Generation, size: int) -> Generation:
    """Return the first tokens of a generation."""
    return replace(
        generation,
        tokens_T=generation.tokens_T[:size],
        logprobs_T=generation.logprobs_T[:size],
        versions_T=generation.versions_T[:size],
    )


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable


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
