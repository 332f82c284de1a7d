"""Synchronous runs (`staleness.max: 0`) compute what a loop without anything at once computes.

The loop below has no queue, no gate, no actor and no second episode in flight: one response after
the other, one group after the other, one step after the other. It shares with the product the
environment, the agent, the engine's sampling and the maths of a step, which have tests of their
own. If the two differ in a bit, rollout has mixed something up: the order of groups, the seeds of
episodes, the version of the weights, the mini-batches.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from agenticrun_api import AgenticRun
from agenticrun_workers.agents import Episode
from agenticrun_workers.driver.credit import CreditAssigner
from agenticrun_workers.driver.export import export_checkpoint, first_model
from agenticrun_workers.envs import StepResult, make_env
from agenticrun_workers.inference.builder import transformers_engine
from agenticrun_workers.models.tokenizer import load_tokenizer
from agenticrun_workers.rollout.env_worker import build_agents
from agenticrun_workers.rollout.groups import EpisodeResult
from agenticrun_workers.seeds import derive
from agenticrun_workers.trainer.batch import RankBatch
from agenticrun_workers.trainer.config_translation import loss_spec, token_spec
from agenticrun_workers.trainer.strategies import build_strategy
from agenticrun_workers.types import EpisodeKey, Stream, Trajectory
from tiny_runs import InProcessAttempt, tiny_run

STEPS = 3
GROUPS, GROUP_SIZE = 4, 2
GROUPS_PER_MINI_BATCH = 2
TURNS = 3
WORDS = ("ant", "bee", "cat", "dog", "elk")


class Lottery:
    """Rewards every answer, by its first byte: so there is a gradient from the first step on."""

    instruction = "Say something."
    blocking = False

    def reset(self, seed: int, split: str) -> str:
        self._rng = random.Random(seed)
        self._turns = 0
        return self._rng.choice(WORDS)

    def step(self, action: str) -> StepResult:
        self._turns += 1
        reward = (action.encode() or b"0")[0] % 5 / 4
        return StepResult(self._rng.choice(WORDS), reward, terminated=self._turns == TURNS)

    def vocabulary(self) -> list[str]:
        return list(WORDS)


def synchronous_run() -> AgenticRun:
    return tiny_run(
        deterministic=True,
        maxSteps=STEPS,
        evalSteps=0,
        saveSteps=STEPS,
        warmup=None,
        envs=[
            {
                "tag": "Lottery",
                "type": f"{__name__}:Lottery",
                "maxSteps": TURNS,
                "maxTokensPerStep": 3,
                "agent": {"config": {"systemTemplate": ""}},
            }
        ],
        trainEnvs={"groups": GROUPS, "groupSize": GROUP_SIZE, "tags": ["Lottery"]},
        valEnvs=None,
        algorithm={"name": "grpo"},
        actorTrain={
            "training": {
                "learningRate": 0.003,
                "miniBatchSize": GROUPS_PER_MINI_BATCH * GROUP_SIZE,
                "lrSchedulerType": "cosine",
            }
        },
    )


async def train_one_after_the_other(
    run: AgenticRun, folder: Path
) -> tuple[dict[str, Tensor], list[float]]:
    """Train the run; return the weights, and each step's mean score."""
    pipeline, source = run.spec.pipeline, first_model(run)
    (spec,) = pipeline.envs
    trainer = build_strategy(pipeline, source)
    agent = build_agents(pipeline, load_tokenizer(source.tokenizer()))[spec.tag, Stream.TRAIN]
    scores: list[float] = []
    with source.folder() as model:
        engine = transformers_engine(pipeline, source, model)
        await engine.start()
    env = make_env(spec.type, spec.config)
    for step in range(STEPS):
        await engine.update_weights(one_file(dict(trainer.export_weights()), folder), step)
        played: list[Trajectory] = []
        for group in range(step * GROUPS, (step + 1) * GROUPS):
            for member in range(GROUP_SIZE):
                key = EpisodeKey(Stream.TRAIN, group, member)
                episode = Episode.seeded(pipeline.seed, key, spec.tag, 0, None)
                made = await agent.collect_trajectory(episode, env, engine.generate)
                assert isinstance(made, Trajectory)
                assert made.stop_reason.trainable, made
                played.append(made)
        results = [EpisodeResult.of(trajectory) for trajectory in played]
        scores.append(float(np.mean([result.score for result in results])))
        order = mini_batches(pipeline.seed, step + 1)
        batch = RankBatch(
            [each for groups in order for group in groups for each in members(group, played)],
            mini_batches=consecutive(order),
        )
        batch.old_logprobs = trainer.compute_log_probs(batch.samples)
        credits, _ = CreditAssigner(pipeline).assign(results, None)
        batch.compute_advantages(token_spec(pipeline), credits, 0.0, trainer.sum_over_data)
        for samples in batch.mini_batch_samples():
            trainer.train_step(samples, loss_spec(pipeline))
        trainer.policy_version = step + 1
    await engine.stop()
    return dict(trainer.export_weights()), scores


async def one_file(weights: dict[str, Tensor], folder: Path) -> AsyncIterator[Path]:
    """Yield the weights as one file."""
    file = folder / "weights.safetensors"
    save_file({name: tensor.clone().contiguous() for name, tensor in weights.items()}, file)
    yield file


def mini_batches(seed: int, version: int) -> list[list[int]]:
    """Return the groups of each optimizer step: a random split, each part in the groups' order."""
    rng = np.random.default_rng(derive(seed, "mini-batches", version, 0))
    drawn = rng.permutation(GROUPS).tolist()
    return [
        sorted(drawn[first : first + GROUPS_PER_MINI_BATCH])
        for first in range(0, GROUPS, GROUPS_PER_MINI_BATCH)
    ]


def members(group: int, played: list[Trajectory]) -> list[Trajectory]:
    return played[group * GROUP_SIZE : (group + 1) * GROUP_SIZE]


def consecutive(order: list[list[int]]) -> list[range]:
    """Return the places of each mini-batch's trajectories, which follow each other."""
    size = GROUPS_PER_MINI_BATCH * GROUP_SIZE
    return [range(n * size, (n + 1) * size) for n in range(len(order))]


async def test_a_synchronous_run_is_a_sequential_loop_bit_for_bit(tmp_path: Path) -> None:
    run = synchronous_run()
    attempt = InProcessAttempt(run, tmp_path / "out")
    await attempt.execute()
    export_checkpoint(run, str(tmp_path / "out/checkpoints"), tmp_path / "exported")
    trained = load_file(tmp_path / "exported/model.safetensors")
    expected, scores = await train_one_after_the_other(run, tmp_path)
    steps = attempt.training_steps()
    assert [steps[step]["critic/score/mean"] for step in sorted(steps)] == pytest.approx(scores)
    assert any(score for score in scores), "there is something to learn from"
    assert min(step["actor/grad_norm"] for step in steps.values()) > 0
    assert set(trained) == set(expected)
    for name, weight in expected.items():
        assert torch.equal(trained[name], weight), name
