"""Requests of engines that die or cannot be reached go to others, but no request ends them all."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from agenticrun_workers.inference import client as client_module
from agenticrun_workers.inference.client import MAX_LOST_ENGINES, GenerationClient, RequestRefused
from agenticrun_workers.inference.request_port import Address
from agenticrun_workers.types import GenerationRequest, SamplingParams
from rollout_fakes import FakeEngine, Remote
from waiting import eventually_in_loop

ANSWER_T = np.array([5], np.int32)


def request(name: str = "a") -> GenerationRequest:
    return GenerationRequest(name, name, np.array([1], np.int32), SamplingParams(1))


class OutOfReach(FakeEngine):
    """An engine that lives, at an address where nobody listens any more."""

    async def requests_address(self) -> Address:
        return Address("127.0.0.1", 1, b"")


async def test_requests_of_an_engine_that_cannot_be_reached_go_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "RECONNECT_SECONDS", 0.01)
    far, near = OutOfReach(ANSWER_T), FakeEngine(ANSWER_T)
    client = GenerationClient("c")
    client.set_engines({"far": Remote(far)})
    asking = [asyncio.create_task(client.generate(request(str(number)))) for number in range(4)]
    await asyncio.sleep(0.05)
    client.set_engines({"far": Remote(far), "near": Remote(near)})
    answers = await asyncio.wait_for(asyncio.gather(*asking), 20)
    assert {answer.engine for answer in answers} == {"near"}
    late = await asyncio.wait_for(client.generate(request("late")), 20)
    assert late.engine == "near"
    client.set_engines({})
    await near.close()
    await asyncio.sleep(0)  # the loop closes the connections


async def test_a_request_of_which_engines_die_is_refused_at_last() -> None:
    """Otherwise it would end the replacements, too, and with them the attempt."""
    client = GenerationClient("c")
    asking = asyncio.create_task(client.generate(request()))
    engines = [FakeEngine(ANSWER_T, lambda request: True) for _ in range(MAX_LOST_ENGINES)]
    for number, engine in enumerate(engines):
        client.set_engines({str(number): Remote(engine)})
        await eventually_in_loop(lambda: bool(engine.requests), 60, "it is asked")
    client.set_engines({})
    with pytest.raises(RequestRefused, match="3 engines died while they sampled it"):
        await asyncio.wait_for(asking, 20)
    for engine in engines:
        await engine.close()
