"""What counts as usable, read off objects of the apiserver."""

from typing import Any

import pytest

from devcluster.kubectl import is_ready, rolled_out

_COMPLETE = {"observedGeneration": 2, "replicas": 1, "updatedReplicas": 1, "availableReplicas": 1}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (_COMPLETE, True),
        (_COMPLETE | {"observedGeneration": 1}, False),
        (_COMPLETE | {"replicas": 2}, False),
        (_COMPLETE | {"updatedReplicas": 0}, False),
        ({key: value for key, value in _COMPLETE.items() if key != "availableReplicas"}, False),
        ({}, False),
    ],
    ids=[
        "complete",
        "not yet seen",
        "an old pod is left",
        "not yet updated",
        "not available",
        "new",
    ],
)
def test_a_deployment_is_available_when_its_newest_generation_is(
    status: dict[str, Any], expected: bool
) -> None:
    assert (
        rolled_out({"metadata": {"generation": 2}, "spec": {"replicas": 1}, "status": status})
        is expected
    )


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ([("DiskPressure", "True")], False),
        ([("Ready", "Unknown")], False),
        ([("Ready", "True")], True),
    ],
)
def test_a_node_is_ready_when_its_condition_says_so(
    conditions: list[tuple[str, str]], expected: bool
) -> None:
    assert (
        is_ready(
            {
                "status": {
                    "conditions": [{"type": kind, "status": status} for kind, status in conditions]
                }
            }
        )
        is expected
    )
