"""Generates the CustomResourceDefinition from the models.

Run `python -m agenticrun_api.crd > crds/agenticruns.yaml`.
"""

from __future__ import annotations

import sys
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from agenticrun_api import names
from agenticrun_api.base import Model
from agenticrun_api.run import AgenticRun
from agenticrun_api.spec import AgenticRunSpec
from agenticrun_api.status import AgenticRunStatus

COLUMNS: tuple[tuple[str, str, str, int], ...] = (
    ("Phase", "string", ".status.phase", 0),
    ("Step", "string", ".status.progress", 0),
    ("Reward", "string", ".status.reward", 0),
    ("Tok/s", "string", ".status.tokensPerSecond", 0),
    ("Staleness", "string", ".status.staleness", 0),
    ("Last-Step", "date", ".status.lastStepTime", 0),
    ("Restarts", "integer", ".status.restarts", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Queue", "string", ".spec.queue.name", 1),
    ("Model", "string", ".spec.model.path", 1),
    ("Algorithm", "string", ".spec.pipeline.algorithm.name", 1),
    ("ETA", "string", ".status.eta", 1),
    ("Message", "string", ".status.message", 1),
)
"""(name, type, JSONPath, priority). Columns of priority 1 are shown with `-o wide` only."""
SELECTABLE = (".status.phase",)
"""Fields for `kubectl get --field-selector`. Kubernetes 1.30 ignores them."""

_KEEP = ("type", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "pattern",
         "minLength", "maxLength", "minItems", "maxItems", "maxProperties", "format",
         "x-kubernetes-int-or-string")  # fmt: skip


def custom_resource_definition() -> dict[str, Any]:
    """Return the CRD as a dictionary, in apiextensions.k8s.io/v1."""
    schema = {
        "type": "object",
        "description": (AgenticRun.__doc__ or "").strip(),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            # The rule about the name can point to it only if it is declared.
            "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
            "spec": model_schema(AgenticRunSpec),
            "status": _status_schema(),
        },
        **_validations(AgenticRun),
    }
    columns = [
        {
            "name": name,
            "type": kind,
            "jsonPath": path,
            **({"priority": priority} if priority else {}),
        }
        for name, kind, path, priority in COLUMNS
    ]
    version = {
        "name": names.VERSION,
        "served": True,
        "storage": True,
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.roles.env.replicas",
                "statusReplicasPath": ".status.envReplicas",
                "labelSelectorPath": ".status.envSelector",
            },
        },
        "additionalPrinterColumns": columns,
        "selectableFields": [{"jsonPath": path} for path in SELECTABLE],
        "schema": {"openAPIV3Schema": schema},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names.PLURAL}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": names.PLURAL,
                "singular": names.SINGULAR,
                "shortNames": [names.SHORT_NAME],
                "categories": ["all"],
            },
            "versions": [version],
        },
    }


def model_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the structural schema of one model: references inlined, rules as CEL validations."""
    full = model.model_json_schema(by_alias=True, mode="validation")
    return _structural(full, full.get("$defs", {}), model)


def _status_schema() -> dict[str, Any]:
    schema = model_schema(AgenticRunStatus)
    for name, key in (("conditions", "type"), ("metrics", "name"), ("roles", "name")):
        schema["properties"][name] |= {
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": [key],
        }
    without: dict[str, Any] = _without_defaults(schema)
    return without


def _structural(node: dict[str, Any], defs: dict[str, Any], model: type | None) -> dict[str, Any]:
    """Convert one node of pydantic's JSON schema to a structural schema.

    Args:
        node: the node.
        defs: the definitions that `$ref` refers to.
        model: the Python type of the node, if it is one of our models.
    """
    if "anyOf" in node:  # Optional[X]: absent, never null
        (inner,) = (part for part in node["anyOf"] if part.get("type") != "null")
        node = {**{k: v for k, v in node.items() if k not in ("anyOf", "default")}, **inner}
    if "$ref" in node:
        node = {
            **defs[node["$ref"].rsplit("/", 1)[1]],
            **{k: v for k, v in node.items() if k != "$ref"},
        }
    # Only what a structural schema may contain: the apiserver refuses other keys.
    out: dict[str, Any] = {key: node[key] for key in _KEEP if key in node}
    if "const" in node:
        out |= {"type": "string", "enum": [node["const"]]}
    if description := node.get("description"):
        out["description"] = " ".join(description.split())
    # A default of null is no default for the apiserver.
    if node.get("default") is not None:
        out["default"] = _without_nulls(node["default"])
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if exclusive in out:  # OpenAPI v3.0: the bound and a separate flag
            out |= {bound: out[exclusive], exclusive: True}
    if "items" in node:
        # Whole lists are replaced: merging them would mix entries of two writers.
        out["x-kubernetes-list-type"] = "atomic"
        arguments = get_args(model)
        out["items"] = _structural(node["items"], defs, _plain(arguments[0]) if arguments else None)
    if "properties" in node:
        out |= _declared(node, defs, model)
    elif node.get("type") == "object":
        extra = node.get("additionalProperties")
        if isinstance(extra, dict) and extra:
            out["additionalProperties"] = _structural(extra, defs, None)
        else:
            # Otherwise the apiserver would remove unknown keys silently.
            out["x-kubernetes-preserve-unknown-fields"] = True
    return out


def _declared(node: dict[str, Any], defs: dict[str, Any], model: type | None) -> dict[str, Any]:
    """Return the part of a structural schema that declares the fields of an object."""
    fields: dict[str, type | None] = {}
    if isinstance(model, type) and issubclass(model, Model):
        fields = {
            info.alias or name: _plain(info.annotation) for name, info in model.model_fields.items()
        }
    out: dict[str, Any] = {
        "properties": {
            name: _structural(child, defs, fields.get(name))
            for name, child in node["properties"].items()
        }
    }
    if required := node.get("required"):
        out["required"] = required
    if node.get("additionalProperties") is True:
        out["x-kubernetes-preserve-unknown-fields"] = True
    return out | (_validations(model) if model is not None else {})


def _validations(model: type) -> dict[str, Any]:
    rules = [
        {
            "rule": rule.cel,
            "message": rule.message,
            "reason": rule.reason,
            **(
                {"messageExpression": f"'{rule.message}: ' + {rule.value_cel}"}
                if rule.value_cel
                else {}
            ),
            **({"fieldPath": rule.path} if rule.path else {}),
        }
        for rule in getattr(model, "RULES", ())
    ]
    return {"x-kubernetes-validations": rules} if rules else {}


def _plain(annotation: Any) -> Any:
    """Return X for `X | None` and `Annotated[X, ...]`."""
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = (part for part in get_args(annotation) if part is not type(None))
    if hasattr(annotation, "__metadata__"):
        annotation = get_args(annotation)[0]
    return annotation


def _without_nulls(default: Any) -> Any:
    """Return a default without nulls, because the apiserver evaluates the rules on it."""
    if isinstance(default, dict):
        return {key: _without_nulls(value) for key, value in default.items() if value is not None}
    return default


def _without_defaults(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: _without_defaults(value) for key, value in schema.items() if key != "default"}
    return schema


def main() -> None:
    sys.stdout.write("# Generated from crds/agenticrun_api by `make generate`. Do not edit.\n")
    yaml.safe_dump(custom_resource_definition(), sys.stdout, sort_keys=False, width=140)


if __name__ == "__main__":
    main()
