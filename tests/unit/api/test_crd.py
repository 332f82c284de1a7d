"""The CRD: generated, committed, and structural."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from agenticrun_api import AgenticRunSpec
from agenticrun_api.crd import custom_resource_definition

ROOT = Path(__file__).parents[3]
SCHEMA = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def test_it_is_plain_yaml_without_anchors() -> None:
    assert (
        yaml.safe_load((ROOT / "crds/agenticruns.yaml").read_text()) == custom_resource_definition()
    ), "run: make generate"


def _nodes(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema node, with its path."""
    if not isinstance(node, dict):
        return
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from _nodes(child, f"{path}.{name}")
    yield from _nodes(node.get("items"), f"{path}[]")
    yield from _nodes(node.get("additionalProperties"), f"{path}.*")


def test_every_list_and_string_of_the_spec_is_bounded_because_rules_cost_by_size() -> None:
    open_ended = [
        path
        for path, node in _nodes(SCHEMA["properties"]["spec"])
        if (node.get("type") == "array" and "maxItems" not in node)
        or (node.get("type") == "string" and not {"maxLength", "enum", "format"} & set(node))
    ]
    assert open_ended == []


def test_every_list_says_how_writers_merge_it() -> None:
    kinds = {
        path: node.get("x-kubernetes-list-type")
        for path, node in _nodes(SCHEMA)
        if node.get("type") == "array"
    }
    assert set(kinds.values()) == {"map", "atomic"}
    assert {path for path, kind in kinds.items() if kind == "map"} == {
        ".status.conditions", ".status.metrics", ".status.roles",
    }  # fmt: skip


def test_kubectl_explain_has_a_text_for_every_field() -> None:
    silent = [
        f"{path}.{name}"
        for path, node in _nodes(SCHEMA)
        for name, child in node.get("properties", {}).items()
        if not child.get("description") and path not in ("", ".metadata")
    ]
    assert silent == [], "write a docstring below the field"
    assert SCHEMA["properties"]["spec"]["description"]
    assert SCHEMA["properties"]["status"]["description"]


def test_no_list_of_the_spec_is_a_map_because_a_run_with_duplicates_could_not_be_written() -> None:
    maps = [
        path
        for path, node in _nodes(SCHEMA["properties"]["spec"])
        if node.get("x-kubernetes-list-type", "atomic") != "atomic"
    ]
    assert maps == []


def test_only_fields_that_hold_foreign_objects_are_open() -> None:
    open_fields = {
        path
        for path, node in _nodes(SCHEMA["properties"]["spec"])
        if node.get("x-kubernetes-preserve-unknown-fields")
    }
    assert {path.rsplit(".", 1)[1] for path in open_fields} == {
        "config", "estimatorConfig", "lossConfig", "customConfig", "chatTemplateArgs",
        "affinity", "tolerations[]", "env[]", "envFrom[]", "volumes[]", "volumeMounts[]",
        "spec", "containers[]", "initContainers[]",
    }  # fmt: skip


def test_the_status_has_no_defaults_so_that_absent_stays_absent() -> None:
    assert [
        path for path, node in _nodes(SCHEMA["properties"]["status"]) if "default" in node
    ] == []


def test_every_default_of_the_schema_is_the_models_own() -> None:
    defaults = {
        path: node["default"]
        for path, node in _nodes(SCHEMA["properties"]["spec"])
        if "default" in node
    }
    assert defaults[".imagePullPolicy"] == "IfNotPresent"
    assert defaults[".roles"] == AgenticRunSpec.model_fields["roles"].default.to_dict()


def test_required_fields_are_those_that_no_default_can_guess() -> None:
    required = {
        f"{path}.{name}"
        for path, node in _nodes(SCHEMA["properties"]["spec"])
        for name in node.get("required", ())
    }
    assert required == {
        ".model", ".pipeline", ".code.git.url", ".code.image.reference",
        ".pipeline.maxSteps", ".pipeline.rolloutBatchSize", ".pipeline.envs", ".pipeline.trainEnvs",
        ".pipeline.envs[].tag", ".pipeline.envs[].type",
        ".pipeline.trainEnvs.groups", ".pipeline.trainEnvs.tags",
        ".pipeline.valEnvs.groups", ".pipeline.valEnvs.tags",
        ".pipeline.warmup.steps", ".pipeline.warmup.dataset.path",
        ".pipeline.envs[].dataset.path",
        ".pipeline.rewards[].name", ".pipeline.rewards[].type", ".tracking.wandb.project",
        ".network.egress[].role", ".queue.name",
    }  # fmt: skip


_FIELD_TERMS = (
    ".pipeline.algorithm",
    ".rewardNormalization",
    ".trainInferCorrection",
    ".architecture",
    ".dtype",
    ".attnImplementation",
    ".chatFormat",
    ".dataset.types",
    ".lrSchedulerType",
    ".strategy.name",
    ".wandb.mode",
    ".network.allowFrom[].role",
    ".network.egress[].role",
)
"""Parts of the spec where a value is a term of papers and libraries, or a field of spec.roles."""


def test_a_choice_is_in_camel_case_and_a_term_of_the_field_in_lower_case() -> None:
    wrong = {
        f"{path}: {value}"
        for path, node in _nodes(SCHEMA["properties"]["spec"])
        for value in node.get("enum", ())
        if not re.fullmatch(
            "[a-z0-9_-]+" if any(term in path for term in _FIELD_TERMS) else "([A-Z][a-z]+)+", value
        )
    }
    assert wrong == set()
