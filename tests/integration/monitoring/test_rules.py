"""The chart's alerts, by promtool: each fires when it should, and none in a healthy cluster.

And what the fleet's dashboard shows of runs that do not train.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import yaml

from pages import blocks
from prometheus_server import RULES, exposed, panels, promtool
from testcluster import ROOT

CASES = Path(__file__).parent / "rules_test.yaml"
MINUTES = (5, 10, 20, 60)
"""At which nothing may fire while all is well."""


def rules() -> dict[str, dict[str, Any]]:
    """Return the alerts by name."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def cases() -> dict[str, Any]:
    """Return the cases as promtool wants them, which compares whole annotations."""
    document: dict[str, Any] = yaml.safe_load(CASES.read_text())
    document["rule_files"] = [str(RULES)]
    for case in document["tests"]:
        if case["alert_rule_test"] == "HEALTHY":
            case["alert_rule_test"] = [
                {"eval_time": f"{minute}m", "alertname": name}
                for name in rules()
                for minute in MINUTES
            ]
        for expected in case["alert_rule_test"]:
            for alert in expected.get("exp_alerts", ()):
                written = rules()[expected["alertname"]]["annotations"]
                alert["exp_annotations"] = written | {"summary": alert.pop("summary")}
    return document


def test_promtool_takes_the_rules() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", "--lint-fatal", RULES)


def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    document = cases()
    file = tmp_path / "cases.yaml"
    file.write_text(yaml.safe_dump(document))
    promtool("test", "rules", file)
    fires = {
        expected["alertname"]
        for case in document["tests"]
        for expected in case["alert_rule_test"]
        if expected.get("exp_alerts")
    }
    assert fires == set(rules())


def test_the_cases_have_the_series_that_the_operator_has() -> None:
    """Otherwise a rule might fire here and never in a cluster."""
    for case in cases()["tests"]:
        for item in case.get("input_series", ()):
            name, _, braces = item["series"].partition("{")
            labels = set(re.findall(r"(\w+)=", braces)) - {"job", "instance"}
            if name not in ("up", "process_resident_memory_bytes"):
                assert labels == set(exposed()[name].labels), item["series"]


def test_runs_that_need_no_steps_have_no_time_without_a_step(tmp_path: Path) -> None:
    phases = ("Running", "Restarting", "Queued", "Suspended", "Succeeded", "Failed")
    (longest,) = panels()["fleet: Longest time without a step"]
    series = {"agenticrun_run_phase": 1, "agenticrun_run_last_step_timestamp_seconds": 60}
    document = {
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {
                        "series": f'{name}{{namespace="runs",run="{phase}"{label}}}',
                        "values": f"{value}x20",
                    }
                    for name, value in series.items()
                    for phase in phases
                    for label in (f',phase="{phase}"' if name.endswith("phase") else "",)
                ],
                "promql_expr_test": [
                    {
                        "expr": longest,
                        "eval_time": "15m",
                        "exp_samples": [
                            {"labels": f'{{namespace="runs",run="{phase}"}}', "value": 840}
                            for phase in phases[:2]
                        ],
                    }
                ],
            }
        ]
    }
    file = tmp_path / "panel.yaml"
    file.write_text(yaml.safe_dump(document))
    promtool("test", "rules", file)


def test_prometheus_takes_the_configuration_of_the_page(tmp_path: Path) -> None:
    (text,) = (
        text
        for text in blocks(ROOT / "docs/monitoring.md", "yaml")
        if text.startswith("# prometheus.yml")
    )
    (tmp_path / "prometheus.yml").write_text(text)
    shutil.copy(RULES, tmp_path / "rules.yaml")
    assert "SUCCESS" in promtool("check", "config", tmp_path / "prometheus.yml")
