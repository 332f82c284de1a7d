"""Policy that samples valid actions uniformly at random.

Its success is a lower bound for training, and its episodes teach the answer format in warm-up.
"""

from __future__ import annotations

import numpy as np

from agenticrun_workers.agents.agent import Generate
from agenticrun_workers.agents.chat import ChatFormat
from agenticrun_workers.envs import Env, EnvCalls, EnvFault
from agenticrun_workers.types import FinishReason, Generation, GenerationRequest, StopReason


def random_valid_policy(env: Env, chat: ChatFormat, timeout: float | None = None) -> Generate:
    """Return a `Generate` that samples valid actions, deterministic in the request's seed.

    Log-probs and versions are 0. Calls raise `EnvFault` if `valid_actions` fails or takes more than
    `timeout` seconds.
    """
    calls = EnvCalls(timeout)

    async def generate(request: GenerationRequest) -> Generation:
        actions = await calls.valid_actions(env)
        if not actions:
            raise EnvFault(
                StopReason.ENV_ERROR,
                "valid_actions is empty: random play needs answers to choose from",
            )
        choice = int(np.random.default_rng(request.seed).integers(len(actions)))
        tokens_T = chat.answer(actions[choice])
        return Generation(
            tokens_T,
            np.zeros(len(tokens_T), np.float32),
            np.zeros(len(tokens_T), np.int32),
            FinishReason.STOP,
        )

    return generate
