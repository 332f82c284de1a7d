"""All that the pages show can be typed: YAML that the API takes, commands and options that exist.

Other tests run whole blocks: the pages' environments, agents and recipes. This one reads every
block of every page, so that nothing is left out.
"""

from __future__ import annotations

import ast
import copy
import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import typer
import yaml

from agenticrun_api import parse_run
from agenticrun_workers.cli import app
from pages import PAGES, ROOT, blocks, commands, indented_yaml

KUBECTL = (
    "apply annotate agenticrun create delete describe exec get label logs patch scale top wait"
)
HELM = "get install upgrade uninstall rollback history template pull repo show"
TYPER = typer.main.get_command(app)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def schema() -> dict[str, Any]:
    """The CRD's schema, in which nothing is required and nothing unknown allowed."""
    crd = yaml.safe_load((ROOT / "crds/agenticruns.yaml").read_text())
    return loose(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])


def loose(node: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in node.items() if key not in ("required", "default")}
    if "items" in kept:
        kept["items"] = loose(kept["items"])
    if "properties" in kept:
        kept["properties"] = {name: loose(field) for name, field in kept["properties"].items()}
        if not kept.get("x-kubernetes-preserve-unknown-fields"):
            kept.setdefault("additionalProperties", False)
    elif isinstance(kept.get("additionalProperties"), dict):
        kept["additionalProperties"] = loose(kept["additionalProperties"])
    return kept


def places(node: dict[str, Any], keys: set[str]) -> Iterator[dict[str, Any]]:
    """Parts of the schema that have fields of all these names."""
    if keys <= node.get("properties", {}).keys():
        yield node
    children = [*node.get("properties", {}).values(), node.get("items")]
    for child in filter(None, children):
        yield from places(child, keys)


def problem(fragment: dict[str, Any]) -> str:
    """Return what the API refuses in a part of a run, wherever its fields belong."""
    found = "no part of an AgenticRun has all of these fields"
    # podTemplate has a `spec` as well, of which the schema knows nothing
    candidates = [schema()] if "spec" in fragment else places(schema(), set(fragment))
    for place in candidates:
        errors = list(jsonschema.Draft4Validator(place).iter_errors(fragment))
        if not errors:
            return ""
        found = errors[0].message
    return found


VALUES = json.loads((ROOT / "charts/agenticrun/values.schema.json").read_text())


def values_problem(values: dict[str, Any]) -> str:
    """Return what the chart refuses in some of its values."""
    loosened = {**VALUES, "required": []}
    errors = [*jsonschema.Draft7Validator(loosened).iter_errors(values)]
    # Helm merges values into the defaults, so that nothing of what is required can be missing.
    return next((e.message for e in errors if e.validator != "required"), "")


def differs(shown: Any, whole: Any, path: str = "") -> str:
    """Return the path of the first value of an excerpt that the whole does not have."""
    if isinstance(shown, dict) and isinstance(whole, dict):
        found = (differs(shown[key], whole.get(key), f"{path}.{key}") for key in shown)
    elif isinstance(shown, list) and isinstance(whole, list) and len(shown) == len(whole):
        pairs = enumerate(zip(shown, whole, strict=True))
        found = (differs(*pair, f"{path}[{n}]") for n, pair in pairs)
    else:
        return "" if shown == whole else path
    return next(filter(None, found), "")


@each_page
def test_an_excerpt_has_values_of_its_file(page: Path) -> None:
    for text in blocks(page, "yaml"):
        if match := re.match(r"# excerpt of (\S+)", text):
            assert (
                differs(yaml.safe_load(text), yaml.safe_load((ROOT / match[1]).read_text())) == ""
            )


def test_an_excerpt_that_differs_is_noticed() -> None:
    whole = {"a": [{"b": 1, "c": 2}]}
    assert differs({"a": [{"b": 1}]}, whole) == ""
    assert differs({"a": [{"b": 2}]}, whole) == ".a[0].b"
    assert differs({"a": []}, whole) == ".a"


@each_page
def test_yaml_is_a_run_a_part_of_one_or_values_of_the_chart(page: Path) -> None:
    wrong = []
    for text in [*blocks(page, "yaml", "yml"), *indented_yaml(page)]:
        if text.startswith("# values.yaml"):
            wrong += [(text, m) for m in [values_problem(yaml.safe_load(text))] if m]
            continue
        if text.startswith("# prometheus.yml"):
            continue  # promtool checks it
        for shown in yaml.safe_load_all(text):
            if isinstance(shown, dict) and shown.get("kind", "AgenticRun") != "AgenticRun":
                continue
            if isinstance(shown, dict) and "apiVersion" in shown:
                parse_run(shown)
            elif isinstance(shown, dict) and (message := problem(shown)):
                wrong.append((text, message))
    assert wrong == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"pipeline": {"maxStep": 3}},
        {"spec": {"checkpoint": {"keep": "two"}}},
        {"envs": [{"tag": "A", "typ": "frozen_lake"}]},
        {"nothing": 1},
    ],
)
def test_yaml_that_the_api_refuses_is_noticed(wrong: dict[str, Any]) -> None:
    assert problem(copy.deepcopy(wrong)) != ""


@pytest.mark.parametrize(
    "wrong",
    [{"registri": "r.example"}, {"watchNamespaces": "a"}, {"admissionPolicy": {"accounts": ["a"]}}],
)
def test_values_that_the_chart_refuses_are_noticed(wrong: dict[str, Any]) -> None:
    assert values_problem(wrong) != ""


@each_page
def test_python_is_python(page: Path) -> None:
    for text in blocks(page, "python"):
        ast.parse(text)


def refused(words: list[str]) -> str:
    """Return what is wrong with a command line, or nothing."""
    program, *rest = words
    if words[:2] == ["kubectl", "agenticrun"]:
        program, rest = "agenticrun", rest[1:]
    if program == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        wrong = [word for word in rest if "=" not in word and word not in targets]
        return f"make has no target {wrong}" if wrong else ""
    if program == "agenticrun":
        return refused_by_us(rest)
    verbs = [word for word in rest if not word.startswith("-")]
    known = KUBECTL.split() if program == "kubectl" else HELM.split()
    if not set(verbs[:2]) & set(known):  # the word after -n comes first
        return f"{program} has no command {verbs[:1]}"
    return next((missing for missing in missing_files(program, rest)), "")


def refused_by_us(rest: list[str]) -> str:
    if not rest or rest[0].startswith("-") or rest[0] in ("...", "COMMAND"):
        return ""
    command = getattr(TYPER, "commands", {}).get(rest[0])
    if command is None:
        return f"agenticrun has no command {rest[0]}"
    options = {"--help"}.union(*(set(p.opts) | set(p.secondary_opts) for p in command.params))
    used = {word.partition("=")[0] for word in rest[1:] if re.match(r"--?[a-z]", word)}
    return f"{rest[0]} has no {sorted(used - options)}" if used - options else ""


def missing_files(program: str, rest: list[str]) -> Iterator[str]:
    """Files of the repository that a command names, and values that the chart does not have."""
    for word in rest:
        if re.match(r"(examples|charts|crds)/", word) and not (ROOT / word).exists():
            yield f"there is no {word}"
    values = yaml.safe_load((ROOT / "charts/agenticrun/values.yaml").read_text())
    for option, setting in pairwise(rest):
        if program == "helm" and option == "--set":
            top = re.split(r"[.=\[]", setting)[0]
            if top not in values:
                yield f"the chart has no value {top}"


@each_page
def test_commands_and_their_options_exist(page: Path) -> None:
    text = page.read_text()
    if page.name == "messages.md":  # its left column is what the product prints
        text = re.sub(r"^\| .* \|(?= .*\|$)", "|", text, flags=re.MULTILINE)
    found = [(" ".join(words), refused(words)) for words in commands(text)]
    assert [wrong for wrong in found if wrong[1]] == []


def test_commands_are_found() -> None:
    text = (
        "    make demo && make down\n\n"
        "```console\n$ agenticrun run \\\n    -f a.yaml\n```\n`helm list`"
    )
    assert sorted(commands(text)) == [
        ["agenticrun", "run", "-f", "a.yaml"],
        ["helm", "list"],
        ["make", "demo"],
        ["make", "down"],
    ]
    assert sum(len(list(commands(page.read_text()))) for page in PAGES) > 150


@pytest.mark.parametrize(
    "line",
    [
        "make demos",
        "agenticrun trainx -f run.yaml",
        "agenticrun run -f run.yaml --sett a=b",
        "kubectl applyx -f run.yaml",
        "kubectl apply -f examples/nothing.yaml",
        "helm install agenticrun charts/agenticrun --set imagee.tag=1",
        "kubectl agenticrun watsh lake",
    ],
)
def test_a_wrong_command_is_noticed(line: str) -> None:
    assert refused(line.split()) != ""
