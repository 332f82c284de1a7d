"""Metrics of a step, under ROLL's names where it has one (rl-semantics, "Metrics")."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from agenticrun_api.status import MAX_METRIC_NAME, MAX_METRICS
from agenticrun_workers.rollout.controller import Batch
from agenticrun_workers.rollout.groups import EpisodeResult
from agenticrun_workers.types import StopReason

Metrics = dict[str, float]

TELLING = (
    "val/", "rollout/score/mean", "env/", "actor/", "system/", "staleness/", "group/", "stop/", "time/step", "warmup/",
    "tokens/", "rollout/", "time/",
)  # fmt: skip
"""Which metrics go into a snapshot when there are more than it may hold: the first ones by this order of prefixes."""


NAME = re.compile(rf"[A-Za-z0-9_./@<>-]{{1,{MAX_METRIC_NAME}}}")
"""Names that a snapshot may hold; an environment may have others, which stay in metrics.jsonl."""


def rollout_metrics(batch: Batch, version: int) -> Metrics:
    """What a batch says about the policy that played it. `version` is the policy version about to be trained."""
    results = batch.results
    scores = np.array([result.score for result in results])
    ages = np.array([version - result.oldest_version for result in results])
    prompt = sum(result.tokens - result.response_tokens for result in results)
    response = sum(result.response_tokens for result in results)
    return {
        "rollout/score/mean": float(scores.mean()),
        "rollout/score/max": float(scores.max()),
        "rollout/score/min": float(scores.min()),
        "rollout/turns/mean": float(np.mean([result.turns for result in results])),
        "rollout/discarded": float(len(batch.counts.untrainable)),
        "rollout/queue_depth": float(batch.queue_depth),
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        "group/rerolled": float(batch.counts.rerolled),
        "group/dropped": float(batch.counts.dropped),
        "group/stale": float(batch.counts.stale),
        "tokens/prompt": float(prompt),
        "tokens/response": float(response),
        "tokens/response_length/mean": response / max(1, sum(result.turns for result in results)),
        "system/samples": float(len(results)),
        **_stop_reasons([*results, *batch.counts.untrainable]),
        **_of_envs("env", results),
    }


def validation_metrics(results: list[EpisodeResult]) -> Metrics:
    """Means over each tag's episodes: val/<tag>/score and what the environment measures, success above all."""
    metrics = _of_envs("val", results)
    for tag, played in _by_tag(results).items():
        metrics[f"val/{tag}/score"] = float(np.mean([result.score for result in played]))
    return metrics


def success_of(metrics: Mapping[str, float]) -> float | None:
    """Mean success over the tags of `validation_metrics`; None where no environment measures it."""
    values = [value for name, value in metrics.items() if name.startswith("val/") and name.endswith("/success")]
    return float(np.mean(values)) if values else None


def telling(metrics: Mapping[str, float]) -> Metrics:
    """At most as many finite metrics as a snapshot may hold, the most telling ones."""

    def rank(name: str) -> int:
        return next((place for place, prefix in enumerate(TELLING) if name.startswith(prefix)), len(TELLING))

    fits = [name for name, value in metrics.items() if np.isfinite(value) and NAME.fullmatch(name)]
    return {name: metrics[name] for name in sorted(fits, key=lambda name: (rank(name), name))[:MAX_METRICS]}


def _stop_reasons(results: Iterable[EpisodeResult]) -> Metrics:
    counts = Counter(result.stop_reason for result in results)
    total = max(1, counts.total())
    return {f"stop/{reason}": counts[reason] / total for reason in StopReason}


def _of_envs(prefix: str, results: list[EpisodeResult]) -> Metrics:
    """Means of what environments measure: per action for `action_*`, per episode else."""
    metrics: Metrics = {}
    for tag, played in _by_tag(results).items():
        sums: dict[str, float] = defaultdict(float)
        for result in played:
            for name, value in result.metrics.items():
                sums[name] += value
        actions = sums.get("num_actions", 0.0)
        for name, value in sums.items():
            per_action = name.startswith("action_") and actions
            metrics[f"{prefix}/{tag}/{name}"] = value / (actions if per_action else len(played))
    return metrics


def _by_tag(results: list[EpisodeResult]) -> dict[str, list[EpisodeResult]]:
    by_tag: dict[str, list[EpisodeResult]] = defaultdict(list)
    for result in results:
        by_tag[result.tag].append(result)
    return by_tag
