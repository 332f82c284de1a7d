"""Requests to a server on this machine: a real one that answers badly on purpose."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

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
        if self.path == "/events":  # in pieces, wherever they end
            self.send_response(200); self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            data = body["text"].encode()
            for start in range(0, len(data), body["piece"]):
                piece = data[start : start + body["piece"]]
                self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(piece), piece))
            if body.get("dies"):
                self.wfile.flush(); print("last words", flush=True); os._exit(3)
            self.wfile.write(b"0\\r\\n\\r\\n")
            return
        if self.path == "/reset":
            self.close_connection = True
            return
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


async def test_the_client_of_a_server_that_is_starting_can_be_closed(tmp_path: Path) -> None:
    """An engine may be stopped while it starts."""
    spec = ServerSpec("toy", lambda port: [sys.executable, str(port)], tmp_path, stop_seconds=0)
    await ServerClient(ServerProcess(spec)).close()


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


async def told(http: ServerClient, **body: Any) -> list[Any]:
    return [event async for event in http.events("/events", body)]


EVENTS = 'data: {"a": 1}\n\ndata: {"b": "x"}\n\n'
END = "data: [DONE]\n\n"


@pytest.mark.parametrize("piece", [1, 7, 1000])
async def test_events_are_their_json(http: ServerClient, piece: int) -> None:
    assert await told(http, text=EVENTS + END, piece=piece) == [{"a": 1}, {"b": "x"}]


async def test_an_event_may_be_longer_than_a_line_of_http(http: ServerClient) -> None:
    (event,) = await told(http, text=f'data: {{"a": "{"x" * 2**18}"}}\n\n{END}', piece=2**16)
    assert len(event["a"]) == 2**18


async def test_an_error_among_the_events_is_told_from_a_refused_request(http: ServerClient) -> None:
    for code, kind in ((400, InvalidRequest), (500, EngineError)):
        text = EVENTS + f'data: {{"error": {{"message": "why", "code": {code}}}}}\n\n{END}'
        with pytest.raises(EngineError, match=f"/events was answered {code}: why") as caught:
            await told(http, text=text, piece=1000)
        assert type(caught.value) is kind


async def test_a_request_is_refused_before_its_first_event(http: ServerClient) -> None:
    with pytest.raises(InvalidRequest, match=r"/echo was answered 400: .*why"):
        async for _ in http.events("/echo", {"status": 400, "why": "no"}):
            pass


async def test_an_event_that_is_no_json_is_a_failure(http: ServerClient) -> None:
    with pytest.raises(EngineError, match="the server's answer cannot be read"):
        await told(http, text="data: <html>\n\n", piece=1000)


async def test_events_end_with_the_servers_last_words_when_it_ends(http: ServerClient) -> None:
    events = http.events("/events", {"text": EVENTS, "piece": 1000, "dies": True})
    assert await anext(events) == {"a": 1}
    assert await anext(events) == {"b": "x"}
    with pytest.raises(EngineError, match=r"toy ended with status 3[\s\S]*last words"):
        await anext(events)


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


async def test_a_connection_that_breaks_while_the_server_lives_is_an_error_at_once(
    http: ServerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not when it has been waited for that the server ends, for a minute."""
    monkeypatch.setattr(server_process, "ENDING_SECONDS", 0.0)
    with pytest.raises(EngineError, match=r"/reset of .* failed: ServerDisconnectedError"):
        await asyncio.wait_for(http.post("/reset", {}), 30)


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
