"""Exceptions of Ray arrive as our own, and what a method raised arrives as it was raised."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.launch import ActorDied, ActorUnavailable, OtherActorDied
from agenticrun_workers.launch.ray_launcher import RayResult


def failed(cause: Exception) -> Exception:
    """As Ray raises what an actor's method raised."""
    error: Any = RayTaskError
    wrapper: Exception = error("setup", "Traceback of the actor", cause).as_instanceof_cause()
    return wrapper


async def raised_for(error: Exception) -> Exception:
    reference = asyncio.get_running_loop().create_future()
    reference.set_exception(error)
    try:
        await RayResult(reference)
    except Exception as raised:
        return raised
    raise AssertionError("it did not fail")


CONFIG = InvalidConfig("spec.pipeline.envs[1].type", "no module named 'x'")


@pytest.mark.parametrize("error", [failed(CONFIG), failed(failed(CONFIG))])
async def test_a_method_that_fails_raises_its_own_error_with_the_actors_traceback(
    error: Exception,
) -> None:
    """Also where the failed result was an argument of another call."""
    raised = await raised_for(error)
    assert type(raised) is InvalidConfig
    assert (raised.path, str(raised)) == (CONFIG.path, str(CONFIG))
    assert raised.__cause__ is error, "Ray's, which shows the traceback of the actor"


async def test_an_actor_that_died_is_told_from_one_that_is_out_of_reach() -> None:
    assert type(await raised_for(ActorDiedError())) is ActorDied
    unavailable = ActorUnavailableError("the network is slow", None)
    raised = await raised_for(unavailable)
    assert (type(raised), str(raised)) == (ActorUnavailable, str(unavailable))


@pytest.mark.parametrize("cause", [ActorDiedError(), ActorDied("its store is gone")])
async def test_a_living_actor_that_met_the_death_of_another_one_is_not_called_dead(
    cause: Exception,
) -> None:
    raised = await raised_for(failed(cause))
    assert (type(raised), str(raised)) == (OtherActorDied, str(cause))
