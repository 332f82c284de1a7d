"""A Prometheus server of a test's own, promtool, and the metrics and panels that there are."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.metrics import MetricWrapperBase

from agenticrun_operator import metrics
from agenticrun_operator.run_metrics import SERIES
from devcluster.settings import Settings
from processes import free_port
from prometheus import fetch
from testcluster import ROOT

RULES = ROOT / "charts/agenticrun/files/rules.yaml"
DASHBOARDS = tuple(sorted((ROOT / "charts/agenticrun/files/dashboards").glob("*.json")))


def promtool(*words: str | Path) -> str:
    """Run promtool; its output is part of the error."""
    program = fetch(Settings.from_environment()) / "promtool"
    done = subprocess.run(
        [program, *words], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass(frozen=True)
class Prometheus:
    """The HTTP API of a server."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples of an expression now: their labels (`metric`) and `value`."""
        answer = self._get("query", {"query": expression})
        found: list[dict[str, Any]] = answer["result"]
        return found

    def seen(self, expression: str, seconds: float) -> list[dict[str, Any]]:
        """Return the series that an expression has had in the last seconds."""
        end = time.time()
        query = {"query": expression, "start": str(end - seconds), "end": str(end), "step": "2"}
        found: list[dict[str, Any]] = self._get("query_range", query)["result"]
        return found

    def sick_rules(self) -> list[str]:
        """Return the rules that could not be evaluated, with the error."""
        groups = self._get("rules", {})["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert rules, "the server has no rules"
        return [f"{rule['name']}: {rule['lastError']}" for rule in rules if rule["health"] == "err"]

    def _get(self, path: str, query: dict[str, str]) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]


@contextmanager
def prometheus(folder: Path, port: int, rules: Path) -> Iterator[Prometheus]:
    """Scrape the operator on this port every two seconds, configured as in docs/monitoring.md.

    Args:
        folder: for configuration, data and log.
        port: of the operator's metrics.
        rules: the file of rules.
    """
    config = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "2s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": "agenticrun-metrics",
                "honor_labels": True,
                "static_configs": [
                    {
                        "targets": [f"127.0.0.1:{port}"],
                        "labels": {"namespace": "agenticrun-system"},
                    }
                ],
            }
        ],
    }
    folder.mkdir()
    file = folder / "prometheus.yaml"
    file.write_text(yaml.safe_dump(config))
    promtool("check", "config", file)
    address = f"127.0.0.1:{free_port()}"
    argv = [
        *("setpriv", "--pdeathsig", "KILL", "--"),
        str(fetch(Settings.from_environment()) / "prometheus"),
        *(f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"),
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(60)


@dataclass(frozen=True)
class Exposed:
    """A metric of the operator as its code defines it."""

    kind: str
    labels: tuple[str, ...]
    help: str


def exposed() -> dict[str, Exposed]:
    """Return the operator's metrics and those of runs, by name without the suffix of a bucket."""
    own = [item for item in vars(metrics).values() if isinstance(item, MetricWrapperBase)]
    families = [(metric, item._labelnames) for item in own for metric in item.describe()]
    families += [(series.family([]), ("namespace", "run", *series.labels)) for series in SERIES]
    return {
        family.name + ("_total" if family.type == "counter" else ""): Exposed(
            family.type, tuple(labels), family.documentation
        )
        for family, labels in families
    }


def panels() -> dict[str, list[str]]:
    """Return the expressions of all dashboards by panel, for run `run-00` of namespace `runs`."""
    variables = {"$namespace": "runs", "$run": "run-00", "$job": "agenticrun-metrics"}
    found: dict[str, list[str]] = {}
    for file in DASHBOARDS:
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel["targets"]:
                expression = target["expr"]
                for name, value in variables.items():
                    expression = expression.replace(name, value)
                found.setdefault(f"{file.stem}: {panel['title']}", []).append(expression)
    return found
