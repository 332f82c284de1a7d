"""llm_judge against a real HTTP server with correct and wrong chat completions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agenticrun_workers.rollout.rewards import (
    JudgeConfigError,
    JudgedEpisode,
    JudgeFailed,
    JudgePanel,
    make_judge,
)
from judging import episode, spec, trajectory

Reply = Callable[[web.Request], Awaitable[web.Response]]


def completion(text: str) -> web.Response:
    return web.json_response(
        {
            "object": "chat.completion",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": text}}],
        }
    )


class Endpoint:
    """Answers as `replies` says, the last one forever."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.at_once = self.most_at_once = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.headers.append(dict(request.headers))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await (self.replies.pop(0) if len(self.replies) > 1 else self.replies[0])(
                request
            )
        finally:
            self.at_once -= 1


def saying(text: str, *, seconds: float = 0.0) -> Reply:
    async def reply(_request: web.Request) -> web.Response:
        await asyncio.sleep(seconds)
        return completion(text)

    return reply


def failing(status: int, body: str = "busy") -> Reply:
    async def reply(_request: web.Request) -> web.Response:
        return web.Response(status=status, text=body)

    return reply


async def hang_up(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint()


@pytest.fixture
async def base_url(endpoint: Endpoint) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", endpoint.answer)
    async with TestServer(app) as server:
        yield str(server.make_url("/v1"))


async def ask(base_url: str, episodes: list[JudgedEpisode], **config: Any) -> list[Any]:
    config = {
        "baseUrl": base_url,
        "model": "judge-1",
        "prompt": "Rate: {answer}",
        "backoffSeconds": 0.01,
        **config,
    }
    judge = make_judge("llm_judge", config)
    try:
        return await judge.judge(episodes)
    finally:
        await judge.close()  # type: ignore[attr-defined]


async def test_it_asks_as_the_protocol_says_and_reads_the_score(
    endpoint: Endpoint, base_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    endpoint.replies = [saying("Out of 10 I give it 7.5")]
    config = {
        "systemPrompt": "You are strict.",
        "apiKeyEnv": "JUDGE_KEY",
        "temperature": 0.3,
        "maxTokens": 9,
    }
    scores = await ask(
        base_url, [episode("blue", item={"q": "colour?"})], prompt="{item[q]} {answer}", **config
    )
    assert scores == [7.5]
    assert endpoint.requests == [
        {
            "model": "judge-1",
            "temperature": 0.3,
            "max_tokens": 9,
            "messages": [
                {"role": "system", "content": "You are strict."},
                {"role": "user", "content": "colour? blue"},
            ],
        }
    ]
    assert endpoint.headers[0]["Authorization"] == "Bearer secret"


async def test_a_pattern_of_its_own_finds_the_score(endpoint: Endpoint, base_url: str) -> None:
    endpoint.replies = [saying("Step 1: fine. SCORE: -3/10. (I said 5 before.)")]
    assert await ask(base_url, [episode()], scorePattern=r"SCORE:\s*(-?\d+)") == [-3.0]


@pytest.mark.parametrize("trouble", [failing(429), failing(503), hang_up])
async def test_a_busy_or_broken_endpoint_is_asked_again(
    endpoint: Endpoint, base_url: str, trouble: Reply
) -> None:
    endpoint.replies = [trouble, trouble, saying("4")]
    assert await ask(base_url, [episode()]) == [4.0]
    assert len(endpoint.requests) == 3


async def test_it_gives_up_after_the_last_retry_and_says_what_it_saw(
    endpoint: Endpoint, base_url: str
) -> None:
    endpoint.replies = [failing(503, "overloaded")]
    (failure,) = await ask(base_url, [episode()], maxRetries=2)
    assert isinstance(failure, JudgeFailed)
    assert str(failure) == f"{base_url}/chat/completions: HTTP 503: overloaded"
    assert len(endpoint.requests) == 3


async def test_a_refusal_is_not_repeated(endpoint: Endpoint, base_url: str) -> None:
    endpoint.replies = [failing(401, "bad key")]
    (failure,) = await ask(base_url, [episode()])
    assert "HTTP 401: bad key" in str(failure)
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (saying("splendid"), "no score by .* in the answer 'splendid'"),
        (failing(200, "<html>"), "is no chat completion: '<html>'"),
        (failing(200, json.dumps({"choices": []})), "is no chat completion"),
        (
            failing(200, json.dumps({"choices": [{"message": {"content": None}}]})),
            "is no chat completion",
        ),
    ],
)
async def test_garbage_is_no_score(
    endpoint: Endpoint, base_url: str, reply: Reply, message: str
) -> None:
    endpoint.replies = [reply]
    (failure,) = await ask(base_url, [episode()])
    assert isinstance(failure, JudgeFailed)
    with pytest.raises(JudgeFailed, match=message):
        raise failure


async def test_one_bad_answer_fails_one_episode(endpoint: Endpoint, base_url: str) -> None:
    async def reply(request: web.Request) -> web.Response:
        asked = (await request.json())["messages"][-1]["content"]
        return completion("?" if asked == "Rate: bad" else "1")

    endpoint.replies = [reply]
    good, bad, also_good = await ask(base_url, [episode("a"), episode("bad"), episode("b")])
    assert (good, also_good) == (1.0, 1.0)
    assert isinstance(bad, JudgeFailed)


async def test_the_panel_keeps_to_the_concurrency_and_gives_up_a_slow_endpoint(
    endpoint: Endpoint, base_url: str
) -> None:
    endpoint.replies = [saying("1", seconds=0.05)]
    config = {"baseUrl": base_url, "model": "m", "prompt": "{answer}", "concurrency": 3}
    judge = make_judge("llm_judge", config)
    patient = JudgePanel([(spec(timeoutSeconds=60.0), judge)])
    judged = await asyncio.gather(
        *(patient.apply(trajectory(0.0), episode(str(n))) for n in range(12))
    )
    assert [j.turns[-1].reward for j in judged] == [1.0] * 12
    assert endpoint.most_at_once == 3
    endpoint.replies = [saying("1", seconds=60)]
    quick = JudgePanel([(spec(timeoutSeconds=0.5), judge)])
    late = await quick.apply(trajectory(0.0), episode("late"))
    assert late.error == "judge style: it took more than 0.5 s"
    await judge.close()  # type: ignore[attr-defined]


async def test_an_endpoint_that_is_not_there_fails_the_episode() -> None:
    (failure,) = await ask("http://127.0.0.1:9", [episode()], maxRetries=1)
    assert "ClientConnectorError" in str(failure)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"prompt": "{question}"}, "known fields are transcript, prompt, answer"),
        ({"scorePattern": "("}, "is no regular expression"),
        ({"scorePattern": r"\d+"}, "has no group for the score"),
        (
            {"apiKeyEnv": "NO_SUCH_KEY"},
            r"NO_SUCH_KEY is not set on the env pods: set it with roles\.env\.envFrom",
        ),
        ({"concurrency": 0}, "concurrency must be at least 1"),
    ],
)
async def test_a_config_that_cannot_work_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(JudgeConfigError, match=message):
        await ask("http://judge", [], **config)


async def test_a_judge_outside_is_asked_through_the_proxy_of_the_machine(
    endpoint: Endpoint, base_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, base_url.removesuffix("/v1"))
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    endpoint.replies = [saying("7")]
    assert await ask("http://judge.invalid:8000/v1", [episode()]) == [7.0]
    assert endpoint.headers[0]["Host"] == "judge.invalid:8000"
