"""docs/monitoring.md, the chart's alerts and its dashboard name what the operator has.

`tests/integration/monitoring` and `test_faulty_apiserver.py` try them with a real Prometheus.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml

from prometheus_server import DASHBOARD, RULES, exposed
from testcluster import ROOT

PAGE = (ROOT / "docs/monitoring.md").read_text()
METRIC = re.compile(r"\bagenticrun_(?:operator|run)_\w+")
SUFFIXES = re.compile(r"_(bucket|count|sum)$")


def rows() -> Iterator[str]:
    """Return the rows of both tables of the page, as they should be."""
    for name, metric in exposed().items():
        of_run = name.startswith("agenticrun_run_")
        labels = [f"`{label}`" for label in metric.labels]
        if of_run:
            assert labels[:2] == ["`namespace`", "`run`"]
            labels = labels[2:]
        yield f"| `{name}` | {metric.kind} | {', '.join(labels)} | {metric.help} |"


def test_the_tables_have_every_metric_as_it_is() -> None:
    expected = list(rows())
    found = [line for line in PAGE.splitlines() if line.startswith("| `agenticrun_")]
    assert found == expected, "paste these rows:\n" + "\n".join(expected)


def test_every_alert_has_its_section_and_its_runbook() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    alerts = {rule["alert"]: rule for group in groups for rule in group["rules"]}
    assert re.findall(r"^### (AgenticRun\w+)$", PAGE, re.MULTILINE) == list(alerts)
    for name, rule in alerts.items():
        assert rule["annotations"]["runbook"] == f"docs/monitoring.md#{name.lower()}"
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_the_page_names_the_critical_alerts() -> None:
    (text,) = re.findall(r"`severity` is `critical` for (.+); `warning` for all others", PAGE)
    groups = yaml.safe_load(RULES.read_text())["groups"]
    assert re.findall(r"AgenticRun\w+", text) == [
        rule["alert"]
        for group in groups
        for rule in group["rules"]
        if rule["labels"]["severity"] == "critical"
    ]


def test_metrics_that_are_named_exist() -> None:
    for text in (PAGE, RULES.read_text(), DASHBOARD.read_text()):
        named = {SUFFIXES.sub("", name) for name in METRIC.findall(text)}
        assert sorted(named - exposed().keys()) == []
        assert named
