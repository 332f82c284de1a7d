"""Generate docs/reference.md from the API models.

    python tools/docs/reference.py > docs/reference.md

Each mapping of the spec becomes a section with a list: field, type, default, constraints, and the
docstring under the field. The lists come from the CRD's schema, so they cannot say anything that
the apiserver does not enforce.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from agenticrun_api import names
from agenticrun_api.crd import COLUMNS, custom_resource_definition

Schema = dict[str, Any]

_BOUNDS = (
    ("minimum", "≥ {}"),
    ("maximum", "≤ {}"),
    ("minItems", "≥ {} items"),
    ("pattern", "`{}`"),
)

_RULES = "x-kubernetes-validations"

_OTHER_DEFAULTS = "other defaults"
"""Key of the defaults that other roles have, in the schema that stands for all roles."""

_INTRODUCTION = f"""# Reference

Generated from `crds/agenticrun_api` by `make generate`. Do not edit.

`{names.API_VERSION}`, kind `{names.KIND}`, short name `{names.SHORT_NAME}`, namespaced.
The name has at most {names.MAX_NAME_LENGTH} lower-case letters, digits and `-`,
and begins with a letter. An unknown field is refused (`kubectl apply` validates strictly).
Choices are in CamelCase, as in Kubernetes (`Colocated`); terms of papers and libraries are in lower
case (`grpo`, `bfloat16`). Limits on the lengths of texts and lists are in the CRD.
"""


def reference() -> str:
    """The whole page."""
    schema = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    parts, shown = [_INTRODUCTION], dict[str, str]()
    for part in ("spec", "status"):
        for path, node in _mappings(part, schema["properties"][part]):
            fields = json.dumps([node.get(key) for key in ("properties", "required", _RULES)])
            parts.append(_section(path, node, shown.get(fields)))
            shown.setdefault(fields, path)
    parts.append(_columns())
    return "\n".join(parts)


def _mappings(path: str, node: Schema) -> Iterator[tuple[str, Schema]]:
    """Every mapping with known fields, parents first."""
    if "properties" not in node:
        return
    yield path, node
    children = node["properties"]
    if path == "spec.roles":
        children = {"ROLE": _any_role(children)}
    for name, child in children.items():
        yield from _mappings(f"{path}.{name}", child)
        yield from _mappings(f"{path}.{name}[]", child.get("items", {}))


def _any_role(roles: dict[str, Schema]) -> Schema:
    """One schema for all roles, which differ in defaults only; the driver has no replicas."""
    common = roles["trainer"]
    fields = dict(common["properties"])
    for role, schema in roles.items():
        for name, field in common["properties"].items():
            theirs = schema["properties"].get(name)
            if theirs is None:
                fields[name] = fields[name] | {
                    "description": f"Not available for the {role}. {_meaning(field)}"
                }
            elif theirs.get("default") != field.get("default"):
                others = fields[name].get(_OTHER_DEFAULTS, ())
                fields[name] = fields[name] | {
                    _OTHER_DEFAULTS: (*others, f"{role}: `{json.dumps(theirs['default'])}`")
                }
    return common | {"description": "Pods of one role.", "properties": fields}


def _section(path: str, node: Schema, same: str | None) -> str:
    """One mapping. `same`: an earlier mapping with the same fields, which are not listed again."""
    lines = [f"## `{path}`", ""]
    if description := node.get("description"):
        lines += [description, ""]
    if path.endswith(".podTemplate.spec"):
        lines += ["Only fields with rules are listed; every field of a pod is accepted.", ""]
    if same:
        return "\n".join([*lines, f"The fields are those of [`{same}`]({_anchor(same)}).", ""])
    required = set(node.get("required", ()))
    for name, child in node["properties"].items():
        facts = [_type(child)]
        if path.startswith("spec"):  # only the operator writes the status, within its bounds
            facts += [_bounds(child), _default(child, name in required)]
        meaning = _meaning(child)
        if "properties" in child:  # its section says what it is
            section = "ROLE" if path == "spec.roles" else name
            facts[0], meaning = f"[mapping]({_anchor(f'{path}.{section}')})", ""
        lines.append(
            f"- `{name}` ({', '.join(filter(None, facts))})" + f": {meaning}" * bool(meaning)
        )
    if rules := node.get(_RULES, ()):
        lines += ["", "Rules:", "", *_joined(rule["message"] for rule in rules)]
    return "\n".join([*lines, ""])


def _anchor(path: str) -> str:
    """Return the address of a section, as GitHub makes it."""
    return "#" + re.sub(r"[^a-z0-9_-]", "", path.lower())


def _joined(messages: Iterable[str]) -> Iterator[str]:
    """List items: messages that differ only in their first word, the field, become one."""
    fields: dict[str, list[str]] = {}
    for message in messages:
        field, _, rest = message.partition(" ")
        fields.setdefault(rest, []).append(field)
    for rest, names_ in fields.items():
        yield f"- {', '.join(names_)}{':' if len(names_) > 1 else ''} {rest}"


def _type(node: Schema) -> str:
    if node.get("x-kubernetes-int-or-string"):
        return "quantity"
    if "enum" in node:
        return " or ".join(f"`{value}`" for value in node["enum"])
    if "items" in node:
        return f"list of {_type(node['items'])}"
    if "properties" in node:
        return "mapping"
    if "additionalProperties" in node:
        return f"map of {_type(node['additionalProperties'])}"
    return "open mapping" if node.get("x-kubernetes-preserve-unknown-fields") else str(node["type"])


def _default(node: Schema, required: bool) -> str:
    if required:
        return "**required**"
    if node.get("default") in (None, [], {}) or "properties" in node:
        return ""
    return ", ".join([f"default `{json.dumps(node['default'])}`", *node.get(_OTHER_DEFAULTS, ())])


def _bounds(node: Schema) -> str:
    found = []
    for key, text in _BOUNDS:
        if key in node:
            exclusive = node.get(f"exclusive{key.capitalize()}") is True
            found.append(
                text.replace("≥", ">").replace("≤", "<").format(node[key])
                if exclusive
                else text.format(node[key])
            )
    if keys := node.get("x-kubernetes-list-map-keys"):
        found.append(f"no two with the same `{', '.join(keys)}`")
    return ", ".join(found)


def _meaning(node: Schema) -> str:
    return str(node.get("description", ""))


def _columns() -> str:
    columns = [
        f"{name.upper()} (`{path}`{', with `-o wide`' if wide else ''})"
        for name, _, path, wide in COLUMNS
    ]
    return "\n".join(["## Columns of `kubectl get agenticruns`", "", ", ".join(columns) + ".", ""])


def main() -> None:
    sys.stdout.write(reference())


if __name__ == "__main__":
    main()
