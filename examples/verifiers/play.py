"""Plays one episode of a verifiers taskset with the policy, in a Python environment of its own.

`python play.py CONFIG`, with verifiers 0.4 installed. The run starts it once for each episode
(`agent.config.command`) and says by environment variables which task, which endpoint and where the
reward goes. CONFIG is JSON for `SingleAgentEnvConfig`: the taskset, and what else its agent needs.
"""

import asyncio
import json
import os
import sys
from itertools import islice
from typing import Any
from urllib.request import Request, urlopen

import verifiers.v1 as vf

MOST_TASKS = 10_000
"""Tasks of an infinite taskset to choose from."""
VALIDATION = 5
"""Every fifth task is for validation."""

# The harness "null" only chats; the default runtime of verifiers is a cloud service.
LOCAL = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


def choose(taskset: vf.Taskset, split: str, seed: int) -> vf.Task:
    """Return the task of a seed, the same for all members of a group."""
    tasks = list(islice(taskset, MOST_TASKS))
    held_out = split == "validation"
    mine = [task for n, task in enumerate(tasks) if (n % VALIDATION == VALIDATION - 1) == held_out]
    return (mine or tasks)[seed % len(mine or tasks)]


async def play(config: dict[str, Any], task: dict[str, Any]) -> float:
    """Play the episode and return its reward."""
    env = vf.SingleAgentEnv(vf.SingleAgentEnvConfig.model_validate({"agent": LOCAL, **config}))
    client = vf.EvalClientConfig(
        base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"
    )
    async with env.serving():
        episode = await env.run_episode(
            choose(env.taskset, task["split"], task["seed"]),
            vf.ModelContext(model=task["model"], client=client),
        )
    if not episode.ok:  # the run repeats the episode
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise SystemExit(f"the episode failed: {errors}")
    return float(episode.traces[0].reward)


if __name__ == "__main__":
    reward = asyncio.run(play(json.loads(sys.argv[1]), json.loads(os.environ["AGENTICRUN_TASK"])))
    body = json.dumps({"reward": reward}).encode()
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
    }
    with urlopen(Request(os.environ["AGENTICRUN_REWARD_URL"], body, headers)):
        pass
