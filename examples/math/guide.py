"""The agent and the environment of docs/math.md, in the style of AReaL's guide."""
# ruff: noqa: B007, C408, RUF059 - these lines come from the guide

import asyncio

from agenticrun_workers.agents import BundledGenerationOutputs, GenerationConfig, Prompt, ScoredSequence, register_agent
from agenticrun_workers.envs import EnvironmentService, register_env
from agenticrun_workers.envs.math import reference_answer, shared_verifier


class MathMultiTurnAgent:
    """An agent that tries several times and learns each time whether it was right."""

    def __init__(self, gconfig: GenerationConfig, tokenizer, num_turns: int = 2, my_param: float = 1.0):
        self.gconfig = gconfig.new(n=1)
        self.tokenizer = tokenizer
        self.num_turns = num_turns
        self.my_param = my_param

    async def collect_trajectory(
        self,
        prompt: Prompt,
        env: EnvironmentService,
        obs_queue: asyncio.Queue,
        act_queue: asyncio.Queue,
    ):
        """Return one trajectory for each turn."""
        await env.reset()
        qid, token_ids = prompt.qid, prompt.token_ids
        trajectories = []
        for turn in range(self.num_turns):
            await obs_queue.put((qid, token_ids, self.gconfig))
            act: BundledGenerationOutputs = await act_queue.get()
            answers = self.tokenizer.batch_decode(act.output_ids, skip_special_tokens=True)
            _, success, *_ = await env.step((qid, answers))

            feedback = None
            if success[0]:
                feedback = "Congratulations! You are correct!"
            else:
                feedback = "Unfortunately your answer is wrong. Let's try again."

            feedback = "\n" + self.tokenizer.apply_chat_template(
                [dict(content=feedback, role="user")],
                add_generation_prompt=True,
                tokenize=False,
            )
            feedback = self.tokenizer(feedback)["input_ids"]
            token_ids = act.seqs[0]
            token_ids.extend(feedback)

            reward = success[0] * self.my_param
            trajectories.append(ScoredSequence(act.seqs[0], reward, trained="last", metrics={"success": success[0]}))
        return trajectories


class MathCodeSingleStepEnv(EnvironmentService):
    """A wrapper around the reward function."""

    async def reset(self, seed=None, options=None):
        return self.item["question"]

    async def step(self, action: tuple[str, list[str]]):
        qid, answers = action
        verifier = shared_verifier(5.0)
        gold = reference_answer(self.item["answer"])
        verdicts = [await verifier.verify(gold, answer) for answer in answers]
        format_rewards = [float(verdict.right) for verdict in verdicts]
        return None, format_rewards, True, False, {}


register_agent("math-multi-turn", MathMultiTurnAgent)
register_env("math-code-single-step")(MathCodeSingleStepEnv)
