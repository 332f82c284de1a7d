"""Outside agents: how an episode ends, with which reward, and what a config must be."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import aiohttp
import numpy as np
import openai
import pytest

from agenticrun_workers.agents import AgentConfigError, AgentLimits, OutsideAgent, make_agent
from agenticrun_workers.agents.outside import agent as outside_agent
from agenticrun_workers.agents.outside import endpoint
from agenticrun_workers.agents.outside.messages import ApiError
from agenticrun_workers.envs import Env
from agenticrun_workers.launch.node import Node
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest, StopReason
from outside_agents import (
    EPISODE,
    LIMITS,
    TOKENIZER,
    Question,
    Says,
    check_token_for_token,
    client,
    play,
    say,
    session,
    user,
)
from processes import lives
from waiting import eventually, eventually_in_loop


def test_an_agent_that_fails_costs_its_episode_and_says_why(agent_of: Any) -> None:
    async def run(base_url: str, task: Any) -> float:
        await say(base_url, [user("?")])
        raise SystemExit("no luck")

    (trajectory,) = play(Says(["a"]), run=agent_of(run))
    assert (trajectory.stop_reason, trajectory.turns) == (StopReason.ENV_ERROR, ())
    assert "SystemExit: no luck" in trajectory.error


@pytest.mark.parametrize("returned", [None, "1", float("nan"), True])
def test_a_reward_must_be_a_finite_number(agent_of: Any, returned: Any) -> None:
    async def run(base_url: str, task: Any) -> Any:
        await say(base_url, [user("?")])
        return returned

    (trajectory,) = play(Says(["a"]), run=agent_of(run))
    if returned is True:  # a verdict is a number
        assert trajectory.score == 1
    else:
        assert trajectory.stop_reason is StopReason.ENV_ERROR
        assert "reward" in trajectory.error


@pytest.mark.parametrize("listed", ["", "example.com"])
def test_no_proxy_comes_between_the_agent_and_its_endpoint(
    agent_of: Any, monkeypatch: pytest.MonkeyPatch, listed: str
) -> None:
    for name in ("HTTP_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, listed)

    async def run(base_url: str, task: Any) -> float:
        await say(base_url, [user("?")])
        # Not urlopen, which would keep these proxies for all later calls in this process.
        await asyncio.to_thread(urllib.request.build_opener().open, f"{base_url}/models")
        return 1.0

    (trajectory,) = play(Says(["a"]), run=agent_of(run))
    assert (trajectory.error, trajectory.score) == ("", 1.0)
    assert os.environ["NO_PROXY"] == ",".join(filter(None, [listed, "127.0.0.1,localhost,::1"]))


def test_the_environment_or_a_function_may_give_the_reward(agent_of: Any) -> None:
    async def run(base_url: str, task: Any) -> None:
        assert (task.instruction, task.observation, task.item, task.split) == (
            "Be brief.",
            "1+1?",
            {"question": "1+1"},
            "train",
        )
        await say(base_url, task.messages)

    def counted(messages: list[Any], task: Any) -> int:
        assert [message["role"] for message in messages] == ["system", "user", "assistant"]
        return len(messages[-1]["content"])

    (trajectory,) = play(Says(["abc"]), run=agent_of(run), reward="environment")
    assert trajectory.score == pytest.approx(0.3)
    assert trajectory.metrics == {"success": 1.0}
    (trajectory,) = play(Says(["abc"]), run=agent_of(run), reward=agent_of(counted, "counted"))
    assert trajectory.score == 3


@pytest.mark.parametrize("reason", [StopReason.MAX_TURNS, StopReason.CONTEXT_OVERFLOW])
def test_an_agent_that_asks_for_too_much_is_cut_and_trained_on(
    agent_of: Any, reason: StopReason
) -> None:
    async def run(base_url: str, task: Any) -> None:
        messages: list[Any] = [user("?")]
        while True:
            messages += [(await say(base_url, messages)).choices[0].message, user("x" * 40)]

    turns, size = (2, 4000) if reason is StopReason.MAX_TURNS else (100, 100)
    limits = AgentLimits(max_turns=turns, max_tokens_per_step=20, sequence_length=size)
    policy = Says(lambda request: "a")
    (trajectory,) = play(policy, limits=limits, run=agent_of(run))
    assert (trajectory.stop_reason, trajectory.score) == (reason, 0)
    assert len(trajectory.turns) == 2
    check_token_for_token([trajectory], policy.asked)


def test_engines_that_fail_are_a_503_and_end_the_episode(agent_of: Any) -> None:
    seen: list[Any] = []

    async def run(base_url: str, task: Any) -> float:
        try:
            await say(base_url, [user("?")])
        except openai.InternalServerError as error:
            seen.append((error.status_code, error.code))
            raise
        return 1.0

    async def aborts(request: GenerationRequest) -> Generation:
        return Generation(
            np.zeros(0, np.int32),
            np.zeros(0, np.float32),
            np.zeros(0, np.int32),
            FinishReason.ABORT,
        )

    (trajectory,) = play(aborts, run=agent_of(run))  # type: ignore[arg-type]
    assert trajectory.stop_reason is StopReason.ABORTED

    async def breaks(request: GenerationRequest) -> Generation:
        raise RuntimeError("engine on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        play(breaks, run=agent_of(run))  # type: ignore[arg-type]
    assert seen in ([], [(503, "engine_error")], [(503, "engine_error")] * 2)


def test_only_the_episodes_own_url_works_and_only_while_it_is_played(agent_of: Any) -> None:
    urls: list[str] = []

    async def run(base_url: str, task: Any) -> float:
        urls.append(base_url)
        with pytest.raises(openai.NotFoundError, match="no episode"):
            await say(base_url.replace("/s/", "/s/x"), [user("?")])
        async with client(base_url) as http:
            with pytest.raises(openai.NotFoundError, match="no-such"):
                await http.chat.completions.create(model="no-such", messages=[user("?")])
            with pytest.raises(openai.NotFoundError, match="responses"):
                await http.responses.retrieve("x")
            assert [model.id async for model in http.models.list()] == ["policy"]
        await say(base_url, [user("?")])
        return 1.0

    (trajectory,) = play(Says(["a"]), run=agent_of(run))
    assert trajectory.score == 1
    with pytest.raises(openai.APIConnectionError):
        asyncio.run(say(urls[0], [user("?")]))


OTHER_ADDRESS = "127.0.0.2"
"""Not 127.0.0.1, as the address of a pod is not."""


def test_in_the_network_an_episode_needs_its_own_token(
    agent_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two episodes at once: the token of one is wrong for the other."""
    monkeypatch.setattr(outside_agent, "current_node", lambda: Node("", OTHER_ADDRESS))
    tokens: list[str] = []
    both = asyncio.Barrier(2)

    async def ask(base_url: str, key: str) -> Any:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as http:
            return await http.chat.completions.create(model="policy", messages=[user("?")])

    async def run(base_url: str, task: Any) -> None:
        assert base_url.startswith(f"http://{OTHER_ADDRESS}:")
        assert task.api_key not in base_url
        assert task.api_key not in repr(task)
        tokens.append(task.api_key)
        await both.wait()
        (other,) = set(tokens) - {task.api_key}
        for wrong in (other, "any", task.api_key[:-1]):
            with pytest.raises(openai.AuthenticationError, match="not the token") as refused:
                await ask(base_url, wrong)
            assert refused.value.code == "invalid_api_key"
        async with aiohttp.ClientSession() as http:
            async with http.post(task.reward_url, json={"reward": 9.0}) as answer:
                assert answer.status == 401
            headers = {"Authorization": f"Bearer {task.api_key}"}
            async with http.post(task.reward_url, json={"reward": 1.0}, headers=headers) as answer:
                assert answer.status == 200
        with pytest.raises(openai.APIConnectionError):
            await ask(base_url.replace(OTHER_ADDRESS, "127.0.0.1"), task.api_key)
        await ask(base_url, task.api_key)
        await both.wait()

    async def episodes() -> list[Any]:
        agent = OutsideAgent(
            tokenizer=TOKENIZER, limits=LIMITS, run=agent_of(run), reachable_from="network"
        )
        policy, env = Says(["a", "b"]), cast(Env, Question())
        playing = (agent.collect_trajectory(EPISODE, env, policy) for _ in range(2))
        return await asyncio.wait_for(asyncio.gather(*playing), 60)

    for (trajectory,) in asyncio.run(episodes()):
        assert (trajectory.error, trajectory.score) == ("", 1.0)


async def test_a_request_that_its_client_gives_up_is_given_up_in_the_engine() -> None:
    policy = Says(["a", "b"], delay=1000)
    one = session(policy)
    async with endpoint.serving(one) as address:
        url = address.url
        asking = asyncio.create_task(say(f"{url}/v1", [user("?")]))
        await eventually_in_loop(lambda: policy.begun, 60, "the engine is asked")
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await eventually_in_loop(lambda: policy.given_up, 60, "the request is given up")
        policy.delay = 0.0
        await say(f"{url}/v1", [user("?")])
    assert policy.given_up == 1
    assert len(one.recorded.answers) == 1


@pytest.mark.parametrize("kind", ["async", "thread", "command"])
def test_an_agent_that_never_ends_is_ended(agent_of: Any, kind: str, tmp_path: Path) -> None:
    ended = threading.Event()

    async def waits(base_url: str, task: Any) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.set()

    def spins(base_url: str, task: Any) -> None:
        try:
            while True:
                time.sleep(0.01)
        finally:
            ended.set()

    child = tmp_path / "child"
    command = ["sh", "-c", f"sleep 1000 & echo $! > {child}; wait"]
    config = (
        {"command": command}
        if kind == "command"
        else {"run": agent_of(waits if kind == "async" else spins)}
    )
    # A command needs time to begin its child.
    timeout = 5.0 if kind == "command" else 0.2
    (trajectory,) = play(Says([]), timeout_seconds=timeout, **config)
    assert trajectory.stop_reason is StopReason.TIMEOUT
    if kind == "command":
        pid = int(child.read_text())
        eventually(lambda: not lives(pid), 60, "what the command began is stopped")
    else:
        assert ended.wait(60)


async def test_a_command_that_is_stopped_as_it_starts_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has begun a process of its own by the time that asyncio says that it runs."""
    child = tmp_path / "child"
    command = ["sh", "-c", f"sleep 1000 & echo $! > {child}.new; mv {child}.new {child}; wait"]
    popen = subprocess.Popen

    def started(*arguments: Any, **options: Any) -> Any:
        process = popen(*arguments, **options)
        eventually(child.exists, 60, "the command runs")
        playing.cancel()
        return process

    monkeypatch.setattr(subprocess, "Popen", started)
    task = outside_agent.Task("", "?", {}, "train", 1, "policy", "http://localhost/reward")
    playing = asyncio.ensure_future(
        outside_agent.command_program(command)("http://localhost/v1", task)
    )
    with pytest.raises(asyncio.CancelledError):
        await playing
    pid = int(child.read_text())
    eventually(lambda: not lives(pid), 60, "what the command began is stopped")


async def test_an_episode_that_is_aborted_leaves_nothing_running(
    agent_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the run does it: `collect_trajectory` is cancelled while the engine samples."""
    monkeypatch.setattr(outside_agent, "PATIENCE_SECONDS", 60.0)
    urls: list[str] = []
    ended = asyncio.Event()

    async def run(base_url: str, task: Any) -> None:
        urls.append(base_url)
        try:
            await say(base_url, [user("?")])
        finally:
            ended.set()

    policy = Says(["a"], delay=1000)
    agent = OutsideAgent(tokenizer=TOKENIZER, limits=LIMITS, run=agent_of(run))
    playing = asyncio.create_task(agent.collect_trajectory(EPISODE, Question(), policy))  # type: ignore[arg-type]
    while not policy.begun:
        await asyncio.sleep(0.01)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert ended.is_set()
    assert policy.given_up == 1
    with pytest.raises(openai.APIConnectionError):
        await say(urls[0], [user("?")])


REWARDS: list[tuple[Any, str]] = [
    ([], "reward"),
    ({}, "reward"),
    ({"reward": "1"}, "reward"),
    ({"reward": float("inf")}, "reward"),
    ({"reward": 1e39}, "reward"),
    ({"reward": 10**400}, "reward"),
    ({"reward": 1, "for": "me"}, "reward"),
    ({"reward": 1, "trajectory": "no-such"}, "trajectory"),
    ({"reward": 1, "trajectory": "train-3-1-1", "choice": 1}, "trajectory"),
]


@pytest.mark.parametrize(("body", "param"), REWARDS)
async def test_a_reward_that_cannot_be_meant_is_refused(body: Any, param: str) -> None:
    one = session(Says(["a"]))
    answered = await one.chat({"model": "policy", "messages": [user("?")]})
    assert answered.id == "train-3-1-1"
    with pytest.raises(ApiError) as refused:
        one.post_reward(body)
    assert refused.value.param == param
    assert (one.reward, one.rewards) == (None, {})


SCRIPT = """
import json, os, sys, urllib.request
from openai import OpenAI
task = json.loads(os.environ["AGENTICRUN_TASK"])
answer = OpenAI().chat.completions.create(model=task["model"], messages=task["messages"])
if "fail" in sys.argv:
    print("first"); sys.exit("it went wrong")
body = json.dumps({"reward": len(answer.choices[0].message.content)}).encode()
request = urllib.request.Request(os.environ["AGENTICRUN_REWARD_URL"], body)
print(urllib.request.urlopen(request).status)
"""


def test_a_command_finds_the_endpoint_in_its_environment_and_posts_its_reward(
    tmp_path: Path,
) -> None:
    script = tmp_path / "agent.py"
    script.write_text(SCRIPT)
    policy = Says(["abcd", "x"])
    (trajectory,) = play(policy, command=[sys.executable, str(script)])
    assert trajectory.score == 4
    check_token_for_token([trajectory], policy.asked)
    (trajectory,) = play(policy, command=[sys.executable, str(script), "fail"])
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert "status 1: it went wrong" in trajectory.error
    (trajectory,) = play(policy, command=["/no/such/program"])
    assert "cannot be started" in trajectory.error


ASKS_BY_HAND = """
import json, os
from urllib.request import Request, urlopen
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "?"}]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urlopen(Request(url, body, {"Content-Type": "application/json"})).read()
urlopen(Request(os.environ["AGENTICRUN_REWARD_URL"], b'{"reward": 4}'))
"""


@pytest.mark.parametrize(
    "words",
    [
        [sys.executable, "play.py"],
        [sys.executable, "./tools/play.py"],
        ["./run.sh", "play.py"],
        ["run.sh", "tools/play.py"],
    ],
)
def test_files_of_a_command_are_looked_up_in_the_code_folder(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the run file is the first of PYTHONPATH, on a cluster that of spec.code."""
    code, here = tmp_path / "code", tmp_path / "here"
    (code / "tools").mkdir(parents=True)
    here.mkdir()
    for script in (code / "play.py", code / "tools" / "play.py"):
        script.write_text(ASKS_BY_HAND)
    (code / "run.sh").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (code / "run.sh").chmod(0o755)
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", f"{code}{os.pathsep}{tmp_path / 'packages'}")
    (trajectory,) = play(Says(["abcd"]), command=words)
    assert (trajectory.error, trajectory.score) == ("", 4)


def test_words_of_a_command_that_name_no_file_of_the_code_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("python", "play", "0.5", "config.yaml"):
        (tmp_path / name).mkdir() if name == "0.5" else (tmp_path / name).write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    seen: list[Sequence[str]] = []

    async def record(command: Sequence[str], *_: Any) -> None:
        seen.append(command)

    monkeypatch.setattr(outside_agent, "_run_command", record)
    words = [
        "python",
        "-m",
        "play",
        "--rate=0.5",
        "0.5",
        "--config=config.yaml",
        "missing.py",
        "/x",
    ]
    task = outside_agent.Task("", "", {}, "train", 0, "policy", "")
    asyncio.run(outside_agent.command_program(words)("", task))  # type: ignore[arg-type]
    changed = f"--config={tmp_path / 'config.yaml'}"
    assert seen == [[*words[:5], changed, *words[6:]]]


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({}, "run and command"),
    ({"run": "json:dumps", "command": ["x"]}, "run and command"),
    ({"run": "no_such_module:f"}, "run: "),
    ({"run": "json:no_such"}, "run: "),
    ({"run": "json:__doc__"}, "run: "),
    ({"command": "ls -l"}, "command must"),
    ({"command": []}, "command must"),
    ({"run": "json:dumps", "reward": "what"}, "reward: "),
    ({"run": "json:dumps", "timeoutSeconds": 0}, "timeoutSeconds"),
    ({"run": "json:dumps", "toolCallPattern": "("}, "toolCallPattern"),
    ({"run": "json:dumps", "reachableFrom": "everywhere"}, "reachableFrom must be machine or net"),
    ({"run": "json:dumps", "other": 1}, "other"),
]


@pytest.mark.parametrize(("config", "message"), CONFIGS)
def test_a_bad_config_is_refused_by_its_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(AgentConfigError, match=message):
        make_agent("outside", config, tokenizer=TOKENIZER, limits=LIMITS)


def test_a_user_function_that_ignores_its_cancellation_is_left_behind(
    agent_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside_agent, "PATIENCE_SECONDS", 0.1)

    async def stubborn(base_url: str, task: Any) -> None:
        for _ in range(20):
            try:
                await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                continue

    (trajectory,) = play(Says([]), timeout_seconds=0.2, run=agent_of(stubborn))
    assert trajectory.stop_reason is StopReason.TIMEOUT
