"""The Python checks of rules over several fields; tests/integration/api tests the CEL rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_api import InvalidRun, parse_run
from agenticrun_api.base import Model
from runs import MINIMAL, RULE_CASES, RuleCase, run_with


def _models(model: type[Model] = Model) -> set[type[Model]]:
    return {model}.union(*(_models(child) for child in model.__subclasses__()))


def test_every_rule_has_a_case() -> None:
    written = {
        rule.message for model in _models() for rule in model.RULES if "oldSelf" not in rule.cel
    }
    covered = {
        message for message in written for case in RULE_CASES if message.startswith(case.message)
    }
    assert covered == written, "add a case in tests/support/runs.py"
    assert len(RULE_CASES) == len(written)


def test_a_rule_without_a_python_check_is_a_transition_or_about_metadata() -> None:
    unchecked = [rule for model in _models() for rule in model.RULES if rule.check is None]
    assert all(
        "oldSelf" in rule.cel or rule.cel.startswith("self.metadata.name") for rule in unchecked
    )


@pytest.mark.parametrize("case", RULE_CASES, ids=lambda case: case.id)
def test_the_rule_refuses_and_names_the_field(case: RuleCase) -> None:
    with pytest.raises(InvalidRun) as caught:
        parse_run(run_with(*case.refused))
    (line,) = caught.value.errors
    assert line.startswith(f"{case.path}: {case.message}")


@pytest.mark.parametrize("case", RULE_CASES, ids=lambda case: case.id)
def test_the_rule_accepts_its_good_side(case: RuleCase) -> None:
    parse_run(run_with(*case.accepted))


def test_a_topology_is_refused_where_cel_cannot_see_that_a_claim_of_one_node_is_made() -> None:
    """CEL does not read where the driver's own volumes are mounted."""
    mounts = [{"name": "data", "mountPath": "/data"}]
    changes = (
        ("spec.queue", {"name": "gpus"}),
        ("spec.roles.driver", {"volumeMounts": mounts}),
        ("spec.roles.trainer", {"topology": {"required": "rack"}}),
        ("spec.checkpoint.uri", "/checkpoints"),
    )
    with pytest.raises(InvalidRun, match="which Kueue does not know"):
        parse_run(run_with(*changes))
    parse_run(run_with(*changes, ("spec.checkpoint.uri", "s3://bucket/prefix")))


@given(groups=st.integers(1, 40), partition=st.lists(st.integers(0, 40), min_size=1, max_size=5))
def test_a_partition_is_accepted_exactly_when_it_adds_up(groups: int, partition: list[int]) -> None:
    tags = [f"Env{i}" for i in range(len(partition))]
    document = run_with(
        ("spec.pipeline.envs", [{"tag": tag, "type": "frozen_lake"} for tag in tags]),
        (
            "spec.pipeline.trainEnvs",
            {"groups": groups, "groupSize": 4, "tags": tags, "partition": partition},
        ),
    )
    if sum(partition) == groups:
        assert parse_run(document).spec.pipeline.train_envs.shares() == dict(
            zip(tags, partition, strict=True)
        )
    else:
        with pytest.raises(InvalidRun, match="partition must add up"):
            parse_run(document)


def test_the_minimal_run_is_valid() -> None:
    assert parse_run(MINIMAL).spec.pipeline.max_steps == 2
