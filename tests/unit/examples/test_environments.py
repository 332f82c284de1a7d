"""Examples of environments: random valid answers fit the limits of the YAML.

Otherwise every episode of a run could overflow.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agenticrun_api import load_run
from agenticrun_workers.envs import HasVocabulary, StepResult, make_env
from agenticrun_workers.models.tokenizer import build_task_tokenizer, words_of
from agenticrun_workers.types import Stream

EXAMPLES = Path(__file__).parents[3] / "examples"
CHAT_TOKENS = 4
"""Around a message and its answer: roles and ends of turns."""


@pytest.mark.parametrize("name", ["sokoban", "webshop", "gymnasium", "python-tool", "mixed"])
def test_answers_and_episodes_fit(name: str) -> None:
    pipeline = load_run(EXAMPLES / f"{name}.yaml").spec.pipeline
    for spec in pipeline.envs:
        env = make_env(spec.type, spec.config)
        assert isinstance(env, HasVocabulary)
        tokenizer = build_task_tokenizer([*env.vocabulary(), *words_of(env.instruction)], 4096)
        rng = np.random.default_rng(0)
        for seed in range(5):
            observation, length = env.reset(seed, Stream.TRAIN), 0
            for _ in range(spec.max_steps):
                actions = env.valid_actions()
                assert isinstance(actions, list)
                answer = str(rng.choice(actions))
                prompt, answered = (
                    len(tokenizer.encode(str(observation))),
                    len(tokenizer.encode(answer)),
                )
                assert answered + 1 <= spec.max_tokens_per_step, answer
                turn = prompt + answered + CHAT_TOKENS
                length = turn if spec.agent.type == "step_wise" else length + turn
                assert length <= pipeline.sequence_length
                result = env.step(answer)
                assert isinstance(result, StepResult)
                if result.terminated:
                    break
                observation = result.observation
