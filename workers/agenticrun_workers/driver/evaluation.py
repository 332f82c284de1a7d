"""Evaluation: a policy plays the validation set, `pipeline.eval.samples` times each level, and nothing is trained."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import comb
from typing import Any

import numpy as np

from agenticrun_api import AgenticRun
from agenticrun_workers.driver.actors import RunCluster
from agenticrun_workers.driver.validation import Validator
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.rollout.env_pool import Players
from agenticrun_workers.rollout.groups import EpisodeResult, GroupTask

Progressed = Callable[[int], None]
"""Told how many episodes have ended since the last call."""


@dataclass(frozen=True)
class TagResult:
    """What a policy did in one kind of environment."""

    levels: int
    episodes: int
    success: float | None
    """Share of episodes with a successful trajectory; None where the environment does not measure it."""
    pass_at: dict[int, float]
    """pass@k by k: the probability that at least one of k episodes of a level succeeds, mean over the levels."""
    score: float
    turns: float
    response_tokens: float
    stop: dict[str, float]
    """Share of each stop reason that occurred."""
    errors: int
    """Episodes that the environment, a judge or a time limit broke off; they count as failures."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def pass_at(k: int, samples: int, successes: int) -> float:
    """Unbiased estimate of the probability that one of k samples succeeds (Chen et al. 2021, arXiv 2107.03374).

    1 - C(n - c, k) / C(n, k): the share of the k-subsets of n samples that hold one of the c successful ones; needs k <= n.
    """
    return 1.0 - comb(samples - successes, k) / comb(samples, k)


def summarize(results: Sequence[EpisodeResult], ks: Sequence[int]) -> dict[str, TagResult]:
    """Per tag, in order of appearance."""
    by_tag: dict[str, list[EpisodeResult]] = defaultdict(list)
    for result in results:
        by_tag[result.tag].append(result)
    return {tag: _of_tag(played, ks) for tag, played in by_tag.items()}


def _of_tag(played: list[EpisodeResult], ks: Sequence[int]) -> TagResult:
    won: dict[tuple[int, int], bool] = defaultdict(bool)
    for result in played:
        won[result.key.group, result.key.member] |= result.metrics.get("success", 0.0) > 0
    levels: dict[int, list[bool]] = defaultdict(list)
    for (group, _), succeeded in won.items():
        levels[group].append(succeeded)
    measured = any("success" in result.metrics for result in played)
    stops = Counter(str(result.stop_reason) for result in played)
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
        score=float(np.mean([result.score for result in played])),
        turns=float(np.mean([result.turns for result in played])),
        response_tokens=float(np.mean([result.response_tokens for result in played])),
        stop={reason: count / len(played) for reason, count in stops.most_common()},
        errors=sum(not result.stop_reason.trainable for result in played),
    )


def evaluation_run(run: AgenticRun, model: str | None) -> AgenticRun:
    """The run whose validation is this evaluation: groups of `eval.samples` members, `eval.generating`, weights from `model`.

    Raises:
        InvalidConfig: no validation set, or no weights.
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
                    "placement": "Disaggregated",  # nothing is trained: engines have the devices to themselves
                    "roles": roles,
                    "model": spec.model.model_copy(update={"path": path, "initialize": None}),
                    "pipeline": pipeline.model_copy(update=changes),
                }
            )
        }
    )


async def evaluate(run: AgenticRun, progressed: Progressed) -> dict[str, TagResult]:
    """Play on an initialised Ray. `run` is what `evaluation_run` returns. Raises what `RunCluster.start` and playing raise."""
    cluster = _PlayingCluster(run)
    try:
        await cluster.start()
        results = await Validator(_Counted(cluster.envs, progressed), run.spec.pipeline).run()
    finally:
        await cluster.stop()
    return summarize(results, run.spec.pipeline.eval.pass_at)


class _PlayingCluster(RunCluster):
    """Engines and environments alone: the engines load the weights themselves."""

    async def _start_trainers(self) -> None:
        model = self._run.spec.model
        self._source.set_result(ModelSource.of(model))


@dataclass
class _Counted:
    """Players that tell how far they are."""

    players: Players
    progressed: Progressed

    async def play(self, task: GroupTask) -> list[EpisodeResult]:
        """See `Players`."""
        results = await self.players.play(task)
        self.progressed(len(results))
        return results
