"""Connections to the apiserver that are dead without an error."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from agenticrun_operator.cluster import KubeClient, connect
from agenticrun_operator.cluster import kube as kube_client
from agenticrun_operator.errors import KubeUnavailable

PATH = "/api/v1/namespaces/team/pods"


class DeafApiserver:
    """Answers, but not on the connections that are dead."""

    def __init__(self) -> None:
        self.used: list[asyncio.Transport] = []
        self.dead: set[asyncio.Transport] = set()
        self.seconds = 0.0
        """Time until it answers."""

    async def handle(self, request: web.Request) -> web.Response:
        assert request.transport
        self.used.append(request.transport)
        if request.transport in self.dead:
            await asyncio.Event().wait()
        await asyncio.sleep(self.seconds)
        return web.json_response({"items": []})


@pytest.fixture
def apiserver() -> DeafApiserver:
    return DeafApiserver()


@pytest.fixture
async def kube(
    apiserver: DeafApiserver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[KubeClient]:
    monkeypatch.setattr(kube_client, "IDLE_SECONDS", 0.3)
    app = web.Application()
    app.router.add_get("/{path:.*}", apiserver.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server = f"http://127.0.0.1:{runner.addresses[0][1]}"
    config = {
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps(config))
    client = KubeClient(await connect(file), [])
    yield client
    await client.close()
    await runner.cleanup()


async def test_a_connection_is_used_again_at_once_and_not_after_a_while(
    apiserver: DeafApiserver, kube: KubeClient
) -> None:
    await kube.raw("GET", PATH)
    await kube.raw("GET", PATH)
    await asyncio.sleep(1)
    await kube.raw("GET", PATH)
    first, second, third = apiserver.used
    assert first is second
    assert third is not first


async def test_a_request_after_one_on_a_dead_connection_is_answered(
    apiserver: DeafApiserver, kube: KubeClient
) -> None:
    await asyncio.gather(*(kube.raw("GET", PATH) for _ in range(4)))
    apiserver.dead.update(apiserver.used)
    with pytest.raises(KubeUnavailable, match=f"GET {PATH}: TimeoutError"):
        await kube.raw("GET", PATH, timeout=1)
    assert (await kube.raw("GET", PATH)).status == 200


async def test_what_a_dead_connection_swallows_is_asked_again_on_another_one(
    apiserver: DeafApiserver, kube: KubeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_client, "_REPEATED_READ", (0.5, 15.0))
    await asyncio.gather(*(kube.raw("GET", PATH) for _ in range(4)))
    apiserver.dead.update(apiserver.used)
    began = time.monotonic()
    assert await kube.list_pods("team", "lake") == []
    assert time.monotonic() - began < 3


async def test_an_apiserver_that_is_slow_gets_more_time_whatever_it_answered_before(
    apiserver: DeafApiserver, kube: KubeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_client, "_REPEATED_READ", (0.5, 15.0))
    for seconds in (0.0, 1.0, 0.0, 1.0):
        apiserver.seconds = seconds
        assert await kube.list_pods("team", "lake") == []
