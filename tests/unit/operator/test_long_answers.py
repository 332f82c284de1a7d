"""A head that answers without end, or with a bomb, costs the operator no memory."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from agenticrun_operator.cluster import (
    DirectTransport,
    HeadTransport,
    KubeClient,
    ProxyTransport,
    connect,
)
from agenticrun_operator.cluster.transports import PodAddress
from agenticrun_operator.errors import HeadUnreachable

MIB = 1 << 20
POD = PodAddress("team", "lake-head", "127.0.0.1")


def bomb(size: int) -> bytes:
    """Return this many MiB of spaces, compressed with gzip."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, 31)
    parts = [compressor.compress(b" " * MIB) for _ in range(size)]
    return b"".join(parts) + compressor.flush()


BOMB = bomb(100)
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


class HostileHead:
    """Answers every request in one of two ways."""

    def __init__(self) -> None:
        self.endless = False
        self.sent = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Serve, and return the port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        assert self._server
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            if not self.endless:
                length = b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BOMB)
                writer.write(OK + length + BOMB)
                await writer.drain()
                return
            writer.write(OK + b"\r\n")
            while self.sent < 200 * MIB:
                writer.write(b" " * 65_536)
                self.sent += 65_536
                await writer.drain()
        except ConnectionError:
            return
        finally:
            writer.close()


@pytest.fixture
async def head() -> AsyncIterator[tuple[HostileHead, int]]:
    head = HostileHead()
    yield head, await head.start()
    await head.stop()


async def peak_mib(transport: HeadTransport, port: int) -> float:
    """Ask for the progress; return the memory that this took at most."""
    tracemalloc.start()
    try:
        with pytest.raises(
            HeadUnreachable, match=f"/progress of pod lake-head answers more than {100_000} bytes"
        ):
            await transport.request(
                "GET", POD, port, "/progress", headers={}, limit=100_000, timeout=60.0
            )
        return tracemalloc.get_traced_memory()[1] / MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("endless", [False, True], ids=["bomb", "endless"])
async def test_an_answer_to_the_operator_is_read_up_to_its_limit(
    head: tuple[HostileHead, int], endless: bool
) -> None:
    hostile, port = head
    hostile.endless = endless
    async with aiohttp.ClientSession() as session:
        assert await peak_mib(DirectTransport(session), port) < 16
    assert hostile.sent < 50 * MIB


@pytest.mark.parametrize("endless", [False, True], ids=["bomb", "endless"])
async def test_an_answer_through_the_apiserver_is_read_up_to_its_limit(
    head: tuple[HostileHead, int], endless: bool, tmp_path: Path
) -> None:
    hostile, port = head
    hostile.endless = endless
    file = tmp_path / "kubeconfig"
    config = {
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    file.write_text(json.dumps(config))
    kube = KubeClient(await connect(file), [])
    try:
        assert await peak_mib(ProxyTransport(kube), port) < 16
    finally:
        await kube.close()
    assert hostile.sent < 50 * MIB
