"""Multi-turn math agent of AReaL's guide: the policy tries again after a wrong answer.

Each answer is a trajectory of its own, with the whole conversation before it as the prompt. The
reward of answer k is R_k, as in AReaL:

    r_k = (1 - rewardBias) * rewardScaling     if answer k is right
          (-1 - rewardBias) * rewardScaling    otherwise
    R_k = r_k + turnLevelDiscount * R_(k+1)

An episode ends with the first right answer or after `numTurns` answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from agenticrun_workers.agents.chat import ChatFormat
from agenticrun_workers.agents.queued import Request
from agenticrun_workers.agents.queued_types import (
    BundledGenerationOutputs,
    EpisodeEnded,
    GenerationConfig,
    Prompt,
    ScoredSequence,
)
from agenticrun_workers.agents.registry import register_agent
from agenticrun_workers.envs.service import EnvironmentService

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class MathMultiTurnAgent:
    """Agent that answers a math problem until it is right or out of turns.

    It needs the environment `math_single_step` or another service: `step((qid, answers))` must
    return one success flag per answer.

    Args:
        gconfig: sampling options of each answer; n is always 1.
        num_turns: maximum number of answers per episode, at most `envs[].maxSteps`.
        reward_scaling, reward_bias, turn_level_discount: see the module's docstring.
        wrong_template: user message after a wrong answer.
    """

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase,
        gconfig: GenerationConfig,
        num_turns: int = 5,
        reward_scaling: float = 1.0,
        reward_bias: float = 0.0,
        turn_level_discount: float = 1.0,
        wrong_template: str = "Unfortunately your answer is wrong. Let's try again.",
    ) -> None:
        if num_turns < 1:
            raise ValueError(f"numTurns must be at least 1, not {num_turns}")
        if not 0 <= turn_level_discount <= 1:
            raise ValueError(f"turnLevelDiscount must be in [0, 1], not {turn_level_discount}")
        self.chat = ChatFormat(tokenizer)
        if self.chat.drops_between_turns:
            raise ValueError(
                "its prompts continue earlier answers: set spec.model.earlierReasoning: Keep"
            )
        self.gconfig = gconfig.new(n=1)
        self.num_turns = num_turns
        self.reward_scaling = reward_scaling
        self.reward_bias = reward_bias
        self.turn_level_discount = turn_level_discount
        self.feedback = wrong_template

    async def collect_trajectory(
        self,
        prompt: Prompt,
        env: EnvironmentService,
        obs_queue: asyncio.Queue[Request],
        act_queue: asyncio.Queue[BundledGenerationOutputs],
    ) -> list[ScoredSequence]:
        """Run one episode and return one trajectory per answer."""
        await env.reset()
        acts: list[BundledGenerationOutputs] = []
        rewards: list[float] = []
        token_ids, success = prompt.token_ids, False
        for _ in range(self.num_turns):
            await obs_queue.put((prompt.qid, token_ids, self.gconfig))
            try:
                acts.append(await act_queue.get())
            except EpisodeEnded:  # no room for another answer
                if not acts:
                    raise
                break
            _, (right,), *_ = await env.step((prompt.qid, self.answers(acts[-1])))
            success = bool(right)
            rewards.append(((success - 0.5) * 2 - self.reward_bias) * self.reward_scaling)
            if success:
                break
            token_ids = (
                acts[-1].seqs[0]
                + self.chat.next(self.feedback, ended=not acts[-1].no_eos[0]).tolist()
            )
        metrics = {"success": float(success), "num_answers": float(len(acts))}
        returns = self.returns(rewards)
        return [
            ScoredSequence(act.seqs[0], reward, trained="last", metrics=metrics)
            for act, reward in zip(acts, returns, strict=True)
        ]

    def answers(self, act: BundledGenerationOutputs) -> list[str]:
        """Return the text of each sample."""
        return [self.chat.text(np.asarray(output, np.int32)) for output in act.output_ids]

    def returns(self, rewards: Sequence[float]) -> list[float]:
        """Return R_k for each turn k."""
        backwards = accumulate(
            reversed(rewards), lambda later, reward: reward + self.turn_level_discount * later
        )
        return list(backwards)[::-1]


register_agent("math_multi_turn", MathMultiTurnAgent)
