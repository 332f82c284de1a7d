"""The replicas that the operator hands to the driver, with its job and while it trains."""

from __future__ import annotations

from typing import Any

import pytest

from agenticrun_api import Role, parse_run
from agenticrun_workers.driver.__main__ import with_replicas
from agenticrun_workers.driver.actors import ActorStarter
from agenticrun_workers.driver.pools import ActorPools
from rollout_fakes import Mute, Remote
from runs import Change, run_with


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


def idle_pools(*changes: Change) -> ActorPools:
    run = parse_run(run_with(*changes))
    return ActorPools(run, ActorStarter(run.spec, Idle()))


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
    pools = idle_pools(change)
    pools.resize({Role.ENV: 2, Role.INFERENCE: 2})
    status = pools.status
    assert {role for role, pool in status.items() if pool.fixed} == fixed
    assert {role for role, pool in status.items() if pool.replicas == 1} == fixed
    await pools.stop()


async def test_colocated_engines_have_no_number_of_their_own() -> None:
    pools = idle_pools(("spec.placement", "Colocated"))
    assert list(pools.status) == [Role.ENV]
    await pools.stop()
