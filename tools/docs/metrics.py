"""Generate docs/metrics.md from the table in crds/agenticrun_api/metrics.py."""

from __future__ import annotations

from collections.abc import Iterator

from agenticrun_api.metrics import METRICS, SECTIONS

INTRODUCTION = """\
# Metrics

<!-- Generated from crds/agenticrun_api/metrics.py by `make generate`. -->

Every metric of every step is in `metrics.jsonl` (and in each [tracker](tracking.md); TensorBoard and W&B group names by the part before the
first `/`). The operator serves those of the [dashboard](monitoring.md#dashboards) for Prometheus (`agenticrun_run_metric{name="..."}`);
`.status.metrics` holds the 16 most important.

Names follow ROLL where ROLL has the metric. A metric that a step does not measure is absent, never 0. `{mean,max,min}` stands for three
metrics. Tokens are counted as the policy saw them; "response" tokens are the sampled ones.

## It runs, but does not learn
"""  # noqa: E501


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield INTRODUCTION
    for metric in METRICS:
        yield from (f"- `{metric.name}` {symptom}" for symptom in metric.symptoms)
    for section in SECTIONS:
        yield f"\n## {section.title}\n"
        if section.introduction:
            yield section.introduction + "\n"
        for metric in section.metrics:
            unit = f" ({metric.unit})" if metric.unit else ""
            yield f"- `{metric.name}`{unit}: {metric.meaning}"


if __name__ == "__main__":
    print("\n".join(page()))
