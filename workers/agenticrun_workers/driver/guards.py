"""Guards: alarms on a run's metrics (`pipeline.guards`). Pure: metrics in, alarms out.

An alarm goes up when its condition has held for `patience` steps in a row, and down at the first
step at which it does not hold. A step that does not measure the metric changes nothing, but many of
them are reported: the guard sees nothing. NaN counts as beyond the bound.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from agenticrun_api.algorithm import Guards

GuardState = dict[str, int]
"""Guard -> number of steps in a row at which its condition held. Saved in checkpoints."""


BLIND_STEPS = 20
"""Steps in a row without the metric after which a guard says, once, that it sees nothing."""


class GuardTripped(Exception):
    """An alarm is up and `guards.action` is Fail; another attempt would end the same way."""


@dataclass(frozen=True)
class Guard:
    """A condition: the worst of the metrics that match `pattern` lies beyond `bound`."""

    name: str
    """<name> in the metric guard/<name>."""
    field: str
    """Name of the field in spec.pipeline.guards."""
    pattern: re.Pattern[str]
    bound: float
    upper: bool
    """True: `bound` is the largest good value. False: the smallest."""
    advice: str
    blind: str = ""
    """End of the message that steps do not measure the metric: why."""

    def worst(self, metrics: Mapping[str, float]) -> tuple[str, float] | None:
        """Return name and value of the worst metric; None if the step measured none."""
        measured = [
            (name, value) for name, value in metrics.items() if self.pattern.fullmatch(name)
        ]
        # One engine that drifts is enough for an alarm; a mean would hide it.
        return max(measured, key=lambda item: self._badness(item[1]), default=None)

    def holds(self, value: float) -> bool:
        """Return True if this value lies beyond the bound."""
        return self._badness(value) > self._badness(self.bound)

    def _badness(self, value: float) -> float:
        # A metric that is not a number is the worst of all, in whichever direction.
        if math.isnan(value):
            return math.inf
        return value if self.upper else -value


@dataclass(frozen=True)
class Watched:
    """The state of all alarms after a step."""

    metrics: dict[str, float]
    """guard/<name>: 1 while the alarm is up, else 0."""
    messages: tuple[str, ...]
    """A message for each alarm that started or ended at this step."""


class GuardWatch:
    """Tracks the alarms of a run from step to step.

    Args:
        state: from a checkpoint; None at the start of a run.
    """

    def __init__(self, spec: Guards, state: Mapping[str, int] | None = None) -> None:
        self._spec, self._guards = spec, guards_of(spec)
        known = state or {}
        self._streaks = {guard.name: known.get(guard.name, 0) for guard in self._guards}
        # Not in the checkpoint: `enforce` has a message for alarms without one.
        self._reasons: dict[str, str] = {}
        self._unmeasured: Counter[str] = Counter()

    def configure(self, spec: Guards) -> None:
        """Take other bounds over. The steps that are counted stay."""
        self._spec, self._guards = spec, guards_of(spec)
        # A guard that was switched off forgets its streak.
        self._streaks = {guard.name: self._streaks.get(guard.name, 0) for guard in self._guards}

    @property
    def state(self) -> GuardState:
        return dict(self._streaks)

    @property
    def up(self) -> tuple[str, ...]:
        """Names of the alarms that are up."""
        return tuple(
            name for name, streak in self._streaks.items() if streak >= self._spec.patience
        )

    def observe(self, metrics: Mapping[str, float]) -> Watched:
        """Update the alarms with the metrics of a step."""
        before = self.up
        messages: list[str] = []
        for guard in self._guards:
            measured = guard.worst(metrics)
            # Neither good nor bad: the streak stays as it is.
            if measured is None:
                self._unmeasured[guard.name] += 1
                if self._unmeasured[guard.name] == BLIND_STEPS:
                    messages.append(
                        f"guard {guard.name} (spec.pipeline.guards.{guard.field}) sees nothing: "
                        f"{BLIND_STEPS} steps in a row did not measure its metric{guard.blind}"
                    )
                continue
            self._unmeasured[guard.name] = 0
            name, value = measured
            # One good step ends an alarm: they are about a state that persists.
            self._streaks[guard.name] = self._streaks[guard.name] + 1 if guard.holds(value) else 0
            side = "above" if guard.upper else "below"
            steps = (
                f"{self._streaks[guard.name]} step{'s' if self._streaks[guard.name] > 1 else ''}"
            )
            field = f"spec.pipeline.guards.{guard.field}"
            self._reasons[guard.name] = (
                f"guard {guard.name}: {name} is {value:.4g}, {side} {field} {guard.bound:g} "
                f"for {steps}: {guard.advice}"
            )
            if guard.name in self.up and guard.name not in before:
                messages.append(self._reasons[guard.name])
            if guard.name in before and guard.name not in self.up:
                messages.append(f"guard {guard.name} is quiet again: {name} is {value:.4g}")
        up = self.up
        return Watched(
            {f"guard/{guard.name}": float(guard.name in up) for guard in self._guards},
            tuple(messages),
        )

    def enforce(self) -> None:
        """Raise `GuardTripped` if an alarm is up and `guards.action` is Fail.

        Call it after the step has been logged.
        """
        if self._spec.action == "Fail" and self.up:
            raise GuardTripped(
                "; ".join(
                    self._reasons.get(name, f"guard {name} was up when the checkpoint was saved")
                    for name in self.up
                )
            )


def guards_of(spec: Guards) -> tuple[Guard, ...]:
    """Return the guards of a spec. `maxSkippedSteps` is checked by the trainer itself."""
    guards = [
        Guard(
            "logprob_gap",
            "maxLogprobGap",
            re.compile(r"engine/(?:[^/]+/)?logprob_gap"),
            spec.max_logprob_gap,
            upper=True,
            advice="trainer and engine give different log-probs on the same weights, "
            "so importance ratios are wrong: use float32, or set a higher maxLogprobGap "
            "together with trainInferCorrection",
            blind=": no token was sampled with the weights that a step began with: "
            "lower staleness.max or modelUpdateFrequency to see the gap",
        )
    ]
    if spec.min_entropy is not None:
        guards.append(
            Guard(
                "entropy",
                "minEntropy",
                re.compile("actor/entropy"),
                spec.min_entropy,
                upper=False,
                advice="the policy has collapsed onto few answers: "
                "raise entropyLossCoef or lower the learning rate",
                blind=": the policy is not trained during criticWarmup",
            )
        )
    if spec.max_zero_variance_share is not None:
        guards.append(
            Guard(
                "zero_variance",
                "maxZeroVarianceShare",
                re.compile("group/zero_variance_share"),
                spec.max_zero_variance_share,
                upper=True,
                advice="most groups have equal rewards and give no gradient: "
                "change the difficulty of the tasks or set trainEnvs.groupFilter",
                blind=": the algorithm does not compare the trajectories of a group",
            )
        )
    return tuple(guards)
