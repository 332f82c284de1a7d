"""From YAML to a run: what the errors say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from agenticrun_api import InvalidRun, load_run, parse_run, version
from agenticrun_api.load import parse_mounted, parse_served, read_run
from agenticrun_api.overrides import load_run_with
from agenticrun_api.version import __version__
from agenticrun_api.yaml_text import InvalidYaml, read_yaml, write_yaml
from kubectl_yaml import READ_BY_KUBECTL
from runs import MINIMAL, REMOVE, Change, run_with

EXAMPLES = [
    file
    for file in sorted((Path(__file__).parents[3] / "examples").rglob("*.yaml"))
    if "kind: AgenticRun\n" in file.read_text()
]
P = "spec.pipeline"
LONG = "a" * 46
NAME = "letters, digits and '-', begin with a letter and end with a letter or digit (got '{}')"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ((f"{P}.algorithm.nmae", "grpo"), f"{P}.algorithm.nmae: unknown field"),
        ((f"{P}.maxSteps", "many"), f"{P}.maxSteps: Input should be a valid integer"),
        ((f"{P}.maxSteps", 0), f"{P}.maxSteps: Input should be greater than or equal to 1 (got 0)"),
        ((f"{P}.maxSteps", REMOVE), f"{P}.maxSteps: Field required"),
        (
            (f"{P}.staleness", {"offPolicy": "Maybe"}),
            f"{P}.staleness.offPolicy: Input should be 'Refuse' or 'Ignore' (got 'Maybe')",
        ),
        ((f"{P}.envs", []), f"{P}.envs: List should have at least 1 item"),
        (
            (f"{P}.envs", [{"tag": "Lake", "type": 7}]),
            f"{P}.envs[0].type: Input should be a valid string (got 7)",
        ),
        (
            (f"{P}.envs", [{"tag": tag, "type": "frozen_lake"} for tag in ("Lake", "Sea", "Lake")]),
            f"{P}.envs: each entry of envs needs a tag of its own, and two have the same: Lake",
        ),
        (
            (f"{P}.rewards", [{"name": "judge", "type": "a:b"}, {"name": "judge", "type": "a:c"}]),
            f"{P}.rewards: each entry of rewards needs a name of its own, "
            "and two have the same: judge",
        ),
        (
            (f"{P}.trainEnvs.tags", ["Lake"] * 2),
            f"{P}.trainEnvs.tags: tags names a tag twice: Lake",
        ),
        (
            (f"{P}.actorTrain", {"training": {"learningRate": math.inf}}),
            f"{P}.actorTrain.training.learningRate: Input should be a finite number (got inf)",
        ),
        (
            (f"{P}.actorTrain", {"training": {"learningRate": "1e999"}}),
            f"{P}.actorTrain.training.learningRate: Input should be a finite number (got '1e999')",
        ),
        (
            (f"{P}.algorithm", {"entropyLossCoef": math.nan}),
            f"{P}.algorithm.entropyLossCoef: Input should be a finite number (got nan)",
        ),
        (
            (f"{P}.envs", [{"tag": "Lake", "type": "m:E", "config": {"a": [{"b": -math.inf}]}}]),
            f"{P}.envs[0].config.a[0].b: Input should be a finite number",
        ),
        (
            ("spec.roles.env.memory", "lots"),
            "spec.roles.env.memory: write a quantity of Kubernetes such as 500m, 2, 1.5Gi (got ",
        ),
        (("spec.rayVersion", "nightly"), "spec.rayVersion: String should match pattern"),
        *(
            (("metadata.name", name), f"metadata.name: must be at most 45 lower-case {rest}")
            for name, rest in ((name, NAME.format(name)) for name in ("Lake", "1a", "a-", "", LONG))
        ),
        (("kind", "RayJob"), "kind: Input should be 'AgenticRun' (got 'RayJob')"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_one_error_is_one_line_that_begins_with_the_path(change: Change, line: str) -> None:
    with pytest.raises(InvalidRun) as caught:
        parse_run(run_with(change))
    (said,) = caught.value.errors
    assert said.startswith(line)


@pytest.mark.parametrize(
    "change",
    [
        (f"{P}.envs", [{"tag": "Lake", "type": "frozen_lake"}, {"tag": "Lake", "type": "sokoban"}]),
        (f"{P}.rewards", [{"name": "judge", "type": "a:b"}, {"name": "judge", "type": "a:c"}]),
        (f"{P}.trainEnvs.tags", ["Lake", "Lake"]),
    ],
    ids=lambda change: change[0],
)
def test_a_run_that_an_earlier_version_accepted_is_served_after_an_upgrade(change: Change) -> None:
    with pytest.raises(InvalidRun):
        parse_run(run_with(change))
    parse_served(run_with(change))


def test_a_served_run_still_has_to_keep_the_rules_that_always_were() -> None:
    with pytest.raises(InvalidRun, match="must be a multiple of"):
        parse_served(run_with((f"{P}.rolloutBatchSize", 9)))


@pytest.mark.parametrize(
    ("attempt", "submission", "number"),
    [
        (-5, "minimal-01234567-2", 2),
        (0, "minimal-01234567-2", 2),
        (2**70, "minimal-01234567-2", 2),
        ("two", "minimal-01234567-2", 2),
        (7, "minimal-01234567-2", 2),
        (3, "minimal-01234567-0", 3),
        (3, "other-01234567-2", 3),
        (3, "minimal-01234567-x", 3),
        (3, "", 3),
        (3, None, 3),
    ],
)
def test_an_attempt_and_a_submission_id_that_contradict_each_other_are_made_to_agree(
    attempt: Any, submission: Any, number: int
) -> None:
    document = run_with()
    document["metadata"]["uid"] = "01234567-89ab"
    document["status"] = {"job": {"attempt": attempt, "submissionId": submission}}
    job = parse_served(document).status.job
    assert job is not None
    assert (job.attempt, job.submission_id) == (number, f"minimal-01234567-{number}")


@pytest.mark.parametrize("attempt", [-5, 0, 2**53 + 1, "two"])
def test_an_attempt_that_nothing_names_is_damage(attempt: Any) -> None:
    document = run_with()
    document["metadata"]["uid"] = "01234567-89ab"
    document["status"] = {"job": {"attempt": attempt, "submissionId": "by-hand"}}
    with pytest.raises(InvalidRun, match=r"status\.job\.attempt: "):
        parse_served(document)


def test_all_errors_are_reported_at_once() -> None:
    with pytest.raises(InvalidRun) as caught:
        parse_run(
            run_with((f"{P}.maxSteps", 0), ("spec.roles.trainer.gpus", -1), ("spec.modle", {}))
        )
    assert {line.split(":")[0] for line in caught.value.errors} == {
        f"{P}.maxSteps",
        "spec.roles.trainer.gpus",
        "spec.modle",
    }


def test_other_documents_in_the_file_are_ignored(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump_all([{"kind": "ConfigMap", "data": {}}, MINIMAL]))
    assert load_run(file).metadata.name == "minimal"


def test_a_file_of_another_encoding_says_so(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("kind: AgenticRun", encoding="utf-16")
    with pytest.raises(InvalidRun, match=f"{file}: not UTF-8 text, write it as such"):
        load_run(file)


@pytest.mark.parametrize("name", ["containers", "initContainers", "volumes"])
def test_an_empty_list_of_a_pod_template_may_be_written_as_nothing(name: str) -> None:
    roles = {"trainer": {"podTemplate": {"spec": {name: None}}}}
    parse_run({**MINIMAL, "spec": {**MINIMAL["spec"], "roles": roles}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("spec: [", "not YAML"),
        ("kind: ConfigMap", "expected one document of kind AgenticRun, found 0"),
        (
            "kind: AgenticRun\n---\nkind: AgenticRun",
            "expected one document of kind AgenticRun, found 2",
        ),
    ],
)
def test_a_file_without_one_run_says_so(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(InvalidRun) as caught:
        load_run(file)
    assert str(file) in str(caught.value)
    assert message in str(caught.value)


EQUAL_KEYS = [
    ("spec:\n  pipeline:\n    seed: 1\n    maxSteps: 2\n    seed: 2\n", "seed", 4, 6),
    ("spec: {pipeline: {seed: 1, maxSteps: 2, seed: 1}}\n", "seed", 2, 2),
    ("spec: {}\nmetadata: {name: a}\nspec: {}\n", "spec", 2, 4),
    ("spec:\n  pipeline:\n    envs:\n    - tag: A\n      'tag': B\n", "tag", 5, 6),
]


@pytest.mark.parametrize(("text", "key", "first", "second"), EQUAL_KEYS)
def test_equal_keys_are_refused_with_the_lines_of_both(
    tmp_path: Path, text: str, key: str, first: int, second: int
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"kind: AgenticRun\n{text}")
    with pytest.raises(InvalidRun) as caught:
        read_run(file)
    message = f"line {second}: {key} is set twice (line {first}): remove one of the two"
    assert str(caught.value) == f"{file}: {message}"


def test_a_key_may_replace_one_of_a_merged_mapping(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "kind: AgenticRun\na: &a {seed: 1, steps: 2}\nb: &b {<<: *a, seed: 3}\nc: {<<: *b, seed: 4}"
    )
    document = read_run(file)
    assert document["b"] == {"seed": 3, "steps": 2}
    assert document["c"] == {"seed": 4, "steps": 2}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e9", 1e9),
        ("1E1", 10.0),
        ("-1e-3", -0.001),
        ("1.5e6", 1.5e6),
        (".5e+1", 5.0),
        ("'1e9'", "1e9"),
        ("1e", "1e"),
        ("e1", "e1"),
        ("1e9Gi", "1e9Gi"),
    ],
)
def test_scientific_notation_is_a_number_as_kubectl_reads_it(
    tmp_path: Path, text: str, value: object
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"kind: AgenticRun\nx: {text}\n")
    assert read_run(file)["x"] == value


@pytest.mark.parametrize(("text", "value"), READ_BY_KUBECTL)
def test_values_are_those_that_kubectl_reads(text: str, value: object) -> None:
    read = read_yaml(f"x: {text}\n")["x"]
    assert (read, type(read)) == (value, type(value))
    assert read_yaml(write_yaml({"x": read})) == {"x": read}
    assert yaml.safe_load(write_yaml({"x": read})) == {"x": read}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:\n- 9223372036854775808", "line 2: 9223372036854775808 is too large for Kubernetes"),
        ("a: -12345678901234567890123", "too large for Kubernetes to store exactly: write it in"),
        ("{1.5: a}", "line 1: the mapping has the key 1.5, which is no text: quote it"),
        ("{7: a, 007: b}", "line 1: 7 is set twice (line 1): remove one of the two"),
        ("a: 1\nb: !!binary aGk=", "line 2: JSON has no tag:yaml.org,2002:binary: quote it"),
        ("{y: a, 'true': b}", "line 1: true is set twice (line 1): remove one of the two"),
    ],
)
def test_what_kubernetes_cannot_store_exactly_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidYaml) as caught:
        read_yaml(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("ascii_only", [False, True])
def test_what_is_written_is_read_again(ascii_only: bool) -> None:
    document = {
        "texts": ["1e9", "2E-3", ".5e1", "1e", "目", "yes", "1", ""],
        "numbers": [1e9, 1e-9],
    }
    text = write_yaml(document, ascii_only=ascii_only)
    assert read_yaml(text) == document
    assert text.isascii() == ascii_only


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_valid(example: Path) -> None:
    load_run(example)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        *((text, text) for text in ("2Pi", "2Ei", "1E", "1e9", "1E9", "+2Gi", ".5Gi", "5.Gi")),
        *((text, text) for text in ("100u", "1.5P", "1e+18", "4000000000000000n")),
        (2**22, "4194304"),
        (1e9, "1000000000"),
    ],
)
def test_every_positive_quantity_of_kubernetes_is_accepted(given: object, text: str) -> None:
    assert parse_run(run_with(("spec.roles.env.memory", given))).spec.roles.env.memory == text


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("4GiB", "write a quantity of Kubernetes as 4Gi (got '4GiB')"),
        ("4 GB", "write a quantity of Kubernetes as 4G (got '4 GB')"),
        ("1K", "write a quantity of Kubernetes as 1k (got '1K')"),
        ("lots", "write a quantity of Kubernetes such as 500m, 2, 1.5Gi (got 'lots')"),
        ("-1", "write a quantity of Kubernetes such as 500m, 2, 1.5Gi (got '-1')"),
        ("1e999", "write a quantity of Kubernetes such as 500m, 2, 1.5Gi (got '1e999')"),
        (True, "write a quantity of Kubernetes such as 500m, 2, 1.5Gi (got True)"),
        (None, "write a quantity of Kubernetes (500m, 2, 1.5Gi), or leave the field out"),
        (0.5, "write a quantity that is no whole number in quotes: '0.5'"),
    ],
)
@pytest.mark.parametrize("field", ["spec.roles.env.cpus", "spec.checkpoint.volumeClaim.size"])
def test_a_quantity_that_is_none_says_how_to_write_it(
    given: object, advice: str, field: str
) -> None:
    if given is None and field.endswith("size"):
        return  # the field may be null
    with pytest.raises(InvalidRun) as caught:
        parse_run(run_with((field, given)))
    assert str(caught.value) == f"{field}: {advice}"


def test_half_a_cpu_needs_no_quotes_on_this_machine() -> None:
    run = parse_run(run_with(("spec.roles.env.cpus", 0.5)), local=True)
    assert run.spec.roles.env.cpus == "0.5"


@pytest.mark.parametrize(
    "text", ["1e9", "1.0e18", "1e1", "2", "4Gi", "'1e9'", "1E+6", "~", "null", "0", "'0'", "0e1"]
)
@pytest.mark.parametrize("path", ["roles.env.memory", "pipeline.maxSteps"])
def test_a_value_means_the_same_in_a_file_and_in_a_change(
    text: str, path: str, tmp_path: Path
) -> None:
    def outcome(file_text: str, *changes: str) -> object:
        file = tmp_path / "run.yaml"
        file.write_text(file_text)
        try:
            return load_run_with(file, changes).spec
        except InvalidRun as error:
            return str(error)

    plain = yaml.safe_dump(run_with((f"spec.{path}", "HERE")))
    assert outcome(plain.replace("HERE", text)) == outcome(plain, f"{path}={text}")


def test_the_document_for_the_pods_has_identity_and_spec_and_parses_again() -> None:
    run = parse_run(
        {
            **run_with(),
            "metadata": {
                "name": "lake",
                "namespace": "team",
                "uid": "u-1",
                "generation": 3,
                "labels": {"a": "b"},
            },
        }
    )
    document = run.document()
    assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
    assert document["metadata"] == {
        "name": "lake",
        "namespace": "team",
        "uid": "u-1",
        "generation": 3,
        "annotations": {"agenticrun.dev/version": __version__},
    }
    assert parse_mounted(document).spec == run.spec


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_document_for_the_pods_has_only_what_the_user_set(example: Path) -> None:
    """So a worker image needs to know only these fields."""
    run = load_run(example)
    served = parse_served(run.to_dict())  # with all defaults, as the CRD fills them in
    document = served.document()
    assert parse_mounted(document).spec == run.spec
    assert _fields(document["spec"]) <= _fields(read_run(example)["spec"]) | {
        "roles",
        "roles.inference",
    }


def _fields(node: Any, path: str = "") -> set[str]:
    """Return the paths of all objects, lists and values of a document, none below lists."""
    below = node.items() if isinstance(node, dict) else ()
    return {path}.union(*(_fields(value, f"{path}.{name}".strip(".")) for name, value in below))


def test_code_of_a_kind_that_a_later_crd_has_is_refused_and_not_ignored() -> None:
    with pytest.raises(InvalidRun, match=r"spec\.code: set configMap, git, image or pip"):
        parse_served(run_with(("spec.code", {"torrent": {"url": "x"}})))


def test_a_config_map_is_told_to_an_earlier_worker_as_ever() -> None:
    served = run_with(("spec.code", {"configMap": "mine"}))
    assert parse_served(served).document()["spec"]["code"] == {"configMap": "mine"}


@pytest.mark.parametrize("where", ["spec.pipeline.later", "spec.roles.env.later", "spec.later"])
def test_a_worker_refuses_a_field_that_the_user_set_and_it_does_not_know(where: str) -> None:
    document = run_with((where, 7))
    document["metadata"]["annotations"] = {"agenticrun.dev/version": "9.9.0"}
    with pytest.raises(InvalidRun) as caught:
        parse_mounted(document)
    (said,) = caught.value.errors
    assert said.startswith(f"{where}: unknown field: ")
    assert f"the worker image has AgenticRun {__version__}, the operator 9.9.0" in said


@pytest.mark.parametrize(
    ("other", "supported"),
    [("0.1.0", True), ("0.0.9", True), ("0.2.7-rc1", True), ("0.3.0", False), ("1.1.0", False)]
    + [(text, False) for text in ("", "main", "1", "a.b")],
)
def test_parts_may_be_one_minor_version_apart(
    other: str, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "__version__", "0.1.0")
    assert version.is_supported(other) is supported


@pytest.mark.parametrize(
    ("code", "path"),
    [
        ({"git": {"url": "ssh://git:password@host.example/mine.git"}}, "spec.code.git.url"),
        (
            {"pip": {"requirements": ["emoji", "mine @ git+https://me:token@host.example/r.git"]}},
            "spec.code.pip.requirements[1]",
        ),
        (
            {"pip": {"requirements": ["--extra-index-url https://token@host.example/simple"]}},
            "spec.code.pip.requirements[0]",
        ),
    ],
)
def test_no_address_contains_a_password(code: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRun, match="must not contain a user or password") as refused:
        parse_run(run_with(("spec.code", code)))
    assert str(refused.value).startswith(f"{path}: ")


def test_an_address_may_contain_the_user_of_ssh() -> None:
    line = "mine @ git+ssh://git@host.example/me/mine.git"
    parse_run(run_with(("spec.code", {"pip": {"requirements": [line]}})))


@pytest.mark.parametrize(
    ("address", "refused"),
    [
        ("http://git.example.com/me/mine", True),
        ("http://localhost.example.com/mine", True),
        ("http://127.0.0.1.example.com/mine", True),
        ("http://git.svc@example.com/mine", True),
        ("http://git/mine", True),  # may be a host outside, by a search domain of the node
        ("https://git.example.com/me/mine", False),
        ("http://localhost:3000/mine", False),
        ("http://127.0.0.1/mine", False),
        ("http://git.tools.svc/mine", False),
        ("http://git.tools.svc.cluster.local:8000/me/mine", False),
    ],
)
def test_no_password_travels_unencrypted_out_of_the_cluster(address: str, refused: bool) -> None:
    run = run_with(("spec.code", {"git": {"url": address, "secretName": "token"}}))
    parse_run(run_with(("spec.code", {"git": {"url": "http://git.example.com/open"}})))
    if not refused:
        parse_run(run)
        return
    with pytest.raises(InvalidRun, match=r"^spec\.code\.git\.url: "):
        parse_run(run)
