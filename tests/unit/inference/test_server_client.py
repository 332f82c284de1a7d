"""Requests to a server on this machine: a real one that answers badly on purpose."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agenticrun_workers.inference import EngineError, InvalidRequest, server_process
from agenticrun_workers.inference.server_process import ServerClient, ServerProcess, ServerSpec
from agenticrun_workers.launch import liveness
from processes import family

SERVER = """
import http.server, json, os, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.answer(200, b"")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/dies":
            print("last words", flush=True); os._exit(3)
        if self.path == "/slow":
            time.sleep(600)
        if self.path == "/garbage":
            return self.answer(200, b"<html>")
        if self.path == "/once":  # closes the connection without a word when it is used again
            if getattr(self, "used", False):
                self.close_connection = True
                return
            self.used = True
        self.answer(body.get("status", 200), json.dumps(body).encode())
    def answer(self, status, data):
        self.send_response(status); self.send_header("Content-Length", str(len(data)))
        self.end_headers(); self.wfile.write(data)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest_asyncio.fixture
async def process(tmp_path: Path) -> AsyncIterator[ServerProcess]:
    process = ServerProcess(
        ServerSpec(
            "toy", lambda port: [sys.executable, "-c", SERVER, str(port)], tmp_path, stop_seconds=0
        )
    )
    await process.start()
    yield process
    await process.stop()


@pytest_asyncio.fixture
async def http(process: ServerProcess) -> AsyncIterator[ServerClient]:
    client = ServerClient(process)
    yield client
    await client.close()


async def test_an_answer_is_its_json(http: ServerClient) -> None:
    assert await http.post("/echo", {"a": [1, 2.5, "x"]}) == {"a": [1, 2.5, "x"]}


async def test_a_refused_request_is_told_from_a_failure(http: ServerClient) -> None:
    with pytest.raises(InvalidRequest, match=r"/echo was answered 400: .*why"):
        await http.post("/echo", {"status": 400, "why": "no"})
    with pytest.raises(EngineError, match="/echo was answered 500") as caught:
        await http.post("/echo", {"status": 500})
    assert not isinstance(caught.value, InvalidRequest)


async def test_an_answer_that_is_no_json_is_a_failure(http: ServerClient) -> None:
    with pytest.raises(EngineError, match="the server's answer cannot be read"):
        await http.post("/garbage", {})


async def test_a_connection_that_the_server_has_closed_meanwhile_does_not_fail_a_request(
    http: ServerClient,
) -> None:
    for number in range(5):
        assert await http.post("/once", {"number": number}) == {"number": number}


async def test_an_answer_that_takes_too_long_is_an_error(http: ServerClient) -> None:
    with pytest.raises(EngineError, match=r"/slow of .* was not answered in 0 s"):
        await http.post("/slow", {}, seconds=0.2)


async def test_requests_fail_with_the_servers_last_words_when_it_ends(http: ServerClient) -> None:
    slow = asyncio.create_task(http.post("/slow", {}))
    await asyncio.sleep(0.1)
    with pytest.raises(EngineError, match=r"toy ended with status 3[\s\S]*last words"):
        await http.post("/dies", {})
    with pytest.raises(EngineError, match="last words"):
        await slow
    with pytest.raises(EngineError, match="last words"):
        await http.post("/echo", {})


async def test_last_words_are_waited_for_while_a_supervisor_is_slow_to_end(
    http: ServerClient, process: ServerProcess
) -> None:
    """On a machine that is busy with other things."""
    assert process._supervisor is not None
    os.kill(process._supervisor.pid, signal.SIGSTOP)
    dying = asyncio.create_task(http.post("/dies", {}))
    await asyncio.wait({dying}, timeout=11)
    os.kill(process._supervisor.pid, signal.SIGCONT)
    with pytest.raises(EngineError, match=r"toy ended with status 3[\s\S]*last words"):
        await dying


async def test_a_healthy_server_is_left_alone(http: ServerClient, process: ServerProcess) -> None:
    await http.check("/")
    assert process.alive


async def test_a_frozen_server_is_killed_and_its_requests_fail(
    http: ServerClient, process: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is sampled has no time limit: the server may be slow."""
    monkeypatch.setattr(server_process, "STEP_SECONDS", 0.3)
    monkeypatch.setattr(liveness, "POLL_SECONDS", 0.1)
    slow = asyncio.create_task(http.post("/slow", {}))
    await asyncio.sleep(0.1)
    assert process._supervisor is not None
    for pid in family(process._supervisor.pid)[2:]:
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineError, match=r"/health .*not answered in 0 s: the server is frozen"):
        await http.check("/health")
    with pytest.raises(EngineError, match="toy was killed"):
        await asyncio.wait_for(slow, 60)


async def test_a_server_that_has_ended_is_not_healthy(http: ServerClient) -> None:
    with pytest.raises(EngineError, match="last words"):
        await http.post("/dies", {})
    with pytest.raises(EngineError, match="last words"):
        await http.check("/health")
