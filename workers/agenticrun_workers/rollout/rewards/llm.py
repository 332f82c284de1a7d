"""Language model as a judge, behind an OpenAI-compatible endpoint (chat completions)."""

from __future__ import annotations

import asyncio
import json
import os
import re
from typing import Any

import aiohttp
from typing_extensions import override

from agenticrun_workers.rollout.rewards.judge import (
    Judge,
    JudgedEpisode,
    JudgeFailed,
    Judgement,
    check_template,
    register_judge,
)

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP statuses that are retried."""

NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
"""No limit per request: `rewards[].timeoutSeconds` limits the call with its retries."""

MAX_SHOWN = 200
"""Characters of an answer that an error message quotes."""


@register_judge("llm_judge")
class LLMJudge(Judge):
    """Judge that asks a language model for a number, with one request per episode.

    Args:
        base_url: endpoint without `/chat/completions`, for example http://judge:8000/v1
        model: model name at the endpoint.
        prompt: template of the user message; see `JudgedEpisode.fill`.
        system_prompt: system message; empty = none.
        score_pattern: regular expression. The score is the last group of its last match in the
            answer.
        api_key_env: environment variable with the API key on the env pods; empty = no key.
        temperature: sampling temperature of the judge.
        max_tokens: token limit of the judge's answer.
        concurrency: maximum number of concurrent requests per env worker.
        max_retries: number of retries if the endpoint is busy or does not answer.
        backoff_seconds: wait before the first retry, in seconds; doubled for each further one.
    """

    episodes_per_call: int | None = 1

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        prompt: str,
        system_prompt: str = "",
        score_pattern: str = r"(-?\d+(?:\.\d+)?)",
        api_key_env: str = "",
        temperature: float = 0.0,
        max_tokens: int = 256,
        concurrency: int = 16,
        max_retries: int = 4,
        backoff_seconds: float = 0.5,
    ) -> None:
        check_template(prompt, "prompt")
        try:
            self._pattern = re.compile(score_pattern)
        except re.error as error:
            raise ValueError(
                f"scorePattern {score_pattern!r} is no regular expression: {error}"
            ) from error
        if not self._pattern.groups:
            raise ValueError(f"scorePattern {score_pattern!r} has no group for the score")
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"baseUrl {base_url!r} does not begin with http:// or https://")
        if concurrency < 1 or max_retries < 0:
            raise ValueError("concurrency must be at least 1 and maxRetries at least 0")
        # Otherwise every episode would fail with status 401.
        if api_key_env and not os.environ.get(api_key_env):
            raise ValueError(
                f"apiKeyEnv: {api_key_env} is not set on the env pods: "
                "set it with roles.env.envFrom"
            )
        self._headers = (
            {"Authorization": f"Bearer {os.environ[api_key_env]}"} if api_key_env else {}
        )
        self._url = base_url.rstrip("/") + "/chat/completions"
        self._options = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._prompt = prompt
        self._max_retries = max_retries
        self._backoff = backoff_seconds
        self._http: aiohttp.ClientSession | None = None
        self.calls_at_once = concurrency

    @override
    async def judge(self, episodes: list[JudgedEpisode]) -> list[Judgement]:
        return list(await asyncio.gather(*map(self._judge_one, episodes)))

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def _judge_one(self, episode: JudgedEpisode) -> Judgement:
        messages = [*self._system, {"role": "user", "content": episode.fill(self._prompt)}]
        try:
            return self._score(await self._ask({**self._options, "messages": messages}))
        except JudgeFailed as failure:
            return failure

    async def _ask(self, body: dict[str, Any]) -> str:
        """Return the model's answer. Raises `JudgeFailed` after the last retry."""
        # Made in the event loop that uses it, which does not run yet in the constructor.
        if self._http is None:
            # With `trust_env` it uses the machine's proxy, as other clients of outside services.
            self._http = aiohttp.ClientSession(
                headers=self._headers, timeout=NO_TIMEOUT, trust_env=True
            )
        for attempt in range(self._max_retries + 1):
            if attempt:
                await asyncio.sleep(self._backoff * 2 ** (attempt - 1))
            try:
                async with self._http.post(self._url, json=body) as response:
                    if response.status == 200:
                        return _content(await response.text())
                    problem = f"HTTP {response.status}: {(await response.text())[:MAX_SHOWN]}"
                    # The service would refuse a retry as well.
                    if response.status not in RETRIED:
                        break
            except (aiohttp.ClientError, ConnectionError) as error:
                problem = f"{type(error).__name__}: {error}"
        raise JudgeFailed(f"{self._url}: {problem}")

    def _score(self, answer: str) -> float:
        # The last match: models reason first, and name numbers on the way.
        matches = list(self._pattern.finditer(answer))
        found = matches[-1].group(self._pattern.groups) if matches else None
        try:
            return float(found or "")
        except ValueError:
            raise JudgeFailed(
                f"no score by {self._pattern.pattern!r} in the answer {answer[:MAX_SHOWN]!r}"
            ) from None


def _content(body: str) -> str:
    """Return the answer in a chat completion. Raises `JudgeFailed` for any other body."""
    try:
        content = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError):
        content = None
    if not isinstance(content, str):
        raise JudgeFailed(f"the endpoint's answer is no chat completion: {body[:MAX_SHOWN]!r}")
    return content
