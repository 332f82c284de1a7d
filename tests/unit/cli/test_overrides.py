"""`--set path=value`: the changes and the error messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from agenticrun_api import InvalidRun
from agenticrun_api.overrides import load_run_with, with_overrides
from runs import run_with


def pipeline(*changes: str) -> dict[str, Any]:
    """Return spec.pipeline of the minimal run after these changes."""
    changed: dict[str, Any] = with_overrides(run_with(), changes)["spec"]["pipeline"]
    return changed


@pytest.mark.parametrize(
    "path",
    ["pipeline.envs[0].maxSteps", "spec.pipeline.envs[0].maxSteps", "pipeline.envs.0.maxSteps"],
)
def test_the_spec_prefix_is_optional_and_indices_have_two_spellings(path: str) -> None:
    assert pipeline(f"{path}=4")["envs"][0]["maxSteps"] == 4


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("0.5", 0.5),
        ("1e-3", 0.001),
        ("2E5", 200_000.0),
        ("true", True),
        ("null", None),
        ("", None),
        ("Auto", "Auto"),
        ("[1, 4]", [1, 4]),
        ("{name: rloo}", {"name": "rloo"}),
        ("a=b", "a=b"),
        ("'4'", "4"),
    ],
)
def test_values_are_yaml(text: str, value: object) -> None:
    assert pipeline(f"pipeline.record={text}")["record"] == value


def test_mappings_on_the_way_are_made() -> None:
    assert pipeline("pipeline.actorTrain.training.learningRate=1e-5")["actorTrain"] == {
        "training": {"learningRate": 1e-5}
    }


def test_a_null_mapping_is_replaced() -> None:
    assert pipeline("pipeline.warmup=null", "pipeline.warmup.steps=3")["warmup"] == {"steps": 3}


def test_a_field_is_found_in_the_file_s_own_spelling() -> None:
    changed = pipeline("pipeline.max_steps=7")
    assert changed["maxSteps"] == 7
    assert "max_steps" not in changed


def test_later_changes_win_and_the_given_document_stays() -> None:
    document = run_with()
    assert (
        with_overrides(document, ["pipeline.seed=1", "pipeline.seed=2"])["spec"]["pipeline"]["seed"]
        == 2
    )
    assert document == run_with()


def test_the_name_can_be_set() -> None:
    assert with_overrides(run_with(), ["metadata.name=other"])["metadata"]["name"] == "other"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("pipeline.seed", "spec.pipeline.seed: write --set pipeline.seed=VALUE"),
        ("pipeline.envs[3].maxSteps=1", "spec.pipeline.envs[3]: the list has 1 entries"),
        (
            "pipeline.envs.maxSteps=1",
            "spec.pipeline.envs: is a list: write spec.pipeline.envs[0] for its first entry",
        ),
        ("pipeline.trainEnvs[0]=1", "spec.pipeline.trainEnvs: is not a list, so it has no entry 0"),
        ("pipeline.maxSteps.x=1", "spec.pipeline.maxSteps: is 2, which has no 'x'"),
        ("pipeline.eval={a: 1, a: 2}", "spec.pipeline.eval: '{a: 1, a: 2}' sets a twice"),
        ("pipeline.seed=[1", "spec.pipeline.seed: '[1' is not YAML"),
        ("pipeline..seed=1", "pipeline..seed: is not a path"),
        ("=1", ": is not a path"),
    ],
)
def test_errors_begin_with_the_path(change: str, error: str) -> None:
    with pytest.raises(InvalidRun) as raised:
        pipeline(change, "pipeline.envs[9].tag=x")
    assert raised.value.errors[0].startswith(error)
    assert raised.value.errors[1] == "spec.pipeline.envs[9]: the list has 1 entries"


def test_the_run_is_validated_after_all_changes(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run_with()))
    run = load_run_with(
        file, ["pipeline.trainEnvs.groupSize=3", "pipeline.rolloutBatchSize=9"]
    )  # each alone is refused
    assert run.spec.pipeline.rollout_batch_size == 9
    with pytest.raises(InvalidRun, match=r"spec\.pipeline\.sead: unknown field"):
        load_run_with(file, ["pipeline.sead=1"])
