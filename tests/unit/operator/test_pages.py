"""The operator's pages answer at IPv4 and IPv6 addresses, and the health page tells the truth."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agenticrun_operator.cluster import DirectTransport, RunHead
from agenticrun_operator.metrics import serve_page
from agenticrun_operator.resources import OperatorKey
from agenticrun_operator.runtime import OperatorRuntime
from agenticrun_operator.settings import Settings
from processes import free_port


async def get(host: str, port: int, path: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{host}:{port}{path}") as answer,
    ):
        return answer.status, await answer.text()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_a_pod_with_an_address_of_either_family_can_be_probed(host: str) -> None:
    async def page() -> web.Response:
        return web.Response(text="ok")

    port = free_port()
    runner = await serve_page(port, "/healthz", page)
    try:
        assert await get(host, port, "/healthz") == (200, "ok")
    finally:
        await runner.cleanup()


@pytest.fixture
async def runtime(monkeypatch: pytest.MonkeyPatch) -> OperatorRuntime:
    monkeypatch.setenv("AGENTICRUN_OPERATOR_KEY", "k" * 32)
    monkeypatch.setenv("AGENTICRUN_WORKER_IMAGE", "worker:1")
    kube: Any = None
    return OperatorRuntime(Settings(), kube, RunHead(DirectTransport(kube)), OperatorKey("k" * 32))


async def test_the_health_page_fails_when_a_background_task_has_ended(
    runtime: OperatorRuntime,
) -> None:
    task = asyncio.create_task(asyncio.sleep(60), name="lease")
    runtime._background.append(task)
    runtime._reconcile_workers.start()
    healthy = await runtime.health()
    assert healthy.status == 200
    assert json.loads(healthy.text or "")["reconciling"] == 0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    ill = await runtime.health()
    await runtime._reconcile_workers.stop()
    assert (ill.status, "ended background tasks: ['lease']" in (ill.text or "")) == (500, True)
