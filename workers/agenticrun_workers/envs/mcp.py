"""`type: mcp`: a task that the policy solves with the tools of an MCP server.

An answer is a call of a tool (`tool_calls.py`), whose result is the next observation, or the final
answer, which ends the episode. The reward comes from a tool of the server that the policy does not
see (`rewardTool`), or from judges (`spec.pipeline.rewards`).

The library `mcp` speaks the protocol. Its client has to be entered and left by one task, so each
session has a task of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import string
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

from agenticrun_api.base import clean_text
from agenticrun_workers.envs.calls import one_line
from agenticrun_workers.envs.env import EnvFault, StepResult, register_env
from agenticrun_workers.envs.gym import placeholders
from agenticrun_workers.envs.python_tool import shortened
from agenticrun_workers.envs.remote import (
    Patience,
    checked_package,
    checked_url,
    uses_proxy,
    with_secrets,
)
from agenticrun_workers.envs.tool_calls import Invalid, Tool, ToolBox, as_json, as_text
from agenticrun_workers.seeds import VALIDATION_SEEDS
from agenticrun_workers.types import StopReason, Stream

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import CallToolResult

RESULT_CHARACTERS = 8_000
"""Default of `resultCharacters`: about 2,000 tokens."""

MOST_PAGES = 1_000
"""Pages of a list of tools, after which it counts as one without an end."""

FINAL = "When you are done, write the final answer, without a call."
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

INVALID_PARAMS = -32602
"""JSON-RPC's code for arguments that a tool does not accept."""


@register_env("mcp")
class McpTools:
    """An environment that plays one episode at a time.

    Args:
        command: the server's program and its arguments; it speaks over stdin and stdout. `python`
            is the one that runs this environment.
        env: environment variables of the server; `${NAME}` is one of ours.
        cwd: its working directory.
        url: address of a server that speaks streamable HTTP, instead of `command`.
        headers: of requests to it; `${NAME}` is an environment variable.
        task: template of the first observation, with the item's columns in braces. Default: the
            item's column `prompt`, below the result of `start_tool`.
        start_tool: tool that begins an episode. It gets those of seed, split, and the item's
            columns that its schema names.
        reward_tool: tool that returns the reward: a number, or an object with a number `reward`. It
            gets the same arguments, and `answer`.
        tools: tools that the policy may call. Default: all but these two.
        random_answers: answers of the random policy and of the warm-up by random play.
        reuse: keep the session for the next episode.
        result_characters: shown of a result; the middle of more is left out.
        instruction: text of the first prompt, before the list of tools.

    Metrics: success (the reward is positive), tool_calls, tool_errors, and the usual ones.
    """

    may_ignore_seeds = True

    def __init__(
        self,
        *,
        command: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        url: str | None = None,
        headers: Mapping[str, str] | None = None,
        task: str | None = None,
        start_tool: str | None = None,
        reward_tool: str | None = None,
        tools: Sequence[str] | None = None,
        random_answers: Sequence[str] = (),
        reuse: bool = False,
        result_characters: int = RESULT_CHARACTERS,
        instruction: str | None = None,
    ) -> None:
        if (url is None) == (command is None):
            raise ValueError("config needs either command (a list) or url")
        if command is not None and (isinstance(command, str) or not command):
            raise ValueError("command must be a list: the program, then its arguments")
        if url is not None and (env or cwd):
            raise ValueError("env and cwd are for command, not for url")
        if command is not None and headers:
            raise ValueError("headers are for url, not for command")
        if result_characters < 1:
            raise ValueError(f"resultCharacters must be at least 1, not {result_characters}")
        placeholders(task or "")
        checked_package("mcp.client.client", "mcp (2.3 or newer)")
        self.reusable = reuse
        self._command = None if command is None else [str(word) for word in command]
        self._environment = with_secrets(env or {}, "env")
        self._cwd = cwd
        self._url = None if url is None else checked_url(url)
        self._headers = with_secrets(headers or {})
        self._task = task
        self._start_tool, self._reward_tool = start_tool, reward_tool
        self._wanted = None if tools is None else list(tools)
        self._random_answers = list(random_answers)
        self._characters = result_characters
        self._instruction = instruction or ""
        self._item: Mapping[str, Any] = {}
        self._arguments: dict[str, Any] = {}
        self._session: _Session | None = None
        self._tools = ToolBox(())
        self._offered: dict[str, Tool] = {}

    @property
    def instruction(self) -> str:
        """The task; the tools are known after `reset`."""
        listed = [self._tools.question(), FINAL] if self._tools.names else []
        return "\n".join(filter(None, [self._instruction, *listed]))

    def set_item(self, item: Mapping[str, Any]) -> None:
        """Set the task of the next episode."""
        self._item = dict(item)

    async def reset(self, seed: int, split: Stream) -> tuple[str, dict[str, Any]]:
        """Connect, unless a session is kept, and begin the episode. Raises `EnvFault`."""
        if self._session is None or self._session.ended:
            # A server that was started again may offer other tools.
            offered = await (await self._connected()).tools()
            self._offered = {tool.name: tool for tool in offered}
            hidden = [tool for tool in (self._start_tool, self._reward_tool) if tool]
            names = self._wanted or [name for name in self._offered if name not in hidden]
            missing = [name for name in (*names, *hidden) if name not in self._offered]
            if missing:
                raise _fault(
                    f"the MCP server has no tool {', '.join(missing)} (it has: "
                    f"{', '.join(self._offered) or 'none'})"
                )
            self._tools = ToolBox(self._offered[name] for name in names)
        levels = VALIDATION_SEEDS if split is Stream.VALIDATION else 0
        self._arguments = {
            **self._item,
            "seed": seed % VALIDATION_SEEDS + levels,
            "split": split.value,
        }
        began = await self._hidden_call(self._start_tool) if self._start_tool else None
        if began is not None and began.is_error:
            raise _fault(f"startTool {self._start_tool}: {_text(began)}")
        shown = self._shown("" if began is None else _text(began))
        return shown, {"env_instruction": self.instruction}

    async def step(self, action: str) -> StepResult:
        """Call a tool, or end the episode with the final answer. Raises `EnvFault`."""
        call = self._tools.parse(action)
        if isinstance(call, Invalid):
            return _invalid(call.reason)
        if call is None:
            return await self._ended(action)
        try:
            result = await self._open_session().call(call.name, call.arguments)
        except _WrongArguments as wrong:
            return _invalid(str(wrong))
        shown = clean_text(shortened(_text(result), self._characters)) or "(no result)"
        return StepResult(shown, 0.0, False, metrics=_metrics(calls=1, errors=result.is_error))

    def valid_actions(self) -> list[str]:
        """Return the random answers of the config; the arguments of tools cannot be listed."""
        return self._random_answers

    def vocabulary(self) -> list[str]:
        """Return printable characters, and the numbers in random answers and the texts between."""
        parts = {part for text in self._random_answers for part in re.findall(r"\d+|\D+", text)}
        return [*string.printable, "<tool_call>", "</tool_call>", *sorted(parts)]

    async def close(self) -> None:
        """End the session, and the server that was started for it."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _shown(self, began: str) -> str:
        """Return the first observation."""
        item = {name: as_text(value) for name, value in self._item.items()}
        if self._task is None:
            text = "\n".join(filter(None, [began, item.get("prompt", "")]))
        else:
            try:
                text = self._task.format(**{"start": began, **item})
            except (LookupError, ValueError, TypeError, AttributeError) as error:
                known = ", ".join(["start", *item])
                raise _fault(
                    f"task {self._task!r} does not fit: {error} (known: {known})"
                ) from None
        return clean_text(shortened(text, self._characters))

    async def _ended(self, action: str) -> StepResult:
        """Return the last step, with the reward of the reward tool if there is one."""
        written = ANSWER.search(action)
        answer = (written[1] if written else action).strip()
        if not answer:
            return _invalid("This has neither a call nor an answer.")
        reward = 0.0
        if self._reward_tool:
            self._arguments["answer"] = answer
            reward = _number(await self._hidden_call(self._reward_tool))
        return StepResult("", reward, True, metrics=_metrics(success=reward > 0))

    async def _hidden_call(self, name: str) -> CallToolResult:
        """Call a tool that the policy does not see, with those arguments that its schema names."""
        known = self._offered[name].parameters.get("properties") or {}
        arguments = {key: value for key, value in self._arguments.items() if key in known}
        try:
            return await self._open_session().call(name, arguments)
        except _WrongArguments as wrong:
            raise _fault(f"{name}({as_json(arguments)[:200]}): {wrong}") from None

    def _open_session(self) -> _Session:
        if self._session is None:
            raise _fault("there is no session: reset was not called")
        return self._session

    async def _connected(self) -> _Session:
        """Connect to the server, which may just restart. Raises `EnvFault`."""
        patience = Patience()
        while True:
            await self.close()
            session = self._session = _Session(self._client)
            try:
                await session.start()
            except Exception as error:  # the library raises groups of errors of several libraries
                where = self._url or " ".join(self._command or ())
                if self._url is None or patience.over:
                    raise _fault(f"no MCP server at {where}: {_innermost(error)}") from error
                await asyncio.sleep(patience.pause())
            else:
                return session

    async def _client(self, stack: AsyncExitStack) -> Client:
        from mcp import Client, StdioServerParameters  # not at the top: it takes half a second

        if self._command is not None:
            program, *arguments = self._command
            path = {}
            if program == "python":  # this one, which finds the modules of `spec.code`
                program = sys.executable
                path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            return Client(
                StdioServerParameters(
                    command=program,
                    args=arguments,
                    env=path | self._environment,
                    cwd=self._cwd,
                    encoding_error_handler="replace",
                )
            )
        from httpx2 import AsyncClient, Timeout
        from mcp.client.streamable_http import streamable_http_client

        assert self._url is not None
        http = await stack.enter_async_context(
            AsyncClient(
                headers=self._headers,
                trust_env=uses_proxy(self._url),
                timeout=Timeout(None, connect=Patience().left),
            )
        )
        return Client(streamable_http_client(self._url, http_client=http))


class _WrongArguments(Exception):
    """The server says that the arguments of a call are wrong."""


class _Session:
    """A connection to a server, in a task of its own.

    Args:
        client: makes the client; what it enters is left with the session.
    """

    def __init__(self, client: Any) -> None:
        self._make = client
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._lost = False

    @property
    def ended(self) -> bool:
        """True if it cannot be used again: the connection or an answer is lost."""
        return self._lost or self._task is None or self._task.done()

    async def start(self) -> None:
        """Connect. Raises what the library raises."""
        self._task = asyncio.create_task(self._hold(), name="mcp-session")
        waited: set[asyncio.Future[Any]] = {self._task, self._client}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            self._task.result()

    async def tools(self) -> list[Tool]:
        """Return all tools of the server. Raises `EnvFault`."""
        found: list[Tool] = []
        cursor: str | None = None
        cursors: set[str] = set()
        while True:
            page = await self._asked(self._client.result().list_tools(cursor=cursor))
            found += [
                Tool(tool.name, tool.description or "", tool.input_schema) for tool in page.tools
            ]
            cursor = page.next_cursor
            if not cursor:
                return found
            if cursor in cursors or len(cursors) >= MOST_PAGES:
                self._lost = True
                raise _fault(
                    f"the MCP server lists its tools without an end: after {len(cursors) + 1} "
                    f"pages, its next page is {cursor[:80]!r}"
                )
            cursors.add(cursor)

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool.

        Raises:
            _WrongArguments: the server refuses the arguments.
            EnvFault: the connection is lost, or the server failed.
        """
        result: CallToolResult = await self._asked(self._client.result().call_tool(name, arguments))
        return result

    async def close(self) -> None:
        """Leave the client, which ends a server that it started, also a frozen one."""
        self._stop.set()
        if self._task is not None:
            if not self._client.done():  # it still connects
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _hold(self) -> None:
        async with AsyncExitStack() as stack:
            client = await self._make(stack)
            await stack.enter_async_context(client)
            self._client.set_result(client)
            await self._stop.wait()

    async def _asked(self, call: Any) -> Any:
        from mcp import MCPError

        try:
            return await call
        except MCPError as error:
            if error.error.code == INVALID_PARAMS:
                raise _WrongArguments(error.error.message) from None
            self._lost = True
            raise _fault(f"the MCP server: {one_line(error)}") from error
        except Exception as error:  # of the connection's libraries, or an answer of another form
            self._lost = True
            raise _fault(f"the MCP server: {_innermost(error)}") from error


def _text(result: CallToolResult) -> str:
    """Return the text of a result; of other content (an image, a sound) only its type."""
    parts = [_part(part) for part in result.content or ()]
    if not parts and result.structured_content is not None:
        return as_json(result.structured_content)
    return "\n".join(parts)


def _part(part: Any) -> str:
    """Return the text of a part of a result, or else its type and address."""
    if part.type == "text":
        return str(part.text)
    if part.type == "resource":
        return str(getattr(part.resource, "text", f"(resource {part.resource.uri})"))
    if part.type == "resource_link":
        return f"(resource_link {part.name} {part.uri})"
    return f"({part.type})"


def _number(result: CallToolResult) -> float:
    """Return the reward that a tool returned. Raises `EnvFault`.

    A server without a reward in structured content writes it as text, which may be JSON.
    """
    text = _text(result)
    found = _named(result.structured_content)
    if found is None:
        found = text.strip()
        with suppress(ValueError, RecursionError):  # a number need not be JSON: .5, +1
            found = _named(json.loads(found))
    with suppress(TypeError, ValueError, OverflowError):
        if not result.is_error:
            return float(found)
    raise _fault(f"rewardTool returned {text[:200]!r}, not a number")


def _named(found: Any) -> Any:
    """Return the reward in an object, or the value itself if it is no object."""
    while isinstance(found, Mapping):
        found = found.get("reward", found.get("result"))
    return found


def _metrics(
    valid: bool = True, success: bool = False, calls: int = 0, errors: bool | None = False
) -> dict[str, float]:
    return {
        "action_is_valid": float(valid),
        "num_actions": 1.0,
        "tool_calls": float(calls),
        "tool_errors": float(bool(errors)),
        "success": float(success),
    }


def _invalid(reason: str) -> StepResult:
    metrics = _metrics(valid=False)
    return StepResult(clean_text(reason), 0.0, False, metrics=metrics, info={"reason": reason})


def _innermost(error: BaseException) -> str:
    """Return the first error of nested groups in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return one_line(error)


def _fault(message: str) -> EnvFault:
    return EnvFault(StopReason.ENV_ERROR, message)
