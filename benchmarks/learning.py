"""Measure how well the demo learns, and how much CPU it takes.

Runs the YAML's own run as a sequential loop in one process, without Ray or Kubernetes.

    python benchmarks/learning.py [RUN.yaml] [--seeds 0 1 2] [--quick] [--json FILE]
        [--set PATH=VALUE ...]

Every part but the transport is the product's: environments, agent, engine, trainer, advantages,
mini-batches and seeds. For each seed it plays the uniformly random valid policy, the policy after
the warm-up, and the trained one (greedy) on the same validation levels, which training never sees.
`--quick` trains one seed for 4 steps: a smoke test, not a result.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from record import write_record

from agenticrun_api import AgenticRun
from agenticrun_api.overrides import load_run_with
from agenticrun_workers.agents import ChatFormat, Episode, Generate, random_valid_policy
from agenticrun_workers.driver.batch_plan import plan_batch
from agenticrun_workers.driver.credit import CreditAssigner
from agenticrun_workers.driver.step import select_groups
from agenticrun_workers.envs import Env, make_env
from agenticrun_workers.inference.transformers.engine import TransformersEngine
from agenticrun_workers.models.initialize import make_model_files
from agenticrun_workers.models.pretrained import load_model
from agenticrun_workers.models.source import ModelSource, ModelSources, TokenizerSource
from agenticrun_workers.models.tokenizer import load_tokenizer
from agenticrun_workers.rollout.controller import Group
from agenticrun_workers.rollout.env_worker import build_agents, describe_envs
from agenticrun_workers.rollout.groups import EpisodeResult, tag_cycle
from agenticrun_workers.trainer.policy_rank import TrainerActor
from agenticrun_workers.trainer.rank import CRITIC, REFERENCE
from agenticrun_workers.types import EpisodeKey, Stream, Trajectory
from agenticrun_workers.weights.buckets import buckets_of

EXAMPLE = Path(__file__).parent.parent / "examples" / "frozen-lake.yaml"
BUCKET_BYTES = 64 << 20
GOAL = 0.5
"""Success on unseen maps that a seed must reach, and 3 times the random policy's."""


@dataclass
class Outcome:
    """The result of one seed."""

    seed: int
    random: float
    warmup: float
    curve: dict[int, float] = field(default_factory=dict)
    """Greedy success on the validation levels after each number of steps."""
    cpu_warmup: float = 0.0
    """Seconds of CPU, as are the others."""
    cpu_rollout: float = 0.0
    cpu_training: float = 0.0
    steps: int = 0

    @property
    def final(self) -> float:
        return self.curve[max(self.curve)]

    @property
    def passed(self) -> bool:
        return self.final >= max(GOAL, 3 * self.random)


class Trainer(TrainerActor):
    """A rank of the product's, called without Ray, on trajectories that it is given."""

    held: dict[EpisodeKey, Trajectory]

    def _fetch(self, keys: Sequence[tuple[EpisodeKey, int]]) -> list[Trajectory]:
        return [self.held[key] for key, _ in keys]


class Learner:
    """One seed's run."""

    def __init__(self, run: AgenticRun, seed: int, folder: Path) -> None:
        assert run.spec.model.initialize is not None, (
            "this benchmark is about runs that make their own model"
        )
        self._pipeline = run.spec.pipeline.model_copy(update={"seed": seed})
        initialize = run.spec.model.initialize.model_copy(update={"seed": seed})
        for name, content in make_model_files(
            initialize, describe_envs(self._pipeline), self._pipeline.sequence_length
        ).items():
            (folder / name).write_bytes(content)
        tokenizer = load_tokenizer(TokenizerSource(str(folder)))
        self._chat = ChatFormat(tokenizer)
        self._agents = build_agents(self._pipeline, tokenizer)
        self._tags = tag_cycle(self._pipeline.train_envs.shares())
        self._engine = TransformersEngine(
            lambda: load_model(str(folder)), max_length=self._pipeline.sequence_length
        )
        sources = ModelSources.of(ModelSource(str(folder)), self._pipeline)
        hosted = {CRITIC} if self._pipeline.uses_critic else set()
        hosted |= {REFERENCE} if self._pipeline.uses_reference else set()
        self._trainer = Trainer(0, 1, self._pipeline, frozenset(hosted))
        self._trainer.setup(sources, ("", 0), torch.get_num_threads())
        self._weights = folder / "weights"
        self._weights.mkdir()
        self._trainer.open_buckets(
            buckets_of(self._trainer.tensor_specs(), BUCKET_BYTES),
            str(self._weights),
            deltas=False,
        )
        self._credit = CreditAssigner(self._pipeline)

    async def learn(self) -> Outcome:
        """Warm up, then train to the last step."""
        await self._engine.start()
        began = time.process_time()
        await self._warm_up()
        warmed = time.process_time()
        outcome = Outcome(
            self._pipeline.seed,
            await self.success(random=True),
            await self.success(),
            cpu_warmup=warmed - began,
        )
        print(
            f"seed {outcome.seed}: random {outcome.random:.3f}, after warm-up {outcome.warmup:.3f}",
            flush=True,
        )
        for step in range(1, self._pipeline.max_steps + 1):
            await self._step(step, outcome)
            if step % self._pipeline.eval_steps == 0 or step == self._pipeline.max_steps:
                outcome.curve[step] = await self.success()
                spent = outcome.cpu_warmup + outcome.cpu_rollout + outcome.cpu_training
                print(
                    f"seed {outcome.seed}: step {step}, success {outcome.curve[step]:.3f}, "
                    f"{spent:.0f} s of CPU",
                    flush=True,
                )
        await self._engine.stop()
        return outcome

    async def success(self, *, random: bool = False) -> float:
        """Mean success on the validation levels."""
        played = await self._play(
            Stream.VALIDATION, range(self._pipeline.val_batch_size), 1, random=random
        )
        return float(np.mean([trajectory.metrics.get("success", 0.0) for trajectory in played]))

    async def _warm_up(self) -> None:
        warmup = self._pipeline.warmup
        for step in range(warmup.steps if warmup else 0):
            assert warmup is not None
            groups = range(step * warmup.batch_size, (step + 1) * warmup.batch_size)
            played = await self._play(Stream.WARMUP, groups, 1, random=True)
            self._trainer.held = {trajectory.key: trajectory for trajectory in played}
            self._trainer.warm_up([(key, 0) for key in self._trainer.held])
        if warmup:
            self._trainer.end_warm_up()
        if self._pipeline.uses_reference:
            self._trainer.begin_update(0)
            for written in self._trainer.export_weights():
                self._trainer.take_bucket(
                    str(self._weights / written.bucket.file), written.checksum
                )
            self._trainer.finish_update()
        await self._publish(0)

    async def _step(self, step: int, outcome: Outcome) -> None:
        began = time.process_time()
        size = self._pipeline.train_envs.group_size
        count = self._pipeline.rollout_batch_size // size
        played = await self._play(Stream.TRAIN, range((step - 1) * count, step * count), size)
        rolled_out = time.process_time()
        self._train(played, step)
        await self._publish(step)
        outcome.cpu_rollout += rolled_out - began
        outcome.cpu_training += time.process_time() - rolled_out
        outcome.steps += 1

    def _train(self, played: list[Trajectory], version: int) -> None:
        results = [EpisodeResult.of(trajectory) for trajectory in played]
        numbers = sorted({result.key.group for result in results})
        groups = tuple(
            Group(n, results[0].tag, tuple(r for r in results if r.key.group == n)) for n in numbers
        )
        groups = select_groups(self._pipeline, groups)
        results = [result for group in groups for result in group.results]
        self._trainer.held = {trajectory.key: trajectory for trajectory in played}
        [plan] = plan_batch(self._pipeline, groups, 1, version)
        scored = self._trainer.score(plan)
        credits, _ = self._credit.assign(results, scored.kl)
        self._trainer.compute_advantages(credits, self._credit.kl_coef)
        if self._pipeline.uses_critic:
            self._trainer.train_critic()
        self._trainer.train_actor(version, version > self._pipeline.critic_warmup)
        self._credit.adapt_kl(results, scored.kl)

    async def _publish(self, version: int) -> None:
        async def parts() -> AsyncIterator[Path]:
            for written in self._trainer.export_weights():
                yield self._weights / written.bucket.file

        await self._engine.update_weights(parts(), version)

    async def _play(
        self, stream: Stream, groups: Iterable[int], members: int, *, random: bool = False
    ) -> list[Trajectory]:
        keys = [EpisodeKey(stream, group, member) for group in groups for member in range(members)]
        return list(await asyncio.gather(*(self._play_one(key, random) for key in keys)))

    async def _play_one(self, key: EpisodeKey, random: bool) -> Trajectory:
        tag = self._tags[key.group % len(self._tags)]
        spec = self._pipeline.env(tag)
        env: Env = make_env(spec.type, spec.config)
        generate: Generate = (
            random_valid_policy(env, self._chat) if random else self._engine.generate
        )
        agent = self._agents[tag, key.stream]
        trajectory = await agent.collect_trajectory(
            Episode.seeded(self._pipeline.seed, key, tag), env, generate
        )
        assert isinstance(trajectory, Trajectory)
        assert trajectory.stop_reason.trainable, trajectory.error
        return trajectory


def table(outcomes: list[Outcome]) -> str:
    lines = ["seed  random  warm-up  final  best   passed  CPU s (warm-up + rollout + training)"]
    for o in outcomes:
        total = o.cpu_warmup + o.cpu_rollout + o.cpu_training
        parts = f"{total:6.0f} ({o.cpu_warmup:.0f} + {o.cpu_rollout:.0f} + {o.cpu_training:.0f})"
        best = max(o.curve.values())
        lines.append(
            f"{o.seed:4}  {o.random:6.3f}  {o.warmup:7.3f}  {o.final:5.3f}  {best:5.3f}  "
            f"{'yes' if o.passed else 'no':6}  {parts}"
        )
    return "\n".join(lines)


def figures(outcomes: list[Outcome]) -> dict[str, float]:
    result: dict[str, float] = {
        "seeds": len(outcomes),
        "seeds_passed": sum(o.passed for o in outcomes),
    }
    for o in outcomes:
        result |= {f"seed{o.seed}_random": o.random, f"seed{o.seed}_warmup": o.warmup}
        result |= {f"seed{o.seed}_step{step}": value for step, value in o.curve.items()}
        result[f"seed{o.seed}_cpu_seconds"] = round(
            o.cpu_warmup + o.cpu_rollout + o.cpu_training, 1
        )
        result[f"seed{o.seed}_cpu_seconds_per_step"] = round(
            (o.cpu_rollout + o.cpu_training) / o.steps, 3
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "run", nargs="?", type=Path, default=EXAMPLE, help="an AgenticRun with model.initialize"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true", help="one seed, 4 steps")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="change the spec, for example pipeline.maxSteps=50",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    run = load_run_with(arguments.run, arguments.set)
    if arguments.quick:
        short = ["pipeline.maxSteps=4", "pipeline.evalSteps=2", "pipeline.warmup.steps=4"]
        run = load_run_with(arguments.run, [*arguments.set, *short])
    outcomes: list[Outcome] = []
    for seed in arguments.seeds[:1] if arguments.quick else arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            outcomes.append(asyncio.run(_learn(run, seed, Path(folder))))
    print(table(outcomes))
    if arguments.json:
        write_record(arguments.json, figures(outcomes))


async def _learn(run: AgenticRun, seed: int, folder: Path) -> Outcome:
    return await Learner(run, seed, folder).learn()


if __name__ == "__main__":
    main()
