"""All that the pages show can be typed: YAML that the API takes, commands and options that exist.

Other tests run whole blocks: the pages' environments, agents and recipes. This one reads every
block of every page, so that nothing is left out.
"""

from __future__ import annotations

import ast
import copy
import json
import re
import subprocess
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
from devcluster.cli import main as devcluster
from pages import (
    FENCED,
    PAGES,
    PROGRAMS,
    ROOT,
    blocks,
    commands,
    indented_yaml,
    shell_lines,
    simple_commands,
)

KUBECTL = (
    "apply annotate agenticrun cp create delete describe exec get label logs patch scale top wait"
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
    found = [(" ".join(words), refused(words)) for words in commands(page.read_text())]
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


UNCHECKED = {
    "cd": "folders that the commands before it make",
    "inspect": "asks a model of this project; it was tried with inspect-ai 0.3",
    "lm_eval": "asks a model of this project; it was tried with lm-eval 0.4",
    "grep": "reads what a program of ours prints; the tests of its page have the pattern",
    "ls": "lists what the commands before it made",
    "pre-commit": "writes a hook into .git; .pre-commit-config.yaml is what it runs",
    "ssh-keyscan": "asks a host of the internet",
    "uv": "installs the packages of another library; the tests of its example do so, too",
    "wandb": "sends to the servers of Weights & Biases",
}
"""Programs whose command lines no test checks, and why."""
SUBCOMMANDS = {"docker": {"build", "push"}, "git": {"clone", "rev-parse"}}


def unknown(words: list[str]) -> str:
    """Return what is wrong with a command of another program, or nothing."""
    program, *rest = words
    files = [ROOT / word for word in rest if re.match(r"(tools|tests|benchmarks)/", word)]
    if missing := [file for file in files if not file.exists()]:
        return f"there is no {missing[0].relative_to(ROOT)}"
    if program in SUBCOMMANDS:
        return "" if rest[0] in SUBCOMMANDS[program] else f"add {program} {rest[0]} to SUBCOMMANDS"
    if program in ("python", "python3"):
        if rest[0] == "-c":
            ast.parse(rest[1])
            return ""
        return "" if files else f"{program} {rest[0]}: name a file of the repository"
    if program in ("pytest", ".venv/bin/pytest"):
        return "" if files or rest == ["test_my_env.py"] else "pytest without a file of ours"
    if program == ".":
        return "" if rest == [".venv/bin/activate"] else f"there is no {rest}"
    if program == "tools/fresh.sh":
        source = (ROOT / "tools/fresh.py").read_text()
        return next((f"{program} has no {word}" for word in rest if f'"{word}"' not in source), "")
    return "" if program in UNCHECKED else f"check {program} here, or say in UNCHECKED why not"


@each_page
def test_every_line_of_a_shell_block_is_checked_or_has_a_reason_why_not(page: Path) -> None:
    others = [
        words
        for line in shell_lines(page)
        for words in simple_commands(line)
        if words[0] not in PROGRAMS
    ]
    assert [(words, unknown(words)) for words in others if unknown(words)] == []


def test_shells_can_read_every_block() -> None:
    scripts = [text for page in PAGES for text in [*shell_lines(page), *blocks(page, "bash", "sh")]]
    assert len(scripts) > 100
    script = "\n".join(f"_() {{\n{text}\n}}" for text in scripts)
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert done.stderr == ""


@each_page
def test_every_fenced_block_has_a_language(page: Path) -> None:
    assert [text for _, language, text in FENCED.findall(page.read_text()) if not language] == []


def test_commands_of_the_dev_cluster_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        devcluster(["--help"])
    names = re.findall(r"\{([\w,]+)\}", capsys.readouterr().out)[0]
    used = {
        words[2]
        for page in PAGES
        for line in shell_lines(page)
        for words in simple_commands(line)
        if words[1:2] == ["tools/devcluster"]
    }
    assert used >= {"up", "down", "images", "image"}
    assert used <= set(names.split(","))


@pytest.mark.parametrize(
    "line",
    [
        "curl https://example.org",
        "pytest tests/unit/nothing.py",
        "X=1 python3 tools/nothing.py && ls",
        "V=$(git frobnicate HEAD)",
        "tools/fresh.sh --everything",
        ". elsewhere/activate",
    ],
)
def test_a_wrong_line_of_another_program_is_noticed(line: str) -> None:
    assert any(unknown(words) for words in simple_commands(line))
