"""Prometheus metrics of runs, made at each scrape of what the operator knows of them.

One target for all runs, and no token: a run's own reporter serves more, but only to those who have
its token. Each run has a bounded number of series, which go when it is deleted. A run that has
ended keeps those about its end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from sys import intern

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from agenticrun_api import Activity, AgenticRun, AgenticRunStatus, ConditionType, Phase, Progress
from agenticrun_api.metrics import STEP_METRICS
from agenticrun_operator.observed import Pod
from agenticrun_operator.resources import storage_of

_LAST_WORDS = frozenset({ConditionType.COMPLETE.value, ConditionType.FAILED.value})
_USES = {
    Phase.RUNNING: "training",
    Phase.SUSPENDING: "stopping",
    Phase.SUSPENDED: "stopping",
    Phase.QUEUED: "stopping",
    Phase.SUCCEEDED: "stopping",
    Phase.FAILED: "stopping",
}
"""Use of the GPUs that pods hold, by the run's phase; `starting` in all others."""


def use_of_gpus(status: AgenticRunStatus) -> str:
    """Return the use of the GPUs that a run's pods hold: training, starting, idle or stopping."""
    if status.phase is not Phase.RUNNING:
        return _USES.get(status.phase, "starting")
    conditions = {item.type: item.status for item in status.conditions}
    if conditions.get(ConditionType.STALLED.value) == "True":
        return "idle"
    return "starting" if status.activity == Activity.STARTING.value else "training"


@dataclass
class Totals:
    """The time, GPUs and steps of a run since this operator first looked at it.

    They are not in the status: each would cost writes. Prometheus keeps them over a restart of the
    operator, because `increase` ignores that a counter begins again at 0.
    """

    at: datetime
    """Time of the newest look."""
    gpu_seconds: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    """By role and use."""
    phase_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By phase."""
    lost_steps: int = 0
    progress: Progress | None = None
    """The newest snapshot of an attempt that has started."""

    def count(
        self,
        before: AgenticRunStatus,
        run: AgenticRun,
        pods: Iterable[Pod],
        seen: Progress | None,
        now: datetime,
    ) -> None:
        """Count the time since the last look, in which the run had the status `before`.

        Args:
            before: the status that the last look left.
            run: the run now.
            pods: its pods. The pods that have a node and have not ended hold their GPUs.
            seen: the progress snapshot of its newest attempt.
            now: the current time.
        """
        after, roles = run.status, run.spec.roles
        seconds, self.at = max(0.0, (now - self.at).total_seconds()), now
        self.phase_seconds[before.phase.value] += seconds
        use = use_of_gpus(before)
        held = Counter(pod.role for pod in pods if pod.node and not pod.ended)
        for role, count in held.items():
            if roles.has(role) and (gpus := roles.of(role).gpus):
                self.gpu_seconds[role.value, use] += count * gpus * seconds
        if before.job and after.job and before.job.attempt < after.job.attempt:
            saved = after.checkpoint.step if after.checkpoint else 0
            self.lost_steps += max(0, (before.step or 0) - saved)
        if after.phase.finished or after.phase in (Phase.SUSPENDED, Phase.QUEUED):
            self.progress = None  # it makes no steps
        elif seen and seen.activity is not Activity.STARTING and seen.max_steps:
            # A driver that starts has no numbers yet: the last ones stay.
            self.progress = seen


@dataclass(frozen=True)
class RunState:
    """The state of one run, as the operator knows it."""

    key: tuple[str, str]
    """(namespace, name)"""
    status: AgenticRunStatus
    progress: Progress | None = None
    """The newest progress snapshot. None: none has been seen since the operator's start, or the run
    has ended or is suspended."""
    totals: Totals | None = None
    """None: the run cannot be read, or has ended and has no pods."""
    save_steps: int = 0
    """Steps between two checkpoints; 0: the run saves none, or cannot be read."""

    @classmethod
    def of(cls, run: AgenticRun, totals: Totals) -> RunState:
        """Return the state of a run that can be read."""
        saves = run.spec.pipeline.save_steps if storage_of(run) else 0
        return cls(run.key, run.status, totals.progress, totals, saves)

    @property
    def ended(self) -> bool:
        return self.status.phase.finished

    def read(self, series: Series) -> Samples:
        """Return the samples of the run in a metric."""
        return series.samples(self)


Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values of further labels, and the value."""


@dataclass(frozen=True, slots=True)
class EndedRun:
    """The samples of a run that has ended, which no longer change: about 2 KiB."""

    key: tuple[str, str]
    """(namespace, name)"""
    samples: dict[str, Samples]
    """By the metric's name."""

    ended = True

    @classmethod
    def of(cls, state: RunState) -> EndedRun:
        """Keep only the samples of a run that has ended."""
        read = {series.name: tuple(series.samples(state)) for series in SERIES}
        return cls(state.key, {name: samples for name, samples in read.items() if samples})

    def read(self, series: Series) -> Samples:
        """Return the samples of the run in a metric."""
        return self.samples.get(series.name, ())


@dataclass(frozen=True)
class Series:
    """A metric with the labels namespace, run and perhaps more."""

    name: str
    help: str
    samples: Callable[[RunState], Samples]
    labels: tuple[str, ...] = ()
    counter: bool = False

    def family(self, states: Sequence[RunState | EndedRun]) -> Metric:
        """Return the metric of all runs."""
        labels = ("namespace", "run", *self.labels)
        kind = CounterMetricFamily if self.counter else GaugeMetricFamily
        family = kind(self.name, self.help, labels=labels)
        for state in states:
            for more, value in state.read(self):
                family.add_metric((*state.key, *more), value)
        return family


def _plain(value: float | None) -> Samples:
    return () if value is None else (((), float(value)),)


def _time(text: str | None) -> Samples:
    return _plain(datetime.fromisoformat(text).timestamp() if text else None)


def _unsaved_steps(state: RunState) -> Samples:
    """Return the steps since the newest checkpoint, of a run that saves checkpoints."""
    if state.ended or not state.save_steps:
        return ()
    saved = state.status.checkpoint
    return _plain((state.status.step or 0) - (saved.step if saved else 0))


def _until_end(read: Callable[[AgenticRunStatus], Samples]) -> Callable[[RunState], Samples]:
    return lambda state: () if state.ended else read(state.status)


def _of_step(name: str) -> Callable[[RunState], Samples]:
    """Return the reader of a number that only a progress snapshot has in full."""
    return lambda state: _plain(getattr(state.progress, name)) if state.progress else ()


SERIES = (
    Series(
        "agenticrun_run_phase",
        "1, with the run's phase.",
        lambda state: [((state.status.phase.value,), 1.0)],
        ("phase",),
    ),
    Series(
        "agenticrun_run_condition",
        "1 for each condition of the run: Complete and Failed after its end, the others before.",
        lambda state: [
            ((intern(item.type), intern(item.status), intern(item.reason)), 1.0)
            for item in state.status.conditions
            if state.ended == (item.type in _LAST_WORDS)
        ],
        ("type", "status", "reason"),
    ),
    Series(
        "agenticrun_run_activity",
        "1, with what the driver does now.",
        _until_end(lambda status: [((status.activity,), 1.0)] if status.activity else ()),
        ("activity",),
    ),
    Series(
        "agenticrun_run_restarts",
        "Restarts of the driver, after failures and after orderly stops.",
        lambda state: _plain(state.status.restarts),
        counter=True,
    ),
    Series(
        "agenticrun_run_disruptions",
        "Attempts that the platform ended: a drain, a preemption, a lost node.",
        lambda state: _plain(state.status.disruptions),
        counter=True,
    ),
    Series(
        "agenticrun_run_failures_without_progress",
        "Failures since the run last got further. Above failurePolicy.maxRestarts, the run fails.",
        _until_end(lambda status: _plain(status.failures_without_progress)),
    ),
    Series(
        "agenticrun_run_step",
        "Completed training steps.",
        lambda state: _plain(state.status.step),
    ),
    Series(
        "agenticrun_run_max_steps",
        "Training steps of the whole run.",
        lambda state: _plain(state.status.max_steps),
    ),
    Series(
        "agenticrun_run_last_step_timestamp_seconds",
        "Time at which the newest step was done, by the clock of the driver's node.",
        lambda state: _time(state.status.last_step_time),
    ),
    Series(
        "agenticrun_run_start_timestamp_seconds",
        "Time at which the operator created the objects of the run.",
        lambda state: _time(state.status.start_time),
    ),
    Series(
        "agenticrun_run_completion_timestamp_seconds",
        "Time at which the run ended.",
        lambda state: _time(state.status.completion_time),
    ),
    Series(
        "agenticrun_run_checkpoint_step",
        "Step of the newest checkpoint.",
        lambda state: _plain(state.status.checkpoint.step if state.status.checkpoint else None),
    ),
    Series(
        "agenticrun_run_checkpoint_timestamp_seconds",
        "Time at which the newest checkpoint was complete, by the clock of the driver's node.",
        lambda state: _time(state.status.checkpoint.time if state.status.checkpoint else None),
    ),
    Series(
        "agenticrun_run_pods",
        "Pods that a role is to have: those of the spec, or fewer if its queue admits fewer.",
        _until_end(lambda status: [((role.name,), float(role.desired)) for role in status.roles]),
        ("role",),
    ),
    Series(
        "agenticrun_run_ready_pods",
        "Pods of a role that are ready.",
        _until_end(lambda status: [((role.name,), float(role.ready)) for role in status.roles]),
        ("role",),
    ),
    Series(
        "agenticrun_run_gpus",
        "GPUs that the pods of a role request together.",
        _until_end(lambda status: [((role.name,), float(role.gpus)) for role in status.roles]),
        ("role",),
    ),
    Series(
        "agenticrun_run_gpu_seconds",
        "GPUs that pods of a role have held, times seconds, by what the run used them for: "
        "training, starting, idle (it stalls) or stopping.",
        lambda state: state.totals.gpu_seconds.items() if state.totals else (),
        ("role", "use"),
        counter=True,
    ),
    Series(
        "agenticrun_run_phase_seconds",
        "Time in each phase. In Queued, it waits in its queue.",
        lambda state: (
            [((phase,), seconds) for phase, seconds in state.totals.phase_seconds.items()]
            if state.totals
            else ()
        ),
        ("phase",),
        counter=True,
    ),
    Series(
        "agenticrun_run_lost_steps",
        "Steps since the newest checkpoint at the end of each attempt; the next one repeats them.",
        lambda state: _plain(state.totals.lost_steps if state.totals else None),
        counter=True,
    ),
    Series(
        "agenticrun_run_unsaved_steps",
        "Steps since the newest checkpoint, which a crash now would lose.",
        _unsaved_steps,
    ),
    Series(
        "agenticrun_run_save_steps",
        "Steps between two checkpoints.",
        lambda state: _plain(None if state.ended else state.save_steps or None),
    ),
    Series(
        "agenticrun_run_reward",
        "Mean score of the newest step's trajectories.",
        _of_step("reward"),
    ),
    Series(
        "agenticrun_run_tokens_per_second",
        "Prompt and response tokens of the newest step per second.",
        _of_step("tokens_per_second"),
    ),
    Series(
        "agenticrun_run_staleness",
        "Mean number of policy versions that the newest step's trajectories were behind.",
        _of_step("staleness"),
    ),
    Series(
        "agenticrun_run_step_seconds",
        "Median duration of the newest steps, with validation and checkpoints.",
        _of_step("seconds_per_step"),
    ),
    Series(
        "agenticrun_run_metric",
        "A metric of the newest step, by its name in docs/metrics.md.",
        lambda state: (
            [
                ((name,), state.progress.metrics[name])
                for name in STEP_METRICS
                if name in state.progress.metrics
            ]
            if state.progress
            else ()
        ),
        ("name",),
    ),
)


@dataclass(frozen=True, eq=False)
class _RunCollector(Collector):
    states: Sequence[RunState | EndedRun]

    def collect(self) -> Iterator[Metric]:
        return (series.family(self.states) for series in SERIES)


def run_registry(states: Sequence[RunState | EndedRun]) -> CollectorRegistry:
    """Return a registry with the metrics of these runs."""
    registry = CollectorRegistry()
    registry.register(_RunCollector(states))
    return registry
