"""Families of chat formats: how the answers of a model are read.

transformers reads an answer by a response template, which lists the parts of an answer and their
delimiters. A checkpoint may bring its own (`response_template` in tokenizer_config.json). For the
others, a family is recognised by what its chat template writes. `AnswerReader` adds what training
needs: an answer with a malformed call is reported as malformed, and never raises.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agenticrun_workers.agents.json_schema import listed_values, types_of

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import (
        ResponseTemplate,
    )

Tools = Sequence[Mapping[str, Any]]

CALLS, CONTENT, REASONING, OUTSIDE = "tool_calls", "content", "reasoning_content", "outside"
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
"""Names of functions that every client can send back."""

TEXT = {"content": "text", "content_args": {"strip": False}, "repeats": True, "join": ""}
THINK_START, THINK_END = "<think>", "</think>"
THINK = TEXT | {"open_pattern": rf"\A\s{{0,16}}{THINK_START}", "close": THINK_END}
"""Only the beginning of an answer is reasoning: later marks are content."""
JSON_CALLS = {"repeats": True, "content": "json", "transform": {"function": "{content}"}}
NAMED = {"function": {"name": "{name}", "arguments": "{content}"}}
"""Calls with the name in their opening. transformers types the values of this form only."""
MAX_NESTING = 100
"""Most objects and lists in each other that an argument may have."""


ATEM_ARGUMENT = r'<atem:parameter name="(?P<key>[^"<>]{1,128})"[^<>]{0,128}>'
GLM_ARGUMENT = r"<arg_key>(?P<key>[^<>]{1,128})</arg_key>\s*<arg_value>"
XML_ARGUMENT = r"<parameter=(?P<key>[^<>]{1,128})>"


def _tagged(opening: str, end: str, *, lines: bool = False, **more: Any) -> dict[str, Any]:
    """Return calls whose arguments are text between tags; the tool's schema gives their types.

    Args:
        opening: pattern of the text before a value, with its `key`.
        end: text after a value. A value contains neither it nor the beginning of `opening`.
        lines: a value has lines of its own, whose breaks do not belong to it.
    """
    # Possessive and bounded, so that no answer takes longer than its length: policies repeat
    # delimiters without end.
    begins = opening.partition("(")[0]
    other = f"<(?!{end[1:]}|{begins[1:]})"
    inside = rf"(?:[^<\n]++|\n(?!{end})|{other})*+" if lines else f"(?:[^<]++|{other})*+"
    gap = r"\n?" if lines else ""
    return more | {
        "repeats": True,
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": f"{opening}{gap}(?P<value>{inside}){gap}{end}",
            "value_parser": {"name": "text", "args": {"strip": False}},
        },
        "transform": NAMED,
    }


@dataclass(frozen=True, slots=True)
class CallText:
    """Form of a call: start, name, between, arguments, end."""

    start: str
    between: str
    end: str
    quoted: bool = True
    """True if name and arguments are members of a JSON object, which may have other spaces."""
    tags: tuple[str, str, str] | None = None
    """Texts before and after an argument's name, and after its value. None: arguments are JSON."""
    style: str = "json"
    """xgrammar's name of the form of the arguments."""

    def before_arguments(self, name: str) -> str:
        """Return what a call of this name begins with."""
        return f"{self.start}{json.dumps(name) if self.quoted else name}{self.between}"


@dataclass(frozen=True, slots=True)
class Family:
    """One way to write calls and reasoning."""

    name: str
    marks: str
    """Pattern of what only the chat templates of this family contain."""
    fields: Mapping[str, Mapping[str, Any]]
    """Fields of the response template, without reasoning in `<think>` and without content."""
    call_end: str | None = None
    """Text that ends the last call of an answer. None: the end of the turn does."""
    opening: str | None = None
    """Text that only a call contains. In the content of an answer it is a malformed call."""
    dropped: tuple[str, ...] = ()
    """Texts around calls that are neither calls nor content."""
    argument: tuple[str, str] | None = None
    """Pattern of the beginning of an argument, and the text that ends it."""
    call_text: CallText | None = None
    """Form of a call that a request demands. None: it cannot be demanded."""


_MARKS = {
    name: "<{bar}tool▁{name}{bar}>".format(bar="\N{FULLWIDTH VERTICAL LINE}", name=name)
    for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
}
"""DeepSeek's marks."""
HERMES = Family(
    "hermes",
    "<tool_call>",
    {CALLS: JSON_CALLS | {"open": "<tool_call>", "close": "</tool_call>"}},
    "</tool_call>",
    "<tool_call>",
    call_text=CallText('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>"),
)
FAMILIES = (
    Family(
        "gpt_oss",
        r"<\|start\|>assistant.*<\|channel\|>",
        {
            REASONING: TEXT
            | {"open": "<|channel|>analysis<|message|>", "close": "<|end|>", "join": "\n"},
            CONTENT: TEXT
            | {
                "open_pattern": r"<\|channel\|>(?:final|commentary)"
                r"(?:\s*<\|constrain\|>\w+)?<\|message\|>",
                "close": "<|end|>",
            },
            CALLS: JSON_CALLS
            | {
                "open_pattern": r"(?:<\|channel\|>(?:commentary|analysis) )?to=functions\."
                r"(?P<name>[^\s<]{1,128}) ?(?:<\|channel\|>(?:commentary|analysis))?"
                r"(?: ?(?:<\|constrain\|>)? ?json)?<\|message\|>",
                "close": "<|call|>",
                "transform": NAMED,
            },
            OUTSIDE: TEXT,
        },
        dropped=("<|start|>assistant", "<|end|>"),
        call_text=CallText(
            "<|channel|>commentary to=functions.",
            " <|constrain|>json<|message|>",
            "",
            quoted=False,
        ),
    ),
    Family(
        "muse",
        "<atem:function_calls>",
        {
            REASONING: TEXT | {"open_pattern": r"to=self<\|message\|>", "close": "<|eom|>"},
            CONTENT: TEXT | {"open_pattern": r"to=user<\|message\|>", "close": "<|eom|>"},
            CALLS: _tagged(
                ATEM_ARGUMENT,
                "</atem:parameter>",
                open_pattern=r"to=[^\s<]{1,128}<\|message\|>\s*<atem:function_calls>\s*"
                r'<atem:invoke name="(?P<name>[^"]{1,128})">',
                close_pattern=r"</atem:invoke>\s*</atem:function_calls>",
            ),
            OUTSIDE: TEXT,
        },
        "</atem:function_calls>",
        "<atem:invoke",
        ("<|start|>assistant", "<|eom|>"),
        (ATEM_ARGUMENT, "</atem:parameter>"),
    ),
    Family(
        "gemma4",
        r"<\|tool_call>call:",
        {
            REASONING: TEXT | {"open_pattern": r"<\|channel>thought\n?", "close": "<channel|>"},
            CALLS: JSON_CALLS
            | {
                "open_pattern": r"<\|tool_call>call:(?P<name>[^\s{}<>]{1,128})(?=\{)",
                "close": "<tool_call|>",
                "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
                "transform": NAMED,
            },
        },
        "<tool_call|>",
        "<|tool_call>",
    ),
    Family(
        "deepseek",
        _MARKS["call▁begin"],
        {
            CALLS: JSON_CALLS
            | {
                "open_pattern": _MARKS["call▁begin"]
                + r"\w*"
                + _MARKS["sep"]
                + r"(?P<name>[^\s<]{1,128})\s*"
                r"```(?:json)?\s*",
                "close_pattern": r"```\s*" + _MARKS["call▁end"],
                "transform": NAMED,
            }
        },
        _MARKS["calls▁end"],
        _MARKS["call▁begin"],
        (_MARKS["calls▁begin"], _MARKS["calls▁end"]),
        call_text=CallText(
            f"{_MARKS['calls▁begin']}{_MARKS['call▁begin']}function{_MARKS['sep']}",
            "\n```json\n",
            f"\n```{_MARKS['call▁end']}{_MARKS['calls▁end']}",
            quoted=False,
        ),
    ),
    Family(
        "lfm2",
        r"<\|tool_call_start\|>|<\|tool_list_start\|>",
        {
            CALLS: {
                "open": "<|tool_call_start|>",
                "close": "<|tool_call_end|>",
                "content": "text",
                "repeats": True,
            }
        },
        "<|tool_call_end|>",
        "<|tool_call_start|>",
    ),
    Family(
        "glm",
        "<arg_key>",
        {
            CALLS: _tagged(
                GLM_ARGUMENT,
                "</arg_value>",
                open_pattern=r"<tool_call>\s*(?P<name>[^\s<>]{1,128})",
                close="</tool_call>",
            )
        },
        "</tool_call>",
        "<tool_call>",
        argument=(GLM_ARGUMENT, "</arg_value>"),
        call_text=CallText(
            "<tool_call>",
            "\n",
            "</tool_call>",
            quoted=False,
            tags=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
            style="glm_xml",
        ),
    ),
    Family(
        "qwen_xml",
        "<function=",
        {
            CALLS: _tagged(
                XML_ARGUMENT,
                "</parameter>",
                lines=True,
                open_pattern=r"<tool_call>\s*<function=(?P<name>[^<>]{1,128})>",
                close_pattern=r"</function>\s*</tool_call>",
            )
        },
        "</tool_call>",
        "<tool_call>",
        argument=(XML_ARGUMENT, "</parameter>"),
        call_text=CallText(
            "<tool_call>\n<function=",
            ">\n",
            "</function>\n</tool_call>",
            quoted=False,
            tags=("<parameter=", ">\n", "\n</parameter>\n"),
            style="qwen_xml",
        ),
    ),
    HERMES,
    Family(
        "mistral",
        r"\[TOOL_CALLS\]",
        {CALLS: {"open": "[TOOL_CALLS]", "content": "json", "repeats": True}},
        opening="[TOOL_CALLS]",
        call_text=CallText('[TOOL_CALLS][{"name": ', ', "arguments": ', "}]"),
    ),
    Family(
        "llama3",
        r"<\|python_tag\|>|\"parameters\": ",
        {
            CALLS: JSON_CALLS
            | {
                "open_pattern": r"\A\s{0,16}(?:<\|python_tag\|>)?"
                r'(?=\s{0,16}\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"\s*:)'
            }
        },
        call_text=CallText('{"name": ', ', "parameters": ', "}"),
    ),
)
"""In the order in which a template is compared with them: the most specific first."""
NO_TOOLS = Family("text", "", {})
"""Answers are text, and reasoning in `<think>` if the template has such marks."""
NAMES = (*(family.name for family in FAMILIES), NO_TOOLS.name)
DEMANDING = tuple(family.name for family in FAMILIES if family.call_text is not None)
"""Families whose calls a request can demand."""


def find_family(name: str, template: str) -> Family:
    """Return the family of this name; for `auto`, the family of the chat template."""
    for family in (*FAMILIES, NO_TOOLS):
        if name == family.name or (name == "auto" and re.search(family.marks, template, re.S)):
            return family
    raise ValueError(f"chatFormat {name!r} is unknown: choose auto, {', '.join(NAMES)}")


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call that a client can run."""

    name: str
    arguments: str
    """A JSON object."""


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """The parts of an answer."""

    content: str
    reasoning: str | None = None
    calls: tuple[ParsedCall, ...] = ()
    problem: str | None = None
    """Reason why the answer is malformed. Its content is then the whole answer."""


class _Malformed(Exception):
    """A call that no client can run; the message says why."""


@dataclass
class AnswerReader:
    """Reads answers of one chat template.

    Args:
        family: family of the template.
        template: the chat template.
        prompt: the end of each prompt, which may begin the answer, as with `<think>`.
        own: response template of the checkpoint, if it has one.
    """

    family: Family
    template: str
    prompt: str
    own: Mapping[str, Any] | None = None
    reads_calls: bool = field(init=False)
    """True if calls of tools can be read."""

    def __post_init__(self) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        spec = dict(self.own) if self.own else self._spec()
        self._compiled: ResponseTemplate = load_response_template(spec)
        self.reads_calls = CALLS in self._compiled.fields
        self.reasons = any(name in self._compiled.fields for name in (REASONING, "thinking"))
        opened = self._opened()
        known = self.reasons and self.own is None and REASONING not in self.family.fields
        self.reasoning_texts: tuple[str, str] | None = None
        """Texts around the reasoning that an answer may begin with, if it is known. The first is
        empty where each prompt begins it."""
        if opened:
            self.reasoning_texts = "", THINK_END
        elif known and THINK_END not in self.prompt:
            self.reasoning_texts = THINK_START, THINK_END
        self._begun = self.prompt if self.own else opened
        self._ends_calls = self.family.call_end is None

    def _spec(self) -> dict[str, Any]:
        fields = {name: dict(part) for name, part in self.family.fields.items()}
        if REASONING not in fields and "<think>" in self.template:
            fields[REASONING] = dict(THINK)
        if CONTENT not in fields:
            fields[CONTENT] = dict(TEXT)
        return {"start_anchor_pattern": r"\A", "fields": fields}

    def _opened(self) -> str:
        """Return the reasoning that each prompt begins, or an empty text."""
        at = self.prompt.rfind("<think>")
        return self.prompt[at:] if at >= 0 and "</think>" not in self.prompt[at:] else ""

    def read(self, text: str, *, ended: bool, tools: Tools = ()) -> ParsedAnswer:
        """Return the parts of an answer.

        Args:
            text: the answer, without the token that ended it.
            ended: True if the policy ended the answer, False if it was cut.
            tools: tools that the policy may call; without any, calls stay in the content.
        """
        try:
            return self._read(text, ended, tools)
        except _Malformed as error:
            return ParsedAnswer(text, problem=str(error))
        except (ValueError, KeyError, TypeError, RecursionError, MemoryError) as error:
            reason = str(error).partition("\n")[0][:200] or type(error).__name__
            return ParsedAnswer(text, problem=f"the tool call cannot be read: {reason}")

    def first_call_end(self, text: str) -> int | None:
        """Return the place after the first whole call, or None."""
        calls = self._compiled.fields.get(CALLS)
        if calls is None or calls.open_re is None or calls.close_re is None:
            return None
        start = calls.open_re.search(text)
        end = start and calls.close_re.search(text, start.end())
        return end.end() if end else None

    def _read(self, text: str, ended: bool, tools: Tools) -> ParsedAnswer:
        from transformers.utils.chat_parsing.response_parser import ResponseParser

        called = self._compiled.fields.get(CALLS)
        typed = _with_types(tools, json_values=called is not None and called.content == "json")
        parser = ResponseParser(self._compiled, prefix=self._begun, tools=typed)
        events = parser.feed(text)
        message, last = parser.finalize()
        content = str(message.get(CONTENT, ""))
        if outside := self._undelimited(str(message.get(OUTSIDE, ""))):
            if content or message.get(REASONING) or message.get(CALLS):
                raise _Malformed(f"the answer has text outside of its channels: {outside[:80]!r}")
            content = outside
        reasoning = message.get(REASONING, message.get("thinking"))
        reasoning = reasoning.strip() if isinstance(reasoning, str) else None
        calls: tuple[ParsedCall, ...] = ()
        if tools:
            self._check_delimiters(text, [*events, *last], last, ended)
            calls = tuple(_calls(message.get(CALLS, []), tools))
            if self.family.argument is not None:
                calls = tuple(_without_space(call, tools) for call in calls)
            if self.family.opening and self.family.opening in content:
                raise _Malformed(f"{self.family.opening} begins no well-formed tool call")
        elif message.get(CALLS):
            content, reasoning = text, None
        if calls or reasoning is not None:
            content = self._undelimited(content)
        return ParsedAnswer(content, reasoning, calls)

    def _undelimited(self, text: str) -> str:
        for delimiter in self.family.dropped:
            text = text.replace(delimiter, "")
        return text.strip()

    def _check_delimiters(
        self, text: str, events: list[dict[str, Any]], last: list[dict[str, Any]], ended: bool
    ) -> None:
        """Raise `_Malformed` for a call without an end, and for text between its arguments."""
        calls = self._compiled.fields.get(CALLS)
        if calls is None:
            return
        if any(e["type"] == "region_close" and e["field"] == CALLS for e in last):
            ends = calls.close_re.finditer(text) if calls.close_re else ()
            closed = any(match.end() == len(text) for match in ends)
            if not closed and not (ended and self._ends_calls):
                raise _Malformed("the tool call has no end")
        if self.family.argument is None or self.own is not None:
            return
        opening, end = self.family.argument
        for body in _bodies(events):
            *arguments, rest = body.split(end)
            odd = next((part for part in arguments if not re.match(rf"\s*{opening}", part)), rest)
            if odd.strip():
                raise _Malformed(
                    f"the tool call has text between its arguments: {odd.strip()[:80]!r}"
                )


def _bodies(events: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the text of each call."""
    body = ""
    for event in events:
        if event["field"] != CALLS:
            continue
        if event["type"] == "region_chunk":
            body += event["text"]
        elif event["type"] == "region_close":
            yield body
            body = ""


def _calls(values: Any, tools: Tools) -> Iterator[ParsedCall]:
    """Yield the calls of an answer. Raises `_Malformed`."""
    for value in values:
        parsed = _python_calls(value) if isinstance(value, str) else value
        for call in parsed if isinstance(parsed, list) else [parsed]:
            yield _call(call, tools)


def _call(value: Any, tools: Tools) -> ParsedCall:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping):
        raise _Malformed("the tool call is not an object with name and arguments")
    name = function.get("name")
    if not isinstance(name, str) or not (NAME.fullmatch(name) or name in _names(tools)):
        raise _Malformed(f"the tool call has no valid name: {str(name)[:80]!r}")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise _Malformed("the arguments of the tool call are not a JSON object")
    if _nesting(arguments) > MAX_NESTING:
        raise _Malformed(f"the arguments are nested more than {MAX_NESTING} deep")
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise _Malformed("an argument of the tool call is not a finite number") from error
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: only its escape can be sent
        text = json.dumps(arguments)
    return ParsedCall(name, text)


def _without_space(call: ParsedCall, tools: Tools) -> ParsedCall:
    """Return a call without the space around texts that the schema lists.

    Between tags it means nothing there, and grammars of engines allow it.
    """
    named = [function for tool in tools if (function := tool.get("function"))]
    root = next((each.get("parameters") for each in named if each.get("name") == call.name), None)
    known = root.get("properties") if isinstance(root, Mapping) else None
    arguments, changed = json.loads(call.arguments), False
    for key, value in arguments.items():
        listed = listed_values(known.get(key), root) if isinstance(known, Mapping) else []
        if isinstance(value, str) and value not in listed and value.strip() in listed:
            arguments[key], changed = value.strip(), True
    if not changed:
        return call
    # Half of a surrogate pair stays an escape.
    text = json.dumps(arguments, ensure_ascii=call.arguments.isascii())
    return ParsedCall(call.name, text)


def _nesting(value: Any) -> int:
    """Return the number of objects and lists that are in each other, without recursion."""
    level, depth = [value], 0
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [
            inner for one in level for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return depth


def _with_types(tools: Tools, *, json_values: bool) -> list[dict[str, Any]]:
    """Return tools with the types of their arguments, as transformers reads them.

    It turns texts into values of these types, and follows no references.

    Args:
        json_values: arguments are JSON, where a string that the schema allows is meant as one.
    """
    typed = []
    for tool in tools:
        function = tool.get("function") or {}
        root = function.get("parameters")
        known = root.get("properties") if isinstance(root, Mapping) else None
        properties = {}
        for name, schema in known.items() if isinstance(known, Mapping) else ():
            types = types_of(schema, root)
            keeps_text = json_values and "string" in types
            properties[name] = {"type": [] if keeps_text else types}
        typed.append({"name": function.get("name"), "parameters": {"properties": properties}})
    return typed


def _names(tools: Tools) -> list[Any]:
    return [function.get("name") for tool in tools if (function := tool.get("function"))]


def _python_calls(text: str) -> list[dict[str, Any]]:
    """Return the calls of a list in Python's syntax: `[add(a=1, b='x')]`. Raises `_Malformed`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise _Malformed(f"the tool call cannot be read: {error.msg}") from error
    if not isinstance(tree, ast.List):
        raise _Malformed("the tool call is not a list of calls")
    calls = []
    for call in tree.elts:
        if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
            raise _Malformed("the tool call is not name(argument=value, ...)")
        arguments = {
            str(keyword.arg): ast.literal_eval(_JsonNames().visit(keyword.value))
            for keyword in call.keywords
        }
        calls.append({"name": ast.unparse(call.func), "arguments": arguments})
    return calls


class _JsonNames(ast.NodeTransformer):
    """Reads true, false and null of JSON, which templates write inside of objects."""

    VALUES: Mapping[str, bool | None] = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.VALUES[node.id]) if node.id in self.VALUES else node
