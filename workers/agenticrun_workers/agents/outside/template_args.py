"""Variables of the chat template that a request sets, by name or by asking for reasoning."""

from __future__ import annotations

from typing import Any

from agenticrun_workers.agents.chat import ChatFormat
from agenticrun_workers.agents.outside.api import ChatRequest
from agenticrun_workers.agents.outside.messages import ApiError, refused

EFFORT = "reasoning_effort"
SWITCHES = ("enable_thinking", "thinking")
"""Variables with which templates turn reasoning on and off."""


def template_args(chat: ChatFormat, request: ChatRequest) -> dict[str, Any]:
    """Return the variables of the template for a request.

    Raises:
        ApiError: the template does not read one, or cannot be asked for such reasoning.
    """
    args = dict(request.template_args)
    for name in args:
        if not chat.reads(name):
            raise _refused(
                f"chat_template_kwargs.{name}", chat, "does not read this variable", "leave it out"
            )
    effort, thinks = request.effort, request.thinks
    if effort is None and thinks is None:
        return args
    switch = next((name for name in SWITCHES if chat.switches(name)), None)
    if effort == "none" and (switch is not None or not chat.reads(EFFORT)):
        effort, thinks = None, False
    if effort is not None:
        if not chat.reads(EFFORT):
            only = "leave it out" if switch is None else "send none, or leave it out"
            raise _refused(EFFORT, chat, "cannot say how much to reason", only)
        args[EFFORT] = effort
    if thinks is not None and switch is not None:
        args[switch] = thinks
    elif thinks is not None and thinks != chat.reasons:
        param = EFFORT if request.effort is not None else "thinking"
        problem = "has no reasoning" if thinks else "cannot turn reasoning off"
        raise _refused(param, chat, problem, "leave it out")
    return args


def _refused(param: str, chat: ChatFormat, problem: str, remedy: str) -> ApiError:
    return refused(param, chat.error(problem, remedy).message, "unsupported_value")
