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

_RULES = "x-kubernetes-validations"

_REMEDY = re.compile(r"(?:: |, or )leave (?:it|them) out$")
"""The remedy of a rule that says enough without it: the page leaves it out."""

_SUMMED = re.compile(
    r"once the run exists|(?:is|are) read by .+ only: leave| is one of .+, or module:function"
)
"""Rules of which the introduction has the sum."""

_AS_IN = re.compile(r"As in an? .+ spec\.")

_OTHER_DEFAULTS = "other defaults"
"""Key of the defaults that other roles have, in the schema that stands for all roles."""

_INTRODUCTION = f"""# Reference

Generated from `crds/agenticrun_api` by `make generate`. Do not edit.

`{names.API_VERSION}`, kind `{names.KIND}`, short name `{names.SHORT_NAME}`, namespaced.
The name has at most {names.MAX_NAME_LENGTH} lower-case letters, digits and `-`,
and begins with a letter. An unknown field is refused (`kubectl apply` validates strictly).
Choices are in CamelCase, as in Kubernetes (`Colocated`); terms of papers and libraries are in lower
case (`grpo`, `bfloat16`). A boolean without a default is false. Limits on the lengths of texts and
lists are in the CRD. A field that the chosen [algorithm, loss](algorithms.md) or mode does not read
is refused. [Some fields](concepts.md) may change while a run exists. To change another, suspend the
run, delete it, and apply it with `checkpoint.resume: FromPreviousRun`.
"""


def reference() -> str:
    """The whole page."""
    schema = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    parts, shown = [_INTRODUCTION], dict[str, Schema]()
    for part in ("spec", "status"):
        for path, node in _mappings(part, schema["properties"][part]):
            if not node.keys() & {"description", _RULES} and all(
                _AS_IN.fullmatch(_meaning(field)) for field in node["properties"].values()
            ):
                continue  # Kubernetes' documentation says it
            parts.append(_section(path, node, shown))
            shown[path] = node
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
    """One schema for all roles, which differ in defaults and in the fields about replicas."""
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
        for name in schema["properties"].keys() - common["properties"].keys():
            with_it = [other for other in roles if name in roles[other]["properties"]]
            field = schema["properties"][name]
            fields[name] = field | {
                "description": f"For {' and '.join(with_it)} only. {_meaning(field)}"
            }
    return common | {"description": "Pods of one role.", "properties": fields}


def _section(path: str, node: Schema, shown: dict[str, Schema]) -> str:
    """One mapping. `shown`: earlier mappings by path, whose fields are not described again."""
    lines = [f"## `{path}`", ""]
    if description := node.get("description"):
        lines += [description, ""]
    if path.endswith(".podTemplate.spec"):
        lines += ["Only fields with rules are listed; every field of a pod is accepted.", ""]
    required = set(node.get("required", ()))
    fields = dict(node["properties"])
    rules = [rule["message"] for rule in node.get(_RULES, ())]
    rules = [rule for rule in rules if not _SUMMED.search(rule)]
    if source := next((earlier for earlier in shown if _has_fields(shown[earlier], node)), None):
        lines.append(f"The fields are those of [`{source}`]({_anchor(source)}).")
        listed = {rule["message"] for rule in shown[source].get(_RULES, ())}
        rules, fields = [rule for rule in rules if rule not in listed], {}
    for meaning, names_ in _as_in_kubernetes(fields, required).items():
        listing = ", ".join(f"`{name}`" for name in names_)
        lines.append(f"- {listing}: {meaning[0].lower()}{meaning[1:]}")
        fields = {name: child for name, child in fields.items() if name not in names_}
    mappings = []
    for name, child in fields.items():
        if "properties" in child:  # its section says what it is
            section = "ROLE" if path == "spec.roles" else name
            link = f"[`{name}`]({_anchor(f'{path}.{section}')})"
            mappings.append(link + " (**required**)" * (name in required))
            continue
        facts = [_type(child)]
        if path.startswith("spec"):  # only the operator writes the status, within its bounds
            facts += [_bounds(child), _default(child, name in required)]
        meaning = _meaning(child)
        lines.append(
            f"- `{name}` ({', '.join(filter(None, facts))})" + f": {meaning}" * bool(meaning)
        )
    if mappings:
        lines.append(f"- Mappings: {', '.join(mappings)}")
    if rules:
        lines += ["", "Rules:", "", *_joined(rules)]
    return "\n".join([*lines, ""])


def _has_fields(other: Schema, node: Schema) -> bool:
    """True if `other` has every field of `node`, as it is there."""
    required = [set(mapping.get("required", ())) for mapping in (other, node)]
    return all(
        other["properties"].get(name) == field and (name in required[0]) == (name in required[1])
        for name, field in node["properties"].items()
    )


def _as_in_kubernetes(fields: dict[str, Schema], required: set[str]) -> dict[str, list[str]]:
    """Return optional fields that Kubernetes explains, by where it does."""
    found: dict[str, list[str]] = {}
    for name, child in fields.items():
        if _AS_IN.fullmatch(_meaning(child)) and not _default(child, name in required):
            found.setdefault(_meaning(child), []).append(name)
    return found


def _anchor(path: str) -> str:
    """Return the address of a section, as GitHub makes it."""
    return "#" + re.sub(r"[^a-z0-9_-]", "", path.lower())


def _joined(messages: Iterable[str]) -> Iterator[str]:
    """List items without remedies: rules that differ only in their first word become one."""
    fields: dict[str, list[str]] = {}
    for message in messages:
        field, _, rest = _REMEDY.sub("", message).partition(" ")
        fields.setdefault(rest, []).append(field)
    for rest, names_ in fields.items():
        yield f"- {', '.join(names_)}{':' if len(names_) > 1 else ''} {rest}"


def _type(node: Schema) -> str:
    if node.get("x-kubernetes-int-or-string"):
        return "quantity"
    if "enum" in node:
        *others, last = (f"`{value}`" for value in node["enum"])
        return f"{', '.join(others)} or {last}" if others else last
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
    if node.get("default") is False or node.get("default") in (None, [], {}):
        return ""
    return ", ".join([f"default `{json.dumps(node['default'])}`", *node.get(_OTHER_DEFAULTS, ())])


def _bounds(node: Schema) -> str:
    low, high = (f"{node[bound]:.15g}" if bound in node else "" for bound in ("minimum", "maximum"))
    above, below = (bool(node.get(f"exclusive{bound}")) for bound in ("Minimum", "Maximum"))
    found = []
    if low and high and not above and not below:
        found.append(f"{low} to {high}" if low.startswith("-") else f"{low}-{high}")
    else:
        found += [f"{'>' if above else '≥'} {low}"] * bool(low)
        found += [f"{'<' if below else '≤'} {high}"] * bool(high)
    if "minItems" in node:
        found.append(f"≥ {node['minItems']} items")
    if "pattern" in node:
        found.append(f"`{node['pattern']}`")
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
