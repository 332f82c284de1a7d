"""JudgePanel: applies a run's judges to the finished episodes of one env worker.

Episodes that finish at about the same time share a call; equal ones are judged once. If a judge
fails, is late or returns a non-finite score, the episode ends with env_error and is re-rolled.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from agenticrun_api import Pipeline
from agenticrun_api.environments import RewardSpec
from agenticrun_workers.envs.calls import Outcome, attempt, in_task, one_line, raised
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.log_once import LogOnce
from agenticrun_workers.plugins import PluginConfigError, PluginError
from agenticrun_workers.rollout.rewards.judge import (
    Judge,
    JudgedEpisode,
    JudgeFailed,
    Judgement,
    checked,
    make_judge,
)
from agenticrun_workers.types import StopReason, Trajectory

log = logging.getLogger(__name__)

MAX_CACHED = 65_536
"""Size of a judge's LRU cache of scores."""

WINDOW_SECONDS = 0.005
"""Seconds that an episode waits for others to share its call."""


class JudgePanel:
    """Judges of a run, applied to finished episodes.

    With `deterministic` each episode is judged alone, because batching changes the last digits.
    """

    def __init__(
        self, judges: list[tuple[RewardSpec, Judge]], *, deterministic: bool = False
    ) -> None:
        self._queues = [_JudgeQueue(spec, judge, deterministic) for spec, judge in judges]

    @classmethod
    def of(cls, pipeline: Pipeline) -> JudgePanel:
        """Build the judges of `pipeline.rewards`. Raises `InvalidConfig`."""
        judges = []
        for index, spec in enumerate(pipeline.rewards):
            try:
                judges.append((spec, make_judge(spec.type, spec.config)))
            except PluginError as error:
                field = "config" if isinstance(error, PluginConfigError) else "type"
                raise InvalidConfig(
                    f"spec.pipeline.rewards[{index}].{field}", str(error)
                ) from error
        return cls(judges, deterministic=pipeline.deterministic)

    def judges(self, tag: str) -> bool:
        """Return True if any judge scores this environment's episodes."""
        return any(queue.scores_tag(tag) for queue in self._queues)

    async def close(self) -> None:
        """End the calls in flight and close the judges that have something to close.

        Raises nothing. Episodes that still wait for a score are cancelled.
        """
        for queue in self._queues:
            await queue.close()
        for name, judge in ((each.spec.name, each.judge) for each in self._queues):
            outcome = attempt(getattr(judge, "close", lambda: None))
            if inspect.isawaitable(outcome.value):
                outcome = await in_task(outcome.value)
            if outcome.error is not None:
                log.warning("judge %s cannot be closed: %s", name, one_line(outcome.error))

    async def apply(self, trajectory: Trajectory, episode: JudgedEpisode) -> Trajectory:
        """Add weight * score of each judge to the reward of the last turn. Raises nothing.

        The returned trajectory has the metrics `reward/<name>` (the score without its weight) and
        `judge/<name>/{seconds,cached}`. If a judge fails, it also has `judge/<name>/failures` and
        ends with env_error.
        """
        # The policy has written nothing that could be judged.
        if not trajectory.turns:
            return trajectory
        queues = [queue for queue in self._queues if queue.scores_tag(trajectory.tag)]
        verdicts = await asyncio.gather(*(queue.verdict(episode) for queue in queues))
        metrics = dict(trajectory.metrics)
        added, failures = 0.0, []
        for queue, verdict in zip(queues, verdicts, strict=True):
            name = queue.spec.name
            metrics |= {
                f"judge/{name}/seconds": verdict.seconds,
                f"judge/{name}/cached": float(verdict.cached),
            }
            score = verdict.judgement
            weighted = (
                score
                if isinstance(score, JudgeFailed)
                else checked(queue.spec.weight * score, "its weighted score is")
            )
            if isinstance(score, JudgeFailed) or isinstance(weighted, JudgeFailed):
                metrics[f"judge/{name}/failures"] = 1.0
                failures.append(f"judge {name}: {weighted}")
            else:
                metrics[f"reward/{name}"] = score
                added += weighted
        # With a score missing, the reward could not be compared with those of the rest of the
        # group.
        if failures:
            return replace(
                trajectory,
                stop_reason=StopReason.ENV_ERROR,
                error="; ".join(failures),
                metrics=metrics,
            )
        *others, last = trajectory.turns
        return replace(
            trajectory, turns=(*others, replace(last, reward=last.reward + added)), metrics=metrics
        )


@dataclass(frozen=True, slots=True)
class _Verdict:
    judgement: Judgement
    seconds: float
    """Seconds from the request to the score, including the wait in the queue."""
    cached: bool


@dataclass(slots=True, eq=False)
class _JudgeQueue:
    """One judge with its queue and its cache."""

    spec: RewardSpec
    judge: Judge
    deterministic: bool
    _known: OrderedDict[bytes, asyncio.Future[Judgement]] = field(default_factory=OrderedDict)
    _queue: list[tuple[JudgedEpisode, asyncio.Future[Judgement]]] = field(default_factory=list)
    _window: asyncio.TimerHandle | None = None
    _calls: set[asyncio.Task[None]] = field(default_factory=set)
    _free: asyncio.Semaphore = field(init=False)
    _batch_size: int = field(init=False)
    _log: LogOnce = field(default_factory=lambda: LogOnce(log.warning))

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.judge.calls_at_once)
        most = self.spec.max_batch_size
        each = min(most, self.judge.episodes_per_call or most)
        self._batch_size = 1 if self.deterministic else each

    def scores_tag(self, tag: str) -> bool:
        return not self.spec.tags or tag in self.spec.tags

    async def verdict(self, episode: JudgedEpisode) -> _Verdict:
        """Return the score. With `rewards[].cache`, equal episodes are judged once."""
        begin = time.perf_counter()
        key = episode.content_hash if self.spec.cache else b""
        known = self._known.get(key)
        if known is None:
            pending = self._enqueue(episode)
            if self.spec.cache:
                self._remember(key, pending)
        else:
            pending = known
            self._known.move_to_end(key)
        # Shielded: one episode that is stopped must not cancel the judgement for others.
        judgement = await asyncio.shield(pending)
        return _Verdict(judgement, time.perf_counter() - begin, cached=known is not None)

    def _remember(self, key: bytes, pending: asyncio.Future[Judgement]) -> None:
        """Cache a pending score. A failure is removed, so the next equal episode asks again."""
        self._known[key] = pending
        if len(self._known) > MAX_CACHED:
            self._known.popitem(last=False)

        def forget_failure(done: asyncio.Future[Judgement]) -> None:
            failed = done.cancelled() or isinstance(done.result(), JudgeFailed)
            if failed and self._known.get(key) is done:
                del self._known[key]

        pending.add_done_callback(forget_failure)

    def _enqueue(self, episode: JudgedEpisode) -> asyncio.Future[Judgement]:
        loop = asyncio.get_running_loop()
        pending: asyncio.Future[Judgement] = loop.create_future()
        self._queue.append((episode, pending))
        if len(self._queue) >= self._batch_size:
            self._flush()
        elif self._window is None:
            self._window = loop.call_later(WINDOW_SECONDS, self._flush)
        return pending

    def _flush(self) -> None:
        """Send all waiting episodes to the judge in one call."""
        # A full batch is sent before its window ends.
        if self._window is not None:
            self._window.cancel()
            self._window = None
        batch, self._queue = self._queue, []
        if batch:
            call = asyncio.create_task(self._call(batch), name=f"judge-{self.spec.name}")
            self._calls.add(call)

            def ended(call: asyncio.Task[None]) -> None:
                self._calls.discard(call)
                # Not in `_call`: a task that is cancelled before its first step never enters it.
                if call.cancelled():
                    for _, pending in batch:
                        pending.cancel()

            call.add_done_callback(ended)

    async def close(self) -> None:
        """Cancel all calls, also the ones in the waiting window."""
        self._flush()
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    async def _call(self, batch: list[tuple[JudgedEpisode, asyncio.Future[Judgement]]]) -> None:
        # Waiting here does not count against the judge's time limit.
        async with self._free:
            judgements = await self._judgements([episode for episode, _ in batch])
        for (_, pending), judgement in zip(batch, judgements, strict=True):
            pending.set_result(judgement)

    async def _judgements(self, episodes: list[JudgedEpisode]) -> list[Judgement]:
        limit = self.spec.timeout_seconds
        try:
            async with asyncio.timeout(limit):
                outcome = attempt(self.judge.judge, episodes)
                if outcome.error is None:
                    outcome = await in_task(outcome.value)
        except TimeoutError:
            outcome = Outcome(error=JudgeFailed(f"it took more than {limit:g} s"))
        if outcome.error is None:
            outcome = attempt(_checked_scores, outcome.value, len(episodes))
        if outcome.error is None:
            judgements: list[Judgement] = outcome.value
        else:
            judgements = [self._failure(outcome.error)] * len(episodes)
        for judgement in judgements:
            if isinstance(judgement, JudgeFailed):
                self._log(f"judge {self.spec.name}: {judgement}")
        return judgements

    def _failure(self, error: BaseException) -> JudgeFailed:
        if isinstance(error, JudgeFailed):
            return error
        return JudgeFailed(str(raised(error, self.judge.judge)))


def _checked_scores(answers: Iterable[Judgement], episodes: int) -> list[Judgement]:
    scores = [checked(each, "its score is") for each in answers]
    # If one is missing, it is not known which, and scores could go to the wrong episodes.
    if len(scores) != episodes:
        raise JudgeFailed(f"it gave {len(scores)} scores for {episodes} episodes")
    return scores
