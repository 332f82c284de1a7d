"""Tasks with the tools of an MCP server: a fake one that breaks on command, over stdin and stdout.

tests/integration/driver/test_foreign_envs.py has servers of the library, also over HTTP.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from agenticrun_workers.envs import Env, EnvCalls, EnvFault, Start, make_env, mcp
from agenticrun_workers.envs.env import EnvConfigError
from agenticrun_workers.envs.mcp import RESULT_CHARACTERS
from agenticrun_workers.seeds import VALIDATION_SEEDS
from agenticrun_workers.types import StopReason, Stream

CALLS = EnvCalls(20.0)
COMMAND = ["python", "-m", "mcp_server"]


def servers() -> list[psutil.Process]:
    """The servers of this process that have not ended."""
    found = psutil.Process().children()
    return [
        each
        for each in found
        if each.status() != psutil.STATUS_ZOMBIE and "mcp_server" in each.cmdline()
    ]


@asynccontextmanager
async def opened(**config: Any) -> AsyncIterator[Env]:
    env = make_env("mcp", {"command": COMMAND, **config})
    try:
        yield env
    finally:
        await CALLS.close(env)
        assert servers() == []


async def begin(env: Env, seed: int = 3, item: dict[str, Any] | None = None) -> Start:
    return await CALLS.reset(env, seed, Stream.TRAIN, item)


def call(name: str, **arguments: Any) -> str:
    said = json.dumps({"name": name, "arguments": arguments})
    return f"I call it: <tool_call>{said}</tool_call>"


async def test_tools_are_listed_called_and_a_final_answer_ends_the_episode() -> None:
    config = {"tools": ["echo", "fails", "big"], "rewardTool": "score", "task": "{question}!"}
    async with opened(**config) as env:
        start = await begin(env, item={"question": "Why"})
        assert start.observation == "Why!"
        assert (
            '{"name": "echo", "description": "The tool echo", "parameters": ' in start.instruction
        )
        assert "score" not in start.instruction
        said = await CALLS.step(env, call("echo", text="\U0001f642"))
        assert (said.observation, said.reward, said.terminated) == ("\U0001f642", 0.0, False)
        assert said.metrics == {
            "action_is_valid": 1.0,
            "num_actions": 1.0,
            "tool_calls": 1.0,
            "tool_errors": 0.0,
            "success": 0.0,
        }
        failed = await CALLS.step(env, call("fails"))
        assert (failed.observation, failed.metrics["tool_errors"]) == ("no such file", 1.0)
        long = await CALLS.step(env, call("big"))
        assert RESULT_CHARACTERS < len(long.observation) < RESULT_CHARACTERS + 100
        ended = await CALLS.step(env, "It is <answer> four </answer>.")
        assert ended.reward == pytest.approx(0.4)
        assert ended.terminated
        assert ended.metrics["success"] == 1.0


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (call("nothing"), "There is no tool 'nothing'"),
        (call("refuses"), "x is missing"),
        ("<tool_call>{}</tool_call>", "A tool call is"),
        ("<tool_call>[1]</tool_call>", "A tool call is"),
        ('<tool_call>{"name": null}', "A tool call is"),
        ('<tool_call>{"name": "echo", "arguments": [1]}', "not a JSON object"),
        ('<tool_call>{"name": "echo", "arguments": "{\\"text\\""}', "not a JSON object"),
        ('<tool_call>{"name": "echo", "arguments": {"text": "\\ud83d"}}', "not JSON"),
        ('<tool_call>{"name": "echo", "arguments": {"text": NaN}}', "not JSON"),
        ("<tool_call>" + '{"a":' * 5000, "not JSON"),
        ("", "neither a call nor an answer"),
        (" <answer> </answer>", "neither a call nor an answer"),
    ],
)
async def test_malformed_calls_are_invalid_actions(answer: str, reason: str) -> None:
    async with opened() as env:
        await begin(env)
        result = await CALLS.step(env, answer)
        assert reason in result.observation
        assert (result.reward, result.terminated) == (0.0, False)
        assert result.metrics["action_is_valid"] == 0.0


async def test_arguments_may_be_a_json_text_and_a_call_may_lack_its_end() -> None:
    async with opened() as env:
        await begin(env)
        said = '<tool_call>{"name": "echo", "arguments": "{\\"text\\": \\"a\\"}"}'
        assert (await CALLS.step(env, said)).observation == "a"


async def test_results_that_are_not_plain_text() -> None:
    async with opened() as env:
        await begin(env)
        shown = [
            (await CALLS.step(env, call(name))).observation
            for name in ("picture", "structured", "document", "binary", "link", "echo")
        ]
    assert shown == [
        "(image)\na caption",
        '{"a": 1}',
        "the file",
        "(resource file:///a.txt)",
        "(resource_link a.txt file:///a.txt)",
        "(no result)",
    ]


async def test_lines_on_stdout_that_are_no_messages_are_skipped() -> None:
    async with opened(command=[*COMMAND, "noisy"]) as env:
        await begin(env)
        assert (await CALLS.step(env, call("echo", text="a"))).observation == "a"


@pytest.mark.parametrize(("mode", "pages", "cursor"), [("endless", 2, 2), ("growing", 21, 21)])
async def test_a_list_of_tools_without_an_end_costs_the_episode(
    mode: str, pages: int, cursor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp, "MOST_PAGES", 20)
    message = f"without an end: after {pages} pages, its next page is '{cursor}'"
    async with opened(command=[*COMMAND, mode]) as env:
        with pytest.raises(EnvFault, match=message):
            await begin(env)


async def test_a_result_that_is_not_unicode_costs_the_episode() -> None:
    """The library cannot read half a pair of surrogates, and waits for another message."""
    async with opened() as env:
        await begin(env)
        with pytest.raises(EnvFault) as raised:
            await EnvCalls(1.0).step(env, call("broken"))
        assert raised.value.reason is StopReason.TIMEOUT


async def test_a_start_tool_gets_what_its_schema_names() -> None:
    async with opened(startTool="begin") as env:
        item = {"word": "w", "other": 1, "prompt": "p"}
        text, prompt = (await begin(env, 5, item)).observation.split("\n")
        assert text.startswith('begin {"seed": 5, "split": "train", "word": "w"} ')
        assert prompt == "p"
        validation = await CALLS.reset(env, 5 + VALIDATION_SEEDS, Stream.VALIDATION)
        assert f'"seed": {5 + VALIDATION_SEEDS}, "split": "validation"' in validation.observation


@pytest.mark.parametrize("reuse", [True, False])
async def test_a_session_is_kept_only_if_the_config_says_so(reuse: bool) -> None:
    pids = set()
    async with opened(startTool="begin", reuse=reuse) as env:
        assert getattr(env, "reusable", None) is reuse
        for seed in range(2):
            pids.add((await begin(env, seed)).observation.split()[-1])
            if not reuse:
                await CALLS.close(env)
    assert len(pids) == (1 if reuse else 2)


@pytest.mark.parametrize(
    ("tool", "reward"),
    [
        ("score", 0.2),
        ("object_score", 1.0),
        ("text_score", 0.5),
        ("truth_score", 1.0),
        ("nested_score", 0.25),
        ("point_score", 0.5),
        ("other_score", 0.5),
        ("huge_score", "1', not a number"),
        ("failed_score", "'1', not a number"),
        ("bad_score", "'very good', not a number"),
    ],
)
async def test_a_reward_is_a_number_or_an_object_with_one(tool: str, reward: float | str) -> None:
    async with opened(rewardTool=tool) as env:
        await begin(env)
        if isinstance(reward, str):
            with pytest.raises(EnvFault, match=reward):
                await CALLS.step(env, "ab")
        else:
            assert (await CALLS.step(env, "ab")).reward == pytest.approx(reward)


@pytest.mark.parametrize(("tool", "message"), [("crashes", "internal error"), ("dies", "closed")])
async def test_a_server_that_fails_costs_the_episode(tool: str, message: str) -> None:
    async with opened(reuse=True) as env:
        await begin(env)
        with pytest.raises(EnvFault, match=message) as raised:
            await CALLS.step(env, call(tool))
        assert raised.value.reason is StopReason.ENV_ERROR
        await begin(env)  # with a new server, if the old one has ended
        assert (await CALLS.step(env, call("echo", text="a"))).observation == "a"


@pytest.mark.parametrize("frozen", [False, True])
async def test_a_call_that_hangs_is_a_timeout_and_the_server_is_killed(frozen: bool) -> None:
    async with opened() as env:
        await begin(env)
        if frozen:
            os.kill(servers()[0].pid, signal.SIGSTOP)
        with pytest.raises(EnvFault) as raised:
            await EnvCalls(0.5).step(env, call("hangs"))
        assert raised.value.reason is StopReason.TIMEOUT


async def test_a_server_that_never_answers_is_a_timeout_and_is_killed() -> None:
    async with opened(command=[*COMMAND, "silent"]) as env:
        with pytest.raises(EnvFault) as raised:
            await EnvCalls(2.0).reset(env, 1, Stream.TRAIN)
        assert raised.value.reason is StopReason.TIMEOUT
        assert servers() != []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"command": ["no-such-program"]}, "no MCP server at no-such-program: FileNotFoundError"),
        ({"command": ["python", "-c", "0"]}, "no MCP server at python"),
        ({"command": COMMAND, "rewardTool": "scores"}, r"no tool scores \(it has: begin, "),
        ({"url": "http://127.0.0.1:1/mcp"}, "no MCP server at http://127.0.0.1:1/mcp"),
        ({"command": COMMAND, "task": "{question}"}, "known: start"),
    ],
)
async def test_a_server_or_a_tool_that_is_not_there_is_named(
    config: dict[str, Any], message: str
) -> None:
    env = make_env("mcp", config)
    with pytest.raises(EnvFault, match=message):
        await begin(env)
    await CALLS.close(env)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "either command"),
        ({"command": "python -m x"}, "command must be a list"),
        ({"command": ["a"], "headers": {"a": "b"}}, "headers are for url"),
        ({"url": "http://a", "cwd": "/"}, "env and cwd are for command"),
        ({"url": "mcp.example.com"}, "is not an address"),
        ({"command": ["a"], "env": {"A": "${NO_SUCH_NAME}"}}, "env: NO_SUCH_NAME is not set"),
    ],
)
def test_mistakes_in_the_config(config: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvConfigError, match=message):
        make_env("mcp", config)


async def test_random_answers_are_those_of_the_config() -> None:
    answers = [call("echo", text="7"), "8"]
    env = make_env("mcp", {"command": COMMAND, "randomAnswers": answers})
    assert await CALLS.valid_actions(env) == answers
    vocabulary = set(getattr(env, "vocabulary", list)())
    assert {"7", "8"} <= vocabulary
