"""Checks of a chat format: what the template does with conversations of a few words.

Env workers make them when a run starts, and `agenticrun check-model` prints them.
"""

from __future__ import annotations

import json
import logging
import re
from contextlib import suppress
from typing import Any

from agenticrun_workers.agents.chat import ChatFormat, ChatTemplateError, Message
from agenticrun_workers.findings import Finding, Report, Verdict, failed, not_checked, ok, warning

log = logging.getLogger(__name__)

TEMPLATE = "set spec.model.chatTemplate to a template that writes earlier messages unchanged"

SWITCHES = {
    "enable_thinking": (True, False),
    "low_effort": (True, False),
    "medium_effort": (True, False),
    "reasoning_effort": ("low", "medium", "high"),
}
"""Variables of templates that change how much a model thinks, with values to try."""

KEPT = "earlierReasoning: Keep keeps it"

MARK = re.compile(r"<\|[^<>|\s]+\|?>|<[^<>|\s]+\|>|<(?:start|end)_of_turn>")
"""Texts that are special tokens in the templates of all families."""

SYSTEM: Message = {"role": "system", "content": "INSTRUCTION"}
ASKED: Message = {"role": "user", "content": "QUESTION 1"}
ANSWERED: Message = {"role": "assistant", "content": "ANSWER"}
ASKED_AGAIN: Message = {"role": "user", "content": "QUESTION 2"}
REASONED: Message = {**ANSWERED, "reasoning_content": "BECAUSE"}
ARGUMENTS: dict[str, Any] = {"count": 1, "text": "1", "flag": True, "items": [1, 2]}
TOOL: Message = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks up.",
        "parameters": {
            "type": "object",
            "properties": {
                "count": {"type": "integer", "description": "Number."},
                "text": {"type": "string", "description": "Text."},
                "flag": {"type": "boolean", "description": "Flag."},
                "items": {
                    "type": "array",
                    "items": {"type": "integer"},
                    "description": "Numbers.",
                },
            },
            "required": ["text"],
        },
    },
}
CALL: Message = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "lookup", "arguments": ARGUMENTS},
}
CALLED: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT: Message = {"role": "tool", "tool_call_id": "call00001", "content": "RESULT 42"}


def check_chat(chat: ChatFormat) -> Report:
    """Return what a template can express. Failures make training on it wrong."""
    checks = {
        "two turns": _two_turns,
        "system role": _system_role,
        "thinking": _thinking,
        "tool calls": _tool_calls,
        "special tokens": _special_tokens,
    }
    reader = ", by the model's response_template" if chat.own_reader else ""
    findings = {"family": ok(chat.family.name + reader)}
    for name, check in checks.items():
        try:
            findings[name] = check(chat)
        except ChatTemplateError as error:
            findings[name] = failed(error.message, TEMPLATE)
    findings["stop tokens"] = ok(" ".join(map(chat.shown_token, chat.stop_tokens)))
    return Report(findings)


def require_chat(chat: ChatFormat) -> None:
    """Raise `ChatTemplateError` for the first failed check, and log warnings."""
    report = check_chat(chat)
    for name, finding in report.of(Verdict.FAILED).items():
        raise chat.error(f"fails the check of {name} ({finding.found})", finding.advice)
    for name, finding in report.of(Verdict.WARNING).items():
        log.warning("the model's %s: %s; %s", name, finding.found, finding.advice)


def _two_turns(chat: ChatFormat) -> Finding:
    """Compare pieces with the whole conversation, after one turn and after two."""
    begun = ""
    for past in ([SYSTEM, ASKED], [SYSTEM, ASKED, ANSWERED, ASKED_AGAIN]):
        whole = chat.render([*past, ANSWERED, ASKED_AGAIN], prompt=True)
        piece = chat.after_answer([ASKED_AGAIN])
        before = whole.removesuffix(piece)
        if before == whole or not before.endswith("ANSWER"):
            return failed(f"the template writes {whole!r}, which does not end {piece!r}", TEMPLATE)
        if not _same_tokens(chat, before, piece):
            return failed(f"the tokens of {piece!r} depend on the text before it", TEMPLATE)
        first = chat.render(past, prompt=True)
        begun = begun or _difference(first, whole)
    if begun:
        return ok(
            f"equal to the whole but for {begun!r}: the template leaves it out of earlier answers, "
            + KEPT
        )
    return ok("equal to the whole conversation")


def _same_tokens(chat: ChatFormat, before: str, piece: str) -> bool:
    """Return True if the tokens of two texts are those of both together.

    A tokenizer of words cannot encode the texts of the checks, and splits at each word anyway.

    Raises:
        ChatTemplateError: the tokenizer refuses a text for another reason.
    """
    try:
        parts = [*chat.encode(before).tolist(), *chat.encode(piece).tolist()]
        return bool(parts == chat.encode(before + piece).tolist())
    except Exception as error:  # tokenizers raises plain ones
        if "[UNK]" in str(error):  # the tokenizer of a tiny model, which has whole words only
            return True
        raise chat.error(f"{before + piece!r} cannot be tokenised: {error}", TEMPLATE) from error


def _difference(first: str, whole: str) -> str:
    """Return the part of a prompt's end that the whole conversation lacks."""
    size = next(
        (n for n, (a, b) in enumerate(zip(first, whole, strict=False)) if a != b), len(first)
    )
    return first[size:]


def _system_role(chat: ChatFormat) -> Finding:
    text = chat.render([SYSTEM, ASKED], prompt=True)
    if "INSTRUCTION" not in text:
        return failed("instructions of environments are left out", TEMPLATE)
    return ok("yes" if chat.system_role else "none: the instruction joins the first user message")


def _thinking(chat: ChatFormat) -> Finding:
    if not chat.reasons:
        return ok("none")
    switches = [
        name
        for name in SWITCHES
        if re.search(rf"\b{name}\b", chat.template) and _changes(chat, name)
    ]
    found = f"switched by {', '.join(switches)}" if switches else "without a switch"
    latest = chat.render([ASKED, REASONED], prompt=False)
    if "BECAUSE" not in latest:
        return ok(f"{found}; the template never writes reasoning, {KEPT}")
    if problem := _unread(chat, latest):
        return failed(problem, "set spec.model.chatFormat")
    if not chat.hides_reasoning([ASKED_AGAIN]):
        return ok(f"{found}; kept in earlier turns")
    shows_results = chat.renders_calls and chat.shows_tools([TOOL])
    after_call = shows_results and chat.hides_reasoning([RESULT], [CALL], [TOOL])
    after = "the next message" if after_call else "the next question"
    return ok(f"{found}; the template drops it at {after}, {KEPT}")


def _changes(chat: ChatFormat, name: str) -> bool:
    """Return True if a variable of the template changes prompts."""
    prompts = set()
    for value in SWITCHES[name]:
        with suppress(ChatTemplateError):  # a value that this template does not know
            variables: dict[str, Any] = {name: value}
            prompts.add(chat.render([SYSTEM, ASKED], prompt=True, **variables))
    return len(prompts) > 1


def _unread(chat: ChatFormat, latest: str) -> str:
    """Return what is wrong with the parts that are read from an answer with reasoning."""
    begun = chat.render([ASKED], prompt=True)
    answer = latest.removeprefix(begun)
    if answer == latest:  # the template writes the beginning of an answer in another way
        return ""
    for token in chat.stop_tokens:
        answer = answer.partition(chat.shown_token(token))[0]
    parsed = chat.parse(answer, ended=True)
    if (parsed.reasoning, parsed.content) == ("BECAUSE", "ANSWER"):
        return ""
    return f"{answer!r} is read as reasoning {parsed.reasoning!r} and content {parsed.content!r}"


def _tool_calls(chat: ChatFormat) -> Finding:
    if not chat.shows_tools([TOOL]):
        return not_checked("the template shows no tools: requests with tools are refused")
    if not chat.reads_calls:
        return warning(
            "the format of calls is not known: requests with tools are refused",
            "set spec.model.chatFormat",
        )
    if not chat.renders_calls:
        return warning(
            "calls are read; the template leaves them out of messages that no recorded answer is",
            "agents must send answers back unchanged",
        )
    piece = chat.after_answer([RESULT], [CALL], [TOOL])
    whole = chat.render([ASKED, CALLED, RESULT], prompt=True, tools=[TOOL])
    before = whole.removesuffix(piece)
    if "RESULT 42" not in piece or before == whole:
        return failed(f"the template writes {whole!r}, which does not end {piece!r}", TEMPLATE)
    answer = before.removeprefix(chat.render([ASKED], prompt=True, tools=[TOOL]))
    if answer == before:
        answer = before.partition("QUESTION 1")[2]
    parsed = chat.parse(answer, ended=True, tools=[TOOL])
    read = [(call.name, json.loads(call.arguments)) for call in parsed.calls]
    if read != [("lookup", ARGUMENTS)]:
        return failed(
            f"the call in {answer!r} is read as {read} ({parsed.problem})",
            "set spec.model.chatFormat",
        )
    return ok(f"read as written, results shown; {_parallel(chat)}")


def _special_tokens(chat: ChatFormat) -> Finding:
    """Check that what delimits messages in a prompt is one token each."""
    text = chat.render([SYSTEM, ASKED, ANSWERED, ASKED_AGAIN], prompt=True)
    marks = dict.fromkeys(MARK.findall(text))
    split = [mark for mark in marks if not _is_one_token(chat, mark)]
    if split:
        return failed(
            f"the template writes {', '.join(split)}, which the tokenizer splits into several",
            "use the tokenizer that belongs to the template, or set spec.model.chatTemplate",
        )
    return ok(f"{', '.join(marks)}: one token each" if marks else "the template writes none")


def _is_one_token(chat: ChatFormat, text: str) -> bool:
    try:
        return len(chat.encode(text)) == 1
    except Exception:  # tokenizers raises plain ones, for words that it does not know
        return False


def _parallel(chat: ChatFormat) -> str:
    second = {
        **CALL,
        "id": "call00002",
        "function": {"name": "lookup", "arguments": {"text": "SECOND"}},
    }
    results = [RESULT, {**RESULT, "tool_call_id": "call00002"}]
    called = {**CALLED, "tool_calls": [CALL, second]}
    with suppress(ChatTemplateError):
        if "SECOND" in chat.render([ASKED, called, *results], prompt=True, tools=[TOOL]):
            return "several calls per answer"
    return "one call per answer"
