"""What an environment reports step by step, as one value per name and episode."""

from __future__ import annotations

from agenticrun_workers.envs import MetricMode, StepResult

LAST_BY_DEFAULT = ("success",)


class EpisodeMetrics:
    """Metrics of one episode. The mode that came with a name's first value holds."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self._modes: dict[str, MetricMode] = {}

    def add(self, name: str, value: float, mode: MetricMode | None = None) -> None:
        """One step's value."""
        self._values.setdefault(name, []).append(value)
        self._modes.setdefault(name, mode or ("last" if name in LAST_BY_DEFAULT else "sum"))

    def add_step(self, result: StepResult) -> None:
        """All values of a step."""
        for name, value in result.metrics.items():
            self.add(name, float(value), result.modes.get(name))

    def totals(self) -> dict[str, float]:
        """One value per name."""
        return {name: _combined(values, self._modes[name]) for name, values in self._values.items()}


def _combined(values: list[float], mode: MetricMode) -> float:
    match mode:
        case "sum":
            return sum(values)
        case "mean":
            return sum(values) / len(values)
        case "min":
            return min(values)
        case "max":
            return max(values)
        case "first":
            return values[0]
        case "last":
            return values[-1]
