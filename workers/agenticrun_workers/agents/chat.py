"""Chat templates, rendered piece by piece so that no token is tokenised twice.

Between two responses a template writes the end of the assistant's turn, the next messages and the
start of the next answer. Each piece is rendered inside a small conversation with a marker in place
of the response, and only the text after the marker is tokenised. Sampled tokens and pieces together
equal what the template renders for the whole conversation, and a piece costs the same after 2 turns
as after 200.

A template may leave the reasoning of earlier answers out. A run keeps it, unless
`spec.model.earlierReasoning` is `Template`: `drops_reasoning` then says where a conversation has to
be rendered whole.

What a template cannot do is found when a `ChatFormat` is made, by rendering conversations of a few
words. A message that a template leaves out is an error, never a shorter prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from agenticrun_workers.agents.chat_families import (
    NAMES,
    AnswerReader,
    ParsedAnswer,
    Tools,
    find_family,
)
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.types import ChatSettings, IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
"""A chat message: `role`, `content`, and for tools `tool_calls` or `tool_call_id`."""

_MARKER = "\N{WHITE SQUARE}answer\N{WHITE SQUARE}"
_REASONING = "\N{WHITE SQUARE}reasoning\N{WHITE SQUARE}"

KEPT_PROMPTS = 4096
KEPT_LENGTH = 1000
"""Longest message, in characters, whose tokens are kept: positions of games come again, the output
of a tool hardly does. So many messages of this length take 22 MB with their tokens (ASCII)."""
KEPT_TOOLS = 64
KEPT_FORMATS = 16
"""Number of formats with other variables of the template that are kept."""
RENDERED = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")
"""Variables of chat templates that each rendering sets (`spec.model.chatTemplateArgs`, too)."""

_USER: Message = {"role": "user", "content": "?"}
_ANSWER: Message = {"role": "assistant", "content": _MARKER}
_TOOL: Message = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Probe.",
        "parameters": {
            "type": "object",
            "properties": {"value": {"type": "string", "description": "Text."}},
            "required": ["value"],
        },
    },
}
_BARE_TOOL: Message = {"type": "function", "function": {"name": "probe_tool"}}
_NOTHING: Message = {"description": "", "parameters": {"type": "object", "properties": {}}}
"""Parts of a function that OpenAI's API does not demand, and some templates do."""
_CALL_ID = "call00001"
"""Nine letters and digits: some templates accept no other ids."""


MODEL_WORDS = "spec.model.initialize.words"


class ChatTemplateError(InvalidConfig):
    """The chat template cannot express a conversation; the message says what, and what to do."""


class ChatFormat:
    """Token pieces of conversations in the tokenizer's own chat template, and parts of answers.

    `end_of_turn` is the token that ends an assistant's turn in the template. `stop_tokens` also
    includes the tokenizer's end of sequence, those of the model's generation_config, and the tokens
    after a tool call.

    Args:
        tokenizer: tokenizer with a chat template. `load_tokenizer` notes on it what else the run
            and its model say about the chat format (`ChatSettings`).
        args: variables of the template, besides those of the run.

    Raises:
        ChatTemplateError: the template changes or hides an assistant's message, or cannot be
            rendered.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, args: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._args = dict(args or {})
        self._completes_tools = False
        """True if the template needs a description and parameters of each tool."""
        self._settings: ChatSettings = getattr(tokenizer, "chat_settings", None) or ChatSettings()
        self._added: dict[str, int] = tokenizer.get_added_vocab()
        self.template = template_text(tokenizer)
        self.family = find_family(self._settings.format, self.template)
        self._reasoning_key = next(
            (key for key in ("reasoning_content", "thinking") if key in self.template), None
        )
        self._completes_tools = not self._renders([_USER], [_BARE_TOOL])
        self.system_role = _MARKER in self._renders([{"role": "system", "content": _MARKER}, _USER])
        """False if the instruction joins the first user message."""
        self._find_end()
        self._find_calls()
        self._reader = self._make_reader()
        self.stop_tokens: tuple[int, ...] = tuple(
            dict.fromkeys(
                token
                for token in (
                    self.end_of_turn,
                    tokenizer.eos_token_id,
                    *self._settings.stop_tokens,
                    *(self._added[text] for text in self._call_ends),
                )
                if token is not None
            )
        )
        self._ends = [
            text
            for text, token in self._added.items()
            if token in self.stop_tokens or text == self._between_text
        ]
        self.drops_between_turns = self.drops_reasoning([_USER])
        """True if no answer keeps its reasoning in the prompt of the next turn."""
        self._cached_next = lru_cache(KEPT_PROMPTS)(self._next)
        self._shows = lru_cache(KEPT_TOOLS)(self._renders_tools)
        self._with_args = lru_cache(KEPT_FORMATS)(
            lambda text: ChatFormat(self._tokenizer, json.loads(text))
        )

    @property
    def reads_calls(self) -> bool:
        """True if the format of tool calls in answers is known."""
        return self._reader.reads_calls

    @property
    def own_reader(self) -> bool:
        """True if answers are read by a response template of the checkpoint."""
        return self._reader.own is not None

    @property
    def reasons(self) -> bool:
        """True if reasoning can be separated from the content of an answer."""
        return self._reader.reasons

    def reads(self, name: str) -> bool:
        """Return True if the chat template reads a variable of this name that may be set."""
        return bool(
            re.fullmatch(r"[A-Za-z_]\w*", name)
            and name not in RENDERED
            and re.search(rf"\b{name}\b", self.template)
        )

    def switches(self, name: str) -> bool:
        """Return True if prompts depend on a variable of the template being true or false."""
        if not self.reads(name):
            return False
        on, off = (
            self.with_args({name: value}).render([_USER], prompt=True) for value in (True, False)
        )
        return on != off

    def with_args(self, args: Mapping[str, Any]) -> ChatFormat:
        """Return the format with these variables of the template, besides its own.

        Raises:
            ChatTemplateError: the template cannot be used with them.
        """
        return self._with_args(json.dumps({**self._args, **args}, sort_keys=True))

    @property
    def reasoning_texts(self) -> tuple[str, str] | None:
        """Texts around reasoning; see `AnswerReader.reasoning_texts`."""
        return self._reader.reasoning_texts

    def not_tokenised(self, what: str, texts: Sequence[str], env: object, error: Exception) -> str:
        """Return why texts have no tokens, and what to do.

        Args:
            what: name of the last text.
            texts: the instruction, and the text.
            env: the environment that gave them.
            error: of the tokenizer.
        """
        reason = str(error)
        if "[UNK]" in reason:  # the tokenizer of a tiny model, which has whole words only
            words = self._tokenizer.get_vocab()
            split = self._tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str
            unknown = [word for text in texts for word, _ in split(text) if word not in words]
            if unknown:
                name = getattr(env, "isolated_class", "") or type(env).__name__
                reason = (
                    f"{unknown[0][:80]!r} is not in the vocabulary: add it to {name}.vocabulary() "
                    f"or {MODEL_WORDS}"
                )
        return f"the {what} {texts[-1][:80]!r} cannot be tokenised: {reason}"

    def first(self, system: str, user: str) -> IntArray:
        """Return the tokens up to the first answer, int32 [T]. Empty `system` = no message."""
        messages = [{"role": "system", "content": system}] if system else []
        return self.conversation([*messages, {"role": "user", "content": user}])

    def conversation(self, messages: Sequence[Message], tools: Tools = ()) -> IntArray:
        """Return the tokens of messages up to the next answer, int32 [T].

        `tools` have the format of OpenAI's API.

        Raises:
            ChatTemplateError: the template leaves a message out.
        """
        text = self.render(messages, prompt=True, tools=tools)
        self._check_shown(messages, text)
        return self.encode(text)

    def bridge(
        self,
        answer_T: IntArray,
        added: Sequence[Message],
        *,
        calls: Sequence[Message] = (),
        tools: Tools = (),
    ) -> IntArray:
        """Return the tokens between an answer and the answer to the `added` messages, int32 [T].

        Args:
            answer_T: the answer as it was sampled, int32 [T].
            added: messages after it, at least one.
            calls: the tool calls that were read from the answer, in the format of OpenAI's API.
            tools: tools of the conversation.

        Raises:
            ChatTemplateError: the template leaves a message out.
            Exception: what the template raises for messages that it rejects.
        """
        tail = self.after_answer(added, calls, tools)
        self._check_shown(added, tail)
        return self.encode(self._without_end(tail, int(answer_T[-1]) if len(answer_T) else None))

    def drops_reasoning(
        self, added: Sequence[Message], calls: Sequence[Message] = (), tools: Tools = ()
    ) -> bool:
        """Return True if an answer loses its reasoning when these messages follow it.

        False if the run keeps reasoning (`spec.model.earlierReasoning`).

        Args:
            added: messages after the answer.
            calls: its tool calls.
            tools: tools of the conversation.
        """
        return self._settings.drops_reasoning and self.hides_reasoning(added, calls, tools)

    def hides_reasoning(
        self, added: Sequence[Message], calls: Sequence[Message] = (), tools: Tools = ()
    ) -> bool:
        """Return True if the template leaves the reasoning of an answer before these messages out.

        The arguments are those of `drops_reasoning`, which also asks if the run wants that.
        """
        if not self.reasons:
            return False
        answer = self._call_stub(calls) if calls and self.renders_calls else _ANSWER
        reasoned = {**answer, "reasoning_content": _REASONING}
        return _REASONING not in self.render([_USER, reasoned, *added], prompt=True, tools=tools)

    def shows_tools(self, tools: Tools) -> bool:
        """Return True if the chat template renders these tools."""
        return self._shows(json.dumps(list(tools), sort_keys=True))

    def next(self, user: str, *, ended: bool) -> IntArray:
        """Return the tokens between an answer and the next one, int32 [T].

        `ended`: the policy ended the answer itself (`ended`).

        Raises:
            ChatTemplateError: the run drops the answer's reasoning, so nothing can follow it.
        """
        if self.drops_between_turns:
            raise self.error(
                "leaves the reasoning of earlier answers out, so no prompt continues an answer",
                "set spec.model.earlierReasoning: Keep, or use agent multi_turn",
            )
        render = self._cached_next if len(user) <= KEPT_LENGTH else self._next
        return render(user, ended)

    def ended(self, answer_T: IntArray) -> bool:
        """Return True if an answer ends with a token that ends turns in the template."""
        return len(answer_T) > 0 and int(answer_T[-1]) in self._turn_ends

    def answer(self, text: str) -> IntArray:
        """Return the tokens of an answer, including the end of turn, int32 [T]."""
        return np.append(self.encode(text), np.int32(self.end_of_turn))

    def text(self, response_T: IntArray) -> str:
        """Return the text of a response without its stop token."""
        if len(response_T) and int(response_T[-1]) in self.stop_tokens:
            response_T = response_T[:-1]
        text: str = self._tokenizer.decode(response_T.tolist(), skip_special_tokens=False)
        return text

    def shown(self, prompt_T: IntArray) -> str:
        """Return the text of a prompt, including special tokens."""
        text: str = self._tokenizer.decode(prompt_T.tolist(), skip_special_tokens=False)
        return text

    def shown_token(self, token: int) -> str:
        """Return the text of a token."""
        return str(self._tokenizer.convert_ids_to_tokens(token))

    def render(
        self, messages: Sequence[Message], *, prompt: bool, tools: Tools = (), **args: Any
    ) -> str:
        """Return the text of messages.

        Args:
            prompt: end with the beginning of the next answer.
            args: variables of the template, for this text only.

        Raises:
            ChatTemplateError: the template raises, with its reason.
        """
        try:
            return self._apply(self._adapted(messages), prompt=prompt, tools=tools, **args)
        except Exception as error:  # templates raise what they like
            raise self.error(
                f"cannot render {' > '.join(str(m['role']) for m in messages[-4:])} "
                f"({type(error).__name__}: {error})",
                "send other messages, or set spec.model.chatTemplate; a model that only takes "
                "messages with images is not supported",
            ) from error

    def after_answer(
        self, added: Sequence[Message], calls: Sequence[Message] = (), tools: Tools = ()
    ) -> str:
        """Return what the template writes between an answer with these calls and the next one."""
        if not (calls and self.renders_calls):
            return self._tail([_USER, _ANSWER, *added], tools=tools)
        text = self.render([_USER, self._call_stub(calls), *added], prompt=True, tools=tools)
        _, marker, tail = text.rpartition(_MARKER)
        if not marker:
            raise self.error("does not write a tool call", "leave tools out")
        return self._after_call(tail, self._ends)

    def parse(self, text: str, *, ended: bool, tools: Tools = ()) -> ParsedAnswer:
        """Return content, reasoning and tool calls of an answer; see `AnswerReader.read`."""
        return self._reader.read(text, ended=ended, tools=tools)

    def message(self, text: str, *, ended: bool) -> Message:
        """Return an answer as a message, with its reasoning apart.

        Special tokens in it are left out if the template refuses them there, as gpt-oss does: a
        malformed answer is invalid, and does not end the episode with an error.
        """
        parsed = self.parse(text, ended=ended)
        said = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning is not None:
            said["reasoning_content"] = parsed.reasoning
        marked = any(mark in part for mark in self._added for part in said.values())
        if marked and not self._renders(self._adapted([_USER, said, _USER])):
            marks = re.compile("|".join(map(re.escape, self._added)))
            for key, part in said.items():
                left = part
                # The removal of one may create another.
                while (rest := marks.sub("", left)) != left:
                    left = rest
                said[key] = left
        return said

    def first_call_end(self, text: str) -> int | None:
        """Return the place after the first whole tool call of an answer, or None."""
        return self._reader.first_call_end(text)

    def error(self, problem: str, remedy: str) -> ChatTemplateError:
        """Return an error that names the model and its template."""
        field = "chatTemplate" if self._settings.own_template else "path"
        return ChatTemplateError(
            f"spec.model.{field}",
            f"the chat template of {self._settings.model or 'the tokenizer'} {problem}: {remedy}",
        )

    def _renders(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """Return the text of messages, empty if the template raises."""
        try:
            return self._apply(messages, prompt=True, tools=tools)
        except Exception:  # templates raise what they like
            return ""

    def _find_end(self) -> None:
        """Find the token that ends a turn: after the last answer, or else before the next message.

        Where they differ, as `<|return|>` and `<|end|>` of gpt-oss, either ends a turn.
        """
        last = self._tail([_USER, _ANSWER], prompt=False)
        between = self._tail([_USER, _ANSWER, _USER])
        self._between_text = self._special_at(between)
        self._end_text = self._special_at(last) or self._between_text
        if not self._end_text:
            raise self.error(
                f"writes {last!r} after an answer, which starts with no special token, so an "
                "answer has no end",
                "use a template that ends each turn with a special token (spec.model.chatTemplate)",
            )
        self.end_of_turn = self._added[self._end_text]
        self._turn_ends = {self.end_of_turn, self._added.get(self._between_text)}

    def _find_calls(self) -> None:
        """Find out how the template writes tool calls, and which tokens follow them."""
        call = self._call_stub([{"id": _CALL_ID, "function": {"name": "probe_tool"}}])
        result = {"role": "tool", "tool_call_id": _CALL_ID, "content": "?"}
        self._text_arguments = False
        """True if the template needs arguments as JSON text, not as an object."""
        self.renders_calls = False
        """True if the template writes the tool calls of messages."""
        self._call_ends: set[str] = set()
        for self._text_arguments in (False, True):
            try:
                text = self.render([_USER, call, result], tools=[_TOOL], prompt=True)
            except Exception:  # templates raise what they like
                continue
            self.renders_calls = _MARKER in text
            break
        if not self.renders_calls:
            self._text_arguments = False
            return
        _, _, tail = text.rpartition(_MARKER)
        if end := self._special_at(self._after_call(tail, self._added).lstrip()):
            self._call_ends.add(end)

    def _make_reader(self) -> AnswerReader:
        before = self.render([_USER], prompt=False)
        whole = self.render([_USER], prompt=True)
        prompt = whole.removeprefix(before) if whole.startswith(before) else ""
        own = getattr(self._tokenizer, "response_template", None)
        use_own = isinstance(own, Mapping) and self._settings.format == "auto"
        try:
            return AnswerReader(self.family, self.template, prompt, own if use_own else None)
        except ValueError as error:
            raise self.error(
                f"comes with a response_template that cannot be used ({error})",
                f"set spec.model.chatFormat to one of {', '.join(NAMES)}",
            ) from error

    def _renders_tools(self, tools: str) -> bool:
        given = json.loads(tools)
        return self.render([_USER], prompt=True, tools=given) != self.render([_USER], prompt=True)

    def _next(self, user: str, ended: bool) -> IntArray:
        message = {"role": "user", "content": user}
        tail = self._tail([_USER, _ANSWER, message])
        self._check_shown([message], tail)
        tokens = self.encode(self._without_end(tail, self.end_of_turn if ended else None))
        tokens.setflags(write=False)
        return tokens

    def _after_call(self, tail: str, ends: Iterable[str]) -> str:
        """Return the part of a tail that follows the last call of the answer."""
        if self.family.call_end is not None and self.family.call_end in tail:
            return tail.partition(self.family.call_end)[2]
        places = [place for end in ends if (place := tail.find(end)) >= 0]
        return tail[min(places, default=0) :]

    def _without_end(self, tail: str, sampled: int | None) -> str:
        """Return a tail without the end of turn that the policy sampled itself."""
        start = max((e for e in self._ends if tail.lstrip().startswith(e)), key=len, default="")
        if not start or sampled is None:
            return tail
        both_end = sampled in self._turn_ends and self._added[start] in self._turn_ends
        if both_end or sampled == self._added[start]:
            return tail.lstrip().removeprefix(start)
        return tail

    def _call_stub(self, calls: Sequence[Message]) -> Message:
        """Return an answer with calls of the same names, the last one with the marker in it."""
        stubs = [
            {
                "id": call.get("id", _CALL_ID),
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": {"value": _MARKER if call is calls[-1] else ""},
                },
            }
            for call in calls
        ]
        return {"role": "assistant", "content": "", "tool_calls": stubs}

    def _check_shown(self, messages: Sequence[Message], text: str) -> None:
        """Raise `ChatTemplateError` for a message that is not in the rendered text.

        Answers are not checked: templates leave their reasoning out. Of their calls, the names are.
        """
        place = 0
        for message in messages:
            role, content = message["role"], message.get("content") or ""
            wanted = [call["function"]["name"] for call in message.get("tool_calls") or ()]
            if role != "assistant":
                wanted.append(content.strip())
            for words in wanted:
                found = _find(words, text, place)
                if found is None and role != "tool":
                    found = _find(words, text, 0)  # instructions may be written first
                if found is None:
                    raise self.error(
                        f"leaves out a message of role {role}: {words[:80]!r}",
                        "leave such messages out, or set spec.model.chatTemplate",
                    )
                place = max(place, found) if role == "tool" else place

    def _tail(self, messages: Sequence[Message], *, prompt: bool = True, tools: Tools = ()) -> str:
        _, marker, tail = self.render(messages, prompt=prompt, tools=tools).partition(_MARKER)
        if not marker:
            raise self.error(
                "does not write an assistant's message as it was given",
                "use a model for text, or set spec.model.chatTemplate",
            )
        return tail

    def _special_at(self, text: str) -> str:
        """Return the special token with which a text starts, or an empty text."""
        return max((token for token in self._added if text.startswith(token)), key=len, default="")

    def _apply(
        self, messages: Sequence[Message], *, prompt: bool, tools: Tools = (), **args: Any
    ) -> str:
        shown, head = [*tools] or None, self._settings.head
        if shown and self._completes_tools:
            shown = [{**tool, "function": {**_NOTHING, **tool["function"]}} for tool in shown]
        if self._args:
            # The variables of the run are set where the template begins: these come after them.
            template = self._tokenizer.get_chat_template(tools=shown).removeprefix(head)
            own = "".join(f"{{% set {name} = request_args['{name}'] %}}" for name in self._args)
            args |= {"chat_template": f"{head}{own}{template}", "request_args": self._args}
        text: str = self._tokenizer.apply_chat_template(
            [*messages], tools=shown, tokenize=False, add_generation_prompt=prompt, **args
        )
        return text

    def _adapted(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with only what the template knows: roles, arguments, reasoning."""
        adapted = []
        for message in messages:
            known = message
            reasoning, calls = message.get("reasoning_content"), message.get("tool_calls")
            if reasoning is not None and self._reasoning_key != "reasoning_content":
                known = {key: value for key, value in message.items() if key != "reasoning_content"}
                if self._reasoning_key is not None and not (calls and message.get("content")):
                    known = {**known, self._reasoning_key: reasoning}
            if calls and self._text_arguments:
                known = {**known, "tool_calls": [_with_text_arguments(call) for call in calls]}
            adapted.append(known)
        if self.system_role or len(adapted) < 2 or adapted[0]["role"] != "system":
            return adapted
        system, first, *others = adapted
        if first["role"] != "user":
            return adapted
        return [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *others]

    def encode(self, text: str) -> IntArray:
        """Return the tokens of a text, int32 [T]."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), np.int32)


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return all chat templates of a tokenizer as one text."""
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else str(template or "")


def _with_text_arguments(call: Message) -> Message:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _find(words: str, text: str, start: int) -> int | None:
    """Return the place after words, as they are or escaped as in JSON; None if there is none."""
    for written in (words, json.dumps(words, ensure_ascii=False)[1:-1], json.dumps(words)[1:-1]):
        place = text.find(written, start)
        if place >= 0:
            return place + len(written)
    return None


NUMBERS = ("turn", "turns_left", "max_tokens", "step_count", "history_length")
"""Placeholders that render as digits."""


def check_template(template: str, fields: Sequence[str]) -> None:
    """Raise `ValueError` if a template uses an unknown field."""
    try:
        template.format_map(dict.fromkeys(fields, ""))
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(
            f"template {template!r}: {error!r}; known fields are {', '.join(fields)}"
        ) from error


def fixed_text(template: str) -> list[str]:
    """Return a template's text without placeholders, and the digits if it renders numbers."""
    text = re.sub(r"\{(\w*)\}", "", template)
    writes_numbers = any(f"{{{name}}}" in template for name in NUMBERS)
    return [text, *"0123456789"] if writes_numbers else [text]
