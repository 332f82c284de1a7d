"""Metrics of a step, under ROLL's names where it has one (docs/metrics.md explains each)."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from agenticrun_workers.rollout.controller import Batch
from agenticrun_workers.rollout.groups import EpisodeResult, every_trajectory
from agenticrun_workers.tracing import span
from agenticrun_workers.types import StopReason
from agenticrun_workers.weights.transports import Transport

if TYPE_CHECKING:
    from agenticrun_workers.weights.sync import SyncReport

Metrics = dict[str, float]


def rollout_metrics(batch: Batch, version: int) -> Metrics:
    """Return the metrics of a batch before it is trained on.

    Args:
        version: the policy version that is about to be trained.
    """
    results, stale = batch.results, every_trajectory(batch.counts.stale_episodes)
    response = sum(result.response_tokens for result in results)
    turns_K = np.concatenate([result.response_tokens_K for result in results])
    good, bad = _by_tag(results), _by_tag(batch.counts.untrainable)
    return {
        **_spread("rollout/score", [result.score for result in results]),
        **_spread("rollout/turns", [result.turns for result in results]),
        **_success("rollout/success/mean", results),
        "rollout/discarded": float(len(batch.counts.untrainable)),
        "rollout/queue_depth": float(batch.queue_depth),
        # Also of episodes that were thrown away: they have waited, too.
        "rollout/memory_wait_seconds": sum(
            result.memory_wait for result in (*results, *batch.counts.untrainable, *stale)
        ),
        **_ages(results, version),
        "rollout/aborted_tokens": float(batch.counts.aborted_tokens),
        "rollout/stale": float(len(batch.counts.stale_episodes)),
        "rollout/stale_tokens": float(sum(result.response_tokens for result in stale)),
        "group/filtered": float(batch.counts.filtered),
        "group/length_bias": batch.counts.length_bias,
        "group/rerolled": float(batch.counts.rerolled),
        "group/dropped": float(batch.counts.dropped),
        "group/stale": float(batch.counts.stale),
        "group/evicted_envs": float(len(batch.evicted)),
        # The share of episodes that cannot be trained on, for tags with such ones.
        **{
            f"group/error_rate/{tag}": len(failed) / (len(failed) + len(good[tag]))
            for tag, failed in bad.items()
        },
        # Everything that the policy did not sample, observations included.
        "tokens/prompt": float(sum(result.tokens for result in results) - response),
        "tokens/response": float(response),
        **_spread(
            "tokens/prompt_length", [result.tokens - result.response_tokens for result in results]
        ),
        **_spread("tokens/response_length", [result.response_tokens for result in results]),
        **_spread("tokens/turn_response_length", turns_K),
        "system/samples": float(sum(result.samples for result in results)),
        **_stop_reasons([*results, *batch.counts.untrainable, *stale]),
        **_of_envs("env", results),
        **_judge_failures(batch.counts.untrainable),
    }


def validation_metrics(results: list[EpisodeResult]) -> Metrics:
    """Return means over the episodes of each tag, and over all episodes."""
    metrics = _of_envs("val", results)
    for tag, played in _by_tag(results).items():
        metrics[f"val/{tag}/turns"] = _mean([result.turns for result in played], played)
        metrics[f"val/{tag}/response_length"] = _mean(
            [result.response_tokens for result in played], played
        )
        metrics |= {
            f"val/{tag}/{name}": value for name, value in _stop_reasons(played).items() if value
        }
    metrics["val/score/mean"] = _mean([result.score for result in results], results)
    # Absent, and not 0, where nothing measures success: 0 would look like failure.
    success = success_of(metrics)
    return metrics if success is None else {**metrics, "val/success/mean": success}


SUCCESS_OF_TAG = re.compile(r"(val/[^/]+/)success")
"""Not a metric of an environment's own, such as val/<tag>/easy/success."""


def success_of(metrics: Mapping[str, float]) -> float | None:
    """Return the mean success over tags; None if no environment measures success.

    Args:
        metrics: from `validation_metrics`.
    """
    values = [value for name, value in metrics.items() if SUCCESS_OF_TAG.fullmatch(name)]
    return float(np.mean(values)) if values else None


class Stopwatch:
    """Adds up the seconds that each phase of a step takes. A trace has a span of each."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside to phase `name`; nothing if it raises."""
        begin = time.perf_counter()
        with span(name):
            yield
        # A phase may run several times in a step: the sum counts.
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begin

    def reset(self) -> dict[str, float]:
        """Return the seconds by phase, and start from zero."""
        seconds, self._seconds = self._seconds, {}
        return seconds


def timing_metrics(seconds: Mapping[str, float], tokens: float) -> Metrics:
    """Return the seconds of each phase of a step, why trainers waited, and tokens per second.

    Args:
        seconds: by phase; `step` is the whole step, `val` is the validation inside it.
        tokens: prompt and response tokens of the step's batch.
    """
    # Validation is left out: it comes only every few steps and would make throughput jump.
    working = seconds["step"] - seconds.get("val", 0.0)
    waiting = {phase: seconds[phase] for phase in ("rollout", "val") if phase in seconds}
    return {
        **{f"time/{phase}": value for phase, value in seconds.items()},
        **{f"train/idle/{phase}": value / seconds["step"] for phase, value in waiting.items()},
        "weight_sync/seconds": seconds.get("sync", 0.0),
        "system/tps": tokens / working,
        **({"train/tokens_per_second": tokens / seconds["train"]} if seconds.get("train") else {}),
    }


def sync_metrics(report: SyncReport | None, *, lora: bool) -> Metrics:
    """Return the metrics of a step's weight sync.

    Args:
        report: None for a step without a sync.
        lora: True if only adapters are trained.
    """
    if report is None:
        # Without a sync, the other metrics have no value.
        return {"weight_sync/bytes": 0.0}
    transports = {
        f"weight_sync/{transport}": float(transport is report.transport) for transport in Transport
    }
    merged = {"weight_sync/lora_merged": float(not report.adapters)} if lora else {}
    pause = report.pause_seconds
    return {
        "weight_sync/bytes": float(report.nbytes),
        "weight_sync/changed_share": report.changed_share,
        **transports,
        **merged,
        **({} if pause is None else {"weight_sync/pause_seconds": pause}),
    }


def gap_metrics(gaps: Mapping[str, tuple[float, float]]) -> Metrics:
    """Return the mean |trainer's - engine's log-prob|, of each engine and over all engines.

    Args:
        gaps: as in `ScoredBatch`; tokens of unknown engines are keyed by the empty string.
    """
    total, tokens = (
        sum(found for found, _ in gaps.values()),
        sum(count for _, count in gaps.values()),
    )
    each = {
        f"engine/{engine}/logprob_gap": found / count
        for engine, (found, count) in gaps.items()
        # Tokens of an engine that has gone count in the total, under no name.
        if engine and count
    }
    return each | ({"engine/logprob_gap": total / tokens} if tokens else {})


def _spread(name: str, values: ArrayLike) -> Metrics:
    """Return mean, maximum and minimum of at least one value."""
    values_N = np.asarray(values, np.float64)
    return {
        f"{name}/mean": float(values_N.mean()),
        f"{name}/max": float(values_N.max()),
        f"{name}/min": float(values_N.min()),
    }


def _ages(results: list[EpisodeResult], version: int) -> Metrics:
    """Return how many versions the oldest tokens of the trajectories are behind."""
    ages_N = np.array([version - result.oldest_version for result in results])
    ages, counts = np.unique(ages_N, return_counts=True)
    return {
        "staleness/mean": float(ages_N.mean()),
        "staleness/max": float(ages_N.max()),
        **{
            f"staleness/share/{age}": float(count / len(ages_N))
            for age, count in zip(ages, counts, strict=True)
        },
    }


def _success(name: str, results: Iterable[EpisodeResult]) -> Metrics:
    """Return the mean over episodes of environments that measure success."""
    measured = [result for result in results if "success" in result.metrics]
    if not measured:
        return {}
    return {name: _mean([result.metrics["success"] for result in measured], measured)}


def _mean(values: ArrayLike, results: Sequence[EpisodeResult]) -> float:
    """Return the mean over episodes of a value of each trajectory."""
    return float(np.average(np.asarray(values, np.float64), weights=_shares(results)))


def _shares(results: Sequence[EpisodeResult]) -> list[float]:
    """Return the weight of each trajectory: 1 / the number of trajectories of its episode."""
    episodes = [(result.key.stream, result.key.group, result.key.member) for result in results]
    trajectories = Counter(episodes)
    return [1.0 / trajectories[episode] for episode in episodes]


def _stop_reasons(results: Iterable[EpisodeResult]) -> Metrics:
    counts = Counter(result.stop_reason for result in results)
    total = max(1, counts.total())
    return {f"stop/{reason}": counts[reason] / total for reason in StopReason}


def _judge_failures(untrainable: Iterable[EpisodeResult]) -> Metrics:
    """Return judge/<name>/failures: episodes that a judge did not score."""
    names = (
        name
        for result in untrainable
        for name in result.metrics
        if name.startswith("judge/") and name.endswith("/failures")
    )
    return {name: float(count) for name, count in Counter(names).items()}


def _of_envs(prefix: str, results: list[EpisodeResult]) -> Metrics:
    """Return mean scores and environment metrics by tag.

    `action_*` are means per action, other metrics per episode. The values of an episode are means
    over its trajectories.
    """
    metrics: Metrics = {}
    for tag, played in _by_tag(results).items():
        shares = _shares(played)
        metrics[f"{prefix}/{tag}/score"] = _mean([result.score for result in played], played)
        sums: dict[str, float] = defaultdict(float)
        for result, share in zip(played, shares, strict=True):
            for name, value in result.metrics.items():
                sums[name] += share * value
        actions, episodes = sums.get("num_actions", 0.0), round(sum(shares))
        for name, value in sums.items():
            # Shares of actions: a mean per episode would depend on the length of episodes.
            per_action = name.startswith("action_") and actions
            metrics[f"{prefix}/{tag}/{name}"] = value / (actions if per_action else episodes)
    return metrics


def _by_tag(results: list[EpisodeResult]) -> dict[str, list[EpisodeResult]]:
    by_tag: dict[str, list[EpisodeResult]] = defaultdict(list)
    for result in results:
        by_tag[result.tag].append(result)
    return by_tag
