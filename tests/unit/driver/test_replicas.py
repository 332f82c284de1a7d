"""The replicas that the operator hands to the driver with its job."""

from __future__ import annotations

import pytest

from agenticrun_api import Role, parse_run
from agenticrun_workers.driver.__main__ import with_replicas
from runs import run_with


@pytest.mark.parametrize(
    ("handed", "env", "inference"),
    [(None, 2, 1), ('{"env": 3}', 3, 1), ('{"env": 1, "inference": 4}', 1, 4)],
)
def test_the_replicas_of_the_pods_win_over_those_of_the_mounted_run(
    handed: str | None, env: int, inference: int
) -> None:
    run = with_replicas(parse_run(run_with(("spec.roles", {"env": {"replicas": 2}}))), handed)
    assert (run.spec.actors(Role.ENV), run.spec.actors(Role.INFERENCE)) == (env, inference)
