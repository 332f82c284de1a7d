"""The manifests for Argo CD and Flux name what the API has. No test runs these programs."""

from __future__ import annotations

import re

import yaml

from agenticrun_api import Phase
from agenticrun_api.names import GROUP
from agenticrun_api.roles import ELASTIC
from pages import blocks
from testcluster import ROOT


def test_argo_cd_and_flux_know_the_phases_and_the_fields_that_may_change() -> None:
    """A sync must undo no change that the API allows, and no phase may be misspelt."""
    texts = blocks(ROOT / "docs/install.md", "yaml")
    documents = [
        item for text in texts if "kind: AgenticRun" in text for item in yaml.safe_load_all(text)
    ]
    application, settings, flux = documents
    (ignored,) = application["spec"]["ignoreDifferences"]
    live = {"/spec/suspend", "/spec/pipeline/maxSteps"}
    assert set(ignored["jsonPointers"]) == live | {
        f"/spec/roles/{role}/replicas" for role in ELASTIC
    }
    (health,) = settings["data"].values()
    tables = dict(re.findall(r"local (health|quiet) = {(.+)}", health))
    (check,) = flux["spec"]["healthCheckExprs"]
    named = [re.findall(r"(\w+) =", tables[name]) for name in ("health", "quiet")]
    named += [re.findall(r"'(\w+)'", check[key]) for key in ("current", "failed")]
    assert all({Phase(name) for name in names} for names in named)
    assert settings["data"].keys() == {f"resource.customizations.health.{GROUP}_AgenticRun"}
