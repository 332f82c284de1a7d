"""Metrics of the operator: requests to heads, refused writes, its memory limit."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from agenticrun_operator import errors, metrics
from agenticrun_operator.cluster import HeadAddress, RunHead
from agenticrun_operator.cluster.kube import Response
from agenticrun_operator.cluster.transports import PodAddress
from agenticrun_operator.slow_writes import SlowWrites

POD = PodAddress("team", "head", "10.0.0.1")
HEAD = HeadAddress(POD, "run", "ray", "reporter", "pod", "1", proves_itself=False)


class OneAnswer:
    """Answers once, then no more."""

    answered = False

    async def request(self, *_: Any, **__: Any) -> Response:
        if self.answered:
            raise errors.HeadUnreachable("gone")
        self.answered = True
        return Response(204, b"")


def count(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


async def test_requests_to_heads_are_counted_by_port_and_status() -> None:
    requests = "agenticrun_operator_head_requests_total"
    seconds = "agenticrun_operator_head_request_seconds_count"
    before = [
        count(requests, port="8787", status="204"),
        count(requests, port="8787", status="none"),
        count(seconds, port="8787"),
    ]
    head = RunHead(OneAnswer())
    await head.progress(HEAD)
    await head.progress(HEAD)
    after = [
        count(requests, port="8787", status="204"),
        count(requests, port="8787", status="none"),
        count(seconds, port="8787"),
    ]
    assert [late - early for early, late in zip(before, after, strict=True)] == [1, 1, 2]


@pytest.mark.parametrize(
    ("error", "counted"), [(errors.WebhookUnavailable("down"), 1), (errors.Conflict("old"), 0)]
)
async def test_refused_writes_are_counted_by_their_error(
    error: errors.ClusterError, counted: int
) -> None:
    async def write() -> None:
        raise error

    name, label = "agenticrun_operator_write_failures_total", type(error).__name__
    before = count(name, error=label)
    writes = SlowWrites(lambda _: None)
    deadline = asyncio.get_running_loop().time() + 5
    with pytest.raises(type(error)):
        await writes.finish(("team", "lake"), "creation of Secret x", 1, deadline, write)
    assert count(name, error=label) - before == counted


@pytest.mark.parametrize(("text", "limit"), [("536870912\n", 2**29), ("max\n", math.inf)])
def test_the_memory_limit_is_that_of_the_container(tmp_path: Path, text: str, limit: float) -> None:
    file = tmp_path / "memory.max"
    assert metrics.memory_limit(file) == math.inf
    file.write_text(text)
    assert metrics.memory_limit(file) == limit
