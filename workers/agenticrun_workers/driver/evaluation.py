"""Playing the validation set: during training (`Validator`), and alone (`agenticrun eval`)."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from math import comb
from typing import Any

import numpy as np

from agenticrun_api import AgenticRun, Pipeline
from agenticrun_workers.driver.actors import ActorStarter
from agenticrun_workers.driver.checkpoints import DriverState
from agenticrun_workers.driver.metrics import (
    SUCCESS_OF_TAG,
    Metrics,
    success_of,
    validation_metrics,
)
from agenticrun_workers.driver.pools import ActorPools
from agenticrun_workers.driver.progress import Requests
from agenticrun_workers.driver.start_up import together
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.launch import Launcher
from agenticrun_workers.log_once import LogOnce
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.rollout.groups import (
    EpisodeResult,
    EpisodeTask,
    RolloutBackend,
    every_trajectory,
    failures,
    tag_cycle,
)
from agenticrun_workers.types import EpisodeKey, Stream

log = logging.getLogger(__name__)


class Validator:
    """Plays the fixed validation set: the same levels in every attempt and for every policy.

    The set has `valBatchSize` episodes: groups 0, 1, 2 ... of the validation stream.

    Args:
        resumed: the driver's state in the checkpoint that the run continues from.
        transcripts: number of groups that return the text of their first episode.
        frames: return pictures of these episodes too.

    Attributes:
        best: the best mean success so far.
        baselines: val/<tag>/random_success, random_errors and warmup_success, measured once.
        last: the metrics of the last validation.
    """

    def __init__(
        self,
        backend: RolloutBackend,
        pipeline: Pipeline,
        *,
        resumed: DriverState | None = None,
        transcripts: int = 0,
        frames: bool = False,
    ) -> None:
        self._backend = backend
        self._pipeline = pipeline
        self._transcripts = transcripts
        self._frames = frames
        self._warn = LogOnce(log.warning)
        self.best = resumed.best_success if resumed else None
        self.baselines: Metrics = dict(resumed.baselines) if resumed else {}
        self.last: Metrics = {}

    def configure(self, pipeline: Pipeline) -> None:
        """Use other values of `evalSteps` and `maxSteps`."""
        self._pipeline = pipeline

    @property
    def enabled(self) -> bool:
        return self._pipeline.val_envs is not None and self._pipeline.eval_steps > 0

    def due(self, step: int) -> bool:
        """Return True every `evalSteps` steps, at step 0, and at the end."""
        return self.enabled and (
            step % self._pipeline.eval_steps == 0 or step == self._pipeline.max_steps
        )

    async def run(self) -> list[EpisodeResult]:
        """Play with the policy; return the trajectories by group and member."""
        return await self._play(random_policy=False)

    def record(self, step: int, results: list[EpisodeResult]) -> Metrics:
        """Keep the metrics of a validation; return them with baselines and the best success.

        Args:
            step: completed training steps.
            results: from `run`.
        """
        metrics = self.last = validation_metrics(results)
        # Before the first RL step: what the warm-up alone has taught.
        if step == 0:
            self.baselines |= _renamed(metrics, "warmup_success")
        success = success_of(metrics)
        if success is not None:
            self.best = success if self.best is None else max(success, self.best)
            metrics = {**metrics, "val/success/best": self.best}
        return {**self.baselines, **metrics}

    async def random_baseline(self) -> None:
        """Measure val/<tag>/random_success: random valid actions on the same levels.

        Where episodes failed, val/<tag>/random_errors is their share.
        """
        played = await self._play(random_policy=True)
        failed = Counter(result.tag for result in played if not result.trainable)
        total = Counter(result.tag for result in played)
        errors = {f"val/{tag}/random_errors": failed[tag] / total[tag] for tag in failed}
        self.baselines = _renamed(validation_metrics(played), "random_success") | errors

    async def _play(self, random_policy: bool) -> list[EpisodeResult]:
        envs = self._pipeline.val_envs
        assert envs is not None
        tags = tag_cycle(envs.shares())
        # Counted in groups, as `valEnvs.groups` is.
        running = asyncio.Semaphore(envs.groups)

        async def play(group: int) -> list[EpisodeResult]:
            async with running:
                return await asyncio.gather(
                    *(self._backend.run(task(group, member)) for member in range(envs.group_size))
                )

        def task(group: int, member: int) -> EpisodeTask:
            shown = group < self._transcripts and member == 0 and not random_policy
            return EpisodeTask(
                EpisodeKey(Stream.VALIDATION, group, member),
                tags[group % len(tags)],
                random_policy=random_policy,
                transcript=shown,
                frames=shown and self._frames,
            )

        groups = range(self._pipeline.val_batch_size // envs.group_size)
        results = [
            result
            for played in await asyncio.gather(*map(play, groups))
            for result in every_trajectory(played)
        ]
        kind = "random validation" if random_policy else "validation"
        for message in failures(kind, results):
            self._warn(message)
        return results


def _renamed(metrics: Metrics, name: str) -> Metrics:
    return {
        found[1] + name: value
        for key, value in metrics.items()
        if (found := SUCCESS_OF_TAG.fullmatch(key))
    }


Progressed = Callable[[int], None]
"""Called with the number of episodes that ended since the last call."""


@dataclass(frozen=True)
class TagResult:
    """Results of a policy in the environments of one tag."""

    levels: int
    episodes: int
    success: float | None
    """Share of episodes with a successful trajectory; None if success is not measured."""
    pass_at: dict[int, float]
    """pass@k by k: mean over levels of the probability that one of k episodes succeeds."""
    score: float
    turns: float
    response_tokens: float
    stop: dict[str, float]
    """Share of each stop reason that occurred."""
    errors: int
    """Episodes that an environment error, a judge or a time limit ended; they count as failures."""
    metrics: dict[str, float]
    """The other metrics val/<tag>/<name> of validation, by name: also the environment's own."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def pass_at(k: int, samples: int, successes: int) -> float:
    """Estimate the probability that one of k samples succeeds (Chen et al. 2021, arXiv 2107.03374).

    Unbiased: 1 - C(n - c, k) / C(n, k), the share of the k-subsets of n samples with at least one
    of the c successful ones.

    Args:
        k: at most `samples`.
        samples: n.
        successes: c.
    """
    return 1.0 - comb(samples - successes, k) / comb(samples, k)


def summarize(results: Sequence[EpisodeResult], ks: Sequence[int]) -> dict[str, TagResult]:
    """Summarize results by tag, in order of appearance."""
    by_tag: dict[str, list[EpisodeResult]] = defaultdict(list)
    for result in results:
        by_tag[result.tag].append(result)
    return {tag: _of_tag(tag, played, ks) for tag, played in by_tag.items()}


SUMMARIZED = ("success", "score", "turns", "response_length")
"""Metrics of validation that `TagResult` has under names of its own, beside stop/<reason>."""


def _of_tag(tag: str, played: list[EpisodeResult], ks: Sequence[int]) -> TagResult:
    won: dict[tuple[int, int], bool] = defaultdict(bool)
    for result in played:
        # Several trajectories of one episode: it succeeded if one of them did.
        won[result.key.group, result.key.member] |= result.metrics.get("success", 0.0) > 0
    levels: dict[int, list[bool]] = defaultdict(list)
    for (group, _), succeeded in won.items():
        levels[group].append(succeeded)
    measured = any("success" in result.metrics for result in played)
    stops = Counter(str(result.stop_reason) for result in played)
    own = f"val/{tag}/"
    metrics = {
        name.removeprefix(own): value
        for name, value in validation_metrics(played).items()
        if name.startswith(own)
    }
    return TagResult(
        levels=len(levels),
        episodes=len(won),
        success=float(np.mean(list(won.values()))) if measured else None,
        pass_at={
            k: float(np.mean([pass_at(k, len(level), sum(level)) for level in levels.values()]))
            for k in ks
        }
        if measured
        else {},
        score=metrics["score"],
        turns=metrics["turns"],
        response_tokens=metrics["response_length"],
        stop={reason: count / len(played) for reason, count in stops.most_common()},
        errors=sum(not result.stop_reason.trainable for result in played),
        metrics={
            name: value
            for name, value in metrics.items()
            if name not in SUMMARIZED and not name.startswith("stop/")
        },
    )


def evaluation_run(run: AgenticRun, model: str | None) -> AgenticRun:
    """Return the run that `evaluate` plays: groups of `eval.samples` members, `eval.generating`.

    Args:
        model: path of the weights; None takes `spec.model.path`.

    Raises:
        InvalidConfig: the run has no validation set, or there are no weights.
    """
    spec, pipeline = run.spec, run.spec.pipeline
    if pipeline.val_envs is None:
        raise InvalidConfig(
            "spec.pipeline.valEnvs",
            "evaluation plays the validation set: set valEnvs and valBatchSize",
        )
    path = model or spec.model.path
    if path is None:
        raise InvalidConfig(
            "spec.model.initialize", "has random weights: name a checkpoint of the run, or a model"
        )
    samples = pipeline.eval.samples
    levels = pipeline.val_batch_size // pipeline.val_envs.group_size
    changes: dict[str, Any] = {
        "val_envs": pipeline.val_envs.model_copy(update={"group_size": samples}),
        "val_batch_size": levels * samples,
    }
    if pipeline.eval.generating is not None:
        changes["actor_infer"] = pipeline.actor_infer.model_copy(
            update={"validation_generating": pipeline.eval.generating}
        )
        changes["envs"] = [
            env.model_copy(update={"validation_generating": None}) for env in pipeline.envs
        ]
    roles = (
        spec.roles
        if spec.roles.inference
        else spec.roles.model_copy(update={"inference": spec.roles.trainer})
    )
    return run.model_copy(
        update={
            "spec": spec.model_copy(
                update={
                    "placement": "Disaggregated",  # no trainer: the engines have the devices
                    "roles": roles,
                    "model": spec.model.model_copy(update={"path": path, "initialize": None}),
                    "pipeline": pipeline.model_copy(update=changes),
                }
            )
        }
    )


@asynccontextmanager
async def playing_actors(run: AgenticRun, launcher: Launcher) -> AsyncIterator[ActorPools]:
    """Start only engines and env workers: the engines load the weights of `spec.model`.

    Raises:
        InvalidConfig: names the field of the run that cannot work.
    """
    starter = ActorStarter(run.spec, launcher)
    pools = ActorPools(run, starter)
    pools.source.set_result(ModelSource.of(run.spec.model))
    try:
        async with together() as starts:
            starts.create_task(pools.start_env_workers())
            starts.create_task(pools.start_engines())
        await pools.connect(())
        yield pools
    finally:
        await pools.stop()
        starter.kill_all()


async def evaluate(
    run: AgenticRun, launcher: Launcher, progressed: Progressed
) -> dict[str, TagResult]:
    """Play the validation set.

    Args:
        run: from `evaluation_run`.
        launcher: starts the actors.
        progressed: called while episodes end.

    Raises:
        InvalidConfig: the spec of the run cannot work.
    """
    async with playing_actors(run, launcher) as pools:
        validator = Validator(_Counted(pools.envs, progressed), run.spec.pipeline)
        results = await Requests().unless_stopped(validator.run(), [pools.engines.failure])
    return summarize(results, run.spec.pipeline.eval.pass_at)


@dataclass
class _Counted:
    """Report the progress of an evaluation while `backend` runs its episodes."""

    backend: RolloutBackend
    progressed: Progressed

    async def run(self, task: EpisodeTask) -> EpisodeResult:
        result = await self.backend.run(task)
        self.progressed(1)
        return result
