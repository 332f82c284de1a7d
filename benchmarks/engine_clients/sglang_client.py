"""SGLang's own benchmark client over given prompts.

Runs in SGLang's environment; see benchmarks/engines.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from types import SimpleNamespace

# SGLang's module of data sets imports a library that its server does not need. None is used here.
sys.modules["datasets"] = SimpleNamespace(load_dataset=None)  # type: ignore[assignment]

from sglang.benchmark import serving  # noqa: E402


async def main(url: str) -> None:
    """Work as stdin says (`engines.Work` as JSON); print the seconds it took."""
    work = json.load(sys.stdin)
    serving.set_global_args(
        argparse.Namespace(
            temperature=1.0,
            top_p=1.0,
            disable_ignore_eos=False,
            disable_stream=True,
            return_logprob=True,
            return_routed_experts=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            cache_report=False,
            header=None,
        )
    )
    length = work["new_tokens"]
    requests = [
        serving.RequestFuncInput(
            prompt=prompt,
            api_url=f"{url}/generate",
            prompt_len=len(prompt),
            output_len=length,
            model="",
            lora_name="",
            image_data=None,
            extra_request_body={},
        )
        for prompt in work["prompts"]
    ]
    slots = asyncio.Semaphore(work["concurrency"])

    async def one(request: serving.RequestFuncInput) -> None:
        async with slots:
            output = await serving.async_request_sglang_generate(request)
        if not output.success:
            raise RuntimeError(output.error)

    began = time.perf_counter()
    await asyncio.gather(*map(one, requests))
    print(json.dumps({"seconds": time.perf_counter() - began}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
