"""Plays episodes of a verifiers taskset with the policy, in a Python environment of its own.

`python player.py CONFIG`, with verifiers 0.4 installed. CONFIG is JSON for `SingleAgentEnvConfig`:
the taskset, and what else its agent needs. play.py starts it once, reads its port from its output,
and posts the endpoint and the task of each episode. It ends with its standard input.
"""

import asyncio
import os
import sys
from itertools import islice
from typing import Any

import verifiers.v1 as vf
from aiohttp import web

MOST_TASKS = 10_000
"""Tasks of an infinite taskset to choose from."""
VALIDATION = 5
"""Every fifth task is for validation."""


def choose(taskset: vf.Taskset, split: str, seed: int) -> vf.Task:
    """Return the task of a seed, the same for all members of a group."""
    tasks = list(islice(taskset, MOST_TASKS))
    held_out = split == "validation"
    mine = [task for n, task in enumerate(tasks) if (n % VALIDATION == VALIDATION - 1) == held_out]
    return (mine or tasks)[seed % len(mine or tasks)]


async def play(config: vf.SingleAgentEnvConfig, order: dict[str, Any]) -> dict[str, Any]:
    """Play an episode. Return its reward, or its error."""
    env = vf.SingleAgentEnv(config)
    client = vf.EvalClientConfig(base_url=order["base_url"], api_key_var="ANY_API_KEY")
    async with env.serving():
        episode = await env.run_episode(
            choose(env.taskset, order["split"], order["seed"]),
            vf.ModelContext(model=order["model"], client=client),
        )
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        return {"error": f"the episode failed: {errors}"}
    return {"reward": float(episode.traces[0].reward)}


async def serve(config: vf.SingleAgentEnvConfig) -> None:
    """Play the episodes that are posted, until standard input ends."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(await play(config, await request.json()))

    app = web.Application()
    app.router.add_post("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    os.environ["ANY_API_KEY"] = "any"
    asyncio.run(serve(vf.SingleAgentEnvConfig.model_validate_json(sys.argv[1])))
