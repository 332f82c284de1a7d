"""Pods with an IPv6 address reach each other: every port that a worker opens for other pods."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from aiohttp import ClientSession

from agenticrun_api.names import Role
from agenticrun_workers.agents.outside import endpoint
from agenticrun_workers.inference.request_port import RequestPort, connect
from agenticrun_workers.launch import Node
from agenticrun_workers.launch.node import shared_node
from agenticrun_workers.trainer.rank import RankActor
from agenticrun_workers.weights.collective import WeightGroup

ADDRESS = "::1"


def _has_ipv6() -> bool:
    try:
        socket.create_server((ADDRESS, 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")


async def test_an_engine_takes_requests() -> None:
    async def abort(names: list[str]) -> None:
        pass

    port = RequestPort(cast(Any, None), abort, ADDRESS)
    address = await port.address()
    assert address.host == ADDRESS
    frames = await connect(address, "env-0")
    frames.close()
    await port.close()


async def test_an_agent_outside_of_the_pod_is_answered() -> None:
    async with endpoint.serving(cast(Any, None), ADDRESS) as address:
        assert address.url.startswith(f"http://[{ADDRESS}]:")
        async with ClientSession() as session, session.get(f"{address.url}/v1/models") as answer:
            assert answer.status == 401, "without the episode's token"


class FirstRank(RankActor):
    role = Role.TRAINER


def test_ranks_and_engines_form_a_group() -> None:
    shared_node.set(Node("here", ADDRESS))
    first = FirstRank(0, 2, cast(Any, None))
    host, port = first.rendezvous()
    assert host == ADDRESS
    cpu = torch.device("cpu")
    with ThreadPoolExecutor(2) as pool:
        trainer = pool.submit(WeightGroup, host, port, 0, 2, cpu, first._taken_listener())
        engine = pool.submit(WeightGroup, host, port, 1, 2, cpu)
        sender, receiver = trainer.result(60), engine.result(60)
        sent = pool.submit(sender.send, torch.arange(3.0))
        received = receiver.receive((3,), torch.float32)
        sent.result(60)
    assert received.tolist() == [0.0, 1.0, 2.0]
