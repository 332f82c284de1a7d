"""vLLM's own benchmark client over given prompts.

Runs in vLLM's environment; see benchmarks/engines.py.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import aiohttp
from vllm.benchmarks.lib.endpoint_request_func import (
    RequestFuncInput,
    async_request_openai_completions,
)


async def main(url: str, model: str) -> None:
    """Work as stdin says (`engines.Work` as JSON); print the seconds it took."""
    work = json.load(sys.stdin)
    length = work["new_tokens"]
    requests = [
        RequestFuncInput(
            prompt=prompt,
            api_url=f"{url}/v1/completions",
            prompt_len=len(prompt),
            output_len=length,
            model=model,
            logprobs=0,
            ignore_eos=True,
            extra_body={"temperature": 1.0},
        )
        for prompt in work["prompts"]
    ]
    slots = asyncio.Semaphore(work["concurrency"])
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(600)
    ) as session:

        async def one(request: RequestFuncInput) -> None:
            async with slots:
                output = await async_request_openai_completions(request, session)
            if not output.success:
                raise RuntimeError(output.error)

        began = time.perf_counter()
        await asyncio.gather(*map(one, requests))
        print(json.dumps({"seconds": time.perf_counter() - began}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
