"""docs/monitoring.md, the chart's alerts and its dashboards name what the operator has.

`tests/integration/monitoring` and `test_faulty_apiserver.py` try them with a real Prometheus.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import yaml

from agenticrun_api.metrics import STEP_METRICS
from pages import blocks
from prometheus_server import DASHBOARDS, RULES, exposed
from testcluster import ROOT

PAGE = (ROOT / "docs/monitoring.md").read_text()
ADAPTER = ROOT / "examples/autoscaling/prometheus-adapter.yaml"
METRIC = re.compile(r"\bagenticrun_(?:operator|run)_\w+")
SUFFIXES = re.compile(r"_(bucket|count|sum)$")


def entries() -> Iterator[str]:
    """Return the entries of both lists of the page, as they should be."""
    for name, metric in exposed().items():
        of_run = name.startswith("agenticrun_run_")
        labels = [f"`{label}`" for label in metric.labels]
        if of_run:
            assert labels[:2] == ["`namespace`", "`run`"]
            labels = labels[2:]
        yield f"- `{name}` ({', '.join([metric.kind, *labels])}): {metric.help}"


def test_the_lists_have_every_metric_as_it_is() -> None:
    expected = list(entries())
    found = [line for line in PAGE.splitlines() if line.startswith("- `agenticrun_")]
    assert found == expected, "paste these lines:\n" + "\n".join(expected)


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
    for text in (PAGE, *(file.read_text() for file in (RULES, ADAPTER, *DASHBOARDS))):
        named = {SUFFIXES.sub("", name) for name in METRIC.findall(text)}
        assert sorted(named - exposed().keys()) == []
        assert named


def test_the_autoscaler_scales_by_the_metric_that_the_adapter_makes() -> None:
    autoscaler = yaml.safe_load((ADAPTER.parent / "hpa.yaml").read_text())["spec"]
    (metric,) = (item["external"]["metric"] for item in autoscaler["metrics"])
    (rule,) = yaml.safe_load(ADAPTER.read_text())["rules"]["external"]
    assert rule["name"] == {"as": metric["name"]}
    assert set(metric["selector"]["matchLabels"]) == {"run"}
    for query in (rule["seriesQuery"], rule["metricsQuery"]):
        (name,) = re.findall(r'agenticrun_run_metric{name="([^"]+)"', query)
        assert name in STEP_METRICS, "the operator serves it"


def test_the_autoscaler_removes_pods_one_by_one() -> None:
    """Without a policy all surplus pods go at once when the stabilization window is over."""
    autoscaler = yaml.safe_load((ADAPTER.parent / "hpa.yaml").read_text())["spec"]
    down = autoscaler["behavior"]["scaleDown"]
    seconds = down["stabilizationWindowSeconds"]
    assert down["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": seconds}]


def test_the_run_that_the_autoscaler_scales_trains_on_while_its_pods_change() -> None:
    run = yaml.safe_load((ROOT / "examples/frozen-lake.yaml").read_text())["spec"]
    assert "queue" not in run
    assert not run["pipeline"].get("deterministic")
    assert "Broadcast" not in json.dumps(run["pipeline"])


def test_plain_prometheus_scrapes_each_operator() -> None:
    """A Service with an address sends a scrape to the leader or to a stand-by."""
    (text,) = (
        text for text in blocks(ROOT / "docs/monitoring.md", "yaml") if "scrape_conf" in text
    )
    (job,) = yaml.safe_load(text)["scrape_configs"]
    assert f'job="{job["job_name"]}"' in RULES.read_text()
    assert set(job) == {"job_name", "honor_labels", "dns_sd_configs"}
    assert job["honor_labels"] is True
    template = (ROOT / "charts/agenticrun/templates/service.yaml").read_text()
    (headless,) = (part for part in template.split("---\n") if "clusterIP: None" in part)
    (name,) = re.findall(
        r'^  name: {{ include "agenticrun.name" . }}(-\S+)$', headless, re.MULTILINE
    )
    (port,) = re.findall(r"name: (\w+), port:", headless)
    names = [f"_{port}._tcp.agenticrun{name}.agenticrun-system.svc"]
    assert job["dns_sd_configs"] == [{"names": names}]


def test_no_line_is_without_its_name() -> None:
    """`or vector(0)` adds a line without labels to those of `sum by (...)`."""
    for file in DASHBOARDS:
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel["targets"]:
                named = "{{" in target["legendFormat"]
                assert not (named and "vector(" in target["expr"]), f"{file.name}: {panel['title']}"


def test_panels_have_numbers_places_and_titles_of_their_own() -> None:
    uids = [json.loads(file.read_text())["uid"] for file in DASHBOARDS]
    assert len(set(uids)) == len(uids) == 3
    for file in DASHBOARDS:
        found = json.loads(file.read_text())["panels"]
        for name in ("id", "title"):
            assert len({panel[name] for panel in found}) == len(found), f"{file.name}: {name}"
        cells = [
            (panel["gridPos"]["x"] + column, panel["gridPos"]["y"] + row)
            for panel in found
            for column in range(panel["gridPos"]["w"])
            for row in range(panel["gridPos"]["h"])
        ]
        assert len(set(cells)) == len(cells), f"{file.name}: panels cover each other"
        assert max(column for column, _ in cells) < 24
