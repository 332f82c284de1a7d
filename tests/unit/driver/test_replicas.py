"""The replicas that the operator hands to the driver, with its job and while it trains."""

from __future__ import annotations

from typing import Any

import pytest

from agenticrun_api import Role, parse_run
from agenticrun_workers.driver.__main__ import with_replicas
from agenticrun_workers.driver.actors import RunActors
from rollout_fakes import Mute, Remote
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


class Idle:
    """A launcher of a run in which nothing starts."""

    def start(self, *_: Any, **__: Any) -> Any:
        return Remote(Mute())

    def put(self, value: Any) -> Any:
        raise AssertionError

    def offers(self, node_id: str) -> tuple[str, ...]:
        return ()


DETERMINISTIC = ("spec.pipeline.deterministic", True)
BROADCAST = ("spec.pipeline.weightSync", {"transport": "Broadcast"})


@pytest.mark.parametrize(
    ("change", "fixed"),
    [(DETERMINISTIC, {Role.ENV, Role.INFERENCE}), (BROADCAST, {Role.INFERENCE})],
    ids=["deterministic", "Broadcast"],
)
async def test_roles_that_cannot_change_keep_their_numbers_and_say_why(
    change: tuple[str, Any], fixed: set[Role]
) -> None:
    actors = RunActors(parse_run(run_with(change)), Idle())
    actors.resize({Role.ENV: 2, Role.INFERENCE: 2})
    pools = actors.pools
    assert {role for role, pool in pools.items() if pool.fixed} == fixed
    assert {role for role, pool in pools.items() if pool.replicas == 1} == fixed
    await actors.stop()


async def test_colocated_engines_have_no_number_of_their_own() -> None:
    actors = RunActors(parse_run(run_with(("spec.placement", "Colocated"))), Idle())
    assert list(actors.pools) == [Role.ENV]
    await actors.stop()
